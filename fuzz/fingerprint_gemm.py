"""Fingerprints of a GEMM: inputs whose outputs tell how products are added, and what can be read from the outputs.

All scales are one. Every row of A is an experiment, all columns of B are alike: large at even positions of K, small at
odd ones, so that products span more exponents than one operand does. With B(ig) = 2^E the largest product:

- *surviving addend*, fraction bits b: in [B, 2^(E - j), -B] the addend comes back for every j up to b.
- *rounding*: of [1.5 B, +-1.5 u, -1.5 B] and [1.5 B, 1.25 u, -1.5 B] with u = 2^(E - b).
- *products a step*: four addends of u/2, then B and -B from position q on. Alone each addend is lost beside B; added up
  before B comes, in an earlier step, they make 2 u, which is not. The smallest q that keeps them ends the first step.
- *promotion*: of [B at 0, an addend far below u at d, -B at 2 d] the addend survives only where the three are summed
  apart and meet in an accumulator of more bits: the smallest such d is the promotion interval.
- *output rounding*: of two ties of BF16.

Method: after Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021); see docs/probe.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.inputs import build
from references.elements import Element, encode
from references.gemm_formats import Side, sides
from references.packing import pack_fp4

EXPONENTS = {"e4m3": (7, -6), "e2m1": (2, 0), "bf16": (10, -20), "f16": (10, -14)}
"""Largest and smallest exponent that an operand's experiments use, all of normal numbers."""
BF16_B = (10, 0)
LEAST_SPAN = 15
"""Exponents that products have to span."""
SPACINGS = (8, 16, 32, 64, 128, 256)
STEPS = (8, 16, 32, 64)
BITS = range(8, 27)
ONE = {torch.uint8: 127, torch.float32: 1.0, torch.int32: 0x7F7F7F7F}
Row = dict[int, float]


@dataclass(frozen=True)
class GemmProbe:
    """The experiments on one case, whose text gives the sizes and the format. `usable` tells whether it has room."""

    case: Case

    @property
    def sides(self) -> tuple[Side, Side]:
        """The operands."""
        return sides(self.case.variant, self.case["scale"])

    @cached_property
    def _range(self) -> tuple[int, int, int, int]:
        a, b = self.sides
        return (*EXPONENTS[a.name], *(BF16_B if b.name in ("bf16", "f16") else EXPONENTS[b.name]))

    @property
    def span(self) -> int:
        """Exponents between the largest product and the smallest."""
        a_high, a_low, b_high, b_low = self._range
        return a_high + b_high - a_low - b_low

    def usable(self) -> str | None:
        """Why the case has no room for the experiments; None if it has."""
        if self.span < LEAST_SPAN:
            return f"products of {self.case.variant} span {self.span} exponents only"
        if self.case.integer("k") < 64:
            return "K is below 64"
        if self.case.integer("m") < len(self.rows):
            return f"M is below {len(self.rows)}"
        return None

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Experiments by name: position of K -> product."""
        a_high, _, b_high, _ = self._range
        big, k = 2.0 ** (a_high + b_high), self.case.integer("k")
        found: dict[str, Row] = {}
        for j in range(1, self.span + 1):
            found[f"keep {j}"] = {0: big, self._place(0, j): big * 2.0**-j, 4: -big}
        for b in BITS:
            if b + 2 > self.span:
                break
            for name, size in (("up", 1.5), ("down", -1.5), ("quarter", 1.25)):
                # 1.5 B, not B: below a power of two FP32's unit is half as large.
                found[f"round {b} {name}"] = {0: 1.5 * big, self._place(0, b): size * big * 2.0**-b, 4: -1.5 * big}
            for q in STEPS:
                if q + 4 < k and self._odd_fits(b + 1):
                    addends = dict.fromkeys((1, 3, 5, 7), big * 2.0 ** -(b + 1))
                    found[f"step {b} {q}"] = {**addends, q: big, q + 4: -big}
        for d in SPACINGS:
            if 2 * d < k:
                found[f"apart {d}"] = {0: big, self._place(d, self.addend): big * 2.0**-self.addend, 2 * d: -big}
        found["tie even"] = {0: big, 2: big * 2.0**-8}
        found["tie odd"] = {0: big, 2: big * 3 * 2.0**-8}
        return found

    @property
    def addend(self) -> int:
        """How far below B the addend of the promotion's experiments lies."""
        return min(18, self.span)

    def _odd_fits(self, j: int) -> bool:
        a_high, a_low, b_high, b_low = self._range
        return a_low <= a_high + b_high - j - b_low <= a_high

    def _place(self, base: int, j: int) -> int:
        """Where an addend of 2^-j B fits: at an even position beside ``base``, else at an odd one."""
        a_high, a_low, _, _ = self._range
        return base + (2 if a_high - j >= a_low else 1)

    def inputs(self) -> dict[str, Tensor]:
        """The case's inputs with the experiments in the first rows of A, zeros below, and all scales one."""
        m, n, k = (self.case.integer(key) for key in "mnk")
        _, _, b_high, b_low = self._range
        column = torch.where(torch.arange(k) % 2 == 0, 2.0**b_high, 2.0**b_low).to(torch.float64)
        a = torch.zeros(m, k, dtype=torch.float64)
        for place, row in enumerate(self.rows.values()):
            for position, product in row.items():
                a[place, position] = product / column[position]
        given = build(self.case)
        left, right = self.sides
        made = {"a": _stored(a, left.element), "b": _stored(column.expand(n, k).contiguous(), right.element)}
        for name, tensor in given.items():
            if name not in made:
                made[name] = torch.full_like(tensor, ONE[tensor.dtype])
        return {name: made[name] for name in given}

    def read(self, output: Tensor) -> dict[str, str]:
        """Property -> what the first column of an output ``[m, n]`` says; a property that cannot be told is absent."""
        values = dict(zip(self.rows, output[:, 0].to(torch.float64).tolist(), strict=False))
        a_high, _, b_high, _ = self._range
        big = 2.0 ** (a_high + b_high)
        bits = 0
        while bits < self.span and values[f"keep {bits + 1}"] == big * 2.0 ** -(bits + 1):
            bits += 1
        found = {"fraction bits": f"{bits}" if bits < self.span else f">={bits}"}
        if f"round {bits} up" in values:
            found["rounding"] = _rounding(values, bits, big * 2.0**-bits)
        steps = [q for q in STEPS if f"step {bits} {q}" in values]
        kept = [values[f"step {bits} {q}"] == big * 2.0 ** -(bits - 1) for q in steps]
        if steps:
            found["products a step"] = _first(steps, kept, "more than")
        apart = [d for d in SPACINGS if f"apart {d}" in values]
        if bits < self.addend and apart:
            alive = [values[f"apart {d}"] == big * 2.0**-self.addend for d in apart]
            found["promotion"] = _first(apart, alive, "none up to")
        if self.case["out"] == "bf16":
            ties = ((values["tie even"] / big - 1) * 2**7, (values["tie odd"] / big - 1) * 2**7)
            names: dict[tuple[float, ...], str] = {(0, 2): "nearest even", (1, 2): "ties away", (0, 1): "toward zero"}
            found["output rounding"] = names.get(ties, f"{ties[0]:g}, {ties[1]:g} steps")
        return found


def _first(places: list[int], kept: list[bool], otherwise: str) -> str:
    """The first place from which on everything is kept."""
    for place in range(len(places)):
        if all(kept[place:]):
            return str(places[place]) if place else f"<={places[0]}"
    return f"{otherwise} {places[-1]}"


def _rounding(values: Mapping[str, float], bits: int, unit: float) -> str:
    up, down, quarter = (values[f"round {bits} {name}"] / unit for name in ("up", "down", "quarter"))
    names: dict[tuple[float, ...], str] = {
        (1, -1, 1): "addends toward zero",
        (2, -2, 1): "nearest",
        (2, -2, 2): "addends away from zero",
        (1, -2, 1): "sums toward zero",
        (2, -1, 2): "sums away from zero",
    }
    return names.get((up, down, quarter), f"1.5 -> {up:g}, -1.5 -> {down:g}, 1.25 -> {quarter:g}")


def _stored(numbers: Tensor, element: Element | None) -> Tensor:
    if element is None:
        return numbers.to(torch.bfloat16)
    codes = encode(numbers, element)
    return pack_fp4(codes) if element.bits == 4 else codes
