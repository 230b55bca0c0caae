"""In which way a case fails: what tells one failure from another, and what shrinking keeps. Torch is not imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reports.record import Record


@dataclass(frozen=True)
class Cause:
    """In which way a case fails; what shrinking keeps.

    kind: what a message tells beyond the verdict: ``form`` (missing, shape, dtype), ``unwritten`` (depends on the
    buffer), ``inputs`` (wrote them), for a call the exception or signal; empty for values outside the admissible set.
    stage: the largest source of the worst element's radius, empty without one. ledger_id: of the known failure.
    """

    part: str
    verdict: str
    kind: str = ""
    stage: str = ""
    ledger_id: str = ""

    @property
    def comes_and_goes(self) -> bool:
        """Whether a case that fails so may pass the next time."""
        return self.verdict == "flaky" or self.kind == "unwritten"

    @property
    def text(self) -> str:
        """Part, verdict and what else there is in a few words."""
        words = [self.part, self.verdict, self.kind, f"stage {self.stage}" if self.stage else ""]
        return " ".join(filter(None, words))


def cause_of(records: Sequence[Record]) -> Cause | None:
    """How a case fails: of its first failing record; None if it does not."""
    record = failing(records)
    return None if record is None else cause_of_record(record)


def failing(records: Sequence[Record]) -> Record | None:
    """The first failing record, one that no ledger entry explains if there is any."""
    found = [record for record in records if record.failing]
    return next((record for record in found if not record.ledger_id), found[0] if found else None)


def cause_of_record(record: Record) -> Cause:
    """How a failing record fails."""
    stage = max(record.stage_radii, key=lambda name: record.stage_radii[name], default="")
    if stage and not record.stage_radii[stage] > 0:
        stage = ""
    return Cause(record.part, record.verdict, _kind(record), stage, record.ledger_id)


_FORM = re.compile(r"(call \d+ of the case: )?(the part is missing|shape \[|dtype |no such part)")
_EXCEPTION = re.compile(r"(?:reproduced alone: |call \d+ of the case: )*([A-Za-z_][A-Za-z0-9_.]*)")


def _kind(record: Record) -> str:
    message = record.message
    if record.part != "call":
        if message.startswith("depends on the output buffer"):
            return "unwritten"
        return "form" if _FORM.match(message) else ""
    if message == "wrote its inputs":
        return "inputs"
    match = _EXCEPTION.match(message)
    return match[1] if match and record.verdict in ("error", "crash") else ""
