"""A GEMM whose first operand is only known around a nominal one.

With a = c + d, |d| <= r elementwise, every admissible operand's exact sum lies within r |b| of the nominal one. The
accumulator's error is bounded for all of them at once by bounding it for a *stand-in*: an operand that is at least as
large as any candidate in every element (raised to the smallest normal number times the scale, as subnormal codes count
that much), and whose uncertain elements have their last FP64 bit set, so that they count as fine terms and lie on no
lattice. `accumulators.radius` grows with magnitudes, so what it says of the stand-in holds for each candidate. What may
underflow is added wherever a row has an uncertain element.

``hopper_fp8`` has no bound by magnitudes there. Here an instruction adds 32 products to the running value, each of the
33 terms cut to a multiple of 2^(E - 13), the sum to 13 bits of its own. 2^E is at most the largest product or the
running value, whichever is larger, so with M the larger of their bounds the terms lose 33 * 2^-13 M and the sum 2^-13
of its own bound; where scales are powers of two, of the powers of two up to these. The largest product is at most that
of the two operands' largest in the group (subnormal codes raised, as the unit sees their exponents); the running value
of any candidate is at most |nominal prefix| + its reach + what was lost before. Nothing is lost where all terms are
multiples of 2^-13 of these bounds: a cut then finds no bit to take. (All numbers are scaled ones here. A scale is at
least its least set bit, so that this holds of the unit's own, too.) The losses of all promoted K blocks add up to D,
and FP32 adds the blocks: D + g(blocks) (S + D), beside the scale multiplications. Instructions take K in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from references.accumulators import SLACK, U32, U64, Radius, Sums, gamma, radius, scale_roundings, sums, underflow
from references.gemm_formats import Operand, Stored
from references.recipes import Recipe
from references.rounding import bits, power_of_two

HOPPER_UNIT = 2.0**-13
HOPPER_TERMS = 33
"""Products that an instruction adds, and the running value."""
HOPPER_PRODUCTS = 32
EXPONENT_BITS = 0x7FF << 52
PIECE = {"cpu": 2**21, "cuda": 2**26}
"""Sums of groups of products that are looked at together, by device type."""


@dataclass(frozen=True)
class Uncertain:
    """An operand within ``reach`` of a nominal one.

    nominal: the operand. reach: FP64 ``[rows, k]``, how far its values may be off. scales: FP64 ``[rows, blocks]``,
    bounds on the magnitudes of its scales.
    """

    nominal: Operand
    reach: Tensor
    scales: Tensor

    @classmethod
    def exactly(cls, nominal: Operand) -> Uncertain:
        """An operand without doubt."""
        return cls(nominal, torch.zeros_like(nominal.values), nominal.scales)

    @cached_property
    def moved(self) -> Tensor | None:
        """Rows with an element that may be off, bool ``[rows]``; None where there are none."""
        found = (self.reach > 0).any(1)
        return found if bool(found.any()) else None

    @cached_property
    def stand_in(self) -> Operand:
        """At least as large and as fine as every candidate (the module's docstring)."""
        a = self.nominal
        moved = self.reach > 0
        largest = (a.values.abs() + self.reach) * SLACK
        codes = largest
        if a.side.element is not None:
            spread = self.scales.repeat_interleave(a.width, dim=1)[:, : largest.shape[1]]
            largest = torch.maximum(largest, spread * 2.0**a.side.element.emin)
            # The largest code with the least bit of the smallest.
            top = a.side.element.max + 2.0 ** (a.side.element.emin - a.side.element.mantissa_bits)
            codes = torch.full_like(largest, top)
        else:
            codes = _finest(largest)
        values = torch.where(moved, _finest(largest), a.values)
        return replace(a, codes=torch.where(moved, codes, a.codes), values=values, scales=self.scales, raw=None)


def _finest(values: Tensor) -> Tensor:
    """Positive FP64 values with their last bit set."""
    return (bits(values) | 1).view(torch.float64)


@dataclass(frozen=True)
class Product:
    """What an uncertain operand times another may be, each FP64 ``[m, n]``.

    centre: the exact product of the nominal operand. accumulation: how far the accumulator may be off the exact product
    of the operand that it got, the scales' roundings and FP64's own error included. size: bound on the sum of the
    terms' magnitudes. carried: how far that exact product may be off ``centre``, by stage, ``[stages, m, n]``.
    weights: sums of the other operand's magnitudes, ``[n]``.
    """

    centre: Tensor
    accumulation: Tensor
    size: Tensor
    carried: Tensor
    weights: Tensor


def product(a: Uncertain, b: Stored, recipe: Recipe, reach: Tensor) -> Product:
    """``a @ b.T`` under the recipe's accumulator, a piece of b at a time.

    reach: that of ``a`` by stage, ``[stages, m, k]``; its sum over the stages bounds ``a.reach`` within 2^-41.
    """
    some = [_product(a, piece.decoded(), recipe, reach) for piece in b.pieces()]
    if len(some) == 1:
        return some[0]
    names = ("centre", "accumulation", "size", "carried", "weights")
    return Product(*(torch.cat([getattr(item, name) for item in some], dim=-1) for name in names))


def _product(a: Uncertain, b: Operand, recipe: Recipe, reach: Tensor) -> Product:
    nominal = sums(a.nominal, b, subnormals=a.moved is None)
    weights = b.row_sums
    carried = nominal.exact.new_zeros(len(reach), *nominal.exact.shape)
    if a.moved is None:
        parts = _radius(nominal, a, a.nominal, b, recipe)
        return Product(nominal.exact, parts.total + nominal.error, nominal.size, carried, weights)
    for stage, part in enumerate(reach):
        if bool((part != 0).any()):
            carried[stage] = (part @ b.size.T) * SLACK
    facts = sums(a.stand_in, b)
    facts = replace(facts, exact=nominal.exact.abs() + carried.sum(0) * SLACK)
    total = _radius(facts, a, a.stand_in, b, recipe).total
    tiny, _ = underflow(a.stand_in, b, recipe, facts.n, everywhere=True)
    total = total + torch.where(a.moved[:, None], tiny, 0.0)
    return Product(nominal.exact, total + nominal.error, facts.size, carried, weights)


def _radius(facts: Sums, known: Uncertain, a: Operand, b: Operand, recipe: Recipe) -> Radius:
    """The accumulator's radius for ``a``, the nominal operand or the stand-in of what is known."""
    if recipe.accumulator != "hopper_fp8":
        return radius(facts, a, b, recipe)
    if {a.side.name, b.side.name} != {"e4m3"}:
        raise ValueError(f"moe: hopper_fp8 multiplies E4M3, not {a.side.name} and {b.side.name}")
    width = min(a.width, b.width, facts.n)
    if recipe.promotion == "every_128":
        width = min(width, 128)
    dots = hopper_losses(known, a, b, facts.unit, width)
    scaling = (facts.size + dots) * gamma(scale_roundings(a, b), U32)
    adding = (facts.size + dots + scaling) * gamma(-(-facts.n // width), U32)
    tiny, safe = underflow(a, b, recipe, facts.n)
    return Radius((dots + adding) * SLACK, (scaling + torch.where(safe, 0.0, tiny)) * SLACK)


def hopper_losses(known: Uncertain, a: Operand, b: Operand, unit: Tensor, width: int) -> Tensor:
    """What Hopper's FP8 unit may lose in all K blocks of ``width`` (the module's docstring), FP64 ``[m, n]``.

    a: an operand as large and as fine as every candidate. unit: exponent of a power of two that divides every term.
    """
    rows, n = a.values.shape[0], b.values.shape[0]
    right, right_size = _groups(b.values, width), _groups(b.size, width)
    right_top = _groups(b.size if b.raised is None else b.raised, width).amax(3)
    top = a.size if a.raised is None else a.raised
    powers = a.side.scale == b.side.scale == "ue8m0"
    own = 2.0 * HOPPER_PRODUCTS * a.values.shape[1] * U64  # of FP64, in units of a group's largest product
    found = unit.new_zeros(rows, n, dtype=torch.float64)
    sums_of_row = max(1, n * right.shape[0] * right.shape[1])
    step = max(1, PIECE.get(found.device.type, PIECE["cpu"]) // sums_of_row)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        largest = _groups(top[some], width).amax(3)[:, :, :, None] * right_top[:, :, None, :]
        prefix = (_groups(known.nominal.values[some], width) @ right.mT).cumsum(1).abs()
        if known.moved is not None:
            prefix += (_groups(known.reach[some], width) @ right_size.mT).cumsum(1)
        prefix = (prefix + own * largest.cumsum(1)) * SLACK
        coarse = power_of_two(unit[some].clamp(-1000, 1000)) / HOPPER_UNIT  # up to this exponent nothing is cut
        lost = torch.zeros_like(prefix[:, 0])
        running = lost
        for group in range(prefix.shape[1]):
            top_term = torch.maximum(largest[:, group], running)
            top_term = _exponent(top_term) if powers else top_term
            lost = lost + torch.where(top_term > coarse, HOPPER_TERMS * HOPPER_UNIT * top_term, 0.0)
            total = prefix[:, group] + lost
            total = _exponent(total) if powers else total
            lost = lost + torch.where(total > coarse, HOPPER_UNIT * total, 0.0)
            running = prefix[:, group] + lost
        found[some] = lost.sum(0)
    return found * SLACK


def _exponent(values: Tensor) -> Tensor:
    """The largest power of two up to each value; 0 for 0."""
    return (bits(values) & EXPONENT_BITS).view(torch.float64)


def _groups(values: Tensor, width: int) -> Tensor:
    """``[rows, k]`` as ``[blocks, groups of a block, rows, 32]``, zeros where a block or a group ends early."""
    rows, k = values.shape
    blocks = torch.nn.functional.pad(values, (0, -k % width)).view(rows, -1, width)
    whole = torch.nn.functional.pad(blocks, (0, -width % HOPPER_PRODUCTS))
    return whole.view(rows, blocks.shape[1], -1, HOPPER_PRODUCTS).permute(1, 2, 0, 3)
