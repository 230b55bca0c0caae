"""Judging weights given the ids that came with them: `judge_weights` and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from references.routing.methods import RoutingConfig
from references.routing.recipe import RoutingRecipe
from references.routing.rounding import to_dtype
from references.routing.rows import check, check_columns, choice_intervals, chunks, padding_rows, shared_weight
from references.routing.selection import fates, grouped_admissible
from references.routing.weights import Zeroed, enclose


@dataclass(frozen=True, kw_only=True)
class WeightJudgement:
    """One entry a token and column (top_k routed, then shared experts).

    inside: admissible or not. headroom: |weight - nominal| / radius on that side; inf for a NaN or a missing radius.
    lo, nominal, hi: FP64. free: nothing is demanded (a NaN logit enters, padding). stage_radii: ``score``,
    ``denominator``, ``output_rounding``.
    """

    inside: Tensor
    headroom: Tensor
    lo: Tensor
    nominal: Tensor
    hi: Tensor
    free: Tensor
    stage_radii: dict[str, Tensor]


def judge_weights(
    weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe
) -> WeightJudgement:
    """Judge weights [tokens, top_k + shared_experts] given the ids that came with them.

    Ids that are out of range (judged by `judge_selection`) take expert 0's place here; padded rows as declared.
    """
    check(logits, bias, config, recipe)
    check_columns(ids, logits, config, "ids")
    check_columns(weights, logits, config, "weights")
    parts = [
        _weights(
            weights[rows].to(torch.float64), ids[rows].to(torch.int64), logits[rows], bias, config, recipe, rows.start
        )
        for rows in chunks(logits)
    ]

    tensors = [field.name for field in fields(WeightJudgement) if field.name != "stage_radii"]
    return WeightJudgement(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in tensors},
        stage_radii={name: torch.cat([part.stage_radii[name] for part in parts]) for name in parts[0].stage_radii},
    )


def _weights(
    weights: Tensor,
    ids: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    config: RoutingConfig,
    recipe: RoutingRecipe,
    start: int,
) -> WeightJudgement:
    x = logits.to(torch.float64)
    picked = ids[:, : config.top_k].clamp(0, config.experts - 1)
    routed = enclose(picked, x, config, recipe, _zeroed(picked, logits, config, recipe))
    shape = (len(ids), config.shared_experts)
    shared = torch.full(shape, shared_weight(config, recipe), dtype=torch.float64, device=x.device)
    relative = 0.0 if recipe.scaling == "topk" or config.scaling_factor == 1.0 else 2 * recipe.division_error
    shared_lo = to_dtype(shared * (1 - relative), recipe.weight_dtype)
    shared_hi = to_dtype(shared * (1 + relative), recipe.weight_dtype)
    lo, hi = torch.cat([routed.lo, shared_lo], 1), torch.cat([routed.hi, shared_hi], 1)
    centre = torch.cat([routed.nominal, to_dtype(shared, recipe.weight_dtype)], 1)
    nothing = torch.zeros(shape, dtype=torch.bool, device=x.device)
    free, nan_allowed = torch.cat([routed.free, nothing], 1), torch.cat([routed.nan_allowed, nothing], 1)

    padding = padding_rows(len(ids), start, config, x.device)[:, None].expand_as(free)
    if config.num_token_non_padded is not None:
        # A row of ids -1 is skipped whatever its weights are; otherwise padding must weigh nothing.
        zero = padding & (recipe.padded_rows == "zero_weight")
        lo, centre, hi = (torch.where(zero, 0.0, end) for end in (lo, centre, hi))
        free = torch.where(padding, ~zero, free)
        nan_allowed = nan_allowed & ~padding

    inside = free | ((weights >= lo) & (weights <= hi)) | (nan_allowed & torch.isnan(weights))
    distance = (weights - centre).abs()
    radius = torch.where(weights >= centre, hi - centre, centre - lo)
    headroom = torch.where((distance == 0) | (weights == centre), 0.0, distance / radius)
    headroom = torch.where(torch.isnan(headroom), torch.inf, headroom)
    headroom = torch.where(free | (nan_allowed & torch.isnan(weights)), 0.0, headroom)
    stage_radii = {
        name: torch.cat([radius, torch.zeros_like(shared)], 1) for name, radius in routed.stage_radii.items()
    }
    stage_radii["denominator"][:, config.top_k :] = shared * relative
    return WeightJudgement(
        inside=inside, headroom=headroom, lo=lo, nominal=centre, hi=hi, free=free, stage_radii=stage_radii
    )


def _zeroed(ids: Tensor, logits: Tensor, config: RoutingConfig, recipe: RoutingRecipe) -> Zeroed | None:
    """With dropped groups at 0.0, an expert of such a group that fills up the selection weighs 0.0."""
    if recipe.dropped_fill == "minus_inf" or not config.grouped:
        return None
    _, c = choice_intervals(logits, None, config, recipe)
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=ids.device).scatter(1, ids, True)
    filled = ~grouped_admissible(mask, c, config)[:, None]
    may, must = fates(c, config)
    group = ids // config.group_size
    return Zeroed(filled & may.gather(1, group), filled & must.gather(1, group))
