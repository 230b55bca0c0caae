"""Router logits: each profile is what it says; sizes always fit together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.case import Case, CaseError
from fuzz.grammar import ROUTERS
from fuzz.inputs import build
from fuzz.routing_shapes import SHAPES, TOKENS, corner, fitted
from references.routing.cases import config_of

TEXT = (
    "routing GroupedTopK v=1 dtype=%s experts=96 groups=8 out=fp32 padding=none renormalize=on scaling=1 shared=0 "
    "stride=%s tokens=64 topk=6 topk_group=3 values=%s seed=%d"
)
BIASED = (
    "routing MiniMax2 v=1 bias=%s bias_dtype=%s dtype=fp32 experts=512 out=fp32 padding=none scaling=1 shared=0 "
    "stride=contiguous tokens=1 topk=6 values=normal seed=%d"
)


def logits(values, dtype="fp32", seed=0, stride="contiguous"):
    return build(Case.parse(TEXT % (dtype, stride, values, seed)))["logits"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("seed", range(3))
def test_profiles_are_what_they_say(dtype, seed):
    distinct = [len(row.unique()) for row in logits("ties", dtype, seed)]
    assert max(distinct) <= 5
    assert min(distinct) >= 2
    assert all(len(row.unique()) == 1 for row in logits("all_equal", dtype, seed))
    assert len(logits("all_equal", dtype, seed).unique()) > 8
    assert bool((logits("all_negative", dtype, seed) < 0).all())
    assert bool((logits("zero", dtype, seed) == 0).all())
    finite = ("normal", "ties", "saturated", "wide", "near_ties", "group_ties")
    assert all(bool(torch.isfinite(logits(values, dtype, seed)).all()) for values in finite)
    far = logits("saturated", dtype, seed).abs()
    assert float(far.min()) >= 8
    assert float(far.max()) > 1000
    ill = logits("nonfinite", dtype, seed)
    assert bool(ill.isnan().any())
    assert {-np.inf, np.inf} <= set(ill.flatten().tolist())
    assert bool((ill == -torch.inf).all(1).any())


def test_near_ties_are_neighbours():
    for row in logits("near_ties", seed=1):
        top = row.topk(30).values
        assert len(top.unique()) <= 5
        assert len(top.unique()) >= 3
        ulps = (top[0] - top[-1]) / (torch.nextafter(top[-1].abs(), torch.tensor(torch.inf)) - top[-1].abs())
        assert 0 < float(ulps) <= 8


def test_groups_hold_the_same_numbers_but_for_one_raised():
    groups = logits("group_ties").view(64, 8, 12).sort(-1).values
    same = (groups == groups.mode(1, keepdim=True).values).all(-1).sum(1)
    assert set(same.tolist()) == {7, 8}
    assert int((same == 8).sum()) > 32


@pytest.mark.parametrize("word", ["0", "0.1", "12", "1e4"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_biases_are_spread_or_near_their_word(word, dtype):
    kinds = set()
    for seed in range(12):
        bias = build(Case.parse(BIASED % (word, dtype, seed)))["bias"].double()
        assert float(bias.abs().max()) <= float(word) * (1 + 2.0**-8)
        kinds.add(bool((bias < 0).any()))
        if not bool((bias < 0).any()) and word == "1e4" and dtype == "fp32":
            assert 0.5 < float(bias.max() - bias.min()) < 5
    assert kinds == ({False} if word == "0" else {True, False})


def test_strides_are_as_named():
    assert logits("normal", stride="contiguous").is_contiguous()
    assert logits("normal", stride="transposed").stride() == (1, 64)
    assert logits("normal", stride="padded").stride(0) > 96
    assert logits("normal", stride="offset").storage_offset() > 0


@settings(max_examples=300, deadline=None)
@given(
    method=st.sampled_from(list(ROUTERS)),
    shape=st.tuples(*(st.integers(1, 600) for _ in range(4))),
    tokens=st.integers(1, 400),
    room=st.integers(1, 2**18),
)
def test_fitted_sizes_make_a_case_within_the_room(method, shape, tokens, room):
    sizes = fitted(method, shape, tokens, room)
    assert int(sizes["experts"]) * int(sizes["tokens"]) <= room
    words = {"dtype": "fp32", "out": "fp32", "padding": "none", "shared": "0", "stride": "contiguous", "values": "ties"}
    router = ROUTERS[method]
    words |= {"bias": "12", "bias_dtype": "fp32"} if router.biased else {}
    words |= {"scaling": "16"} if router.scaled else {}
    words |= {"renormalize": "on"} if router.renormalize else {}
    config_of(Case.make("routing", method, seed=0, **words, **sizes))


def test_routers_in_use_are_kept_as_they_are():
    assert fitted("DeepSeekV3", (256, 8, 4, 8), 17, 2**16) == {
        "experts": "256",
        "tokens": "17",
        "groups": "8",
        "topk_group": "4",
        "topk": "8",
    }
    assert fitted("Llama4", (128, 1, 1, 8), 3, 2**16) == {"experts": "128", "tokens": "3", "topk": "1"}
    corners = {tuple(corner("DeepSeekV3", index, 2**23).items()) for index in range(len(SHAPES) * len(TOKENS))}
    assert len(corners) == len(SHAPES) * len(TOKENS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"groups": 7}, "does not divide"),
        ({"topk_group": 9}, "does not divide"),
        ({"topk_group": 1, "topk": 20}, "above the 12 experts"),
        ({"experts": 513}, "not an integer within"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, problem):
    with pytest.raises(CaseError, match=problem):
        Case.parse(TEXT % ("fp32", "contiguous", "normal", 0)).replace(**change)
