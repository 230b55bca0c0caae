"""Judging a selection: `judge_selection` and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from references.routing import scores, ties
from references.routing.methods import RoutingConfig
from references.routing.recipe import RoutingRecipe
from references.routing.rows import check, check_columns, choice_intervals, chunks, padding_rows, shared_ids, undefined
from references.routing.scores import Interval
from references.routing.selection import dropped_at_zero_admissible, grouped_admissible, ungrouped_admissible

BISECTIONS = 12
"""Headroom of a selection is found to within 2^-12."""


class Reason(IntEnum):
    """Why a token's selection is not admissible."""

    OK = 0
    OUT_OF_RANGE = 1
    DUPLICATE = 2
    NOT_TOP_K = 3
    TIE_RULE = 4
    SHARED_EXPERT = 5
    PADDING = 6


@dataclass(frozen=True, kw_only=True)
class SelectionJudgement:
    """One entry a token.

    inside: admissible or not. headroom: share of the score intervals that the selection needs: 0 if it is a top-k of
    the nominal scores, at most 1 where admissible, inf elsewhere. margin: smallest upper end inside less largest lower
    end outside (the slack of the ungrouped criterion; for groups, within the groups that were used).
    reason: a `Reason`, uint8. stage_radii: ``score_error`` and ``bias_rounding``, the half widths at the weakest
    selected expert.
    """

    inside: Tensor
    headroom: Tensor
    margin: Tensor
    reason: Tensor
    stage_radii: dict[str, Tensor]


def selection_admissible(
    ids: Tensor, logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe
) -> Tensor:
    """Whether each token's ids are admissible: bool [tokens]. Arguments as for `judge_selection`."""
    return judge_selection(ids, logits, bias, config, recipe).inside


def judge_selection(
    ids: Tensor, logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe
) -> SelectionJudgement:
    """Judge ids [tokens, top_k + shared_experts] (any integer dtype, any order of the routed ones).

    logits, bias: as for `nominal`. Raises ValueError for shapes or a recipe that do not fit.
    """
    check(logits, bias, config, recipe)
    check_columns(ids, logits, config, "ids")
    parts = [
        _selection(ids[rows].to(torch.int64), logits[rows], bias, config, recipe, rows.start) for rows in chunks(logits)
    ]
    return SelectionJudgement(
        inside=torch.cat([part.inside for part in parts]),
        headroom=torch.cat([part.headroom for part in parts]),
        margin=torch.cat([part.margin for part in parts]),
        reason=torch.cat([part.reason for part in parts]),
        stage_radii={name: torch.cat([part.stage_radii[name] for part in parts]) for name in parts[0].stage_radii},
    )


def _selection(
    ids: Tensor, logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe, start: int
) -> SelectionJudgement:
    routed, shared = ids[:, : config.top_k], ids[:, config.top_k :]
    in_range = ((routed >= 0) & (routed < config.experts)).all(1)
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=ids.device)
    mask.scatter_(1, routed.clamp(0, config.experts - 1), True)
    distinct = mask.sum(1) == config.top_k
    known_shared = (shared.sort(1).values == shared_ids(config, ids.device)).all(1)
    free = undefined(logits, config)

    s, c = choice_intervals(logits, bias, config, recipe)
    judged = in_range & distinct & ~free
    barred, broken, same = _tie_rules(mask, c, logits, bias, config, recipe, judged)
    top_k = _is_top_k(mask, c, config, recipe, barred, same)
    headroom = _headroom(mask, c, config, recipe, barred, same, judged & top_k)

    reason = torch.full(ids.shape[:1], int(Reason.OK), dtype=torch.uint8, device=ids.device)
    reason[~known_shared] = Reason.SHARED_EXPERT
    reason[judged & broken] = Reason.TIE_RULE
    reason[judged & ~top_k] = Reason.NOT_TOP_K
    reason[~distinct] = Reason.DUPLICATE
    reason[~in_range] = Reason.OUT_OF_RANGE
    padding = padding_rows(ids.shape[0], start, config, ids.device)
    unpadded = (ids != -1).any(1) if recipe.padded_rows == "minus_one" else torch.zeros_like(padding)
    reason = torch.where(padding, torch.where(unpadded, int(Reason.PADDING), int(Reason.OK)).to(torch.uint8), reason)
    inside = reason == Reason.OK
    headroom = torch.where(inside, torch.where(judged & ~padding, headroom, 0.0), torch.inf)

    weakest = torch.where(mask, c.hi, torch.inf).argmin(1, keepdim=True)
    score_radius = (0.5 * (s.hi - s.lo)).gather(1, weakest).squeeze(1)
    radius = (0.5 * (c.hi - c.lo)).gather(1, weakest).squeeze(1)
    stages = {"score_error": score_radius, "bias_rounding": (radius - score_radius).clamp_min(0.0)}
    return SelectionJudgement(
        inside=inside,
        headroom=headroom,
        margin=_margin(mask, c, config),
        reason=reason,
        stage_radii={name: torch.nan_to_num(value, nan=0.0) for name, value in stages.items()},
    )


def _margin(mask: Tensor, c: Interval, config: RoutingConfig) -> Tensor:
    rivals = ~mask
    if config.grouped:
        used = mask.view(-1, config.n_group, config.group_size).any(-1)
        rivals &= used.repeat_interleave(config.group_size, dim=1)
    return torch.where(mask, c.hi, torch.inf).amin(1) - torch.where(rivals, c.lo, -torch.inf).amax(1)


def _is_top_k(
    mask: Tensor, c: Interval, config: RoutingConfig, recipe: RoutingRecipe, barred: Tensor | None, same: Tensor | None
) -> Tensor:
    if not config.grouped:
        return ungrouped_admissible(mask, c)
    inside = grouped_admissible(mask, c, config, barred, same)
    if recipe.dropped_fill == "zero":
        inside |= dropped_at_zero_admissible(mask, c, config)
    return inside


def _tie_rules(
    mask: Tensor,
    c: Interval,
    logits: Tensor,
    bias: Tensor | None,
    config: RoutingConfig,
    recipe: RoutingRecipe,
    judged: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Groups that a tie bars [tokens, groups], tokens that break a rule outright, pairs of equal groups."""
    broken = torch.zeros_like(judged)
    if recipe.tie_rule == "any" and (recipe.group_tie_rule == "any" or not config.grouped):
        return None, broken, None
    # Equal bits have equal nominal scores, so a token whose order is strict by those holds no broken tie.
    size = config.group_size if config.grouped else config.experts
    by_group = (-1, config.experts // size, size)
    weakest = torch.where(mask, c.mid, torch.inf).reshape(by_group).amin(2)
    strongest = torch.where(mask, -torch.inf, c.mid).reshape(by_group).amax(2)
    rows = (judged & (strongest >= weakest).any(1)).nonzero().squeeze(1)
    if recipe.tie_rule == "lowest_index" and len(rows):
        keys = ties.bit_keys(logits[rows], None if bias is None else scores.effective_bias(bias, recipe))
        left = ties.overtaken(mask[rows].reshape(-1, size), keys.reshape(-1, size))
        broken[rows] = left.reshape(len(rows), -1).any(1)
    if recipe.group_tie_rule == "any" or not config.grouped:
        return None, broken, None
    keys = ties.bit_keys(logits, None if bias is None else scores.effective_bias(bias, recipe))
    shape = (config.n_group, config.group_size)
    barred = ties.overtaken(mask, keys).view(-1, *shape).any(-1)
    return barred, broken, ties.equal_groups(keys.view(-1, *shape))


def _headroom(
    mask: Tensor,
    c: Interval,
    config: RoutingConfig,
    recipe: RoutingRecipe,
    barred: Tensor | None,
    same: Tensor | None,
    admissible: Tensor,
) -> Tensor:
    """The smallest share of the intervals' radii under which each admissible selection stays one; by bisection."""
    headroom = torch.zeros_like(c.mid[:, 0])

    def holds(rows: Tensor, share: Tensor) -> Tensor:
        ties_of = (None if barred is None else barred[rows], None if same is None else same[rows])
        return _is_top_k(mask[rows], c.rows(rows).shrunk(share[:, None]), config, recipe, *ties_of)

    centre = Interval(c.mid, c.mid, c.mid)
    rows = (admissible & ~_is_top_k(mask, centre, config, recipe, barred, same)).nonzero().squeeze(1)
    low, high = torch.zeros_like(headroom[rows]), torch.ones_like(headroom[rows])
    for _ in range(BISECTIONS if len(rows) else 0):
        middle = 0.5 * (low + high)
        good = holds(rows, middle)
        low, high = torch.where(good, low, middle), torch.where(good, middle, high)
    headroom[rows] = high
    return headroom
