"""Properties of expert layers: tokens stand alone, experts are names, and router weights are linear."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.relations import Expected, Inputs, Parts, Relation, Twin, everywhere, order
from fuzz.case import Case
from references.moe.config import local_ids

TOKENS = ("x", "ids", "weights")


def _rows(inputs: Inputs, moved: Tensor) -> dict[str, Tensor]:
    return {**inputs, **{name: inputs[name][moved] for name in TOKENS}}


def rows(case: Case, inputs: Inputs) -> Twin | None:
    """Tokens in another order."""
    if case.integer("tokens") < 2:
        return None
    moved = order(case, case.integer("tokens"))

    def expected(parts: Parts) -> Mapping[str, Expected]:
        return {"output": everywhere(parts["output"][moved.to(parts["output"].device)])}

    return Twin(case, _rows(inputs, moved), expected)


def subset(case: Case, inputs: Inputs) -> Twin | None:
    """The first half of the tokens."""
    some = case.integer("tokens") // 2
    if not some:
        return None
    return Twin(
        case.replace(tokens=some),
        _rows(inputs, torch.arange(some)),
        lambda parts: {"output": everywhere(parts["output"][:some])},
    )


def slots(case: Case, inputs: Inputs) -> Twin | None:
    """A token's experts in another order, with their weights."""
    if case.integer("topk") < 2:
        return None
    moved = order(case, case.integer("topk"))
    found = {**inputs, "ids": inputs["ids"][:, moved], "weights": inputs["weights"][:, moved]}
    return Twin(case, found, lambda parts: {"output": everywhere(parts["output"])})


def experts(case: Case, inputs: Inputs) -> Twin | None:
    """Experts under other numbers, by the map where there is one."""
    count = case.integer("experts")
    if count < 2:
        return None
    old = order(case, count)  # the new expert e was old[e]
    names = torch.empty(count, dtype=torch.int64)
    names[old] = torch.arange(count)
    numbered = "expert_map" if "expert_map" in inputs else "ids"
    given = inputs[numbered]
    renamed = torch.where(given < 0, given, names[given.clamp(min=0).long()].to(given.dtype))
    found = {name: tensor[old] if name[:2] in ("w1", "w2") else tensor for name, tensor in inputs.items()}
    return Twin(case, {**found, numbered: renamed}, lambda parts: {"output": everywhere(parts["output"])})


def unused(case: Case, inputs: Inputs) -> Twin | None:
    """Other weights of experts that no token has, and other activations of tokens without experts."""
    local = local_ids(inputs)
    count = case.integer("experts")
    idle = torch.tensor([expert for expert in range(count) if not bool((local == expert).any())], dtype=torch.int64)
    lost = (local < 0).all(1)
    if not len(idle) and not bool(lost.any()):
        return None
    found = dict(inputs)
    for name in ("w1", "w2"):
        found[name] = inputs[name].clone()
        found[name][idle] = found[name][idle].flip(-1)
    found["x"] = inputs["x"].clone()
    found["x"][lost] = found["x"][lost].flip(-1)
    return Twin(case, found, lambda parts: {"output": everywhere(parts["output"])})


def doubled(case: Case, inputs: Inputs) -> Twin | None:
    """Router weights twice as large: twice the output, exactly, since every stage from there on is linear."""
    if case["weight"] == "input":
        return None

    def expected(parts: Parts) -> Mapping[str, Expected]:
        values = parts["output"] * 2
        return {"output": Expected(values, values.isfinite())}

    return Twin(case, {**inputs, "weights": inputs["weights"] * 2}, expected)


RELATIONS = (
    Relation("rows", "tokens in another order", "permutation_invariant", rows),
    Relation("subset", "the first half of the tokens alone", "batch_invariant", subset),
    Relation("slots", "a token's experts in another order", "", slots),
    Relation("experts", "experts under other numbers", "", experts),
    Relation("unused", "weights of experts without tokens and tokens without experts changed", "run_to_run", unused),
    Relation("doubled", "router weights twice as large", "run_to_run", doubled),
)
"""The properties of ``moe``."""
