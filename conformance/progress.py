"""Progress of a run: a bar with rate and time left on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from reports.record import Record

INTERVAL = 10.0
"""Seconds between plain lines."""


class Progress(Protocol):
    """What the engine tells of its progress; `advance` is called from several threads."""

    def start(self, total: int | None) -> None:
        """total: cases that targets are to be called on; None where nobody knows."""

    def advance(self, records: Sequence[Record]) -> None:
        """A target's calls on one case are judged, with these records."""

    def finish(self) -> None:
        """Nothing more will come."""


class _Tally:
    """How many calls, and what failed."""

    def __init__(self) -> None:
        self.mutex = Lock()
        self.done, self.began = 0, time.monotonic()
        self.total: int | None = None
        self.failing: Counter[str] = Counter()

    def start(self, total: int | None) -> None:
        self.total, self.began = total, time.monotonic()

    def add(self, records: Sequence[Record]) -> None:
        self.done += 1
        worst = next((record for record in records if record.failing and not record.ledger_id), None)
        known = any(record.failing for record in records)
        self.failing["known"] += worst is None and known
        self.failing["failing"] += worst is not None

    @property
    def rate(self) -> float:
        return self.done / max(time.monotonic() - self.began, 1e-9)

    @property
    def findings(self) -> str:
        return f"{self.failing['failing']} failing, {self.failing['known']} known to fail"


class PlainProgress:
    """A line every `INTERVAL` seconds."""

    def __init__(self, console: Console, interval: float = INTERVAL) -> None:
        self._console, self._interval = console, interval
        self._tally, self._last = _Tally(), time.monotonic()

    def start(self, total: int | None) -> None:
        """See `Progress`."""
        self._tally.start(total)

    def advance(self, records: Sequence[Record]) -> None:
        """See `Progress`."""
        tally = self._tally
        with tally.mutex:
            tally.add(records)
            if time.monotonic() - self._last < self._interval:
                return
            self._last = time.monotonic()
            of = "" if tally.total is None else f"/{tally.total}"
            left = "" if tally.total is None else f", {(tally.total - tally.done) / tally.rate:.0f} s left"
            line = f"{tally.done}{of} calls, {tally.rate:.0f}/s{left}, {tally.findings}"
        self._console.print(line, highlight=False)

    def finish(self) -> None:
        """See `Progress`."""


class BarProgress:
    """A bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._tally = _Tally()
        self._bar = RichProgress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[findings]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def start(self, total: int | None) -> None:
        """See `Progress`."""
        self._tally.start(total)
        self._task = self._bar.add_task("calls", total=total, rate="", findings="")
        self._bar.start()

    def advance(self, records: Sequence[Record]) -> None:
        """See `Progress`."""
        tally = self._tally
        with tally.mutex:
            tally.add(records)
            if self._task is not None:
                rate = f"{tally.rate:.0f}/s"
                self._bar.update(self._task, completed=tally.done, rate=rate, findings=tally.findings)

    def finish(self) -> None:
        """See `Progress`."""
        self._bar.stop()


def progress_on(console: Console) -> Progress:
    """The kind of progress that suits where the output goes."""
    return BarProgress(console) if console.is_terminal else PlainProgress(console)
