"""The judges of GEMMs pass what torch computes, name what is wrong, and leave alone what is not judged."""

import pytest
import torch

from conformance.backends import hopper_model
from conformance.backends._torch_gemm import gemm as torch_gemm
from conformance.backends._torch_gemm import grouped_gemm as torch_grouped
from conformance.operations import OPERATIONS, gemm, grouped_gemm
from fuzz.case import Case
from fuzz.grammar import GEMM_FORMATS, GEMM_LAYOUTS, GEMM_SCALES, GEMM_VALUES, GROUPINGS
from references.backend import Backend
from references.recipes import Recipe

ANY = Recipe(source="a test")


def make(variant="deepseek_fp8", operation="gemm", seed=1, **params):
    words = {
        "k": 300,
        "layout": GEMM_LAYOUTS[variant][-1],
        "m": 6,
        "n": 140,
        "out": "bf16",
        "scale": GEMM_SCALES[variant][0],
        "values": "normal",
    }
    if operation == "grouped_gemm":
        words |= {"groups": 3, "grouping": "contiguous", "m": 12}
    return Case.make(operation, variant, seed=seed, **{**words, **params})


def parts(case, output, recipe=ANY, inputs=None):
    operation = OPERATIONS[case.operation]
    inputs = operation.inputs(case) if inputs is None else inputs
    return {verdict.part: verdict for verdict in operation.judge(case, inputs, {"output": output}, recipe)}


def judged(case, output, recipe=ANY, inputs=None):
    return parts(case, output, recipe, inputs)["output"]


def answer(case, inputs=None):
    inputs = OPERATIONS[case.operation].inputs(case) if inputs is None else inputs
    return (torch_grouped if case.operation == "grouped_gemm" else torch_gemm)(case, inputs)


@pytest.mark.parametrize("variant", GEMM_FORMATS)
@pytest.mark.parametrize("values", GEMM_VALUES)
def test_torch_passes(variant, values):
    for out in ("bf16", "fp32"):
        case = make(variant, values=values, out=out, scale=GEMM_SCALES[variant][-1])
        # x86 flushes subnormal numbers in BF16 dot products.
        flush = (variant, values, out) == ("bf16", "subnormal", "bf16")
        verdict = judged(case, answer(case), Recipe(source="a test", subnormals="flush" if flush else "keep"))
        assert (verdict.verdict, verdict.message.split(" ")[0]) == ("pass", "largest")
        assert verdict.headroom <= 1


def test_a_verdict_names_stages_share_and_the_rival():
    case = make()
    verdict = judged(case, answer(case))
    assert list(verdict.stage_radii) == ["accumulation", "scaling", "output_rounding", "evaluation"]
    assert min(verdict.stage_radii.values()) > 0
    assert verdict.bit_equal > 0.98
    assert "of an FP32 matmul" in verdict.message


def test_one_wrong_element_is_found_and_described():
    case = make()
    output = answer(case)
    output[4, 77] = output[4, 77] * 1.5
    verdict = judged(case, output)
    assert verdict.verdict == "wrong"
    assert verdict.worst_index == [4, 77]
    assert verdict.examples[0]["index"] == [4, 77]
    assert "an exact sum of" in verdict.message
    assert "1 of 840 elements outside" in verdict.message


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_is_wrong(poison):
    case = make()
    output = answer(case)
    output[0, 0] = poison
    assert judged(case, output).verdict == "wrong"


def swapped(case, inputs, name, change):
    return {**inputs, name: change(inputs[name])}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a_scales", lambda s: s.roll(1, 0)),
        ("a_scales", lambda s: s.roll(1, 1)),
        ("b_scales", lambda s: s.flip(0)),
        ("b_scales", lambda s: s.roll(1, 1)),
        ("b_scales", lambda s: s[:2, :2].t().contiguous().repeat(1, 2)[:, :3]),
        ("a", lambda c: c.roll(1, 1)),
        ("b", lambda c: c.roll(1, 0)),
        ("b", lambda c: c ^ 0x80),
    ],
)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_mistaken_inputs_are_wrong(name, change, out):
    """Scales of a neighbour, transposed grids, shifted rows and columns, lost signs."""
    case = make(layout="plain", out=out, values="scale_ladder")
    inputs = gemm.inputs(case)
    assert judged(case, answer(case, {**inputs, name: change(inputs[name])}), inputs=inputs).verdict == "wrong"


def test_a_recipe_is_cut_to_the_open_choices():
    case = make()
    assert judged(case, answer(case), Recipe(source="a test", via="bf16", zero_sign="keep")).verdict == "pass"


# Exact models


def test_hopper_models_are_backends():
    assert all(isinstance(backend, Backend) for backend in hopper_model.backends())
    assert len({backend.name for backend in hopper_model.backends()}) == 3


def models():
    return [(backend, claim) for backend in hopper_model.backends() for claim in backend.claims("cpu")]


@pytest.mark.parametrize(("backend", "claim"), models(), ids=lambda item: getattr(item, "name", None) or item.variant)
@pytest.mark.parametrize("values", ["normal", "wide", "subnormal"])
def test_hopper_models_are_equal_to_themselves_alone(backend, claim, values):
    case = make(claim.variant, values=values, out="fp32", scale=GEMM_SCALES[claim.variant][0])
    output = backend.run(backend.prepare(case, gemm.inputs(case), {}), {})["output"]
    verdict = judged(case, output, backend.recipe(claim))
    assert (verdict.verdict, verdict.bit_equal) == ("pass", 1.0)
    other = answer(case)
    found = judged(case, other, backend.recipe(claim))
    if values != "subnormal":
        assert found.verdict == "wrong"
        assert "(exact model)" in found.message
        assert found.bit_equal < 0.9


def test_a_model_s_last_bit_counts():
    backend = hopper_model.backends()[0]
    case = make(out="fp32")
    claim = next(claim for claim in backend.claims("cpu") if claim.variant == case.variant)
    output = backend.run(backend.prepare(case, gemm.inputs(case), {}), {})["output"]
    output.view(torch.int32)[2, 3] += 1
    verdict = judged(case, output, backend.recipe(claim))
    assert (verdict.verdict, verdict.worst_index) == ("wrong", [2, 3])


# Groups


@pytest.mark.parametrize("variant", GEMM_FORMATS)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_torch_passes_by_groups(variant, grouping):
    for seed in range(3):
        case = make(variant, "grouped_gemm", grouping=grouping, seed=seed, out=("bf16", "fp32")[seed % 2])
        assert judged(case, answer(case)).verdict == "pass"


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_rows_of_no_group_are_not_judged_and_others_are(grouping):
    for seed in range(20):
        case = make(operation="grouped_gemm", grouping=grouping, m=40, seed=seed)
        inputs = grouped_gemm.inputs(case)
        rows = grouped_gemm.row_groups(case, inputs)
        if 0 < int((rows < 0).sum()) < len(rows):
            break
    output = answer(case, inputs)
    flat = output.view(-1, 140)
    flat[rows < 0] = float("nan")
    assert bool((rows < 0).any())
    passed = judged(case, output, inputs=inputs)
    assert passed.verdict == "pass"
    assert passed.bit_equal > 0.98
    last = int((rows >= 0).nonzero().max())
    flat[last, 9] += 1 + flat[last, 9].abs()
    failed = judged(case, output, inputs=inputs)
    assert failed.verdict == "wrong"
    index = failed.worst_index
    assert gemm.row_of(index, tuple(output.shape)) == last
    assert index[-1] == 9
    assert failed.examples[0]["index"] == index


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_another_group_s_weights_are_wrong(grouping):
    case = make(operation="grouped_gemm", grouping=grouping, seed=4, m=300)
    inputs = grouped_gemm.inputs(case)
    for name in ("b", "b_scales"):
        assert judged(case, answer(case, {**inputs, name: inputs[name].roll(1, 0)}), inputs=inputs).verdict == "wrong"


def test_settling_hides_what_is_not_judged():
    case = make(operation="grouped_gemm", grouping="masked", seed=2)
    inputs = grouped_gemm.inputs(case)
    first, second = (torch.full((3, 12, 140), value, dtype=torch.bfloat16) for value in (1.0, float("nan")))
    used = grouped_gemm.row_groups(case, inputs).view(3, 12) >= 0
    assert bool((~used).any())
    second[used] = 1.0
    settled = [grouped_gemm.settle(case, inputs, {"output": item})["output"] for item in (first, second)]
    assert torch.equal(*settled)
    assert (settled[0][used] == 1).all()
    odd = torch.zeros(2)
    assert grouped_gemm.settle(case, inputs, {"output": odd})["output"] is odd
    assert grouped_gemm.settle(case, inputs, {}) == {}


def test_nothing_but_empty_groups_passes():
    case = next(
        case
        for case in (make(operation="grouped_gemm", grouping="masked", groups=1, seed=seed) for seed in range(50))
        if int(grouped_gemm.inputs(case)["masked_m"].sum()) == 0
    )
    verdict = judged(case, torch.full((1, 12, 140), float("nan"), dtype=torch.bfloat16))
    assert (verdict.verdict, verdict.bit_equal) == ("pass", None)
    assert verdict.message == "no row belongs to a group"


# The whole tensor

RN = Recipe(source="a test", accumulator="fp32_rn")


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_errors_of_the_whole_tensor_are_judged_where_they_have_a_model(out):
    case = make(out=out, k=512, m=16)
    output = answer(case)
    assert set(parts(case, output)) == {"output"}
    found = parts(case, output, RN)
    assert {name: verdict.verdict for name, verdict in found.items()} == {"output": "pass", "property:tensor": "pass"}
    assert found["property:tensor"].headroom < 0.5
    assert set(parts(make(values="codes"), answer(make(values="codes")), RN)) == {"output"}


def test_scales_a_thousandth_off_hide_in_every_element_but_not_in_the_tensor():
    case = make(k=2048, m=32, n=256)
    inputs = gemm.inputs(case)
    off = answer(case, {**inputs, "b_scales": inputs["b_scales"] * torch.tensor([1.0, 1.001])[:, None]})
    hopper = Recipe(source="a test", accumulator="hopper_fp8")
    for recipe in (RN, hopper):
        assert parts(case, off, recipe, inputs)["property:tensor"].verdict == "wrong"
    assert parts(case, off, ANY, inputs)["output"].bit_equal < 0.95


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups_have_a_tensor_level_too(grouping):
    case = make(operation="grouped_gemm", grouping=grouping, m=64, seed=3)
    inputs = grouped_gemm.inputs(case)
    output = answer(case, inputs)
    found = parts(case, output, RN, inputs)
    assert found["property:tensor"].verdict == "pass"
    wrong = parts(case, (output.float() * 1.02).to(torch.bfloat16), RN, inputs)
    assert wrong["property:tensor"].verdict == "wrong"
