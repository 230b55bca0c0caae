"""Routing: router logits to expert ids and weights. Contract: docs/routing.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import CLASSES, classify, distance, part_verdict, show_float
from conformance.operations.routing_tokens import KINDS, example_of, kinds_of
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references.recipes import Recipe
from references.routing import METHODS, RoutingConfig, RoutingRecipe, judge_selection, judge_weights, nominal
from references.routing.cases import config_of, routing_recipe, weight_name
from references.routing.forms import to_local, unpack
from references.routing.rounding import DTYPES
from references.routing.rows import padding_rows

NAME = "routing"


def open_choices(variant: str) -> frozenset[str]:
    """Ties and padded rows; errors and forms of the functions that the method evaluates; what its keys leave open."""
    rule = METHODS[variant]
    scores = {rule.choice, rule.score} | ({"softmax"} if rule.weight == "softmax_selected" else set())
    choices = {"tie_rule", "padded_rows"}
    if scores - {"logit"}:
        choices |= {"exp_error", "exp_slope", "division_error"}
    if "sigmoid" in scores:
        choices |= {"sigmoid", "tanh_error"}
    if "sqrt_softplus" in scores:
        choices |= {"log_error"}
    if rule.biased:
        choices |= {"bias_dtype"}
    if rule.renormalize is not False:
        choices |= {"denominator"}
    if rule.scaled:
        choices |= {"scaling", "division_error"}
    if rule.group_score != "none":
        choices |= {"group_tie_rule"}
    if rule.group_score == "max":
        choices |= {"dropped_fill"}
    return frozenset(choices)


def inputs(case: Case) -> dict[str, Tensor]:
    """``logits`` `[tokens, experts]`; where there are any ``bias`` `[experts]`, ``expert_map`` `[experts + shared]`."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``selection`` (ids), ``weights``, ``local`` if asked for, all `[tokens, topk + shared]`; or ``packed`` alone."""
    shape = case.integer("tokens"), case.integer("topk") + case.integer("shared")
    if case["out"] == "packed":
        return {"packed": OutputSpec(shape, torch.int32)}
    parts = {
        "selection": OutputSpec(shape, torch.int32),
        "weights": OutputSpec(shape, DTYPES[weight_name(case)]),
    }
    return {**parts, "local": OutputSpec(shape, torch.int32)} if case["out"] == "local" else parts


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """The ids as sets, then weights and local ids given those returned; packed, ids and weights in one verdict."""
    router, choices = config_of(case), routing_recipe(recipe.only(open_choices(case.variant)), case)
    logits, bias = inputs["logits"], inputs.get("bias")
    if case["out"] != "packed":
        ids, weights = outputs["selection"], outputs["weights"]
        verdicts = [
            selection_verdict(ids, logits, bias, router, choices),
            weights_verdict(weights, ids, logits, bias, router, choices),
        ]
        if case["out"] == "local":
            verdicts.append(local_verdict(outputs["local"], ids, inputs["expert_map"], router, choices))
        return verdicts
    ids, weights = unpack(outputs["packed"])
    weights = weights.to(torch.bfloat16)
    selection = selection_verdict(ids, logits, bias, router, choices)
    verdict = weights_verdict(weights, ids, logits, bias, router, choices)
    shown = selection if selection.verdict != "pass" else verdict
    message = f"{shown.part}: {shown.message}" if shown.message else ""
    headroom = max(selection.headroom or 0.0, verdict.headroom or 0.0)
    whole = replace(shown, part="packed", message=message, headroom=headroom, bit_equal=verdict.bit_equal)
    return [replace(whole, error=verdict.error, selection=selection.selection)]


def selection_verdict(
    ids: Tensor, logits: Tensor, bias: Tensor | None, router: RoutingConfig, recipe: RoutingRecipe
) -> PartVerdict:
    """The verdict on ids `[tokens, topk + shared]`, an element a token; bit_equal is the share with the nominal set."""
    found = judge_selection(ids, logits, bias, router, recipe)
    expected, _ = nominal(logits, bias, router, recipe)
    equal = (ids.sort(1).values == expected.sort(1).values).all(1)
    kinds = torch.zeros(found.inside.shape, dtype=torch.uint8, device=ids.device)
    outside = (~found.inside).nonzero().squeeze(1)
    if len(outside):
        kinds[outside] = kinds_of(outside, logits, bias, router, recipe)
    verdict = part_verdict(
        "selection",
        inside=found.inside,
        headroom=found.headroom,
        equal=equal,
        kinds=kinds,
        classes=KINDS,
        example=lambda index: example_of(index[0], ids, expected, found, logits, bias, router, recipe),
    )
    return replace(verdict, stage_radii=_at_worst(found.stage_radii, verdict), selection=fingerprints(ids))


def weights_verdict(
    weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, router: RoutingConfig, recipe: RoutingRecipe
) -> PartVerdict:
    """The verdict on weights `[tokens, topk + shared]`, given the ids that came with them."""
    found = judge_weights(weights, ids, logits, bias, router, recipe)
    dtype = weights.dtype

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        low, high = (float(end[index]) for end in (found.lo, found.hi))
        ends = show_float(low, dtype) if low == high else f"{show_float(low, dtype)} .. {show_float(high, dtype)}"
        expert = int(ids[index])
        source = f"expert {expert}"
        if index[1] >= router.top_k:
            source += ", shared"
        elif 0 <= expert < router.experts:
            source += f", logit {show_float(float(logits[index[0], expert]), logits.dtype)}"
        return {"actual": show_float(float(weights[index]), dtype), "admissible": ends, "input": source}

    kinds = classify(found.nominal)
    kinds[:, router.top_k :] = len(CLASSES)
    verdict = part_verdict(
        "weights",
        inside=found.inside,
        headroom=found.headroom,
        equal=(weights.to(torch.float64) == found.nominal) | found.free,
        kinds=kinds,
        classes=(*CLASSES, "shared"),
        error=distance(weights, found.nominal).masked_fill(found.free, 0.0),
        example=example,
    )
    return replace(verdict, stage_radii=_at_worst(found.stage_radii, verdict))


def local_verdict(
    local: Tensor, ids: Tensor, mapping: Tensor, router: RoutingConfig, recipe: RoutingRecipe
) -> PartVerdict:
    """The verdict on local ids `[tokens, topk + shared]`, given the ids that came with them.

    Free are those of ids that are no expert, which is for the ids' own verdict, and of padded rows that nobody judges.
    """
    known = (ids >= -1) & (ids < len(mapping))
    expected = to_local(torch.where(known, ids, -1).to(torch.int32), mapping)
    free = ~known
    if recipe.padded_rows == "any":
        free |= padding_rows(len(ids), 0, router, ids.device)[:, None]
    inside = (local == expected) | free
    kinds = torch.where(ids < 0, 2, torch.where(expected < 0, 1, 0)).to(torch.uint8)

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        actual, admissible = (int(item[index]) for item in (local, expected))
        return {"actual": _shown(actual), "admissible": _shown(admissible), "input": f"expert {int(ids[index])}"}

    return part_verdict(
        "local",
        inside=inside,
        headroom=torch.where(inside, 0.0, torch.inf),
        equal=inside,
        kinds=kinds,
        classes=("here", "elsewhere", "none"),
        example=example,
    )


def _shown(number: int) -> str:
    """An int32 with its bits."""
    return f"0x{number & 0xFFFFFFFF:08x} ({number})"


def fingerprints(ids: Tensor) -> str:
    """8 hex digits for each token's set of ids `[tokens, topk + shared]`: a polynomial of the sorted ids mod 2^32."""
    hashed = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    for column in ids.to(torch.int64).sort(1).values.unbind(1):
        hashed = (hashed * 1_000_003 + column + 2) % 2**32
    return "".join(f"{value:08x}" for value in hashed.tolist())


def _at_worst(radii: Mapping[str, Tensor], verdict: PartVerdict) -> dict[str, float]:
    worst = tuple(verdict.worst_index or ())
    return {name: float(radius[worst]) for name, radius in radii.items()}
