"""Fingerprints of quantisers: inputs whose scales and payloads tell the scale policy, floors, ties and overflow.

Every block is an experiment. Its first element is the block's amax, the others are zero or, for ties, all midpoints
between codes and all points a quarter of a step above a code, of either sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.inputs import TORCH_FLOATS, build, element_of
from references import ue8m0
from references.blocks import scales_from_amax
from references.elements import E2M1, E2M3, E3M2, E4M3FN, E5M2, Element, decode, encode
from references.packing import unpack_fp4
from references.recipes import Recipe
from references.schemes import Scheme, scheme

AMAX_ELEMENTS = {"amax_e4m3": E4M3FN, "amax_e5m2": E5M2, "amax_e2m1": E2M1, "amax_e2m3": E2M3, "amax_e3m2": E3M2}
LADDER = 128
"""Maxima (1 + i / 128) 2^3: every BF16 significand."""
EDGES = (-12, -5, 0, 3, 9, 20, 33)
"""Exponents k of the maxima at which policies turn: the element's largest number, its power of two and the edge of
``even``, times 2^k, with the FP32 numbers beside them. Above the floors in use, below overflow."""
Found = dict[str, str]


def _row(name: str, words: Sequence[str], otherwise: str) -> Found:
    return {name: ", ".join(words) or otherwise}


@dataclass(frozen=True)
class QuantizeProbe:
    """The experiments on one case, which gives format, block, scale and dtype; sizes are `sizes`, see ``for_sizes``."""

    case: Case

    @staticmethod
    def usable(case: Case) -> str | None:
        """Why a case's words give no experiments; None if they do."""
        if case["block"] == "tensor":
            return "one scale for the whole tensor"
        return None

    @property
    def kind(self) -> Scheme:
        """The block scheme."""
        return scheme(self.case.variant, self.case["block"], self.case["scale"])

    @property
    def element(self) -> Element:
        """Of the payload."""
        return E2M1 if element_of(self.case) == "e2m1" else E4M3FN

    @cached_property
    def _blocks(self) -> list[tuple[str, list[float]]]:
        ladder = [("ladder", [(1 + i / LADDER) * 8.0]) for i in range(LADDER)]
        width = int(self.case["block"].split("x")[1])
        ties = [*self._between(0.5), *self._between(0.25)]
        per = width - 1
        rows = [("ties", [self._anchor, *ties[start : start + per]]) for start in range(0, len(ties), per)]
        edges = [("edge", [amax]) for amax in self._edges()]
        return [*ladder, ("zero", [0.0]), ("tiny", [self.tiny]), ("over", [self._over]), *rows, *edges]

    def _edges(self) -> list[float]:
        """Maxima whose last bit decides the scale; none where the scale is no power of two or the input no FP32."""
        if self.kind.scale != "ue8m0" or self.case["dtype"] != "fp32":
            return []
        even = 2.0 - 2.0 ** -(self.element.mantissa_bits + 1)
        power = 2.0**self.element.emax
        middle = torch.tensor([edge * 2.0**k for k in EDGES for edge in (self.element.max, power, even * power)])
        beside = [torch.nextafter(middle, torch.tensor(end)) for end in (0.0, torch.inf)]
        found: list[float] = torch.cat([middle, *beside]).tolist()
        return found

    @property
    def tiny(self) -> float:
        """An amax far below any floor."""
        return 2.0**-24 if self.case["dtype"] == "fp16" else 2.0**-100

    @property
    def _anchor(self) -> float:
        """An amax that makes the scale one under every policy."""
        return 2.0**self.element.emax if self.kind.scale == "ue8m0" else self.element.max

    @property
    def _over(self) -> float:
        """The largest BF16 number below the next power of two, in the element's last binade."""
        return (2 - 2.0**-7) * 2.0**self.element.emax

    def _codes(self) -> list[int]:
        """Positive codes whose successor is at most the anchor."""
        positive = range(self.element.sign)
        values = decode(torch.tensor(list(positive), dtype=torch.uint8), self.element).tolist()
        return [code for code in positive[:-1] if values[code + 1] <= self._anchor]

    def _between(self, share: float) -> list[float]:
        values = decode(torch.arange(self.element.sign, dtype=torch.uint8), self.element).tolist()
        points = [values[code] + share * (values[code + 1] - values[code]) for code in self._codes()]
        return [*points, *(-point for point in points)]

    @classmethod
    def sizes(cls, case: Case) -> dict[str, int]:
        """The m and k that hold every block of a case with these words: the blocks lie below one another."""
        height, width = map(int, case["block"].split("x"))
        return {"m": len(cls(case)._blocks) * height, "k": width}

    def inputs(self) -> dict[str, Tensor]:
        """The case's inputs with the experiments in ``x`` and a global scale of one."""
        given = build(self.case)
        height, _ = map(int, self.case["block"].split("x"))
        x = given["x"].clone() if given["x"].is_contiguous() else given["x"]
        x.zero_()
        for place, (_, numbers) in enumerate(self._blocks):
            x[place * height, : len(numbers)] = torch.tensor(numbers).to(TORCH_FLOATS[self.case["dtype"]])
        if "global_scale" in given:
            given["global_scale"] = torch.ones(1)
        return {**given, "x": x}

    def read(self, scales: Tensor, payload: Tensor) -> Found:
        """Property -> what the answer says. scales: as stored, one a block. payload: stored codes."""
        raw = unpack_fp4(payload) if self.element.bits == 4 else payload
        height, _ = map(int, self.case["block"].split("x"))
        by_block = raw.view(torch.uint8)[::height]
        scales = scales.reshape(-1)
        names = [name for name, _ in self._blocks]
        found = _row("scale policy", self._policies(scales[:LADDER]), "none of the known")
        found["scale of a zero block"] = self.shown(scales[names.index("zero")])
        found["scale of a tiny block"] = self.shown(scales[names.index("tiny")])
        found["ties"] = self._ties(by_block)
        found["overflow"] = self._overflow(by_block[names.index("over"), 0], scales[names.index("over")])
        if "edge" in names:
            found["scale at the last bit"] = self._at_edges(scales[names.index("edge") :].view(torch.uint8))
        return found

    @cached_property
    def edge_answers(self) -> dict[str, Tensor]:
        """Policy -> its scales at the edges; ``POLICY by reciprocal`` too where a product with 1 / max gives others."""
        amax = torch.tensor(self._edges(), dtype=torch.float32)
        found = {}
        for policy in ue8m0.AMAX_POLICIES:
            kind = replace(self.kind, policy=policy)
            found[policy] = scales_from_amax(amax, kind, Recipe(source="docs/probe.md"))
            product = scales_from_amax(amax, kind, Recipe(source="docs/probe.md", scale_arithmetic="reciprocal"))
            if not torch.equal(product, found[policy]):
                found[f"{policy} by reciprocal"] = product
        return found

    def _at_edges(self, codes: Tensor) -> str:
        matching = [name for name, scales in self.edge_answers.items() if torch.equal(scales, codes)]
        unlike = int((self.edge_answers[self.case["scale"]] != codes).sum())
        return ", ".join(matching) or f"none of the known ({unlike} of {len(codes)} unlike {self.case['scale']})"

    def _policies(self, scales: Tensor) -> list[str]:
        amax = torch.tensor([numbers[0] for _, numbers in self._blocks[:LADDER]], dtype=torch.float32)
        if self.kind.scale == "ue8m0":
            stored = scales.view(torch.uint8)
            named = ue8m0.AMAX_POLICIES
            return [name for name in named if torch.equal(ue8m0.from_amax(amax, self.element, name), stored)]
        found = []
        for name in ("divide", "reciprocal"):
            exact = ue8m0.scale_from_amax(amax, self.element, name)
            if self.kind.scale == "e4m3":
                matches = torch.equal(encode(exact.to(torch.float64), E4M3FN), scales.view(torch.uint8))
            else:
                matches = torch.equal(exact, scales)
            found += [name] * matches
        return found

    def shown(self, scale: Tensor) -> str:
        """A stored scale in words."""
        if self.kind.scale == "fp32":
            return f"{scale.item():.6g}"
        code = int(scale.view(torch.uint8).item())
        if self.kind.scale == "e4m3":
            return f"{decode(torch.tensor(code, dtype=torch.uint8), E4M3FN).item():g}"
        return "NaN" if code == ue8m0.NAN else f"2^{code - 127}"

    def _ties(self, by_block: Tensor) -> str:
        """The rule that explains every midpoint and every point below one."""
        blocks = [
            by_block[place, 1 : len(numbers)] for place, (name, numbers) in enumerate(self._blocks) if name == "ties"
        ]
        actual = torch.cat(blocks).to(torch.int64)
        lower = torch.tensor(self._codes())
        positive = torch.zeros(len(lower), dtype=torch.int64)
        sign = torch.cat([positive, positive + self.element.sign]).repeat(2)
        lower = lower.repeat(4)
        middle = torch.arange(len(lower)) < len(lower) // 2
        rules = {
            "nearest even": torch.where(middle, lower + lower % 2, lower),
            "ties away": lower + middle,
            "ties toward zero": lower,
            "ties up": lower + (middle & (sign == 0)),
            "away from zero": lower + 1,
        }
        for name, expected in rules.items():
            coded = expected + sign
            # Either zero may stand for a zero.
            same = (coded == actual) | ((expected == 0) & (actual % self.element.sign == 0))
            if bool(same.all()):
                return name
        nearest = ((lower + middle + sign == actual) | (lower + sign == actual)).float().mean().item()
        return f"no single rule ({nearest:.0%} at a neighbour)"

    def _overflow(self, code: Tensor, scale: Tensor) -> str:
        if self.kind.scale == "ue8m0":
            divisor = ue8m0.decode(scale.view(torch.uint8)).item()
        elif self.kind.scale == "e4m3":
            divisor = decode(scale.view(torch.uint8), E4M3FN).item()
        else:
            divisor = float(scale.item())
        if divisor == 0 or self._over / divisor <= self.element.max * (1 + 2.0**-8):  # a quotient rounded up is none
            return "does not occur"
        value = decode(code, self.element).item()
        return "saturates" if value == self.element.max else f"gives {value:g}"


@dataclass(frozen=True)
class Ue8m0Probe:
    """The experiments on one ``ue8m0`` case of `count` numbers: the edges of exponents and the special numbers."""

    case: Case

    @staticmethod
    def numbers() -> Tensor:
        """FP32: normal numbers at the edges of some exponents, then zero, a subnormal, infinity, NaN and a negative."""
        half = 1 << 22
        mantissas = (0, 1, half - 1, half, half + 1, 2 * half - 1)
        bits = [exponent << 23 | mantissa for exponent in (1, 2, 60, 126, 127, 128, 200, 253) for mantissa in mantissas]
        special = [0, 1 << 21, 0x7F800000, 0x7FC00000, 0xBFC00000 - (1 << 32)]
        return torch.tensor([*bits, *special], dtype=torch.int32).view(torch.float32)

    @classmethod
    def sizes(cls, case: Case) -> dict[str, int]:
        """The n of the case."""
        return {"n": len(cls.numbers())}

    def inputs(self) -> dict[str, Tensor]:
        """The numbers."""
        return {"x": self.numbers()}

    def read(self, scales: Tensor) -> Found:
        """Property -> what the codes say."""
        x, codes = self.numbers(), scales.reshape(-1).view(torch.uint8)
        normal = len(x) - 5
        names = ue8m0.SCALE_POLICIES if self.case["from"] == "scale" else ue8m0.AMAX_POLICIES
        matching = [name for name in names if torch.equal(self.expected(name)[:normal], codes[:normal])]
        found = _row("policy", matching, "none of the known")
        special = ("of zero", "of 2^-128", "of infinity", "of NaN", "of -1.5")
        return found | {f"code {name}": str(code) for name, code in zip(special, codes[normal:].tolist(), strict=True)}

    def expected(self, policy: str) -> Tensor:
        """The codes under a policy."""
        source = self.case["from"]
        if source == "scale":
            return ue8m0.encode(self.numbers(), policy)
        return ue8m0.from_amax(self.numbers(), AMAX_ELEMENTS[source], policy)
