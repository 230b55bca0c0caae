"""What a whole output of an expert layer looks like, for faults that hide inside every element's bound.

The model is that of `references.tensor_level`: under an accumulator that rounds to nearest, roundings are independent,
of mean zero and uniform within their bound, and what may move all outputs one way counts as bias.

**Before FC2.** Under the model a sum of FC1 is within `SPREADS` of its spread and its bias but for a probability of
2 exp(-SPREADS^2 / 2) = 5e-18. Activation and requantisation of that interval are bounded as in the pipeline. Where an
element may then become another code its token is left out: one flipped code moves all outputs of a token together, and
they are no independent sample. What is left moves only with a continuous scale, which counts as bias. A fault before
FC2, such as a scale that is 0.1 % off or partial sums in BF16, flips codes in the tokens that are looked at.

**From FC2 on.** With Q = (S + |sum|) / 2, an expert's output has a spread of at most u Q sqrt((n + 9) / 3) and a bias
of 3 u |sum| and the reach of its operand; the combination adds topk + 3 roundings of the terms' sum of magnitudes.
Spreads add up in squares, biases as they are; the bias is counted in the spread as well, so that mean squares stay
below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from references.accumulators import SLACK, U32, U64
from references.gemm_formats import Stored
from references.moe.config import MoeConfig
from references.moe.pipeline import F64, Parts, activated, groups, rows_of
from references.moe.requantise import requantise
from references.recipes import Recipe
from references.tensor_level import LEAST, Expectation

SPREADS = 9.0
FLIP = 2.0**-10
"""A reach above this part of a value is another code: neighbouring codes are at least 2^-4 apart."""
UNITS = {"fp32_rn": U32, "fp64": U64}
STORED = ("fc1_dtype", "activation_dtype", "fc2_dtype", "weighted_dtype", "combine_dtype")


def expectation(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Callable[[int], tuple[Stored, Stored]],
    config: MoeConfig,
    recipe: Recipe,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Expectation | None:
    """The model's word on ``[tokens, hidden]``; arguments as of `admissible_moe`.

    None for a recipe without a model: another accumulator, BF16 on the way, flushed subnormal numbers.
    """
    unit = UNITS.get(recipe.accumulator)
    if unit is None or recipe.subnormals != "keep" or any(getattr(recipe, name) != "fp32" for name in STORED):
        return None
    exact = x.to(F64)
    entering = requantise(exact, exact, exact, config.scheme, config.sides[0], recipe, scales[0])
    centre, square, bias, size = (torch.zeros_like(exact) for _ in range(4))
    skipped = (entering.reach > 0).any(1)
    for group in groups(ids):
        factors = [weights[part.rows, part.places].to(F64)[:, None] for part in group]
        before = [
            _first(rows_of(entering, part.rows).nominal.values, factor, experts(part.expert)[0], config, unit)
            for part, factor in zip(group, factors, strict=True)
        ]
        h, low, high = activated(Parts.joined(before), config, recipe)
        second = requantise(low, high, h.centre, config.scheme, config.sides[0], recipe, scales[1])
        flips, start = (second.reach > FLIP * second.nominal.values.abs()).any(1), 0
        for part, factor in zip(group, factors, strict=True):
            mine = slice(start, start + len(part.rows))
            start = mine.stop
            skipped[part.rows] |= flips[mine]
            found, spread, off = _sums(second.nominal.values[mine], experts(part.expert)[1], unit, second.reach[mine])
            if not config.weight_on_input:
                found, spread, off = found * factor, spread * factor.abs(), off * factor.abs()
            centre.index_add_(0, part.rows, found)
            square.index_add_(0, part.rows, spread * spread)
            bias.index_add_(0, part.rows, off)
            size.index_add_(0, part.rows, found.abs())
    combined = U32 * size * math.sqrt((ids.shape[1] + 3) / 3)
    total = (square + combined * combined + bias * bias).sqrt() * config.scaling
    looked = ~skipped[:, None] & (centre.abs() * config.scaling >= LEAST)
    return Expectation(centre * config.scaling, torch.where(looked, total, 0.0), bias * config.scaling)


def _first(x: Tensor, factor: Tensor, w1: Stored, config: MoeConfig, unit: float) -> Parts:
    """FC1's sums, within `SPREADS` of their spread."""
    first, spread, off = _sums(x, w1, unit)
    if config.weight_on_input:
        first = first * factor
        spread, off = spread * factor.abs() + U32 * first.abs(), off * factor.abs()
    return Parts.of(first).plus("fc1", SPREADS * spread + off + 2.0**-126)


def _sums(a: Tensor, b: Stored, unit: float, reach: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Exact sums of ``a @ b.T``, their spread and their bias, each FP64 ``[m, n]``. reach: of a, without flips."""
    found = []
    for piece in b.pieces():
        values = piece.values()
        size = values.abs()
        exact = a @ values.T
        largest = (a.abs() @ size.T + exact.abs()) * 0.5
        off = 3 * unit * exact.abs()
        if reach is not None:
            off = off + (reach @ size.T) * SLACK
        found.append((exact, largest * unit * math.sqrt((a.shape[1] + 9) / 3), off))
    parts = zip(*found, strict=True)
    exact, spread, off = (torch.cat(part, dim=1) for part in parts)
    return exact, spread, off
