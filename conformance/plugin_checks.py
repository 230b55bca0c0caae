"""Checks: what one item of the pytest suite runs, and what its records amount to. No process is started here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from conformance.journal import Key
from conformance.ledger import Entry, Ledger
from conformance.runs import failure_lines
from conformance.target import Target
from fuzz.case import Case
from reports import text
from reports.record import Record, repro_line

MAX_REASONS = 3
"""Reasons of a skip that are named."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The cases of one operation x variant on one target, the ledger's witnesses first, or the witness of one entry.

    id: such as ``quantize-mxfp8-torch-cpu`` or ``ledger-ID``. entry: None for the cases of a plan.
    """

    id: str
    target: Target
    operation: str
    variant: str
    cases: tuple[Case, ...]
    entry: Entry | None = None

    @property
    def keys(self) -> list[Key]:
        """What identifies the records of the cases."""
        return [self.target.key(case) for case in self.cases]

    @property
    def marks(self) -> tuple[str, str]:
        """The operation, and ``cpu`` or ``gpu``."""
        return self.operation, "cpu" if self.target.description.device == "cpu" else "gpu"

    @property
    def place(self) -> str:
        """The backend, its version and device."""
        about = self.target.description
        return f"{about.backend} {about.version} on {about.device}"


def checks(plan: Sequence[Case], targets: Sequence[Target]) -> list[Check]:
    """The checks of a plan: target after target, its known failures first."""
    groups = dict.fromkeys((case.operation, case.variant) for case in plan)
    entries = Counter(entry.id for target in targets for entry in target.ledger.entries)
    found = []
    for target in targets:
        about = target.description
        for entry in target.ledger.entries:
            witness = Case.parse(entry.witness)
            name = f"ledger-{entry.id}" if entries[entry.id] == 1 else f"ledger-{entry.id}-{about.device}"
            found.append(_check(name, target, witness.operation, witness.variant, [witness], entry))
        share = target.share(plan)
        for operation, variant in groups:
            cases = [case for case in share if (case.operation, case.variant) == (operation, variant)]
            name = f"{operation}-{variant}-{about.backend}-{about.device}"
            found.append(_check(name, target, operation, variant, cases))
    return found


def _check(
    name: str, target: Target, operation: str, variant: str, cases: Sequence[Case], entry: Entry | None = None
) -> Check:
    return Check(id=name, target=target, operation=operation, variant=variant, cases=tuple(cases), entry=entry)


@dataclass(frozen=True)
class Outcome:
    """What a check's records amount to. text: why, its first line a summary; empty for ``passed``."""

    kind: Literal["passed", "failed", "known", "skipped"]
    text: str = ""


def outcome(check: Check, records: Sequence[Record], plugins: tuple[str, ...]) -> Outcome:
    """An unexplained failure counts before a known one, and that before anything that passed.

    records: those of the check, marked by the ledger. plugins: as the repro lines repeat them.
    """
    if check.entry is not None:
        return _of_entry(check, check.entry, records, plugins)
    executed = len({record.case for record in records if record.verdict != "unsupported"})
    bad = _first_failing(record for record in records if not record.ledger_id)
    known = _first_failing(record for record in records if record.ledger_id and record.case not in bad)
    if bad:
        verdicts = text.counts(Counter(record.verdict for record in bad.values()))
        first = f"{len(bad)} of {text.plural(executed, 'case')} of {check.operation} {check.variant} "
        first += f"{'fails' if len(bad) == 1 else 'fail'} unexplained ({verdicts}) in {check.place}"
        if known:
            first += f"; {len(known)} more as known to the ledger"
        return Outcome("failed", "\n".join([first, *failure_lines(records, plugins)]))
    if known:
        ids = Counter(record.ledger_id for record in known.values())
        entries = {entry.id: entry for entry in check.target.ledger.entries}
        said = "; ".join(f"{reason(entries[name])}: {count} of {executed}" for name, count in sorted(ids.items()))
        return Outcome("known", f"{said} cases" if executed != 1 else f"{said} case")
    if not executed:
        reasons = list(dict.fromkeys(record.message for record in records))
        more = f" and {len(reasons) - MAX_REASONS} more reasons" * (len(reasons) > MAX_REASONS)
        return Outcome("skipped", f"not claimed by {check.place}: {'; '.join(reasons[:MAX_REASONS])}{more}")
    return Outcome("passed")


def reason(entry: Entry) -> str:
    """A ledger entry in a line."""
    return f"ledger {entry.id}: {entry.reason}" + (f" ({entry.issue})" if entry.issue else "")


def _of_entry(check: Check, entry: Entry, records: Sequence[Record], plugins: tuple[str, ...]) -> Outcome:
    problems = Ledger((entry,)).problems(records)
    if not problems:
        return Outcome("known", reason(entry))
    about = check.target.description
    line = repro_line(
        entry.witness, about.backend, device=about.device, options=check.target.options_text, plugins=plugins
    )
    return Outcome("failed", "\n".join([*problems, f"    {line}"]))


def _first_failing(records: Iterable[Record]) -> dict[str, Record]:
    """case -> its first failing record."""
    found: dict[str, Record] = {}
    for record in records:
        if record.failing:
            found.setdefault(record.case, record)
    return found
