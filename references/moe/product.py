"""A GEMM whose first operand is only known around a nominal one.

With a = c + d, |d| <= r elementwise, every admissible operand's exact sum lies within r |b| of the nominal one. The
accumulator's error is bounded for all of them at once by bounding it for a *stand-in*: an operand that is at least as
large as any candidate in every element (raised to the smallest normal number times the scale, as subnormal codes count
that much), and whose uncertain elements have their last FP64 bit set, so that they count as fine terms and lie on no
lattice. `accumulators.radius` grows with magnitudes, so what it says of the stand-in holds for each candidate. What may
underflow is added wherever a row has an uncertain element.

``hopper_fp8`` has no bound by magnitudes there: see `references.moe.hopper`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from references.accumulators import SLACK, U32, Radius, Sums, gamma, radius, scale_roundings, sums, underflow
from references.gemm_formats import Operand, Stored
from references.moe.hopper import losses
from references.recipes import Recipe
from references.rounding import bits


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
    dots = losses(known.nominal, known.reach, a, b, facts.unit, width)
    scaling = (facts.size + dots) * gamma(scale_roundings(a, b), U32)
    adding = (facts.size + dots + scaling) * gamma(-(-facts.n // width), U32)
    tiny, safe = underflow(a, b, recipe, facts.n)
    return Radius((dots + adding) * SLACK, (scaling + torch.where(safe, 0.0, tiny)) * SLACK)
