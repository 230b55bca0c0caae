"""Every probe of an expert-parallel map on one small layer and one small router, beside the right answer, by hand."""

from __future__ import annotations

import pytest
import torch

from fuzz.case import Case
from fuzz.mutants import maps, moe, routing
from fuzz.mutants.base import Inputs, Partial

BY_NAME = {mutant.family.removeprefix("probe-"): mutant for mutant in maps.MAPS}
BY_CALLS = {"moe-map-frozen", "router-map-frozen"}
"""Whose answer to one call is right: they keep the map of the call before."""


def layer() -> tuple[Case, Inputs]:
    """Two experts of six are here, number 4 as 0 and number 2 as 1; gates of 64 make them multiply by 1 and 10.

    Rows of ids and weights: (4, 2), (2, 1), (0, 5), (-1, 4), (3, 2), each with weights 0.25 and 0.5.
    """
    words = "gate=first hidden=1 ids=map_any intermediate=1 limit=none out=fp32 scale=none scaling=1 tokens=5 topk=2"
    case = Case.parse(f"moe bf16 v=1 experts=2 {words} values=normal weight=output seed=0")
    bf16 = torch.bfloat16
    return case, {
        "x": torch.ones(5, 1, dtype=bf16),
        "ids": torch.tensor([[4, 2], [2, 1], [0, 5], [-1, 4], [3, 2]], dtype=torch.int32),
        "weights": torch.tensor([[0.25, 0.5]] * 5),
        "expert_map": torch.tensor([-1, -1, 1, -1, 0, -1], dtype=torch.int32),
        "w1": torch.tensor([[[64.0], [1 / 64]], [[64.0], [10 / 64]]], dtype=bf16),
        "w2": torch.ones(2, 1, 1, dtype=bf16),
    }


RIGHT = [0.25 + 5.0, 2.5, 0.0, 0.5, 5.0]
LAYERS = {
    # Ids 0 and 1 are computed as they stand.
    "unread": [0.0, 5.0, 0.25, 0.0, 0.0],
    "modulo": [0.25 + 0.5, 0.25 + 5.0, 0.25 + 5.0, 0.5, 2.5 + 0.5],
    # The map moved by two: 4 is 1 and 0 is 0.
    "next-rank": [2.5, 0.0, 0.25, 5.0, 0.0],
    # 4 -> 0 -> elsewhere, 2 -> 1 -> elsewhere.
    "twice": [0.0] * 5,
    # The map ends with -1 here: see `test_none_reads_the_end`.
    "end": RIGHT,
    "none-first": RIGHT,
    "elsewhere-first": [5.25, 2.5 + 0.5, 0.75, 0.5, 0.25 + 5.0],
    "elsewhere-last": [5.25, 2.5 + 5.0, 7.5, 0.5, 2.5 + 5.0],
    "last-lost": [0.25, 0.0, 0.0, 0.5, 0.0],
    "first-ranks": [0.0] * 5,
    # Experts 4 and 5 are taken to be here.
    "one-run": [0.25, 0.0, 5.0, 0.5, 0.0],
    # 2 is taken to be 0, and 4 to be 1.
    "ascending": [2.5 + 0.5, 0.25, 0.0, 5.0, 0.5],
    "renormalised": [5.25, 7.5, 0.0, 0.75, 7.5],
    "weights-behind": [5.25, 2.5, 0.0, 0.25, 2.5],
    "first-place": [5.25, 2.5, 0.0, 0.0, 0.0],
}


def flat(found: torch.Tensor) -> list[float]:
    return [float(number) for number in found.view(-1)]


def test_the_right_layer_by_hand() -> None:
    # Expert 3 is elsewhere, so that the last token has 0.5 * 10 of expert 2; the second 0.25 * 10.
    assert flat(moe.layer(*layer())["output"]) == [5.25, 2.5, 0.0, 0.5, 5.0]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_by_hand(name: str) -> None:
    output = BY_NAME[f"moe-map-{name}"].answer(*layer())["output"]
    assert isinstance(output, torch.Tensor)
    assert flat(output) == LAYERS[name]


@pytest.mark.parametrize(("name", "place"), [("end", 5), ("none-first", 0)])
def test_an_id_of_none_reads_an_entry(name: str, place: int) -> None:
    case, inputs = layer()
    mapping = inputs["expert_map"].clone()
    mapping[[2, place]] = mapping[[place, 2]]
    inputs = {**inputs, "expert_map": mapping}
    output = BY_NAME[f"moe-map-{name}"].answer(case, inputs)["output"]
    assert isinstance(output, torch.Tensor)
    # The fourth token's -1 becomes the expert that multiplies by 10.
    assert flat(output)[3] == 0.25 * 10 + 0.5
    assert flat(moe.layer(case, inputs)["output"])[3] == 0.5


def test_tokens_without_an_expert_here_are_left_out() -> None:
    output = BY_NAME["moe-map-unwritten"].answer(*layer())["output"]
    assert isinstance(output, Partial)
    assert output.written.view(-1).tolist() == [True, True, False, True, True]


def router(padding: str = "none") -> tuple[Case, Inputs]:
    """Three tokens of seven experts by sigmoid, top-2, one shared; the rank has experts 4 and 1 as 0 and 1.

    Each token's best are 4 then 1, 1 then 0, 6 then 5; the last one is padding where that is asked for.
    """
    text = (
        "routing Sigmoid v=1 dtype=fp32 experts=7 out=local padding=none shared=1 stride=contiguous tokens=3 topk=2 "
        "values=normal seed=0"
    )
    logits = torch.full((3, 7), -4.0)
    for token, (best, second) in enumerate(((4, 1), (1, 0), (6, 5))):
        logits[token, best], logits[token, second] = 1.0, 0.5
    mapping = torch.tensor([-1, 1, -1, -1, 0, -1, -1, 2], dtype=torch.int32)
    return Case.parse(text).replace(padding=padding), {"logits": logits, "expert_map": mapping}


ROUTERS = {
    "unread": [[4, 1, 7], [1, 0, 7], [6, 5, 7]],
    # The map of eight entries moved by three: 4 is 1, 7 is 0, 2 is the shared one.
    "next-rank": [[1, -1, 0], [-1, -1, 0], [-1, -1, 0]],
    "twice": [[-1, 1, -1], [1, -1, -1], [-1, -1, -1]],
    "none-first": [[0, 1, 2], [1, -1, 2], [-1, -1, 2]],
    "elsewhere-first": [[0, 1, 2], [1, 0, 2], [0, 0, 2]],
    "last-lost": [[0, 1, -1], [1, -1, -1], [-1, -1, -1]],
    # Counted on from expert 4, three of them with the shared one.
    "one-run": [[0, -1, -1], [-1, -1, -1], [2, 1, -1]],
    "ascending": [[1, 0, 2], [0, -1, 2], [-1, -1, 2]],
    "byte": [[0, 1, 2], [1, -1, 2], [-1, -1, 2]],
    # Experts that do not lie in a run are not counted.
    "remainder": [[0, 1, 2], [1, -1, 2], [-1, -1, 2]],
    "shared-elsewhere": [[0, 1, -1], [1, -1, -1], [-1, -1, -1]],
    "shared-global": [[0, 1, 7], [1, -1, 7], [-1, -1, 7]],
}


@pytest.mark.parametrize("name", ROUTERS)
def test_local_ids_by_hand(name: str) -> None:
    found = BY_NAME[f"router-map-{name}"].answer(*router())
    right = routing.route(*router())
    assert right["local"].tolist() == [[0, 1, 2], [1, -1, 2], [-1, -1, 2]]
    local, selection = found["local"], found["selection"]
    assert isinstance(local, torch.Tensor)
    assert isinstance(selection, torch.Tensor)
    assert local.tolist() == ROUTERS[name]
    assert torch.equal(selection, right["selection"])


def test_a_remainder_belongs_to_nobody() -> None:
    # Ranks of 7 // 3 = 2 experts: 2 and 3 on the second, where the right one has 2, 3 and no more.
    case, inputs = router()
    mapping = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)
    local = BY_NAME["router-map-remainder"].answer(case, {**inputs, "expert_map": mapping})["local"]
    assert isinstance(local, torch.Tensor)
    # The last rank begins with expert 4 and ends before 6, the remainder.
    assert local.tolist() == [[0, -1, 3], [-1, -1, 3], [-1, 1, 3]]


def test_a_byte_ends_at_127() -> None:
    case, inputs = router()
    mapping = torch.arange(8, dtype=torch.int32) + 124
    local = BY_NAME["router-map-byte"].answer(case, {**inputs, "expert_map": mapping})["local"]
    assert isinstance(local, torch.Tensor)
    assert local.tolist() == [[-128, 125, -125], [125, 124, -125], [-126, -127, -125]]


def test_padded_rows() -> None:
    case, inputs = router(padding="some")
    right = routing.route(case, inputs)["local"].tolist()
    assert right[2] == [-1, -1, -1]
    for name, expected in (("end", [2, 2, 2]), ("padding", [-1, -1, 2])):
        local = BY_NAME[f"router-map-{name}"].answer(case, inputs)["local"]
        assert isinstance(local, torch.Tensor)
        assert local.tolist() == [*right[:2], expected]


def test_weights_and_selections_of_all_ranks() -> None:
    case, inputs = router()
    one, half = torch.sigmoid(torch.tensor([1.0, 0.5])).tolist()
    found = {name: BY_NAME[f"router-map-{name}"].answer(case, inputs) for name in ("renormalised", "weight-lost")}
    right = routing.route(case, inputs)["weights"]
    assert right[1].tolist() == pytest.approx([one, half, 1.0])
    more = (one + half + 1.0) / (one + 1.0)
    for name, expected in (("renormalised", [one * more, half * more, more]), ("weight-lost", [one, 0.0, 1.0])):
        weights = found[name]["weights"]
        assert isinstance(weights, torch.Tensor)
        assert weights[1].tolist() == pytest.approx(expected)
        assert torch.allclose(weights[0], right[0])
    in_place = BY_NAME["router-map-in-place"].answer(case, inputs)
    assert in_place["selection"] is in_place["local"]
    own = BY_NAME["router-map-own-best"].answer(case, inputs)["selection"]
    assert isinstance(own, torch.Tensor)
    assert own.tolist() == [[4, 1, 7], [1, 4, 7], [1, 4, 7]]


def test_every_probe_of_a_map_is_shown() -> None:
    shown = {f"moe-map-{name}" for name in LAYERS} | {f"router-map-{name}" for name in ROUTERS}
    shown |= {
        f"router-map-{name}" for name in ("end", "padding", "renormalised", "weight-lost", "in-place", "own-best")
    }
    assert set(BY_NAME) == shown | BY_CALLS | {"moe-map-unwritten"}
