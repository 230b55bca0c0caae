"""The expert layer: FC1, SwiGLU, requantisation, FC2, weighted sum, with every radius kept by the stage it comes from.

    x -> quantise -> W1 -> gate, up -> silu(gate) * up -> quantise -> W2 -> times weight, sum over experts -> output

A stage's own error is bounded where it arises and carried on: linearly through the GEMMs and the sum, exactly (as an
interval) through activation and requantisation. Weights are decoded one expert at a time, and activations are held for
a few experts together (`ROWS`).

**Attribution.** Behind the activation an element's radius splits into what the activation itself adds to a certain gate
and up, and the rest, in the proportion in which input quantisation and FC1 share the radii of gate and up. Behind
requantisation the radius r of h has become the reach D of the dequantised number: min(D, r) stays with the stages that
r came from, D - r is requantisation's own: what flipping codes adds.

**Combination.** Terms w y are FP32 products, added in FP32 in any order, multiplied by the routed scaling factor at the
weights, the terms or the sum: k + 1 roundings of u = 2^-24, one more where the factor is not 1, of the sum of the
terms' magnitudes; and 2^-126 each where something may underflow. Where terms are certain and all multiples of some 2^q
within 24 bits of their sum, nothing is rounded at all. A sum that is held in BF16 (``combine_dtype``) is rounded k
times more within 2^-8, k - 1 times where terms are BF16 themselves, and exact within 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.accumulators import SLACK, U32, U64, gamma, on_lattice
from references.enclosures import Enclosure
from references.gemm_formats import Stored
from references.judging import Interval
from references.least_bits import NOTHING, least_bit
from references.moe.activation import silu, swiglu
from references.moe.config import MoeConfig
from references.moe.product import Uncertain, product
from references.moe.requantise import requantise
from references.recipes import Recipe
from references.rounding import half_ulp, round_to

F64 = torch.float64
STAGES = ("input_quantisation", "fc1", "activation", "requantisation", "fc2", "combine")
"""Where a radius may come from; ``output_rounding`` is the seventh."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST_NORMAL = 2.0**-126
U_BF16 = 2.0**-8
ROWS = {"cpu": 2**8, "cuda": 2**12}
"""Tokens of experts whose intermediates are held together, by device type; experts with more are taken one by one."""


@dataclass(frozen=True)
class AdmissibleMoe:
    """The admissible outputs ``[tokens, hidden]`` and their radii by stage (`STAGES`, ``output_rounding``)."""

    interval: Interval
    radii: dict[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """Numbers and how far they may be off, by stage: FP64 ``[rows, n]`` and ``[stages, rows, n]``."""

    centre: Tensor
    radii: Tensor

    @classmethod
    def of(cls, centre: Tensor) -> Parts:
        """Numbers without doubt."""
        return cls(centre, centre.new_zeros(len(STAGES), *centre.shape))

    @classmethod
    def joined(cls, some: Sequence[Parts]) -> Parts:
        """Rows one after another."""
        if len(some) == 1:
            return some[0]
        return cls(torch.cat([part.centre for part in some]), torch.cat([part.radii for part in some], dim=1))

    @property
    def total(self) -> Tensor:
        """The whole radius."""
        return self.radii.sum(0) * SLACK

    @property
    def enclosure(self) -> Enclosure:
        """The interval."""
        return Enclosure.from_value(self.centre).widened(self.total)

    def plus(self, stage: str, radius: Tensor) -> Parts:
        """With more doubt from a stage."""
        radii = self.radii.clone()
        radii[STAGES.index(stage)] += radius
        return Parts(self.centre, radii)

    def times(self, factor: Tensor) -> Parts:
        """Times exact factors ``[rows, 1]``; the FP64 rounding counts to ``combine``."""
        found = Parts(self.centre * factor, self.radii * factor.abs() * SLACK)
        inexact = (least_bit(self.centre) + least_bit(factor)) < least_bit(found.centre)
        return found.plus("combine", torch.where(inexact, found.centre.abs() * U64, 0.0))

    def stored(self, dtype: torch.dtype, stage: str) -> Parts:
        """Rounded to a narrower dtype."""
        total = self.total
        low, high = round_to(self.centre - total, dtype), round_to(self.centre + total, dtype)
        reach = torch.maximum(high - self.centre, self.centre - low)
        return self.plus(stage, (reach - total).clamp(min=0.0) * SLACK)


def admissible_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Callable[[int], tuple[Stored, Stored]],
    config: MoeConfig,
    recipe: Recipe,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> AdmissibleMoe:
    """What the layer may answer.

    x: bf16 ``[tokens, hidden]``. ids: int32 ``[tokens, topk]``, negative for an expert that is elsewhere. weights: fp32
    ``[tokens, topk]``. experts: id -> (W1, W2), asked for one at a time.
    scales: given scales of input and intermediate (`config.scheme`).
    """
    tokens, hidden = x.shape
    exact = x.to(F64)
    entering = requantise(exact, exact, exact, config.scheme, config.sides[0], recipe, scales[0])
    answer = Parts.of(exact.new_zeros(tokens, hidden))
    size = torch.zeros_like(answer.centre)
    unit = torch.full((tokens, hidden), NOTHING, dtype=torch.int32, device=x.device)
    for group in groups(ids):
        factors = [weights[part.rows, part.places].to(F64)[:, None] for part in group]
        first = [
            _first(rows_of(entering, part.rows), factor, experts(part.expert)[0], config, recipe)
            for part, factor in zip(group, factors, strict=True)
        ]
        h, low, high = activated(Parts.joined(first), config, recipe)
        second = requantise(low, high, h.centre, config.scheme, config.sides[0], recipe, scales[1])
        reach, start = _attributed(h, second.reach), 0
        for part, factor in zip(group, factors, strict=True):
            mine = slice(start, start + len(part.rows))
            start = mine.stop
            terms = _second(rows_of(second, mine), reach[:, mine], experts(part.expert)[1], recipe)
            if not config.weight_on_input:
                terms = terms.times(factor)
            if recipe.weighted_dtype != "fp32":
                slip = gamma(1, U32) * (terms.centre.abs() + terms.total)
                terms = terms.plus("combine", slip).stored(DTYPES[recipe.weighted_dtype], "combine")
            if config.scaling != 1:
                terms = terms.times(torch.full_like(factor, config.scaling))
            answer.centre.index_add_(0, part.rows, terms.centre)
            answer.radii.index_add_(1, part.rows, terms.radii)
            size.index_add_(0, part.rows, terms.centre.abs() + terms.total)
            unit[part.rows] = torch.minimum(unit[part.rows], least_bit(terms.centre))
    return _answer(_combined(answer, size, unit, ids.shape[1], config, recipe), config.dtype, recipe)


@dataclass(frozen=True)
class Share:
    """The tokens of an expert: numbers of their rows, and the places among the token's experts that name it."""

    expert: int
    rows: Tensor
    places: Tensor


def groups(ids: Tensor) -> Iterator[list[Share]]:
    """The experts in use, in order, as many together as have `ROWS` tokens; one at least."""
    limit, group, taken = ROWS.get(ids.device.type, ROWS["cpu"]), list[Share](), 0
    for expert in torch.unique(ids[ids >= 0]).tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        if group and taken + len(rows) > limit:
            yield group
            group, taken = [], 0
        group.append(Share(expert, rows, places))
        taken += len(rows)
    if group:
        yield group


def rows_of(some: Uncertain, rows: Tensor | slice) -> Uncertain:
    """Some of the rows."""
    return Uncertain(some.nominal.rows(rows), some.reach[rows], some.scales[rows])


def _first(x: Uncertain, weight: Tensor, w1: Stored, config: MoeConfig, recipe: Recipe) -> Parts:
    """FC1 of one expert's tokens, times the weight where that is on the input."""
    first = product(x, w1, recipe, _staged(x.reach, "input_quantisation"))
    sums = Parts(first.centre, first.carried).plus("fc1", first.accumulation)
    if config.weight_on_input:
        sums = sums.times(weight)
        # The contract's order is sums, then weights; a power of two rounds nothing.
        slip = first.size * weight.abs() * gamma(1, U32) + LEAST_NORMAL * (1 + first.weights)
        sums = sums.plus("fc1", torch.where(torch.frexp(weight)[0] == 0.5, 0.0, slip))
    return sums if recipe.fc1_dtype == "fp32" else sums.stored(DTYPES[recipe.fc1_dtype], "fc1")


def _second(h: Uncertain, reach: Tensor, w2: Stored, recipe: Recipe) -> Parts:
    """FC2 of one expert's tokens. reach: of h by stage."""
    third = product(h, w2, recipe, reach)
    found = Parts(third.centre, third.carried).plus("fc2", third.accumulation)
    return found if recipe.fc2_dtype == "fp32" else found.stored(DTYPES[recipe.fc2_dtype], "fc2")


def _staged(radius: Tensor, stage: str) -> Tensor:
    """A radius that comes from one stage, ``[stages, ...]``."""
    found = radius.new_zeros(len(STAGES), *radius.shape)
    found[STAGES.index(stage)] = radius
    return found


def activated(sums: Parts, config: MoeConfig, recipe: Recipe) -> tuple[Parts, Tensor, Tensor]:
    """h = silu(gate) * up by stage, and its ends, all as stored."""
    half = sums.centre.shape[1] // 2
    halves = [Parts(sums.centre[:, part], sums.radii[:, :, part]) for part in (slice(0, half), slice(half, None))]
    gate, up = halves if config.gate_first else halves[::-1]
    dtype = DTYPES[recipe.activation_dtype]
    found = swiglu(gate.enclosure, up.enclosure, recipe, config.limit).to_dtype(dtype)
    certain = swiglu(Enclosure.from_value(gate.centre), Enclosure.from_value(up.centre), recipe, config.limit).to_dtype(
        dtype
    )
    middle = gate.centre, up.centre
    if config.limit is not None:
        middle = gate.centre.clamp(max=config.limit), up.centre.clamp(-config.limit, config.limit)
    centre = round_to(silu(middle[0]) * middle[1], dtype)
    centre = torch.minimum(torch.maximum(centre, found.lo), found.hi)
    whole = torch.maximum(found.hi - centre, centre - found.lo)
    own = torch.minimum(torch.maximum(certain.hi - centre, centre - certain.lo).clamp(min=0.0), whole)
    incoming = gate.radii + up.radii
    share = incoming / incoming.sum(0).clamp(min=torch.finfo(F64).tiny)
    h = Parts(centre, share * (whole - own)).plus("activation", own)
    return h, found.lo, found.hi


def _attributed(h: Parts, reach: Tensor) -> Tensor:
    """The reach of requantised elements by stage."""
    whole = h.radii.sum(0)
    kept = torch.minimum(reach, whole)
    share = h.radii / whole.clamp(min=torch.finfo(F64).tiny)
    return Parts(h.centre, share * kept).plus("requantisation", reach - kept).radii


def _combined(answer: Parts, size: Tensor, unit: Tensor, topk: int, config: MoeConfig, recipe: Recipe) -> Parts:
    roundings = topk + 1 + (config.scaling != 1)
    error = size * (gamma(roundings, U32) + gamma(topk + 1, U64)) + roundings * LEAST_NORMAL
    if recipe.combine_dtype == "bf16":
        # Each addition rounds a partial sum that FP32's roundings have already moved; the first adds to zero.
        error = error + gamma(topk - (recipe.weighted_dtype == "bf16"), U_BF16) * (size + error)
    digits = 8 if recipe.combine_dtype == "bf16" else 24
    exact = (answer.total == 0) & on_lattice(size, unit, digits) & ((unit >= -126) | (size == 0))
    return answer.plus("combine", torch.where(exact, 0.0, error))


def _answer(found: Parts, dtype: torch.dtype, recipe: Recipe) -> AdmissibleMoe:
    whole = found.enclosure
    ends = whole.to_dtype(dtype)
    nominal = round_to(found.centre, dtype)
    rounding = half_ulp(nominal, dtype)
    reach = rounding
    for end in (ends.lo, ends.hi, nominal):
        reach = torch.maximum(reach, (end - found.centre).abs().nan_to_num(nan=0.0, posinf=0.0))
    radii = dict(zip(STAGES, found.radii, strict=True)) | {"output_rounding": rounding}
    return AdmissibleMoe(Interval(ends.lo, ends.hi, nominal, found.centre, reach), radii)
