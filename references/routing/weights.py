"""Enclosures of the weights, given the ids that were really returned.

A ratio s_i / sum grows with s_i and falls with every other score, so its ends are lo_i / (lo_i + sum of other hi) and
hi_i / (hi_i + sum of other lo). On top come, relative to the value: at most (n - 1) u for summing n terms in any order,
delta for the division, 2 u for adding 1e-20 (its own FP32 value and the sum), 2 u for the scaling factor (its FP32
value and the product); absolutely 2^-126 wherever a result may be flushed. Last, the FP32 value is rounded to the
weight's dtype.

A softmax's sum errs by less, in any order and any tree. Its n - 1 partial sums of n nonnegative terms err by u times
themselves. At most n - t + 1 of them have t terms or more, since the lowest of these holds t - 2 smaller ones: so
together they are at most the sums of the 2, 3, ... n largest terms. And with h = u times the whole sum an addition errs
by min(h, x, y) at most, x and y being what it adds, since either is a number of FP32. By induction all errors below a
partial sum s, with min(h, s) added, are at most the terms' sum of min(h, term) times (1 + 2 u)^n: an addition of
x, y >= h leaves h + h of min(h, x) + min(h, y), one of x < h <= y leaves x + h, one of x, y < h leaves x + y but for
2 u of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.routing.methods import RoutingConfig
from references.routing.recipe import RoutingRecipe
from references.routing.rounding import SLACK, TINY, U32, to_dtype
from references.routing.scores import GROWTH, Interval, exponentials, score

EPSILON = 1e-20


@dataclass(frozen=True)
class Weights:
    """Enclosure of weights [tokens, top_k], FP64.

    lo, hi: ends, both values of the weight's dtype. nominal: the exactly computed weight, rounded once to that dtype.
    free: nothing is demanded, because a NaN or an undefined quotient (inf / inf) enters. nan_allowed: 0 / 0 may occur.
    stage_radii: ``score``, ``denominator``, ``output_rounding`` -> half width each stage adds, [tokens, top_k].
    """

    lo: Tensor
    nominal: Tensor
    hi: Tensor
    free: Tensor
    nan_allowed: Tensor
    stage_radii: dict[str, Tensor]


@dataclass(frozen=True)
class Zeroed:
    """Selected experts [tokens, top_k] whose score may have been, or has certainly been, replaced by 0.0."""

    may: Tensor
    must: Tensor

    def apply(self, s: Interval) -> Interval:
        """The interval of the scores that are left."""
        gone = self.must
        return Interval(
            torch.where(self.may | gone, 0.0, s.lo), torch.where(gone, 0.0, s.mid), torch.where(gone, 0.0, s.hi)
        )


def enclose(
    ids: Tensor, x: Tensor, config: RoutingConfig, recipe: RoutingRecipe, zeroed: Zeroed | None = None
) -> Weights:
    """The weights of routed ids int64 [tokens, top_k], all within range, from FP64 logits [tokens, experts]."""
    picked = x.gather(1, ids)
    free = _free(picked, x, config)
    clean = torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if config.rule.weight == "logit":
        exact = clean.gather(1, ids)
        return _finish(Interval(exact, exact, exact), 0.0, 0.0, free, torch.zeros_like(free), config, recipe)
    ratio, roundings, nan_allowed = _ratio(ids, clean, config, recipe, zeroed)
    factor = config.scaling_factor if recipe.scaling == "topk" else 1.0
    if factor != 1.0:
        roundings += 2 * U32
        ratio = Interval(ratio.lo * factor, ratio.mid * factor, ratio.hi * factor)
    flush = TINY * (1.0 + factor) if isinstance(roundings, Tensor) or roundings else 0.0
    return _finish(ratio, (roundings + SLACK) * GROWTH, flush, free, nan_allowed, config, recipe)


def _free(picked: Tensor, x: Tensor, config: RoutingConfig) -> Tensor:
    """Where the contract says nothing of the value: a NaN enters, or inf / inf, or exp(inf - inf)."""
    nan = torch.isnan(picked)
    if config.rule.weight == "softmax_selected":
        undefined = nan.any(1) | (picked == torch.inf).any(1) | (picked == -torch.inf).all(1)
    elif config.rule.score == "softmax":
        undefined = torch.isnan(x).any(1) | (x == torch.inf).any(1) | (x == -torch.inf).all(1)
    elif config.normalized:
        undefined = nan.any(1)
        if config.rule.score == "sqrt_softplus":
            undefined |= (picked == torch.inf).any(1)
    else:
        return nan
    return undefined[:, None].expand_as(picked) | nan


def _ratio(
    ids: Tensor, x: Tensor, config: RoutingConfig, recipe: RoutingRecipe, zeroed: Zeroed | None
) -> tuple[Interval, Tensor | float, Tensor]:
    """The weight before scaling, the relative error of the steps after the scores, and where 0 / 0 may occur."""
    never = torch.zeros(ids.shape, dtype=torch.bool, device=x.device)
    division = recipe.division_error
    if config.rule.weight == "softmax_selected":
        picked = x.gather(1, ids)
        top = picked.amax(1, keepdim=True).clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
        e = exponentials(picked, top, recipe)
        return _share(e, e, division, never)
    if config.rule.score != "softmax":
        s = score(config.rule.score, x.gather(1, ids), recipe)
        if not config.normalized:
            return s, 0.0, never
        return _renormalized(s, torch.ones_like(s.mid[:, :1]), config, recipe)
    top = x.amax(1, keepdim=True).clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    e = exponentials(x, top, recipe)
    total = _sum(e)
    if not config.normalized:
        share, roundings, never = _share(e.gather(ids), e, division, never)
        return (zeroed.apply(share) if zeroed else share), roundings, never
    # Quotients by the common sum, in units of that sum: only their own rounding is left of the first division.
    widened = (division + SLACK) * GROWTH
    flush = TINY * config.experts
    own = e.gather(ids)
    p = Interval((own.lo * (1 - widened) - flush).clamp_min(0.0), own.mid, own.hi * (1 + widened) + flush)
    return _renormalized(zeroed.apply(p) if zeroed else p, total.mid, config, recipe)


def _sum(e: Interval) -> Interval:
    return Interval(e.lo.sum(1, keepdim=True), e.mid.sum(1, keepdim=True), e.hi.sum(1, keepdim=True))


def _share(part: Interval, terms: Interval, division: float, nan: Tensor) -> tuple[Interval, Tensor, Tensor]:
    total = _sum(terms)
    others_lo, others_hi = (total.lo - part.lo).clamp_min(0.0), (total.hi - part.hi).clamp_min(0.0)
    lo, hi = part.lo / (part.lo + others_hi), part.hi / (part.hi + others_lo)
    mid = part.mid / total.mid
    lo, hi = (torch.where(torch.isnan(end), 0.0, end) for end in (lo, hi))
    return Interval(lo, torch.where(torch.isnan(mid), 0.0, mid), hi), sum_error(terms) + division, nan


def sum_error(terms: Interval) -> Tensor:
    """Relative error of an FP32 sum of nonnegative terms [tokens, n] in any order, [tokens, 1]."""
    total, most = _sum(terms), (terms.hi.shape[1] - 1) * U32
    prefixes = U32 * terms.hi.sort(1, descending=True).values.cumsum(1)[:, 1:].sum(1, keepdim=True)
    absorbed = torch.minimum(terms.hi, U32 * total.hi).sum(1, keepdim=True)
    found = torch.minimum(prefixes, absorbed) / total.lo
    return torch.where(found < most, found, most)


def _renormalized(
    s: Interval, unit: Tensor, config: RoutingConfig, recipe: RoutingRecipe
) -> tuple[Interval, float, Tensor]:
    """s_i over the declared denominator; ``unit`` [tokens, 1] is what 1 stands for in the scores' units."""
    total = _sum(s)
    others_lo, others_hi = (total.lo - s.lo).clamp_min(0.0), (total.hi - s.hi).clamp_min(0.0)
    epsilon = EPSILON * unit
    ends = []
    for own, rest in ((s.lo, others_hi), (s.mid, (total.mid - s.mid).clamp_min(0.0)), (s.hi, others_lo)):
        below = own + rest
        if recipe.denominator == "add":
            below = below + epsilon
        elif recipe.denominator == "max":
            below = torch.maximum(below, epsilon.expand_as(below))
        quotient = own / below
        ends.append(torch.where(torch.isnan(quotient), 0.0, quotient))
    rounding = (config.top_k - 1) * U32 + recipe.division_error + (0.0 if recipe.denominator == "none" else 2 * U32)
    nan_allowed = (
        (total.lo <= 0).expand_as(s.lo) if recipe.denominator == "none" else torch.zeros_like(s.lo, dtype=torch.bool)
    )
    return Interval(*ends), rounding, nan_allowed


def _finish(
    ratio: Interval,
    relative: Tensor | float,
    flush: float,
    free: Tensor,
    nan_allowed: Tensor,
    config: RoutingConfig,
    recipe: RoutingRecipe,
) -> Weights:
    lo, hi = ratio.lo, ratio.hi
    if isinstance(relative, Tensor) or relative:
        lo = torch.where(lo > 0, (lo * (1 - relative) - flush).clamp_min(0.0), lo)
        hi = hi * (1 + relative) + flush
    out_lo, nominal, out_hi = (to_dtype(end, recipe.weight_dtype) for end in (lo, ratio.mid, hi))
    nominal = nominal.clamp(out_lo, out_hi)
    stage_radii = {
        "score": 0.5 * (ratio.hi - ratio.lo),
        "denominator": 0.5 * ((hi - lo) - (ratio.hi - ratio.lo)),
        "output_rounding": 0.5 * ((out_hi - out_lo) - (hi - lo)),
    }
    clean = {name: torch.nan_to_num(radius, nan=0.0).clamp_min(0.0) for name, radius in stage_radii.items()}
    return Weights(out_lo, nominal, out_hi, free, nan_allowed, clean)
