"""What an operation is: how a case's inputs are made, which outputs it has, and how they are judged.

An operation is a module of ``conformance.operations`` with the members of `Operation`. It imports torch, numpy,
``references`` and ``fuzz`` only, because it also runs in the workers of foreign interpreters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fuzz.case import Case
from references.recipes import Recipe


@dataclass(frozen=True)
class OutputSpec:
    """One output part: its shape, its canonical dtype, and other dtypes whose bits mean the same.

    shape: as a tuple of sizes. dtype: of the poisoned buffer. also: dtypes accepted beside it (``float8_e4m3fn`` for
    ``uint8``), reinterpreted bit for bit by the judge.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    also: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PartVerdict:
    """The judgement of one part of one answer.

    headroom: largest |out - centre| / radius; at most 1 exactly where the part passes, inf without a distance.
    examples: the first elements outside: ``index``, ``actual``, ``admissible`` (text with bits), ``input``.
    error: root mean square of |out - exact|, see `Record.error`. fp32_error, output_sha256, selection: see `Record`.
    classes: classes of input that the elements outside come from (``zero``, ``subnormal``, ``nan``, ``normal``, ...),
        sorted; the message repeats them, so that a ledger entry can be as narrow as its cause.
    """

    part: str
    verdict: str
    headroom: float | None = None
    worst_index: list[int] | None = None
    bit_equal: float | None = None
    error: float | None = None
    fp32_error: float | None = None
    output_sha256: str = ""
    selection: str = ""
    stage_radii: dict[str, float] = field(default_factory=dict)
    message: str = ""
    classes: tuple[str, ...] = ()
    examples: list[dict[str, Any]] = field(default_factory=list)


class Operation(Protocol):
    """The members of an operation's module.

    A module may also have ``settle(case, inputs, parts)``: the parts of an answer with everything that is not judged
    overwritten, so that what a backend leaves there is not compared from call to call. It gets whatever a backend
    returned and changes only what has the right shape.
    """

    NAME: str

    def open_choices(self, variant: str) -> frozenset[str]:
        """The fields of a `Recipe` that a backend may choose for this variant."""

    def inputs(self, case: Case) -> dict[str, Tensor]:
        """The inputs on the CPU, a pure function of the case."""

    def outputs(self, case: Case) -> dict[str, OutputSpec]:
        """The parts of an answer, in the order in which they are judged."""

    def judge(
        self, case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe
    ) -> list[PartVerdict]:
        """One verdict a part, earlier parts conditioning later ones. Outputs have passed `check_outputs`."""
