"""Mutant: a faulty implementation that re-creates one historical bug, as a pure function of a case and its inputs.

A mutant starts from a correct answer (``fuzz.mutants.correct``) and changes one thing. Where the real fault lies in
memory that is never written, or in a race, the function says so in its answer (`Partial`, `Racing`), so that it stays
pure; where a device would stop, it raises `Trap`.
No mutant knows how it will be searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from references.backend import CaseLike

AREAS = (
    "ue8m0",
    "quant",
    "dequant",
    "layout",
    "routing",
    "gemm",
    "moe",
    "memory",
    "determinism",
    "gating",
    "robustness",
    "probe",
)
"""The areas of the project's list of historical bugs (docs/power.md), and that of probes."""


@dataclass(frozen=True)
class Partial:
    """A part that is not written everywhere.

    values: the part. written: bool of the same shape; elsewhere the output buffer keeps what it held.
    """

    values: Tensor
    written: Tensor


class Trap(Exception):  # noqa: N818 - what a device does, not an error of ours
    """Raised where the real fault makes a device stop: an address outside every buffer, an instruction it lacks."""


@dataclass(frozen=True)
class Racing:
    """A part whose value depends on which of several threads came first: the outcomes of successive calls."""

    outcomes: tuple[Tensor, ...]


Inputs = Mapping[str, Tensor]
Part = Tensor | Partial | Racing
Answer = Callable[[CaseLike, Inputs], Mapping[str, Part]]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One faulty implementation.

    family: the name of the bug's family, the same for reports of one fault in several projects. area: of `AREAS`.
    source: ``owner/repo#number``. description: the fault in one line. operation, variants, where: what it claims to
    support, ``where`` as parameter -> values. answer: the function. choices: fields of the recipe that it declares
    beside the defaults. enforced: parameters of ``where`` whose limits it promises to enforce. frozen: inputs that
    every later call on the same memory finds as they were at the first one, as a replayed graph does that kept a copy.
    """

    family: str
    area: str
    source: str
    description: str
    operation: str
    variants: tuple[str, ...]
    answer: Answer
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    choices: Mapping[str, str | float] = field(default_factory=dict)
    enforced: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Operation, variants and restrictions in one line."""
        words = [f"{key}={'|'.join(values)}" for key, values in self.where.items()]
        return " ".join([self.operation, "|".join(self.variants), *words])
