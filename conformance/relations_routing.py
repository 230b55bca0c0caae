"""Properties of routers: tokens stand alone, experts are names, and a softmax knows differences only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.relations import Expected, Inputs, Parts, Relation, Twin, everywhere, order
from fuzz.case import Case
from references.routing.cases import real_tokens
from references.routing.forms import unpack
from references.routing.methods import METHODS

SHIFT = 64.0
"""Added to every logit: exp of the sum of many overflows unless the largest is subtracted first."""


def rows(case: Case, inputs: Inputs) -> Twin | None:
    """Tokens that are no padding in another order."""
    real, tokens = real_tokens(case), case.integer("tokens")
    if real < 2:
        return None
    moved = torch.cat([order(case, real), torch.arange(real, tokens)])
    return Twin(case, {**inputs, "logits": inputs["logits"][moved]}, lambda parts: _rows(parts, moved, real))


def subset(case: Case, inputs: Inputs) -> Twin | None:
    """The first half of the tokens."""
    some = case.integer("tokens") // 2
    if not some or case["padding"] != "none":
        return None
    twin = {**inputs, "logits": inputs["logits"][:some]}
    return Twin(case.replace(tokens=some), twin, lambda parts: _rows(parts, torch.arange(some), some))


def unused(case: Case, inputs: Inputs) -> Twin | None:
    """Other logits of padded tokens."""
    real, tokens = real_tokens(case), case.integer("tokens")
    if real == tokens or not real:
        return None
    logits = inputs["logits"].clone()
    logits[real:] = logits[real:].roll(1, dims=1) * 0.5 + 1.0
    return Twin(case, {**inputs, "logits": logits}, lambda parts: _rows(parts, torch.arange(tokens), real))


def _rows(parts: Parts, moved: Tensor, real: int) -> Mapping[str, Expected]:
    """Every part's rows, compared where they are no padding."""
    found = {}
    for name, part in parts.items():
        values = part[moved.to(part.device)]
        compared = (torch.arange(len(values), device=values.device) < real)[:, None].expand(values.shape)
        found[name] = Expected(values, compared)
    return found


def experts(case: Case, inputs: Inputs) -> Twin | None:
    """Experts under other numbers, whole groups and within each group."""
    count = case.integer("experts")
    number = case.integer("groups") if METHODS[case.variant].group_score != "none" else 1
    size = count // number
    within = torch.stack([order(case, size, f"group {group}") for group in range(number)])
    old = (order(case, number, "groups")[:, None] * size + within).reshape(-1)  # the new expert e was old[e]
    found = {**inputs, "logits": inputs["logits"][:, old]}
    if "bias" in inputs:
        found["bias"] = inputs["bias"][old]
    if "expert_map" in inputs:
        found["expert_map"] = torch.cat([inputs["expert_map"][:count][old], inputs["expert_map"][count:]])
    names = torch.arange(count + case.integer("shared"))
    names[old] = torch.arange(count)

    def expected(parts: Parts) -> Mapping[str, Expected]:
        ids = unpack(parts["packed"])[0] if "packed" in parts else parts["selection"]
        there = (ids >= 0) & (ids < len(names))
        renamed = torch.where(there, names.to(ids.device)[ids.clamp(0, len(names) - 1).long()].to(ids.dtype), ids)
        if "packed" in parts:
            return {"packed": everywhere((renamed << 16) | (parts["packed"] & 0xFFFF))}
        return {"selection": everywhere(renamed), "weights": everywhere(parts["weights"])}

    return Twin(case, found, expected)


def shifted(case: Case, inputs: Inputs) -> Twin | None:
    """The same number added to all logits: a softmax does not change where that is exact."""
    rule = METHODS[case.variant]
    if "softmax" not in (rule.choice, rule.score) or rule.weight == "logit":
        return None
    logits = inputs["logits"]
    moved = logits + SHIFT
    finite = moved.isfinite().all(1)
    moved = torch.where(finite[:, None], moved, logits)
    exact = finite & (moved.double() == logits.double() + SHIFT).all(1)

    def expected(parts: Parts) -> Mapping[str, Expected]:
        found = {}
        for name, part in parts.items():
            found[name] = Expected(part, exact.to(part.device)[:, None].expand(part.shape))
        return found

    return Twin(case, {**inputs, "logits": moved}, expected)


RELATIONS = (
    Relation("rows", "tokens in another order", "permutation_invariant", rows),
    Relation("subset", "the first half of the tokens alone", "batch_invariant", subset),
    Relation("experts", "experts under other numbers", "", experts),
    Relation("shifted", "64 added to every logit", "", shifted),
    Relation("unused", "other logits of padded tokens", "run_to_run", unused),
)
"""The properties of ``routing``."""
