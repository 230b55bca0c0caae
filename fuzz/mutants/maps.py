"""Faults with the maps of expert parallelism, in routers and expert layers: which expert lies where, as which number.

Probes like `fuzz.mutants.edges`, written before anybody knew whether the search finds them. Ranks hold their experts as
`fuzz.expert_maps` says; a map has one entry for each expert of all ranks, its number here or -1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fuzz.grammar import RANKS
from fuzz.mutants import moe, routing
from fuzz.mutants.base import Answer, Inputs, Mutant, Part, Partial
from fuzz.mutants.correct import Parts
from fuzz.mutants.probes import probe
from references.backend import CaseLike
from references.moe.config import local_ids
from references.routing.cases import config_of
from references.routing.forms import to_local

Mapped = Callable[[Tensor, Tensor], Tensor]
"""Ids of all ranks and the map to ids here."""


# Misread maps, of layers and routers alike.


def _unmapped(ids: Tensor, mapping: Tensor) -> Tensor:
    return ids


def _twice(ids: Tensor, mapping: Tensor) -> Tensor:
    return to_local(to_local(ids, mapping), mapping)


def _read_at_the_end(ids: Tensor, mapping: Tensor) -> Tensor:
    return mapping[ids.to(torch.int64)].to(ids.dtype)


def _none_is_the_first(ids: Tensor, mapping: Tensor) -> Tensor:
    return to_local(ids.clamp(min=0), mapping)


def _elsewhere_is_the_first(ids: Tensor, mapping: Tensor) -> Tensor:
    return torch.where(ids < 0, -1, to_local(ids, mapping).clamp(min=0))


def _elsewhere_is_the_last(ids: Tensor, mapping: Tensor) -> Tensor:
    local = to_local(ids, mapping)
    return torch.where((ids >= 0) & (local < 0), int(mapping.max()), local)


def _last_is_elsewhere(ids: Tensor, mapping: Tensor) -> Tensor:
    local = to_local(ids, mapping)
    return torch.where(local == int(mapping.max()), -1, local)


def _one_run(ids: Tensor, mapping: Tensor) -> Tensor:
    # Numbers counted from the expert that is the first here, as if the others followed it.
    here = mapping >= 0
    first = int((mapping == 0).int().argmax())
    local = ids - first
    return torch.where((ids < 0) | (local < 0) | (local >= int(here.sum())), -1, local)


def _ascending(ids: Tensor, mapping: Tensor) -> Tensor:
    # Which experts are here is kept, in which order they lie is not.
    here = mapping >= 0
    numbers = torch.where(here, here.cumsum(0) - 1, -1).to(mapping.dtype)
    return to_local(ids, numbers)


# Expert layers.

LAYERS = ("deepseek_fp8", "bf16")
MAPPED = ("map_linear", "map_any")


def _layer(mapped: Mapped) -> Answer:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        steps = replace(moe.CORRECT, mapped=lambda given: mapped(given["ids"], given["expert_map"]))
        return moe.layer(case, inputs, steps)

    return answer


def _next_rank(ids: Tensor, mapping: Tensor) -> Tensor:
    return to_local(ids, mapping.roll(len(mapping) // RANKS))


def _modulo(ids: Tensor, mapping: Tensor) -> Tensor:
    return torch.where(ids < 0, -1, ids % (len(mapping) // RANKS))


def _first_ranks_map(ids: Tensor, mapping: Tensor) -> Tensor:
    # The map is taken to be as long as there are experts here.
    return torch.where(ids < len(mapping) // RANKS, to_local(ids, mapping), -1)


def _weights_of_local_experts(case: CaseLike, inputs: Inputs) -> Parts:
    weights, here = inputs["weights"], local_ids(inputs) >= 0
    local = torch.where(here, weights, 0.0).sum(dim=1, keepdim=True)
    scaled = torch.where(local > 0, weights * (weights.sum(dim=1, keepdim=True) / local), weights)
    return moe.layer(case, {**inputs, "weights": scaled})


def _weights_left_behind(case: CaseLike, inputs: Inputs) -> Parts:
    # Local experts move to the front of their row, their weights do not.
    ids = inputs["ids"]
    order = (local_ids(inputs) < 0).to(torch.uint8).argsort(dim=1, stable=True)
    return moe.layer(case, {**inputs, "ids": ids.gather(1, order)})


def _rows_without_experts_unwritten(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    right = moe.layer(case, inputs)["output"]
    some = (local_ids(inputs) >= 0).any(dim=1, keepdim=True)
    return {"output": Partial(right, some.expand(right.shape))}


def _rows_of_the_first_place_alone(case: CaseLike, inputs: Inputs) -> Parts:
    # A token is sent here only if its first expert is.
    right = moe.layer(case, inputs)["output"]
    return {"output": torch.where(local_ids(inputs)[:, :1] >= 0, right, torch.zeros_like(right))}


# Routers.

ROUTERS = ("DeepSeekV3", "Sigmoid")
LOCAL = ("local",)


def _local(mapped: Mapped) -> Answer:
    return lambda case, inputs: routing.route(case, inputs, routing.Steps(to_here=mapped))


def _local_of(change: Callable[[CaseLike, Inputs, Parts], Parts]) -> Answer:
    """An answer of which some parts are changed, where there is a map."""

    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        right = routing.route(case, inputs)
        return right | change(case, inputs, right) if "expert_map" in inputs else right

    return answer


def _renormalised_here(case: CaseLike, inputs: Inputs, right: Parts) -> Parts:
    weights, here = right["weights"], right["local"] >= 0
    local = torch.where(here, weights, 0.0).sum(dim=1, keepdim=True)
    return {"weights": torch.where(local > 0, weights * (weights.sum(dim=1, keepdim=True) / local), weights)}


def _weight_elsewhere_is_zero(case: CaseLike, inputs: Inputs, right: Parts) -> Parts:
    return {"weights": torch.where(right["local"] >= 0, right["weights"], 0.0)}


def _selection_overwritten(case: CaseLike, inputs: Inputs, right: Parts) -> Parts:
    return {"selection": right["local"]}


def _shared_elsewhere(case: CaseLike, inputs: Inputs, right: Parts) -> Parts:
    return {"local": torch.where(right["selection"] >= case.integer("experts"), -1, right["local"])}


def _shared_numbered_as_of_all(case: CaseLike, inputs: Inputs, right: Parts) -> Parts:
    ids = right["selection"]
    return {"local": torch.where(ids >= case.integer("experts"), ids, right["local"])}


def _remainder_left_over(case: CaseLike, inputs: Inputs, right: Parts) -> Parts:
    # Ranks of a third of the experts each, rounded down, where experts lie in runs.
    experts, mapping = case.integer("experts"), inputs["expert_map"][: case.integer("experts")]
    here = (mapping >= 0).nonzero().view(-1)
    if not len(here) or not torch.equal(mapping[here], torch.arange(len(here), dtype=mapping.dtype)):
        return {}
    if int(here[-1] - here[0]) != len(here) - 1:
        return {}
    held, rank = experts // RANKS, -(-int(here[0]) * RANKS // experts)
    local = torch.arange(experts, dtype=mapping.dtype) - rank * held
    found = inputs["expert_map"].clone()
    found[:experts] = torch.where((local >= 0) & (local < held), local, -1)
    return {"local": to_local(right["selection"], found)}


def _padding_mapped(case: CaseLike, inputs: Inputs, right: Parts) -> Parts:
    # Rows are masked in the ids of all ranks, after these were mapped.
    return {"local": to_local(routing.selected(case, inputs)[0].to(torch.int32), inputs["expert_map"])}


def _best_of_local_experts(case: CaseLike, inputs: Inputs) -> Parts:
    # Experts that are elsewhere are masked before the top-k, as if a rank chose among its own.
    mapping = inputs["expert_map"][: case.integer("experts")]
    if int((mapping >= 0).sum()) < config_of(case).top_k:
        return routing.route(case, inputs)
    hidden = mapping < 0

    def order(choice: Tensor) -> Tensor:
        return routing.descending(choice.masked_fill(hidden, -torch.inf))

    return routing.route(case, inputs, routing.Steps(order=order))


def _in_a_byte(ids: Tensor, mapping: Tensor) -> Tensor:
    return to_local(ids, mapping).to(torch.int8).to(ids.dtype)


def _next_third(ids: Tensor, mapping: Tensor) -> Tensor:
    return to_local(ids, mapping.roll(-(-len(mapping) // RANKS)))


MAPS: tuple[Mutant, ...] = (
    *(
        probe(f"moe-map-{name}", description, "moe", LAYERS, _layer(mapped), ids=MAPPED)
        for name, description, mapped in (
            ("unread", "ids of all ranks taken for ids here", _unmapped),
            ("modulo", "other ranks' experts folded onto those here", _modulo),
            ("next-rank", "map of the rank before", _next_rank),
            ("twice", "map applied to ids that are mapped", _twice),
            ("end", "id -1 reads the end of the map", _read_at_the_end),
            ("none-first", "id -1 is expert 0 of all ranks", _none_is_the_first),
            ("elsewhere-first", "experts elsewhere computed by the first one here", _elsewhere_is_the_first),
            ("elsewhere-last", "experts elsewhere computed by the last one here", _elsewhere_is_the_last),
            ("last-lost", "last expert here taken for one elsewhere", _last_is_elsewhere),
            ("first-ranks", "map ends with as many experts as are here", _first_ranks_map),
        )
    ),
    *(
        probe(f"moe-map-{name}", description, "moe", LAYERS, _layer(mapped), ids=("map_any",))
        for name, description, mapped in (
            ("one-run", "experts here taken for a run that begins with the first", _one_run),
            ("ascending", "experts here taken in ascending order", _ascending),
        )
    ),
    probe("moe-map-frozen", "a map kept by address", "moe", LAYERS, moe.layer, frozen=("expert_map",), ids=MAPPED),
    probe(
        "moe-map-renormalised",
        "router weights renormalised over the experts here",
        "moe",
        LAYERS,
        _weights_of_local_experts,
        ids=MAPPED,
    ),
    probe(
        "moe-map-weights-behind",
        "experts here moved to the front without their weights",
        "moe",
        LAYERS,
        _weights_left_behind,
        ids=MAPPED,
    ),
    probe(
        "moe-map-unwritten",
        "tokens without an expert here unwritten",
        "moe",
        LAYERS,
        _rows_without_experts_unwritten,
        ids=MAPPED,
    ),
    probe(
        "moe-map-first-place",
        "tokens whose first expert is elsewhere left out",
        "moe",
        LAYERS,
        _rows_of_the_first_place_alone,
        ids=MAPPED,
    ),
    *(
        probe(f"router-map-{name}", description, "routing", ROUTERS, _local(mapped), out=LOCAL)
        for name, description, mapped in (
            ("unread", "local ids are those of all ranks", _unmapped),
            ("next-rank", "map of the rank before", _next_third),
            ("twice", "map applied to ids that are mapped", _twice),
            ("none-first", "id -1 is expert 0 of all ranks", _none_is_the_first),
            ("elsewhere-first", "experts elsewhere are the first one here", _elsewhere_is_the_first),
            ("last-lost", "last expert here taken for one elsewhere", _last_is_elsewhere),
            ("one-run", "experts here taken for a run that begins with the first", _one_run),
            ("ascending", "experts here taken in ascending order", _ascending),
            ("byte", "local ids in 8 bits", _in_a_byte),
        )
    ),
    *(
        probe(f"router-map-{name}", description, "routing", ROUTERS, _local_of(change), out=LOCAL)
        for name, description, change in (
            ("renormalised", "weights renormalised over the experts here", _renormalised_here),
            ("weight-lost", "weight of an expert elsewhere is 0", _weight_elsewhere_is_zero),
            ("in-place", "selection overwritten by local ids", _selection_overwritten),
            ("remainder", "ranks of experts // 3 each", _remainder_left_over),
        )
    ),
    probe(
        "router-map-shared-elsewhere",
        "shared experts on no rank",
        "routing",
        ROUTERS,
        _local_of(_shared_elsewhere),
        out=LOCAL,
        shared=("1", "2"),
    ),
    probe(
        "router-map-shared-global",
        "shared experts under their numbers of all ranks",
        "routing",
        ROUTERS,
        _local_of(_shared_numbered_as_of_all),
        out=LOCAL,
        shared=("1", "2"),
    ),
    *(
        probe(f"router-map-{name}", description, "routing", ROUTERS, answer, out=LOCAL, padding=("some",))
        for name, description, answer in (
            ("end", "id -1 reads the end of the map", _local(_read_at_the_end)),
            ("padding", "padded rows mapped before they are masked", _local_of(_padding_mapped)),
        )
    ),
    probe("router-map-own-best", "top-k among the experts here", "routing", ROUTERS, _best_of_local_experts, out=LOCAL),
    probe(
        "router-map-frozen",
        "a map kept by address",
        "routing",
        ROUTERS,
        routing.route,
        frozen=("expert_map",),
        out=LOCAL,
    ),
)
"""Every probe of a map."""
