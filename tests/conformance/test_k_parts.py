"""Products that are split over K: the order is found from the answer, and anything else is not admitted."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from conformance.operations import gemm
from fuzz.case import Case
from references.gemm import admissible_gemm
from references.gemm_models import exact_rows, orders
from references.recipes import Recipe
from references.rounding import round_to

FP8 = Case.parse("gemm deepseek_fp8 v=1 k=1100 layout=plain m=4 n=6 out=fp32 scale=fp32 values=normal seed=3")
BF16 = Case.parse("gemm bf16 v=1 k=500 layout=plain m=4 n=6 out=fp32 scale=none values=normal seed=3")
RECIPES = {
    "deepseek_fp8": Recipe(source="t", accumulator="hopper_fp8", scale_combination="fma_dot_sasb", k_parts=4),
    "bf16": Recipe(source="t", accumulator="hopper_f16", promotion="none", k_parts=4),
}


def test_parts_by_hand() -> None:
    spans = orders(500, RECIPES["bf16"], blocks=False)
    assert [[(part.start, part.stop) for part in found] for found in spans] == [
        [(0, 500)],
        [(0, 256), (256, 500)],
        [(0, 192), (192, 384), (384, 500)],
        [(0, 128), (128, 256), (256, 384), (384, 500)],
    ]
    assert [len(found) for found in orders(1100, RECIPES["deepseek_fp8"], blocks=True)] == [1, 2, 3]
    assert orders(1100, RECIPES["deepseek_fp8"], blocks=True)[1][0] == slice(0, 640)
    assert len(orders(64, RECIPES["bf16"], blocks=False)) == 1


@pytest.mark.parametrize("case", [FP8, BF16], ids=["fp8", "bf16"])
def test_the_order_is_found_and_reported(case: Case) -> None:
    recipe, inputs = RECIPES[case.variant], gemm.inputs(case)
    a, b = gemm.operands(case, inputs)
    answers = []
    for spans in orders(case.integer("k"), recipe, blocks=case.variant != "bf16"):
        answer = round_to(exact_rows(a, b, recipe, spans), torch.float32).to(torch.float32)
        answers.append(answer)
        found = admissible_gemm(a, b, recipe, torch.float32, answer)
        assert found.parts == len(spans)
        verdict = gemm.judge(case, inputs, {"output": answer}, recipe)[0]
        assert (verdict.verdict, verdict.bit_equal) == ("pass", 1.0)
        assert (f"; K in {len(spans)} parts" in verdict.message) == (len(spans) > 1)
    assert all(not torch.equal(one, other) for one, other in pairwise(answers))
    alone = Recipe.from_json({**recipe.to_json(), "k_parts": 1})
    assert gemm.judge(case, inputs, {"output": answers[1]}, alone)[0].verdict == "wrong"
    mixed = torch.cat((answers[0][:2], answers[1][2:]))  # one order for the whole answer
    assert gemm.judge(case, inputs, {"output": mixed}, recipe)[0].verdict == "wrong"


@pytest.mark.parametrize("case", [FP8, BF16], ids=["fp8", "bf16"])
def test_every_order_lies_within_the_bound(case: Case) -> None:
    recipe = RECIPES[case.variant]
    a, b = gemm.operands(case, gemm.inputs(case))
    loose = Recipe.from_json({**recipe.to_json(), "scale_combination": "any", "out_rounding": "faithful"})
    interval = admissible_gemm(a, b, loose, torch.float32).interval
    for spans in orders(case.integer("k"), recipe, blocks=case.variant != "bf16"):
        answer = exact_rows(a, b, recipe, spans)
        assert bool(((answer >= interval.lo) & (answer <= interval.hi)).all())


def test_nothing_more_is_asked_of_a_whole_answer_whose_bits_are_known() -> None:
    """The errors of K in three parts are not those of K in one, whose sums a test of the whole tensor would look at."""
    case = BF16.replace(m=4, n=256, k=4096, values="outliers")
    inputs = gemm.inputs(case)
    a, b = gemm.operands(case, inputs)
    spans = orders(4096, RECIPES["bf16"], blocks=False)[2]
    answer = round_to(exact_rows(a, b, RECIPES["bf16"], spans), torch.float32).to(torch.float32)
    verdicts = gemm.judge(case, inputs, {"output": answer}, RECIPES["bf16"])
    assert [(verdict.part, verdict.verdict, verdict.bit_equal) for verdict in verdicts] == [("output", "pass", 1.0)]


def test_first_parts_are_summed_first() -> None:
    """2^24 + 1 + 1 loses both ones in one piece; two parts keep the sum of the ones, 2, in the second."""
    a = torch.zeros(1, 128, dtype=torch.bfloat16)
    a[0, 0], a[0, 64], a[0, 80] = 4096.0, 1.0, 1.0
    b = torch.ones(1, 128, dtype=torch.bfloat16)
    b[0, 0] = 4096.0
    case = BF16.replace(m=1, n=1, k=128)
    left, right = gemm.operands(case, {"a": a, "b": b})
    recipe = RECIPES["bf16"]
    one, two = (float(exact_rows(left, right, recipe, spans)) for spans in orders(128, recipe, blocks=False))
    assert (one, two) == (2.0**24, 2.0**24 + 2)


def test_only_where_an_exact_model_is() -> None:
    with pytest.raises(ValueError, match="k_parts=2"):
        Recipe(source="t", k_parts=2)
    with pytest.raises(ValueError, match="k_parts=0"):
        Recipe(source="t", accumulator="hopper_f16", k_parts=0)
