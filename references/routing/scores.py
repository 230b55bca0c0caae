"""Certified score intervals: what an FP32 implementation of a score may return, from the exact logits.

u = 2^-24, eps(t) = exp_error + exp_slope * |t| is the relative error of exp(t), delta that of a division. Each radius
is a first-order sum; `GROWTH` covers the higher orders (see there) and `SLACK` our own FP64 arithmetic.

sigmoid, exp form. e = exp(-x)(1 + eps), d = RN(1 + e), s = 1/d. d ln(s)/d ln(e) = -e/(1+e) = -(1 - s), so the relative
    error is (1 - s) eps(x) + u + delta. For x < -88 exp overflows and s is 0: an absolute 2^-126. exp(x)/(1 + exp(x))
    has the same error where it does not overflow.
sigmoid, tanh form. s = RN(0.5 t + 0.5), t = tanh(x/2)(1 + tau): absolute 0.5 |t| tau, then relative u. Below x = -18
    this is the whole of s, which may be 0.
softmax. t = RN(x - max), so exp(t) errs by eps(t) + u |t|, and below -87 by 2^-126 (subnormals may be flushed). The
    quotient adds delta. The sum in the denominator is common to all experts: it cannot change an order, so choice
    intervals leave it out (they are in units of exp(x - max)), and weights add it.
sqrt(softplus). e = exp(x)(1 + eps), log1p(e): d ln(log1p e)/d ln(e) = e / ((1+e) log1p(e)) = sigmoid / softplus, so
    eps(x) sigmoid / softplus + log_error + u, absolute 2^-126. max(x, 0) + log1p(exp(-|x|)) depends less on its exp,
    and x itself above 20 errs by 2^-33. The square root halves all this and adds delta.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.routing.methods import Score
from references.routing.recipe import RoutingRecipe
from references.routing.rounding import SLACK, TINY, U32, add_fp32, to_dtype, to_fp32

GROWTH = 1.0 + 2.0**-10
EXP_FLOOR = -1024.0
"""exp is 0 in FP64 below this, so arguments are clamped here to keep infinities out of products."""


@dataclass(frozen=True)
class Interval:
    """FP64 tensors of one shape, lo <= mid <= hi; mid is the correctly rounded or exact value."""

    lo: Tensor
    mid: Tensor
    hi: Tensor

    def gather(self, index: Tensor) -> Interval:
        """Columns picked by ``index`` int64 [tokens, k]."""
        return Interval(self.lo.gather(1, index), self.mid.gather(1, index), self.hi.gather(1, index))

    def rows(self, index: Tensor) -> Interval:
        """Rows picked by ``index``."""
        return Interval(self.lo[index], self.mid[index], self.hi[index])

    def shrunk(self, share: Tensor) -> Interval:
        """The interval with its radii times ``share`` [tokens, 1]; an infinite value stays itself."""
        lo, hi = self.mid - share * (self.mid - self.lo), self.mid + share * (self.hi - self.mid)
        infinite = torch.isinf(self.mid)
        return Interval(torch.where(infinite, self.mid, lo), self.mid, torch.where(infinite, self.mid, hi))


def _relative(mid: Tensor, relative: Tensor | float, absolute: Tensor | float) -> Interval:
    """mid (nonnegative) widened by a relative and an absolute radius; never below 0."""
    radius = (mid * (relative + SLACK) + absolute) * GROWTH
    return Interval((mid - radius).clamp_min(0.0), mid, mid + radius)


def sigmoid(x: Tensor, recipe: RoutingRecipe) -> Interval:
    """The sigmoid of FP64 logits."""
    s = torch.sigmoid(x)
    if recipe.sigmoid == "tanh":
        return _relative(s, U32, 0.5 * torch.tanh(0.5 * x).abs() * (recipe.tanh_error * GROWTH) + TINY)
    error = recipe.exp_error + recipe.exp_slope * x.abs().clamp_max(-EXP_FLOOR)
    return _relative(s, torch.sigmoid(-x) * error + U32 + recipe.division_error, TINY)


def exponentials(x: Tensor, top: Tensor, recipe: RoutingRecipe) -> Interval:
    """exp(x - top) of FP64 logits; ``top`` [tokens, 1] is the largest."""
    t = (x - top).clamp(EXP_FLOOR, 0.0)
    return _relative(torch.exp(t), recipe.exp_error + (recipe.exp_slope + U32) * t.abs(), TINY)


def softmax_choice(x: Tensor, recipe: RoutingRecipe) -> Interval:
    """Softmax up to its common denominator: ranks experts, in units of exp(x - max).

    A quotient below 2^-126 may be flushed; in these units that is 2^-126 times the sum, at most ``experts``.
    """
    e = exponentials(x, x.amax(1, keepdim=True), recipe)
    factor = (recipe.division_error + SLACK) * GROWTH
    flush = TINY * x.shape[1]
    return Interval((e.lo * (1 - factor) - flush).clamp_min(0.0), e.mid, e.hi * (1 + factor) + flush)


def sqrt_softplus(x: Tensor, recipe: RoutingRecipe) -> Interval:
    """sqrt(log(1 + exp(x))) of FP64 logits."""
    exact = x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
    condition = torch.where(exact > 0, torch.sigmoid(x) / exact, 1.0).nan_to_num(0.0)
    error = recipe.exp_error + recipe.exp_slope * x.abs().clamp_max(-EXP_FLOOR)
    inner = _relative(exact, condition * error + recipe.log_error + U32, TINY)
    factor = (recipe.division_error + SLACK) * GROWTH
    root = Interval(inner.lo.sqrt() * (1 - factor), exact.sqrt(), inner.hi.sqrt() * (1 + factor))
    infinite = torch.isinf(x) & (x > 0)
    return Interval(torch.where(infinite, torch.inf, root.lo), root.mid, torch.where(infinite, torch.inf, root.hi))


def score(kind: Score, x: Tensor, recipe: RoutingRecipe) -> Interval:
    """The score of FP64 logits [tokens, experts] without NaN. A logit is its own score, exactly."""
    match kind:
        case "logit":
            return Interval(x, x, x)
        case "softmax":
            return softmax_choice(x, recipe)
        case "sigmoid":
            return sigmoid(x, recipe)
        case "sqrt_softplus":
            return sqrt_softplus(x, recipe)


def effective_bias(bias: Tensor, recipe: RoutingRecipe) -> Tensor:
    """The bias [experts] in FP64 after its declared rounding. Raises ValueError unless it is finite."""
    wide = bias.to(torch.float64)
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("routing: the bias is not finite")
    return to_dtype(wide, recipe.bias_dtype)


def biased(s: Interval, bias: Tensor) -> Interval:
    """RN32(s + b), exactly at both ends; results that are subnormal may be flushed to 0."""
    lo, hi = add_fp32(s.lo, bias.expand_as(s.lo)), add_fp32(s.hi, bias.expand_as(s.hi))
    lo = torch.where((lo > 0) & (lo < TINY), 0.0, lo)
    hi = torch.where((hi < 0) & (hi > -TINY), 0.0, hi)
    return Interval(lo, add_fp32(to_fp32(s.mid), bias.expand_as(s.mid)).clamp(lo, hi), hi)
