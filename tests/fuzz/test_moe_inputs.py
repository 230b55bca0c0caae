"""Inputs of expert layers have the shapes of docs/moe.md, and their profiles are what they promise."""

import pytest
import torch

from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR, MOE_SCALES, MOE_VALUES
from fuzz.inputs import build
from fuzz.moe_shapes import COUNT, sizes
from references.moe import config_of, expert_operands


def make(variant="deepseek_fp8", seed=1, **words):
    given = {
        "experts": 5,
        "gate": "first",
        "hidden": 130,
        "ids": "spread",
        "intermediate": 34,
        "limit": "none",
        "out": "bf16",
        "scale": MOE_SCALES[variant][0],
        "scaling": "1",
        "tokens": 30,
        "topk": 3,
        "values": "normal",
        "weight": "output",
    }
    return Case.make("moe", variant, seed=seed, **(given | words))


W1_SCALES = {
    "deepseek_fp8": (5, 1, 2),
    "mxfp8": (5, 68, 5),
    "w4a8": (5, 68, 5),
    "w4a16": (5, 68, 5),
    "nvfp4": (5, 68, 9),
    "fp8_per_tensor": (5, 1, 1),
}


@pytest.mark.parametrize("variant", MOE_SCALES)
def test_shapes(variant):
    found = {name: tuple(tensor.shape) for name, tensor in build(make(variant)).items()}
    half = 2 if variant in ("w4a8", "w4a16", "nvfp4") else 1
    expected = {"x": (30, 130), "ids": (30, 3), "weights": (30, 3)}
    expected |= {"w1": (5, 68, 130 // half), "w2": (5, 130, 34 // half)}
    if variant in W1_SCALES:
        assert found.pop("w1_scales") == W1_SCALES[variant]
        assert len(found.pop("w2_scales")) == 3
    if variant == "nvfp4":
        expected |= {"w1_global_scale": (5,), "w2_global_scale": (5,), "x_global_scale": (1,), "h_global_scale": (1,)}
    if variant == "fp8_per_tensor":
        expected |= {"x_scale": (1,), "h_scale": (1,)}
    assert found == expected


def test_ids_are_distinct_and_distributed_as_the_word_says():
    ids = build(make())["ids"]
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert set(ids.flatten().tolist()) == set(range(5))
    skewed = build(make(ids="skewed"))["ids"]
    assert bool((skewed == skewed[0]).all())
    elsewhere = build(make(ids="elsewhere"))["ids"]
    assert 0.2 < float((elsewhere < 0).double().mean()) < 0.5
    assert bool((elsewhere[1] < 0).all())  # the token of the seed


@pytest.mark.parametrize("variant", MOE_SCALES)
@pytest.mark.parametrize("values", MOE_VALUES)
def test_numbers_are_finite_and_gates_are_neither_flat_nor_linear(variant, values):
    case = make(variant, values=values)
    inputs = build(case)
    w1, w2 = (stored.decoded() for stored in expert_operands(config_of(case), inputs)(2))
    gate = (inputs["x"].double() @ w1.values.T)[:, :34]
    assert bool(w2.values.isfinite().all() & gate.isfinite().all() & inputs["weights"].isfinite().all())
    if values == "normal":
        assert 0.5 < float(gate.std()) < 12
    if values == "zeros":
        assert not bool(gate.any())
    if values == "saturated":
        assert bool(((gate == 0) | (gate >= 32)).all())
        assert bool((gate == gate.round()).all())


def test_experts_differ():
    inputs = build(make())
    assert not torch.equal(inputs["w1"][0], inputs["w1"][1])
    assert not torch.equal(inputs["w2_scales"][0], inputs["w2_scales"][1])


@pytest.mark.parametrize("variant", MOE_SCALES)
@pytest.mark.parametrize("room", [1, 7, 8192, 10**6])
def test_sizes_fit_the_room_and_the_grammar(variant, room):
    for index in range(COUNT):
        found = {key: int(size) for key, size in sizes(variant, index, room).items()}
        least = 4 if variant in ("w4a8", "w4a16", "nvfp4") else 1
        assert found["experts"] * found["hidden"] * found["intermediate"] <= max(room, least)
        assert make(variant, **found)


def test_topk_above_the_experts_is_refused():
    with pytest.raises(CaseError, match="topk=6 is above experts=5"):
        make(topk=6)
    assert set(GRAMMAR["moe"]) == set(MOE_SCALES)
