"""Scale policies dropped on the way through an expert layer, as models on a CPU.

- activations with continuous scales where powers of two were asked for: at FC1, at FC2, at both;
- SGLang's released layer (0.5.23), whose activation scales are always continuous, asked to honour UE8M0;
- continuous expert scales handed to a kernel that reads their exponents alone (sgl-project/sglang#43556).
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from benchmarks.planted_moe_faults import BF16, FP32, Layer, draw
from conformance.backends import _sglang_moe as sglang
from conformance.backends import _torch_moe as composite
from conformance.operations import moe

SIZES = {"tokens": 6, "experts": 3, "topk": 2, "hidden": 256, "intermediate": 256}
SEEDS = (0, 900013)


def verdict_of(case, output, recipe=FP32, inputs=None):
    verdict, *_ = moe.judge(case, moe.inputs(case) if inputs is None else inputs, {"output": output}, recipe)
    return verdict


@pytest.mark.parametrize("places", [("x_policy",), ("h_policy",), ("x_policy", "h_policy")])
@pytest.mark.parametrize("seed", SEEDS)
def test_continuous_activation_scales_are_wrong_where_powers_of_two_were_asked_for(places, seed):
    case, inputs = draw(seed, scale="ceil", **SIZES)
    assert verdict_of(case, Layer()(case, inputs), inputs=inputs).verdict == "pass"
    verdict = verdict_of(case, Layer(**dict.fromkeys(places, "fp32"))(case, inputs), inputs=inputs)
    assert verdict.verdict == "wrong"
    assert verdict.headroom > 1.5


@dataclass(frozen=True)
class SGLangLayer(Layer):
    """SGLang's released layer: scale amax * RN(1 / 448), payload x * (448 / amax), BF16 between the stages."""

    fc1: torch.dtype = BF16
    activation: torch.dtype = BF16
    weighted: torch.dtype = BF16

    def _quantised(self, case, x: Tensor, inputs, name: str, policy: str | None) -> Tensor:
        blocks = x.view(x.shape[0], -1, 128)
        amax = blocks.abs().amax(2, keepdim=True).clamp(min=1e-10)
        payload = composite.to_e4m3(blocks * (torch.full_like(amax, 448.0) / amax))
        return (payload * (amax * torch.full_like(amax, 1 / 448))).view(x.shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_sglangs_layer_keeps_its_recipe_and_breaks_the_policy_that_it_cannot_be_asked_for(seed):
    claim = next(claim for claim in sglang.claims() if (claim.operation, claim.variant) == ("moe", "deepseek_fp8"))
    recipe = replace(sglang.recipe(claim), accumulator="fp32_rn")  # torch multiplies here
    case, inputs = draw(seed, scale="fp32", **SIZES)
    assert claim.refusal(case) is None
    assert verdict_of(case, SGLangLayer()(case, inputs), recipe, inputs).verdict == "pass"
    asked, inputs = draw(seed, scale="ceil", **SIZES)
    assert claim.refusal(asked) == "scale=ceil is none of fp32"
    verdict = verdict_of(asked, SGLangLayer()(asked, inputs), recipe, inputs)
    assert verdict.verdict == "wrong"
    right = SGLangLayer()._quantised(asked, inputs["x"].float(), inputs, "x", None)
    assert not torch.equal(right, composite.quantised(asked, inputs["x"].float(), inputs, "x"))


def exponents_alone(scales: Tensor) -> Tensor:
    """FP32 scales as a kernel sees them that shifts out the mantissa."""
    return (scales.view(torch.int32) >> 23 << 23).view(torch.float32)


@pytest.mark.parametrize("names", [("w1_scales",), ("w2_scales",), ("w1_scales", "w2_scales")])
@pytest.mark.parametrize("seed", SEEDS)
def test_continuous_expert_scales_read_by_their_exponents_are_wrong(names, seed):
    case, inputs = draw(seed, scale="fp32", **SIZES)
    recipe = replace(FP32, amax_floor=composite.AMAX_FLOOR)
    seen = {**inputs, **{name: exponents_alone(inputs[name]) for name in names}}
    assert verdict_of(case, Layer()(case, inputs), recipe, inputs).verdict == "pass"
    verdict = verdict_of(case, Layer()(case, seen), recipe, inputs)
    assert verdict.verdict == "wrong"
    assert verdict.headroom > 10
    # The same layer is right once the scales are powers of two, which is what requantisation is for.
    powers = {**inputs, **{name: exponents_alone(inputs[name]) for name in ("w1_scales", "w2_scales")}}
    again = {**powers, **{name: exponents_alone(powers[name]) for name in names}}
    assert verdict_of(case, Layer()(case, again), recipe, powers).verdict == "pass"
