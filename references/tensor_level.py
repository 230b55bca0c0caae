"""Tests over a whole GEMM output, for faults that hide inside every element's bound.

A bound on one element is worst case. Real rounding errors are far smaller and have no direction, so a scale that is
0.1 % off, a BF16 partial sum or a missing promotion shows in the whole tensor long before it shows in an element.

**Model.** The recipe says how errors arise: each of r roundings of a sum errs by at most u |partial sum| <= u Q. They
are taken as independent, of mean zero and uniform within +-u Q or narrower, so that an accumulator's error has a
variance of at most (r + 9) (u Q)^2 / 3: the 9 covers three roundings of each scaled term, whose squares add up to at
most 2 Q^2. The roundings of scale products that whole blocks share are no noise; they move a sum by at most 3 u |sum|,
which counts as bias.

- ``fp32_rn``, ``fp64``: r = n around the exact sum.
- ``hopper_fp8``, ``f16_upcast`` without a named combination: the tensor core's answer is known, r = K blocks around the
  exact model's sum, with S for Q, in the sampled rows.

``fp32_any`` admits truncation and has no such model; an exact model needs none.

**Outputs narrower than the accumulator.** An output is the model's sum rounded once unless the error reaches from the
sum to the nearest point halfway between two neighbours, t away. An error that is sub-Gaussian with this spread does so
with a probability of at most p = min(1, 2 exp(-(t - bias)^2 / (2 spread^2))), or 1 where t <= bias. The count of such
outputs is a sum of independent events with mean mu = sum p, and exceeds s with a probability of at most
exp(-(s ln(s / mu) - s + mu)) (Chernoff).

**FP32 outputs.** With z = error / spread, sub-Gaussian of variance 1, over N outputs: mean(z^2) exceeds 1 + t with a
probability of at most exp(-N (t - ln(1 + t)) / 2), and |mean(sign(sum) z)| exceeds bias + t with at most
2 exp(-N t^2 / 2).

**Independence.** Outputs share operands, but no roundings beyond those that count as bias. Where two sums are equal
they may have gone through equal roundings, so each distinct magnitude is looked at once. Tests simulate legal
accumulators to check the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.accumulators import U32, U64, Sums
from references.gemm_formats import Operand
from references.recipes import Recipe
from references.rounding import next_down, next_up, round_to

FALSE_ALARM = 1e-9
"""Probability that one correct output fails, under the model."""
LEAST = 2.0**-100
"""Smallest sum that is looked at: far from underflow."""


@dataclass(frozen=True)
class Expectation:
    """What the model says of every output, FP64 ``[m, n]``.

    sum: the accumulator's expected value. spread: bound on its standard deviation, 0 where the output is not looked at.
    bias: bound on what it may be off by in one direction. wide: sums are wider than FP32, so that an FP32 output is one
    of them rounded.
    """

    sum: Tensor
    spread: Tensor
    bias: Tensor
    wide: bool = False


def around_exact(facts: Sums, recipe: Recipe) -> Expectation | None:
    """The expectation of scalar accumulators that round to nearest; None for others."""
    unit = {"fp32_rn": U32, "fp64": U64}.get(recipe.accumulator)
    if unit is None or recipe.subnormals != "keep" or recipe.out_rounding != "nearest":
        return None
    largest = (facts.size + facts.exact.abs()) * 0.5
    return replace(_expectation(facts.exact, largest, facts.n, unit), wide=unit == U64)


def around_model(model: Tensor, size: Tensor, blocks: int) -> Expectation:
    """The expectation around an exact model's sums. blocks: K blocks that are scaled and added in FP32."""
    return _expectation(model, size, blocks, U32)


def _expectation(sums: Tensor, largest: Tensor, roundings: int, unit: float) -> Expectation:
    spread = largest * (unit * math.sqrt((roundings + 9) / 3))
    return Expectation(sums, torch.where(sums.abs() >= LEAST, spread, 0.0), 3 * unit * sums.abs())


def blocks_of(a: Operand, b: Operand, recipe: Recipe) -> int:
    """K blocks between promotions."""
    width = min(a.width, b.width)
    if recipe.promotion == "every_128":
        width = min(width, 128)
    return -(-a.values.shape[1] // width)


@dataclass(frozen=True)
class Finding:
    """headroom: the largest statistic over its limit; passes up to 1. message: the statistics in words."""

    headroom: float
    message: str


def examine(actual: Tensor, expected: Expectation, dtype: torch.dtype) -> Finding | None:
    """Test an output in FP64 against the model; None where there is nothing to look at."""
    chosen = _distinct(expected)
    count = len(chosen)
    if not count:
        return None
    found, sums = actual.reshape(-1)[chosen], expected.sum.reshape(-1)[chosen]
    spread, bias = expected.spread.reshape(-1)[chosen], expected.bias.reshape(-1)[chosen]
    if not bool(found.isfinite().all()):
        return Finding(math.inf, "not every output is finite")
    if dtype != torch.float32 or expected.wide:
        return _narrow(found, sums, spread, bias, dtype)
    scaled = (found - sums) / spread
    square, mean = float((scaled * scaled).mean()), float((torch.sign(sums) * scaled).mean())
    allowed = 1 + _solve(lambda t: count * (t - math.log1p(t)) / 2, math.log(2 / FALSE_ALARM))
    most = float((bias / spread).mean()) + math.sqrt(2 * math.log(4 / FALSE_ALARM) / count)
    return Finding(
        max(math.sqrt(square / allowed), abs(mean) / most),
        f"errors of {count} outputs over the model's spread: RMS {math.sqrt(square):.3g} (limit "
        f"{math.sqrt(allowed):.3g}), signed mean {mean:.3g} (limit {most:.3g})",
    )


def _distinct(expected: Expectation) -> Tensor:
    """Flat numbers of outputs to look at, one of each magnitude."""
    chosen = (expected.spread.reshape(-1) > 0).nonzero().view(-1)
    sizes, order = expected.sum.reshape(-1)[chosen].abs().sort(stable=True)
    first = torch.ones_like(sizes, dtype=torch.bool)
    first[1:] = sizes[1:] != sizes[:-1]
    return chosen[order[first]]


def _narrow(found: Tensor, sums: Tensor, spread: Tensor, bias: Tensor, dtype: torch.dtype) -> Finding:
    nominal = round_to(sums, dtype)
    up, down = next_up(nominal, dtype), next_down(nominal, dtype)
    room = torch.minimum((nominal + up) / 2 - sums, sums - (nominal + down) / 2)
    reach = ((room - bias) / spread).clamp(min=0.0)
    mean = float((2 * torch.exp(-reach * reach / 2)).clamp(max=1.0).sum()) + 2.0**-40
    flips = int((found != nominal).sum())
    limit = max(1.0, _solve(lambda s: (mean + s) * math.log1p(s / mean) - s, math.log(1 / FALSE_ALARM)) + mean)
    return Finding(
        flips / limit,
        f"{flips} of {len(found)} outputs are not the expected sum rounded once, {mean:.3g} at most are expected "
        f"(limit {limit:.4g})",
    )


def _solve(function: Callable[[float], float], level: float) -> float:
    """The least x >= 0 where an increasing function reaches a level, by bisection, from above."""
    high = 1.0
    while function(high) < level:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) >= level else (middle, high)
    return high
