"""``property:tensor`` of an expert layer: small faults all over an output that every element's bound has room for."""

import pytest
import torch

from benchmarks.planted_moe_faults import FP32, LEGAL, Layer
from conformance.backends import _torch_gemm as products
from conformance.backends import _torch_moe as composite
from conformance.operations import moe
from fuzz.case import Case
from fuzz.grammar import MOE_SCALES
from references.moe import expectation
from references.recipes import Recipe
from references.rounding import next_down, next_up

QUANTISED = ("deepseek_fp8", "mxfp8", "w4a8", "nvfp4", "fp8_per_tensor")


def make(variant, seed=1, **words):
    given = {
        "experts": 4,
        "gate": "first",
        "hidden": 96,
        "ids": "spread",
        "intermediate": 34,
        "limit": "none",
        "out": "fp32",
        "scale": MOE_SCALES[variant][-1],
        "scaling": "1",
        "tokens": 33,
        "topk": 2,
        "values": "normal",
        "weight": "output",
    }
    case = Case.make("moe", variant, seed=seed, **(given | words))
    return case, moe.inputs(case)


def judged(case, inputs, output, recipe=FP32):
    """Part -> verdict."""
    return {item.part: item for item in moe.judge(case, inputs, {"output": output}, recipe)}


def bf16_parts(a, b):
    half = -(-a.shape[1] // 2)
    parts = (products.matmul(x, y) for x, y in zip(a.split(half, 1), b.split(half, 1), strict=True))
    return sum(part.to(torch.bfloat16).float() for part in parts)


@pytest.mark.parametrize("variant", QUANTISED)
@pytest.mark.parametrize("out", ["fp32", "bf16"])
def test_small_faults_are_found_and_fp32_arithmetic_is_not(variant, out, monkeypatch):
    case, inputs = make(variant, out=out)
    right = judged(case, inputs, Layer()(case, inputs))
    assert right["property:tensor"].verdict == "pass"
    assert right["property:tensor"].headroom < 0.5
    faults = [Layer(matmul=bf16_parts)(case, inputs)]
    plain = composite.dequantised
    for name in ("w1", "w2"):
        monkeypatch.setattr(
            composite, "dequantised", lambda c, i, n, e, name=name: plain(c, i, n, e) * (1.001 if n == name else 1.0)
        )
        faults.append(Layer()(case, inputs))
    monkeypatch.undo()
    for output in faults:
        found = judged(case, inputs, output)["property:tensor"]
        assert found.verdict == "wrong"
        assert found.headroom > 1.5


@pytest.mark.parametrize("variant", ["fp8_per_tensor", "nvfp4"])
def test_errors_that_fit_every_bound_and_point_one_way_are_found(variant):
    case, inputs = make(variant, intermediate=130)
    interval = moe.admissible(case, inputs, FP32).interval
    # Most of the way to the end that is farther from zero, as far as FP32 has numbers there.
    up = next_down(interval.nominal + 0.9 * (interval.hi - interval.nominal), torch.float32)
    down = next_up(interval.nominal + 0.9 * (interval.lo - interval.nominal), torch.float32)
    found = judged(case, inputs, torch.where(interval.nominal < 0, down, up).float())
    assert found["output"].verdict == "pass"
    assert found["property:tensor"].verdict == "wrong"
    assert "signed mean" in found["property:tensor"].message


@pytest.mark.parametrize("seed", range(4))
def test_other_legal_arithmetic_passes(seed):
    some = {name: item for name, item in LEGAL.items() if "BF16" not in name and "reciprocal" not in name}
    names = list(some)
    for number, variant in enumerate(MOE_SCALES):
        name = names[(seed * len(MOE_SCALES) + number) % len(names)]
        layer, recipe = some[name]
        words = {"weight": ("output", "input")[seed % 2], "limit": ("none", "7")[number % 2], "scaling": "2.5"}
        case, inputs = make(variant, seed=seed, out=("fp32", "bf16")[number % 2], **words)
        for part in judged(case, inputs, layer(case, inputs), recipe).values():
            assert part.verdict == "pass", (name, part.message)
            assert part.headroom <= 1


def test_tokens_whose_codes_may_flip_are_left_out():
    case, inputs = make("bf16", intermediate=300, hidden=200)
    expected = expectation(*moe.layer(case, inputs, FP32))
    found = moe.admissible(case, inputs, FP32)
    looked = (expected.spread > 0).any(1)
    assert not bool(looked.all())
    # Where no code can flip even in the worst case, a token is looked at.
    certain = (found.radii["requantisation"] == 0).all(1)
    assert bool((looked | ~certain).all())
    case, inputs = make("mxfp8", ids="elsewhere")
    expected = expectation(*moe.layer(case, inputs, FP32))
    assert not bool((expected.spread[1] > 0).any())  # no expert is here


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(source="a test"),
        Recipe(source="a test", accumulator="fp32_rn", fc1_dtype="bf16"),
        Recipe(source="a test", accumulator="fp32_rn", subnormals="flush"),
    ],
)
def test_there_is_no_model_of_other_arithmetic(recipe):
    case, inputs = make("mxfp8")
    assert expectation(*moe.layer(case, inputs, recipe)) is None
    assert list(judged(case, inputs, composite.moe(case, inputs), recipe)) == ["output"]
