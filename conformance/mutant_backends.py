"""The mutants of ``fuzz.mutants`` as backends: ``--plugin conformance.mutant_backends``.

No ordinary run offers them. Each is named ``mutant_FAMILY``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fuzz.grammar import GRAMMAR, Choice
from fuzz.mutants import MUTANTS, PROBES
from fuzz.mutants.base import Mutant, Part, Partial, Racing
from references.backend import Claim
from references.recipes import Recipe

Call = Callable[[], Mapping[str, Part]]


class MutantBackend:
    """One mutant behind the protocol of a backend.

    name: ``mutant_`` and the family. mutant: what it runs.
    """

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"mutant_{mutant.family}"
        self.mutant = mutant
        self._calls = 0

    def version(self) -> str:
        """Mutants have none."""
        return "1"

    def claims(self, device: str) -> Iterable[Claim]:
        """What the mutant pretends to support, on the CPU."""
        if device != "cpu":
            return []
        about = self.mutant
        return [
            Claim(
                operation=about.operation,
                variant=variant,
                source=about.source,
                where=_known(about, variant),
                enforced=about.enforced,
            )
            for variant in about.variants
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """The defaults and the mutant's own declarations."""
        choices: dict[str, Any] = dict(self.mutant.choices)
        return Recipe(source=f"fuzz/mutants: {self.mutant.family}", **choices)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The computation, bound to its inputs; frozen ones as they were at the first call on their memory."""
        for name in self.mutant.frozen:
            if not hasattr(inputs[name], "frozen"):
                inputs[name].frozen = inputs[name].clone()  # type: ignore[attr-defined]
        frozen = {name: inputs[name].frozen for name in self.mutant.frozen}  # type: ignore[attr-defined]
        return lambda: self.mutant.answer(case, {**inputs, **frozen})

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run it; what the mutant does not write keeps the contents of the buffer."""
        self._calls += 1
        return {name: self._laid(part, out[name]) for name, part in prepared().items()}

    def _laid(self, part: Part, buffer: Tensor) -> Tensor:
        if isinstance(part, Racing):
            # Every outcome twice, so that of three calls neither the poison nor the number tells which one comes.
            return part.outcomes[self._calls // 2 % len(part.outcomes)]
        if isinstance(part, Partial):
            # Bytes where a mutant leaves out parts of an element.
            target = buffer if part.values.dtype == buffer.dtype else buffer.view(torch.uint8).view(part.values.shape)
            target[part.written] = part.values[part.written]
            return buffer
        return part


def _known(mutant: Mutant, variant: str) -> dict[str, tuple[str, ...]]:
    """The mutant's restrictions, without words that this variant does not have."""
    keys = GRAMMAR[mutant.operation][variant].keys
    found = {}
    for key, values in mutant.where.items():
        domain = keys[key]
        assert isinstance(domain, Choice)
        found[key] = tuple(value for value in values if value in domain.values)
    return found


def backends() -> Iterable[MutantBackend]:
    """Every mutant and every probe."""
    return [MutantBackend(mutant) for mutant in (*MUTANTS, *PROBES)]
