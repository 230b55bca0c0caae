"""Expert layers by the exact arithmetic of Hopper's FP8 unit are admissible; those that break a policy are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.operations import moe
from fuzz.case import Case
from references.blocks import quantize
from references.gemm_formats import Operand, operand, sides
from references.gemm_models import exact_rows
from references.recipes import Recipe
from references.schemes import scheme

LINE = (
    "moe deepseek_fp8 v=1 experts=3 gate=first hidden=256 ids=spread intermediate=256 limit=none out=bf16 scale=%s "
    "scaling=1 tokens=4 topk=2 values=%s weight=output seed=%d"
)
RECIPE = Recipe(source="a test", accumulator="hopper_fp8")
MODEL = Recipe(source="a test", accumulator="hopper_fp8", scale_combination="fma_dot_sa_sb")


def quantised(x: Tensor, policy: str, scale: str) -> Operand:
    """Activations under a policy; powers of two have FP32's place in the kernel."""
    found = quantize(x, scheme("deepseek_fp8", "1x128", policy), RECIPE)
    return operand(found.payload, found.scales, sides("deepseek_fp8", "ue8m0" if policy == "ceil" else "fp32")[0])


def layer(case: Case, inputs: dict[str, Tensor], first: str, second: str) -> Tensor:
    """FP32 between the products. first, second: the policies of both quantisations."""
    word = "ue8m0" if case["scale"] == "ceil" else "fp32"
    side = sides("deepseek_fp8", word)[1]
    total = torch.zeros(inputs["x"].shape)
    x = quantised(inputs["x"].float(), first, word)
    for expert in range(case.integer("experts")):
        w1, w2 = (operand(inputs[name][expert], inputs[f"{name}_scales"][expert], side) for name in ("w1", "w2"))
        token, slot = (inputs["ids"] == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate, up = exact_rows(x.rows(token), w1, MODEL).float().chunk(2, dim=1)
        hidden = quantised(torch.nn.functional.silu(gate) * up, second, word)
        total[token] += exact_rows(hidden, w2, MODEL).float() * inputs["weights"][token, slot, None]
    return total.bfloat16()


def verdict(case: Case, inputs: dict[str, Tensor], *policies: str) -> str:
    return moe.judge(case, inputs, {"output": layer(case, inputs, *policies)}, RECIPE)[0].verdict


@pytest.mark.parametrize("scale", ["fp32", "ceil"])
@pytest.mark.parametrize("values", ["outliers", "cancellation", "scale_ladder"])
def test_the_unit_itself_passes(scale: str, values: str) -> None:
    case = Case.parse(LINE % (scale, values, 4))
    assert verdict(case, moe.inputs(case), scale, scale) == "pass"


@pytest.mark.parametrize(("scale", "other"), [("fp32", "ceil"), ("ceil", "fp32")])
def test_a_policy_that_one_product_breaks_is_wrong(scale: str, other: str) -> None:
    case = Case.parse(LINE % (scale, "normal", 4))
    inputs = moe.inputs(case)
    found = [verdict(case, inputs, *policies) for policies in ((scale, scale), (other, scale), (scale, other))]
    assert found == ["pass", "wrong", "wrong"]
