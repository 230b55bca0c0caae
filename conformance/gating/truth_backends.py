"""Truth by way of this project's own backends: a few cases of what each claims on a device, run as in every run."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from conformance import journal, runs
from conformance.discover import UsageError
from conformance.engine import Limits
from conformance.gating.model import Truth
from conformance.gating.truth import from_records
from conformance.journal import JournalError
from conformance.ledger import Ledger
from conformance.oracles import HarnessError
from conformance.run_settings import Settings

CASES = 4
"""Cases for each operation and variant: gates are looked at here, not values."""


def backends_called(device: str, out: Path, ledger: Ledger, subjects: tuple[str, ...], console: Console) -> list[Truth]:
    """Run the backends on a device and join their records. Raises UsageError.

    out: where the run's own files go. subjects: names of backends, all if empty.
    """
    limits = Limits(jobs=len(os.sched_getaffinity(0)), deadline=60.0)
    settings = Settings(
        backends=subjects,
        devices=(device,),
        cases=CASES,
        out=out,
        limits=limits,
        command="python -m conformance gating",
    )
    try:
        runs.run(settings, ledger, console)
    except (HarnessError, JournalError) as error:
        raise UsageError(f"the backends cannot be called: {error}") from None
    return from_records(journal.read_records(out / journal.RECORDS))
