"""A sound bound on Hopper's FP8 tensor core (`references.tensor_cores.HOPPER_FP8`) without emulating it.

In a group of 32 products that join a running value, with E the largest exponent, every term is cut toward zero to a
multiple of 2^(E - 13) and the sum to 13 bits below its own exponent. So:

- a *term* loses something only if its least set bit lies below 2^(E - 13), and then less than 2^(E - 13). Positive
  terms shrink and negative ones grow: with P positive and N negative lossy terms the group's sum moves within
  (-P, +N) * 2^(E - 13). The running value counts as one term more, on the side of its sign.
- the *sum* loses less than 2^(e - 13), e being its exponent, toward zero; nothing if its unit is not below 2^(e - 13).
- E is the largest ea + eb of nonzero products (exponents as the multiplier sees them) and of the running value, whose
  magnitude is at most that of the exact prefix plus the deviation so far; e is bounded in the same way. An E that is
  too large only widens the bound.

What is never below a bit that is kept is exact: on small integers the deviation is zero.

The K blocks are then scaled and added in FP32, rounded to nearest: at most r roundings a term (2 where
``scale_combination`` is named, else 3), and one for each of B blocks in any order. With D the sum over the blocks of
|dot| sA sB, deviation included, and u = 2^-24: scaling errs by g D with g = r u / (1 - r u), the additions by at most
B u / (1 - B u) (D + g D).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.accumulators import SLACK, U32, Sums, gamma, on_lattice, underflow
from references.gemm_formats import Operand
from references.least_bits import NOTHING, least_bit
from references.recipes import Recipe
from references.rounding import power_of_two
from references.tensor_cores import HOPPER_FP8, exponents

GROUP = HOPPER_FP8.products
KEPT = HOPPER_FP8.fraction_bits
PRODUCTS = {"cpu": 2**21, "cuda": 2**27}
"""Products that are looked at together, by device type."""

COUNTED = {"cpu": 2**30, "cuda": 2**38}
"""Products up to which lossy terms are counted, by device type. Beyond, all 32 of a group count and its largest
exponent is that of its largest operands: about 30 times wider and faster."""


@dataclass(frozen=True)
class Deviation:
    """How far the FP32 accumulator may lie from the exact sum: within ``low`` <= 0 and ``high`` >= 0, ``[m, n]``.

    scaling: the part of both that scale multiplications and underflow make.
    """

    low: Tensor
    high: Tensor
    scaling: Tensor


def deviation(facts: Sums, a: Operand, b: Operand, recipe: Recipe) -> Deviation:
    """The bound for two E4M3 operands. facts: `accumulators.sums` of them.

    Raises ValueError for other payloads and for K blocks that are no whole groups.
    """
    block = promoted_block(a, b, recipe)
    low, high, size = _zeros(a, b), _zeros(a, b), _zeros(a, b)
    left, right = _Terms.of(a, block), _Terms.of(b, block)
    width = b.values.shape[0] * left.exponent.shape[1] * GROUP
    device = a.values.device.type
    limit = PRODUCTS.get(device, PRODUCTS["cpu"])
    one_by_one = a.values.numel() * b.values.shape[0] <= COUNTED.get(device, COUNTED["cpu"])
    limit = limit if one_by_one else limit * GROUP // 4
    for rows in _pieces(a.values.shape[0], max(1, limit // width)):
        parts = _dots(left.rows(rows), right, one_by_one)
        scale = left.scale[rows][:, None, :] * right.scale[None, :, :]
        low[rows] = (parts.low * scale).sum(2)
        high[rows] = (parts.high * scale).sum(2)
        size[rows] = (parts.largest * scale).sum(2)
    roundings = 3 if recipe.scale_combination == "any" else 2
    if a.side.scale == "ue8m0" and b.side.scale == "ue8m0":
        roundings = 0
    blocks = left.exponent.shape[2]
    tiny, safe = underflow(a, b, recipe, blocks)
    scaling = size * gamma(roundings, U32)
    adding = (size + scaling) * gamma(blocks, U32)
    exact = on_lattice(facts.size, facts.unit, 24) & safe & (low == 0) & (high == 0)
    scaling = torch.where(exact, 0.0, (scaling + torch.where(safe, 0.0, tiny)) * SLACK)
    adding = torch.where(exact, 0.0, adding * SLACK)
    return Deviation(low * SLACK - scaling - adding, high * SLACK + scaling + adding, scaling)


def promoted_block(a: Operand, b: Operand, recipe: Recipe) -> int:
    """K elements between two promotions into FP32."""
    if a.side.name != "e4m3" or b.side.name != "e4m3":
        raise ValueError(f"gemm: hopper_fp8 multiplies E4M3, not {a.side.name} and {b.side.name}")
    k = a.values.shape[1]
    block = min(a.width, b.width)
    if recipe.promotion == "every_128":
        block = min(block, 128)
    if block < k and block % GROUP:
        raise ValueError(f"gemm: K blocks of {block} are no multiple of {GROUP}")
    return block


def _zeros(a: Operand, b: Operand) -> Tensor:
    return a.values.new_zeros(a.values.shape[0], b.values.shape[0])


def _pieces(rows: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@dataclass(frozen=True)
class _Terms:
    """One operand by groups: ``[rows, groups in a block, blocks, 32]``; scale ``[rows, blocks]``."""

    code: Tensor
    exponent: Tensor
    least: Tensor
    negative: Tensor
    scale: Tensor

    @classmethod
    def of(cls, side: Operand, block: int) -> _Terms:
        rows, k = side.codes.shape
        blocks = -(-k // block)
        inner = -(-block // GROUP)
        # A block that is no whole number of groups is the only one (see `promoted_block`).
        padded = torch.nn.functional.pad(side.codes, (0, blocks * inner * GROUP - k))
        code = padded.view(rows, blocks, inner, GROUP).transpose(1, 2)
        exponent = torch.where(code == 0, -NOTHING, exponents(code, "e4m3")).to(torch.int16)
        scale = side.scales.repeat_interleave(-(-min(side.width, k) // block), dim=1)[:, :blocks]
        return cls(code, exponent, least_bit(code).to(torch.int16), code < 0, scale)

    def rows(self, rows: slice) -> _Terms:
        return _Terms(self.code[rows], self.exponent[rows], self.least[rows], self.negative[rows], self.scale[rows])


@dataclass(frozen=True)
class _Dots:
    """Of each block's dot product, ``[rows, n, blocks]``: deviation and the largest magnitude."""

    low: Tensor
    high: Tensor
    largest: Tensor


def _dots(a: _Terms, b: _Terms, one_by_one: bool) -> _Dots:
    shape = (a.code.shape[0], b.code.shape[0], a.code.shape[2])
    prefix, low, high = (a.code.new_zeros(shape) for _ in range(3))
    least = torch.full(shape, NOTHING, dtype=torch.int32, device=prefix.device)
    for group in range(a.code.shape[1]):
        exact = torch.einsum("rbk,nbk->rnb", a.code[:, group], b.code[:, group])
        exponents_, bits = (a.exponent[:, group], b.exponent[:, group]), (a.least[:, group], b.least[:, group])
        running = _exponent(torch.maximum((prefix + low).abs(), (prefix + high).abs()))
        if one_by_one:
            fewest = _outer(*bits)
            last = torch.maximum(_outer(*exponents_).amax(3).to(torch.int32), running) - KEPT
            lossy = fewest < last[..., None]
            negative = a.negative[:, None, group] ^ b.negative[None, :, group]
            shrinking, growing = (lossy & ~negative).sum(3), (lossy & negative).sum(3)
            fewest = fewest.amin(3).to(torch.int32)
        else:
            fewest = _outer(*(item.amin(2) for item in bits)).to(torch.int32)
            last = torch.maximum(_outer(*(item.amax(2) for item in exponents_)).to(torch.int32), running) - KEPT
            shrinking = growing = (fewest < last) * GROUP
        unit = power_of_two(last.clamp(min=-1000))
        cut = (least < last) * unit
        minus = shrinking * unit + torch.where(prefix + high > 0, cut, 0.0)
        plus = growing * unit + torch.where(prefix + low < 0, cut, 0.0)
        low, high = low - minus, high + plus
        prefix = prefix + exact
        least = torch.minimum(least, fewest)
        last = _exponent(torch.maximum((prefix + low).abs(), (prefix + high).abs())) - KEPT
        cut = (least < last) * power_of_two(last.clamp(min=-1000))
        low, high = (
            low - torch.where(prefix + high > 0, cut, 0.0),
            high + torch.where(prefix + low < 0, cut, 0.0),
        )
    return _Dots(low, high, torch.maximum((prefix + low).abs(), (prefix + high).abs()))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sums of all pairs of rows, ``[r, b, 32]`` and ``[n, b, 32]`` to ``[r, n, b, 32]``."""
    return a[:, None] + b[None, :]


def _exponent(values: Tensor) -> Tensor:
    """floor(log2) of FP64 magnitudes, int32; far below for zero."""
    _, exponent = torch.frexp(values)
    return torch.where(values == 0, -NOTHING, exponent - 1).to(torch.int32)
