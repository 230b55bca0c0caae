"""Drawn cases in which nothing is rounded on the way: one answer is admissible, whatever the order of the sums.

``values=integer`` of grouped GEMMs beside integer arithmetic, ``values=saturated`` of expert layers beside an exact one
and the FP32 composite. One step of the output's dtype beside the answer is wrong.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.backends import _torch_moe as composite
from conformance.operations import gemm, grouped_gemm, moe
from fuzz.case import Case
from fuzz.grammar import GEMM_FORMATS, MOE_SCALES, MX_POLICIES
from fuzz.mutants.moe import layer
from fuzz.plan import draw_plan
from references.gemm import admissible_gemm
from references.gemm_formats import Operand
from references.recipes import Recipe

INT = torch.int64
RECIPES = [Recipe(source="a test", accumulator=name) for name in ("fp32_any", "fp32_rn", "fp64")]
HOPPER = {
    **dict.fromkeys(("deepseek_fp8", "mxfp8", "fp8_per_tensor"), Recipe(source="a test", accumulator="hopper_fp8")),
    **dict.fromkeys(("bf16", "fp16"), Recipe(source="a test", accumulator="hopper_f16", promotion="none")),
}
STRICT = Recipe(source="a test", accumulator="fp32_rn")


def drawn(operation: str, variant: str, values: str, **words: tuple[str, ...]) -> list[Case]:
    """The drawn cases of a profile and some words, among 120 of a plan; there are some."""
    plan = draw_plan([(operation, variant)], 120, 6)
    found = [case for case in plan if case["values"] == values and all(case[key] in words[key] for key in words)]
    assert found
    return found


def whole(a: Operand, b: Operand) -> Tensor:
    """The product in integers; the profile's codes and scales are some."""
    rows = []
    for side in (a, b):
        assert torch.equal(side.codes, side.codes.round())
        assert torch.equal(side.scales, side.scales.round())
        rows.append(side.codes.to(INT) * side.spread(side.scales.to(INT)))
    return rows[0] @ rows[1].T


def stepped(output: Tensor, row: int, column: int) -> Tensor:
    """An output with one element a step of its dtype further from zero."""
    found = output.clone()
    bits = found.view(torch.int32 if found.dtype == torch.float32 else torch.int16)
    bits[row, column] += 1
    return found


@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_grouped_integers_have_one_answer(variant: str) -> None:
    groups = 0
    for case in drawn("grouped_gemm", variant, "integer")[:5]:
        inputs, dtype = grouped_gemm.inputs(case), gemm.DTYPES[case["out"]]
        rows = grouped_gemm.row_groups(case, inputs)
        answer = torch.zeros(len(rows), case.integer("n"), dtype=dtype)
        for where, a, b in list(grouped_gemm.group_operands(case, inputs, rows))[:8]:
            expected = whole(a, b)
            assert int(expected.abs().max()) < 2**24
            answer[where] = expected.to(torch.float32).to(dtype)
            for recipe in (*RECIPES, *([HOPPER[variant]] if variant in HOPPER else ())):
                interval = admissible_gemm(a, b, recipe, dtype, answer[where]).interval
                assert torch.equal(interval.lo, answer[where].double()), (case.text, recipe.accumulator)
                assert torch.equal(interval.hi, interval.lo), (case.text, recipe.accumulator)
            groups += 1
    assert groups >= 5


@pytest.mark.parametrize("variant", ["deepseek_fp8", "nvfp4", "bf16"])
def test_a_step_beside_a_grouped_integer_is_wrong(variant: str) -> None:
    case = next(case for case in drawn("grouped_gemm", variant, "integer", grouping=("contiguous",)))
    inputs, dtype = grouped_gemm.inputs(case), gemm.DTYPES[case["out"]]
    rows = grouped_gemm.row_groups(case, inputs)
    answer = torch.zeros(len(rows), case.integer("n"), dtype=dtype)
    for where, a, b in grouped_gemm.group_operands(case, inputs, rows):
        answer[where] = whole(a, b).to(torch.float32).to(dtype)
    row = int((rows >= 0).int().argmax())
    column = int((answer[row] != 0).int().argmax())
    for output, verdict in ((answer, "pass"), (stepped(answer, row, column), "wrong")):
        assert grouped_gemm.judge(case, inputs, {"output": output}, STRICT)[0].verdict == verdict


@pytest.mark.parametrize("variant", MOE_SCALES)
def test_saturated_layers_have_one_answer(variant: str) -> None:
    scales = ("ceil",) if variant == "deepseek_fp8" else MOE_SCALES[variant]
    single, count, wrong = 0, 0, 0
    for case in drawn("moe", variant, "saturated", scale=scales)[:8]:
        inputs = moe.inputs(case)
        found = moe.admissible(case, inputs, Recipe(source="a test")).interval
        exact = layer(case, inputs)["output"]
        certain = found.lo == found.hi
        assert torch.equal(exact.double()[certain], found.lo[certain]), case.text
        assert torch.equal(composite.moe(case, inputs).double()[certain], found.lo[certain]), case.text
        single, count = single + int(certain.sum()), count + certain.numel()
        places = (certain & (exact != 0)).nonzero()
        if len(places):
            row, column = places[0].tolist()
            verdict, *_ = moe.judge(case, inputs, {"output": stepped(exact, row, column)}, STRICT)
            wrong += verdict.verdict == "wrong"
            assert verdict.verdict == "wrong", case.text
    assert single > 0.99 * count
    assert wrong >= 3


def test_policies_of_powers_of_two_are_drawn() -> None:
    """Every policy of MXFP8 has saturated layers among the drawn ones."""
    assert {case["scale"] for case in drawn("moe", "mxfp8", "saturated")} == set(MX_POLICIES)
