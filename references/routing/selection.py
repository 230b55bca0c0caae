"""Admissible selections: which sets of k experts some vector of scores within the intervals makes a top-k.

Ungrouped. S is a top-k of some c in [L, U] exactly if min over S of U >= max over the rest of L (put S at U, the rest
at L).

Grouped. For a kept set G that holds S, let m = min over S of U. The vector that favours (S, G) most puts S at U, the
rest of G at min(U, m), everything else at L: group scores grow with their members, so no other vector is better. It is
in the box exactly if L <= m for the rest of G, and G is kept exactly if its smallest group score is at least the
largest outside. Which G exists is decided without trying them: with lo (hi) the score of a group when outside (inside)
G, a threshold T works if every required group has hi >= T, every group that cannot be kept has lo <= T, at most r free
groups have lo > T and at least r have hi >= T (r: places left). Raising T shrinks both counts, so only the smallest T
that meets the second and third demand has to be tried.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.routing.methods import RoutingConfig
from references.routing.rounding import add_fp32
from references.routing.scores import Interval

INF = torch.inf


def ungrouped_admissible(mask: Tensor, c: Interval) -> Tensor:
    """Whether each row's selected set is admissible. mask: bool [tokens, experts]. Returns bool [tokens]."""
    weakest = torch.where(mask, c.hi, INF).amin(1)
    strongest = torch.where(mask, -INF, c.lo).amax(1)
    return weakest >= strongest


def group_scores(c: Tensor, config: RoutingConfig) -> Tensor:
    """Group scores [tokens, groups] of choice scores [tokens, experts]: RN32 of the two largest, or the largest."""
    grouped = c.view(-1, config.n_group, config.group_size)
    if config.rule.group_score == "max":
        return grouped.amax(-1)
    best = grouped.topk(2, dim=-1).values
    return add_fp32(best[..., 0], best[..., 1])


def kept_set_exists(required: Tensor, allowed: Tensor, lo: Tensor, hi: Tensor, kept: int) -> Tensor:
    """Whether some ``kept`` groups hold all required and only allowed ones, with min hi inside >= max lo outside.

    All are [tokens, groups]; lo and hi are a group's score outside and inside the set. Returns bool [tokens].
    """
    free = allowed & ~required
    places = kept - required.sum(1)
    ranked = torch.where(free, lo, -INF).sort(dim=1, descending=True).values
    ranked = torch.cat([ranked, torch.full_like(ranked[:, :1], -INF)], dim=1)
    threshold = ranked.gather(1, places.clamp(0, lo.shape[1])[:, None]).squeeze(1)
    threshold = torch.maximum(threshold, torch.where(allowed, -INF, lo).amax(1))
    enough = (free & (hi >= threshold[:, None])).sum(1) >= places
    strong = torch.where(required, hi, INF).amin(1) >= threshold
    return ~(required & ~allowed).any(1) & (places >= 0) & enough & strong


def grouped_admissible(
    mask: Tensor, c: Interval, config: RoutingConfig, barred: Tensor | None = None, same: Tensor | None = None
) -> Tensor:
    """Whether each row's selected set is admissible with dropped groups at -inf.

    barred: bool [tokens, groups], groups that a tie rule keeps out. same: `ties.equal_groups` where the lower of two
    equal groups has to win.
    """
    shape = (config.n_group, config.group_size)
    weakest = torch.where(mask, c.hi, INF).amin(1, keepdim=True)
    inside = torch.where(mask, c.hi, torch.minimum(c.hi, weakest))
    allowed = (mask | (c.lo <= weakest)).view(-1, *shape).all(-1)
    required = mask.view(-1, *shape).any(-1)
    if barred is not None:
        allowed &= ~barred
    if same is not None:
        required |= (same & required[:, None, :]).any(2)
        allowed &= ~(same & ~allowed[:, :, None]).any(1)
    return kept_set_exists(
        required, allowed, group_scores(c.lo, config), group_scores(inside, config), config.topk_group
    )


def dropped_at_zero_admissible(mask: Tensor, c: Interval, config: RoutingConfig) -> Tensor:
    """Further sets that are admissible with dropped groups at 0.0: those whose weakest member scores 0.

    Scores are nonnegative, so a dropped expert (0.0) ties with a kept one only at 0. Then every expert of a kept group
    that is not selected has L <= 0 and sits at 0; selected ones may be in any group.
    """
    shape = (config.n_group, config.group_size)
    allowed = (mask | (c.lo <= 0)).view(-1, *shape).all(-1)
    inside = torch.where(mask, c.hi, torch.zeros_like(c.hi))
    required = torch.zeros_like(allowed)
    return kept_set_exists(
        required, allowed, group_scores(c.lo, config), group_scores(inside, config), config.topk_group
    )


def fates(c: Interval, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Groups that may be dropped and groups that must be, whatever is selected: two bool [tokens, groups].

    A group may be dropped if at least topk_group others can reach its lowest score, and must be if as many beat its
    highest.
    """
    lo, hi = group_scores(c.lo, config), group_scores(c.hi, config)
    itself = torch.eye(config.n_group, dtype=torch.bool, device=lo.device)
    rivals = ((hi[:, None, :] >= lo[:, :, None]) & ~itself).sum(2)
    winners = ((lo[:, None, :] > hi[:, :, None]) & ~itself).sum(2)
    return rivals >= config.topk_group, winners >= config.topk_group
