"""Drawn matrix products against rational arithmetic: the exact sum, rounded, is admissible in every way to add."""

from fractions import Fraction

import pytest
import torch

from conformance.operations import gemm, grouped_gemm
from fuzz.grammar import GEMM_FORMATS
from fuzz.plan import draw_plan
from references.gemm import admissible_gemm
from references.recipes import Recipe

CASES = 8
RECIPES = [
    Recipe(source="test", accumulator=name, **more)
    for name, more in (("fp32_any", {}), ("fp32_rn", {}), ("fp64", {}), ("bf16_split_k", {"split_k": 2}))
]


def rounded(value, dtype):
    """A Fraction to the nearest number of a dtype, ties to even, overflow to infinity."""
    bits, least, most = {torch.float32: (24, -149, 128), torch.bfloat16: (8, -133, 128)}[dtype]
    if not value:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** max(exponent - bits + 1, least)
    near = round(size / step) * step
    number = float("inf") if near >= Fraction(2) ** most else float(near)
    return number if value > 0 else -number


def products(case):
    """(A, B) of a dense case, or of each group with rows."""
    inputs = gemm.inputs(case) if case.operation == "gemm" else grouped_gemm.inputs(case)
    if case.operation == "gemm":
        return [gemm.operands(case, inputs)]
    return [(a, b) for _, a, b in grouped_gemm.group_operands(case, inputs, grouped_gemm.row_groups(case, inputs))]


@pytest.mark.parametrize("operation", ["gemm", "grouped_gemm"])
@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_the_exact_product_is_admissible_in_every_way_to_add(operation, variant):
    seen = 0
    for number, case in enumerate(draw_plan([(operation, variant)], CASES, 5, 2**8)):
        recipe, dtype = RECIPES[number % len(RECIPES)], gemm.DTYPES[case["out"]]
        for a, b in products(case):
            interval = admissible_gemm(a, b, recipe, dtype).interval
            left, right = ([[Fraction(v) for v in row] for row in side.values[:3].tolist()] for side in (a, b))
            for i, row in enumerate(left):
                for j, column in enumerate(right):
                    exact = sum(x * y for x, y in zip(row, column, strict=True))
                    low, high = float(interval.lo[i, j]), float(interval.hi[i, j])
                    assert low <= rounded(exact, dtype) <= high, (case.text, recipe.accumulator, i, j)
                    seen += 1
    assert seen > 30


def test_rounding_by_hand():
    one = Fraction(1)
    assert rounded(one + Fraction(1, 2**24), torch.float32) == 1.0  # a tie, to even
    assert rounded(one + Fraction(3, 2**24), torch.float32) == 1.0 + 2.0**-22
    assert rounded(-one - Fraction(1, 2**8), torch.bfloat16) == -1.0
    assert rounded(Fraction(1, 2**150), torch.float32) == 0.0
    assert rounded(Fraction(2) ** 128, torch.float32) == float("inf")
