"""The entry points: nominal answers, and judgements of ids and of weights, in chunks of tokens.

Memory: about two dozen FP64 tensors the size of a chunk (see ``references.chunks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from references.chunks import row_pieces
from references.routing import scores, ties
from references.routing.methods import RoutingConfig
from references.routing.recipe import RoutingRecipe
from references.routing.rounding import DTYPES, to_dtype
from references.routing.scores import Interval
from references.routing.selection import (
    dropped_at_zero_admissible,
    fates,
    group_scores,
    grouped_admissible,
    ungrouped_admissible,
)
from references.routing.weights import Zeroed, enclose

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


def nominal(logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe) -> tuple[Tensor, Tensor]:
    """The answer of a correctly rounded implementation in which the lowest index wins ties.

    logits: [tokens, experts] fp32, bf16 or fp16. bias: [experts] where the method is biased, else None.
    Returns ids int32 and weights (the recipe's dtype), both [tokens, top_k + shared_experts]. A NaN logit counts as
    -inf in the selection, and undefined weights are 0.
    """
    _check(logits, bias, config, recipe)
    parts = [_nominal(logits[rows], bias, config, recipe, rows.start) for rows in _chunks(logits)]
    ids, weights = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return ids.to(torch.int32), weights.to(DTYPES[recipe.weight_dtype])


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
    _check(logits, bias, config, recipe)
    _check_columns(ids, logits, config, "ids")
    parts = [
        _selection(ids[rows].to(torch.int64), logits[rows], bias, config, recipe, rows.start)
        for rows in _chunks(logits)
    ]
    return SelectionJudgement(
        inside=torch.cat([part.inside for part in parts]),
        headroom=torch.cat([part.headroom for part in parts]),
        margin=torch.cat([part.margin for part in parts]),
        reason=torch.cat([part.reason for part in parts]),
        stage_radii={name: torch.cat([part.stage_radii[name] for part in parts]) for name in parts[0].stage_radii},
    )


def judge_weights(
    weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe
) -> WeightJudgement:
    """Judge weights [tokens, top_k + shared_experts] given the ids that came with them.

    Ids that are out of range (judged by `judge_selection`) take expert 0's place here; padded rows as declared.
    """
    _check(logits, bias, config, recipe)
    _check_columns(ids, logits, config, "ids")
    _check_columns(weights, logits, config, "weights")
    parts = [
        _weights(
            weights[rows].to(torch.float64), ids[rows].to(torch.int64), logits[rows], bias, config, recipe, rows.start
        )
        for rows in _chunks(logits)
    ]

    def joined(pick: Callable[[WeightJudgement], Tensor]) -> Tensor:
        return torch.cat([pick(part) for part in parts])

    return WeightJudgement(
        inside=joined(lambda part: part.inside),
        headroom=joined(lambda part: part.headroom),
        lo=joined(lambda part: part.lo),
        nominal=joined(lambda part: part.nominal),
        hi=joined(lambda part: part.hi),
        free=joined(lambda part: part.free),
        stage_radii={name: torch.cat([part.stage_radii[name] for part in parts]) for name in parts[0].stage_radii},
    )


def choice_intervals(
    logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe
) -> tuple[Interval, Interval]:
    """The score and the choice (score + bias) of every expert, intervals [tokens, experts]; NaN logits read as 0."""
    x = torch.nan_to_num(logits.to(torch.float64), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if config.rule.choice == "softmax":
        x = torch.where(_undefined(logits, config)[:, None], 0.0, x)
    s = scores.score(config.rule.choice, x, recipe)
    if bias is None:
        return s, s
    return s, scores.biased(s, scores.effective_bias(bias, recipe))


def _chunks(logits: Tensor) -> Iterator[slice]:
    tokens, experts = logits.shape
    # A tenth of a device piece keeps two dozen tensors below 1 GiB. No token is one empty chunk: answers keep a shape.
    columns = experts if logits.device.type == "cpu" else 10 * experts
    yield from row_pieces(tokens, columns, logits.device) if tokens else (slice(0, 0),)


def _check(logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe) -> None:
    if logits.ndim != 2 or logits.shape[1] != config.experts:
        raise ValueError(f"routing: logits {tuple(logits.shape)} are not [tokens, {config.experts}]")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"routing: logits are {logits.dtype}, expected float32, bfloat16 or float16")
    if config.rule.biased != (bias is not None):
        raise ValueError(f"routing: {config.method} {'needs a' if config.rule.biased else 'takes no'} bias")
    if bias is not None and tuple(bias.shape) != (config.experts,):
        raise ValueError(f"routing: bias {tuple(bias.shape)} is not [{config.experts}]")
    if recipe.dropped_fill == "zero" and config.rule.group_score != "max":
        raise ValueError(f"routing: dropped_fill=zero is no choice of {config.method}")


def _check_columns(tensor: Tensor, logits: Tensor, config: RoutingConfig, name: str) -> None:
    if tuple(tensor.shape) != (logits.shape[0], config.columns):
        raise ValueError(f"routing: {name} {tuple(tensor.shape)} are not [{logits.shape[0]}, {config.columns}]")


def _undefined(logits: Tensor, config: RoutingConfig) -> Tensor:
    """Tokens whose choice scores are undefined: a NaN logit, or a softmax over inf or over -inf alone."""
    undefined = torch.isnan(logits).any(1)
    if config.rule.choice == "softmax":
        undefined = undefined | (logits == torch.inf).any(1) | (logits == -torch.inf).all(1)
    return undefined


def _padding(tokens: int, start: int, config: RoutingConfig, device: torch.device) -> Tensor:
    if config.num_token_non_padded is None:
        return torch.zeros(tokens, dtype=torch.bool, device=device)
    return torch.arange(start, start + tokens, device=device) >= config.num_token_non_padded


def _shared_ids(config: RoutingConfig, device: torch.device) -> Tensor:
    return torch.arange(config.experts, config.experts + config.shared_experts, device=device)


def _shared_weight(config: RoutingConfig, recipe: RoutingRecipe) -> float:
    return 1.0 if recipe.scaling == "topk" else 1.0 / config.scaling_factor


def _nominal(
    logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe, start: int
) -> tuple[Tensor, Tensor]:
    tokens = logits.shape[0]
    _, c = choice_intervals(logits, bias, config, recipe)
    ranked = torch.where(torch.isnan(logits), -torch.inf, c.mid)
    if config.grouped:
        group = group_scores(ranked, config)
        best = group.argsort(dim=1, descending=True, stable=True)[:, : config.topk_group]
        kept = torch.zeros_like(group, dtype=torch.bool).scatter(1, best, True)
        outside = ~kept.repeat_interleave(config.group_size, dim=1)
    else:
        outside = torch.zeros_like(ranked, dtype=torch.bool)
    # Two stable sorts, so that an expert of a kept group at -inf still precedes every dropped one.
    order = ranked.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, outside.gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
    ids = order[:, : config.top_k]
    values = enclose(ids, logits.to(torch.float64), config, recipe)
    weights = torch.where(values.free, 0.0, values.nominal)
    shared = _shared_ids(config, logits.device).expand(tokens, -1)
    filled = torch.full(shared.shape, _shared_weight(config, recipe), dtype=torch.float64, device=logits.device)
    ids, weights = torch.cat([ids, shared], 1), torch.cat([weights, filled], 1)
    padding = _padding(tokens, start, config, logits.device)[:, None]
    return torch.where(padding, -1, ids), torch.where(padding, 0.0, weights)


def _selection(
    ids: Tensor, logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe, start: int
) -> SelectionJudgement:
    routed, shared = ids[:, : config.top_k], ids[:, config.top_k :]
    in_range = ((routed >= 0) & (routed < config.experts)).all(1)
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=ids.device)
    mask.scatter_(1, routed.clamp(0, config.experts - 1), True)
    distinct = mask.sum(1) == config.top_k
    known_shared = (shared.sort(1).values == _shared_ids(config, ids.device)).all(1)
    undefined = _undefined(logits, config)

    s, c = choice_intervals(logits, bias, config, recipe)
    judged = in_range & distinct & ~undefined
    barred, broken, same = _tie_rules(mask, c, logits, bias, config, recipe, judged)
    top_k = _is_top_k(mask, c, config, recipe, barred, same)
    headroom = _headroom(mask, c, config, recipe, barred, same, judged & top_k)

    reason = torch.full(ids.shape[:1], int(Reason.OK), dtype=torch.uint8, device=ids.device)
    reason[~known_shared] = Reason.SHARED_EXPERT
    reason[judged & broken] = Reason.TIE_RULE
    reason[judged & ~top_k] = Reason.NOT_TOP_K
    reason[~distinct] = Reason.DUPLICATE
    reason[~in_range] = Reason.OUT_OF_RANGE
    padding = _padding(ids.shape[0], start, config, ids.device)
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
    shared = torch.full(shape, _shared_weight(config, recipe), dtype=torch.float64, device=x.device)
    relative = 0.0 if recipe.scaling == "topk" or config.scaling_factor == 1.0 else 2 * recipe.division_error
    shared_lo = to_dtype(shared * (1 - relative), recipe.weight_dtype)
    shared_hi = to_dtype(shared * (1 + relative), recipe.weight_dtype)
    lo, hi = torch.cat([routed.lo, shared_lo], 1), torch.cat([routed.hi, shared_hi], 1)
    centre = torch.cat([routed.nominal, to_dtype(shared, recipe.weight_dtype)], 1)
    nothing = torch.zeros(shape, dtype=torch.bool, device=x.device)
    free, nan_allowed = torch.cat([routed.free, nothing], 1), torch.cat([routed.nan_allowed, nothing], 1)

    padding = _padding(len(ids), start, config, x.device)[:, None].expand_as(free)
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
