"""What Hopper's FP8 unit may lose on an operand in doubt, instruction by instruction.

An instruction adds 32 products to the running value: each of the 33 terms is cut toward zero at 2^(E - 13), E being the
largest exponent among them, and so is the sum, at 13 bits of its own. With a candidate operand within ``reach`` of the
nominal one, and all numbers scaled:

- 2^E is at most M, the largest product (subnormal codes raised, as the unit sees their exponents) or what the running
  value may be; where scales are powers of two, the power of two up to that.
- A product of numbers whose least set bits are 2^p and 2^q loses nothing where 2^(p + q) >= 2^-13 M, else less than
  2^-13 M and no more than itself. A code of E4M3 has four significant bits, so that its least one is above 1/16 of it:
  that is what is known of an element in doubt, by its smallest magnitude.
- Positive products shrink and negative ones grow, so the two kinds are summed apart; a product whose sign is in doubt
  counts as both. So does the running value, whose sign is that of the interval in which it lies.
- The running value of a candidate lies within its reach of the nominal prefix, further by what was lost before.
- Nothing is cut where all terms are multiples of 2^-13 M.

A scale multiplies M and least bits alike, so that what holds of scaled numbers holds of the unit's own. Promoted blocks
of K add up. Instructions take K in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.accumulators import SLACK, U64
from references.gemm_formats import Operand
from references.least_bits import least_bit
from references.rounding import bits, power_of_two

UNIT = 2.0**-13
PRODUCTS = 32
LEAST_OF_CODE = 2.0**-4
EXPONENT_BITS = 0x7FF << 52
PIECE = {"cpu": 2**21, "cuda": 2**24}
"""Products that are looked at together, by device type."""
COUNTED = {"cpu": 2**24, "cuda": 2**37}
"""Products up to which each is looked at, by device type; beyond, a group's largest and finest stand for all 32."""


@dataclass(frozen=True)
class _Terms:
    """An operand by K blocks and groups, each FP64 ``[blocks, groups, rows, 32]``, or 1 instead of 32.

    top: bound on magnitudes, subnormal codes raised. least: lower bound on the least set bits. sign: 0 where in doubt.
    """

    top: Tensor
    least: Tensor
    sign: Tensor

    def rows(self, some: slice) -> _Terms:
        return _Terms(self.top[:, :, some], self.least[:, :, some], self.sign[:, :, some])

    def together(self) -> _Terms:
        """One number a group."""
        least = torch.where(self.top > 0, self.least, torch.inf).amin(3, keepdim=True)
        return _Terms(self.top.amax(3, keepdim=True), least, torch.zeros_like(least))


def losses(nominal: Operand, reach: Tensor, a: Operand, b: Operand, unit: Tensor, width: int) -> Tensor:
    """How far the dot products of all K blocks of ``width`` may lie from exact ones, FP64 ``[m, n]``.

    nominal: the operand, within ``reach`` ``[m, k]`` of every candidate. a: an operand as large and as fine as every
    candidate; ``nominal`` where nothing is in doubt. unit: exponent of a power of two that divides every term.
    """
    rows, n = a.values.shape[0], b.values.shape[0]
    doubt = (reach > 0) | (a.spread(a.scales) != nominal.spread(nominal.scales))
    lowest = (nominal.values.abs() - reach).clamp(min=0.0)
    sign = torch.where(lowest > 0, nominal.values.sign(), 0.0)
    least = torch.where(doubt, LEAST_OF_CODE * lowest, _least(nominal))
    left = _Terms(*(groups(part, width) for part in (_top(a), least, sign)))
    right = _Terms(*(groups(part, width) for part in (_top(b), _least(b), b.values.sign())))
    each = 1
    device = unit.device.type
    if a.values.numel() * n > COUNTED.get(device, COUNTED["cpu"]):
        left, right, each = left.together(), right.together(), PRODUCTS
    powers = a.side.scale == b.side.scale == "ue8m0"
    own = 2.0 * PRODUCTS * a.values.shape[1] * U64  # of FP64, in units of a group's largest product
    found = unit.new_zeros(rows, n, dtype=torch.float64)
    products = max(1, n * right.top.shape[0] * max(right.top.shape[1], right.top.shape[3]))
    step = max(1, PIECE.get(device, PIECE["cpu"]) // products)
    values, sizes = groups(b.values, width), groups(b.size, width)
    uncertain = bool((reach > 0).any())
    for start in range(0, rows, step):
        some = slice(start, start + step)
        exact = (groups(nominal.values[some], width) @ values.mT).cumsum(1)
        around = (groups(reach[some], width) @ sizes.mT).cumsum(1) if uncertain else torch.zeros_like(exact)
        coarse = power_of_two(unit[some].clamp(-1000, 1000)) / UNIT  # up to this M nothing is cut
        minus, plus, low, high, before, largest = (torch.zeros_like(exact[:, 0]) for _ in range(6))
        part = left.rows(some)
        for group in range(exact.shape[1]):
            sides = [
                (item[:, group, :, None], other[:, group, None])
                for item, other in zip(_all(part), _all(right), strict=True)
            ]
            size, fine, kind = (first * second for first, second in sides)
            top = size.amax(3)
            largest = largest + top
            limit = torch.maximum(top, before)
            limit = UNIT * (_exponent(limit) if powers else limit)
            cut = (limit > coarse * UNIT)[..., None] & (fine < limit[..., None])
            lost = each * torch.where(cut, torch.minimum(size, limit[..., None]), 0.0)
            running = torch.where(limit > coarse * UNIT, torch.minimum(limit, before), 0.0)
            minus = minus + torch.where(kind >= 0, lost, 0.0).sum(3) + torch.where(high > 0, running, 0.0)
            plus = plus + torch.where(kind <= 0, lost, 0.0).sum(3) + torch.where(low < 0, running, 0.0)
            reached = around[:, group] + own * largest
            low, high = exact[:, group] - reached - minus, exact[:, group] + reached + plus
            before = torch.maximum(low.abs(), high.abs())
            limit = UNIT * (_exponent(before) if powers else before)
            limit = torch.where(limit > coarse * UNIT, limit, 0.0)
            minus, plus = minus + torch.where(high > 0, limit, 0.0), plus + torch.where(low < 0, limit, 0.0)
            before = before * SLACK
        found[some] = torch.maximum(minus.sum(0), plus.sum(0))
    return found * SLACK


def groups(values: Tensor, width: int) -> Tensor:
    """``[rows, k]`` as ``[blocks, groups of a block, rows, 32]``, zeros where a block or a group ends early."""
    rows, k = values.shape
    blocks = torch.nn.functional.pad(values, (0, -k % width)).view(rows, -1, width)
    whole = torch.nn.functional.pad(blocks, (0, -width % PRODUCTS))
    return whole.view(rows, blocks.shape[1], -1, PRODUCTS).permute(1, 2, 0, 3)


def _all(terms: _Terms) -> tuple[Tensor, Tensor, Tensor]:
    return terms.top, terms.least, terms.sign


def _top(side: Operand) -> Tensor:
    return side.size if side.raised is None else side.raised


def _least(side: Operand) -> Tensor:
    """The least set bits of an operand's codes, times their scales."""
    return power_of_two(least_bit(side.codes).clamp(-1000, 1000)) * side.spread(side.scales).abs()


def _exponent(values: Tensor) -> Tensor:
    """The largest power of two up to each value; 0 for 0."""
    return (bits(values) & EXPONENT_BITS).view(torch.float64)
