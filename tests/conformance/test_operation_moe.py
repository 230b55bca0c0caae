"""The judge of expert layers: what is legal passes, planted faults do not, and a verdict names the stage."""

import dataclasses

import pytest
import torch

from benchmarks.planted_moe_faults import FP32, LEGAL, Layer, draw, faults, judged, table
from conformance.backends import _torch_moe as composite
from conformance.backends.torch_ops import TorchBackend
from conformance.operations import OPERATIONS, moe
from fuzz.case import Case
from fuzz.grammar import MOE_SCALES, MOE_VALUES
from fuzz.mutants import legal
from references.moe import STAGES
from references.recipes import Recipe

SMALL = {"tokens": 6, "experts": 3, "topk": 2, "hidden": 160, "intermediate": 144}
TINY = {"tokens": 5, "experts": 3, "topk": 2, "hidden": 66, "intermediate": 34}
ANY = Recipe(source="a test")


def make(variant="deepseek_fp8", seed=1, **words):
    given = {
        "gate": "second",
        "ids": "spread",
        "limit": "none",
        "out": "bf16",
        "scale": MOE_SCALES[variant][-1],
        "scaling": "2.5",
        "values": "normal",
        "weight": "output",
        **TINY,
    }
    return Case.make("moe", variant, seed=seed, **(given | words))


def judge(case, output, recipe=FP32, inputs=None):
    verdict, *_ = moe.judge(case, moe.inputs(case) if inputs is None else inputs, {"output": output}, recipe)
    return verdict


@pytest.mark.parametrize("variant", MOE_SCALES)
@pytest.mark.parametrize("values", MOE_VALUES)
def test_torch_passes_under_its_own_recipe(variant, values):
    backend = TorchBackend("torch", "fp32")
    index = MOE_VALUES.index(values)
    case = make(
        variant,
        values=values,
        seed=index,
        scale=MOE_SCALES[variant][index % len(MOE_SCALES[variant])],
        ids=("spread", "skewed", "elsewhere")[index % 3],
        out=("fp32", "bf16")[index % 2],
        limit=("none", "7")[index // 2 % 2],
        weight=("output", "input")[index // 3 % 2],
    )
    inputs = moe.inputs(case)
    (claim,) = (item for item in backend.claims("cpu") if item.refusal(case) is None)
    outputs = backend.run(backend.prepare(case, inputs, {}), {})
    verdict = judge(case, outputs["output"], backend.recipe(claim), inputs)
    assert verdict.verdict == "pass", verdict.message
    assert verdict.headroom <= 1


def test_a_verdict_names_its_stages_and_the_largest():
    case = make(out="fp32")
    output = composite.moe(case, moe.inputs(case))
    verdict = judge(case, output)
    assert list(verdict.stage_radii) == [*STAGES, "output_rounding"]
    assert verdict.stage_radii["input_quantisation"] == 0
    largest = max(verdict.stage_radii, key=verdict.stage_radii.get)
    assert f"comes from {largest} (" in verdict.message
    output[2, 5] *= 2
    wrong = judge(case, output)
    assert wrong.verdict == "wrong"
    assert wrong.worst_index == [2, 5]
    assert wrong.message.startswith("1 of 330 elements outside")
    assert "experts" in wrong.examples[0]["input"]


def test_errors_stand_beside_those_of_fp32_arithmetic():
    case = make(out="fp32")
    inputs = moe.inputs(case)
    output = composite.moe(case, inputs)
    verdict = judge(case, output, inputs=inputs)
    assert 0.2 < verdict.error / verdict.fp32_error < 5
    halved = judge(case, output.to(torch.bfloat16).float(), inputs=inputs)
    assert halved.error / verdict.fp32_error > 100
    assert halved.fp32_error == verdict.fp32_error


def test_freedom_of_the_input_has_a_stage_of_its_own():
    case = make(scale="fp32")
    found = moe.admissible(
        case, moe.inputs(case), Recipe(source="a test", scale_arithmetic="approximate", scale_error=1e-3)
    )
    assert float(found.radii["input_quantisation"].max()) > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_is_wrong(poison):
    case = make()
    output = composite.moe(case, moe.inputs(case))
    output[0, 0] = poison
    assert judge(case, output).verdict == "wrong"


def test_a_token_without_an_expert_is_zero_exactly():
    case = make(ids="elsewhere", seed=4, values="outliers")
    inputs = moe.inputs(case)
    alone = (inputs["ids"] < 0).all(1)
    found = moe.admissible(case, inputs, ANY).interval
    assert bool(alone.any())
    assert not bool(found.lo[alone].any() | found.hi[alone].any())


@pytest.mark.parametrize("seed", [0, 1])
def test_every_planted_fault_is_caught(seed):
    case, inputs = draw(seed, **SMALL)
    passed = [name for name, output in faults(case, inputs).items() if judged(case, inputs, output)]
    assert passed == []
    assert len(faults(case, inputs)) == 13


@pytest.mark.parametrize("name", LEGAL)
def test_legal_variants_are_never_outside(name):
    layer, recipe = LEGAL[name]
    for seed in range(4):
        values = ("normal", "scale_ladder", "outliers", "cancellation")[seed]
        case, inputs = draw(10 + seed, **TINY, values=values, out=("fp32", "bf16")[seed % 2])
        verdict = judge(case, layer(case, inputs), recipe, inputs)
        assert verdict.verdict == "pass", verdict.message


@pytest.mark.parametrize("seed", range(4))
def test_experts_added_in_bf16_need_to_be_declared(seed):
    case, inputs = draw(
        20 + seed, **(TINY | {"experts": 6, "topk": 5}), values=("normal", "outliers")[seed % 2], out="bf16"
    )
    (mutant,) = (one for one in legal.LEGAL if one.family.endswith("added-in-bf16"))
    output = mutant.answer(case, inputs)["output"]
    stored = Recipe(source="a test", weighted_dtype="bf16")
    declared = dataclasses.replace(stored, combine_dtype="bf16")
    assert judge(case, output, declared, inputs).verdict == "pass"
    assert judge(case, output, stored, inputs).verdict == "wrong"
    alone = Recipe(source="a test", combine_dtype="bf16")  # one more rounding stands for the terms' own
    assert judge(case, output, alone, inputs).verdict == "pass"


@pytest.mark.parametrize("variant", ["mxfp8", "w4a8", "w4a16", "bf16", "nvfp4", "fp8_per_tensor"])
def test_legal_variants_of_other_formats(variant):
    for seed, name in enumerate(("split-K in FP32", "one product at a time", "x * sigmoid(x)", "all in BF16")):
        case = make(variant, seed=seed, out="fp32")
        layer, recipe = LEGAL[name]
        verdict = judge(case, layer(case, moe.inputs(case)), recipe)
        assert verdict.verdict == "pass", f"{name}: {verdict.message}"


@pytest.mark.parametrize("stored", ["FC1", "activation", "FC2", "weighted"])
def test_a_bf16_intermediate_needs_a_declaration(stored):
    case = make(out="fp32", **SMALL)
    layer, _ = LEGAL[f"{stored} in BF16"]
    assert judge(case, layer(case, moe.inputs(case)), FP32).verdict == "wrong"


@pytest.mark.parametrize("scale", ["ceil", "fp32"])
def test_half_of_normal_data_uses_a_fair_part_of_its_radius(scale):
    """Neither is the bound loose by orders of magnitude, nor is it a coincidence that legal answers pass."""
    case = make(scale=scale, out="bf16", **SMALL)
    output = composite.moe(case, moe.inputs(case)).double()
    found = moe.admissible(case, moe.inputs(case), FP32).interval
    used = ((output - found.centre).abs() / found.radius).median()
    assert 0.01 < float(used) < 0.7


@pytest.mark.parametrize("accumulator", ["fp32_any", "hopper_fp8", "f16_upcast", "bf16_split_k"])
def test_wider_accumulators_admit_more(accumulator):
    case, inputs = make(out="fp32"), moe.inputs(make(out="fp32"))
    wider = Recipe(source="a test", accumulator=accumulator, split_k=2 if accumulator == "bf16_split_k" else 1)
    narrow, wide = (moe.admissible(case, inputs, recipe).interval for recipe in (FP32, wider))
    assert float((wide.hi - wide.lo).sum()) > float((narrow.hi - narrow.lo).sum())
    assert judge(case, composite.moe(case, inputs), wider, inputs).verdict == "pass"


def test_saturated_layers_leave_no_room():
    """Integers under power-of-two scales: most outputs admit one FP32 number, and torch gives it."""
    case = make(values="saturated", out="fp32", scaling="1", scale="ceil")
    found = moe.admissible(case, moe.inputs(case), FP32)
    assert float((found.interval.lo == found.interval.hi).double().mean()) > 0.5


def test_an_undeclared_policy_is_wrong_at_fc2_alone():
    case, inputs = draw(5, **SMALL)
    for policy in ("floor", "fp32"):
        assert not judged(case, inputs, Layer(h_policy=policy)(case, inputs))


def test_the_table_counts_what_each_check_rejects():
    text = table(1, **SMALL)
    assert "| fault: all-zero output | 1 |" in text
    assert "| legal: all in BF16 | 0 |" in text
    assert "| **faults always rejected** | 13 of 13 |" in text


def test_the_operation_is_listed():
    assert OPERATIONS["moe"] is moe
    assert "scale_floor" not in moe.open_choices("bf16")
