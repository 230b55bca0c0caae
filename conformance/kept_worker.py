"""A worker that serves one engine after another, as pytest's checks and the fuzzer need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from conformance.messages import CallReply
from conformance.target import BackendWorker
from conformance.verdicts import DEATHS
from reports.record import Record


class Silent:
    """A progress that is shown elsewhere."""

    def start(self, total: int | None) -> None:
        """See `progress.Progress`."""

    def advance(self, records: Sequence[Record]) -> None:
        """See `progress.Progress`."""

    def finish(self) -> None:
        """See `progress.Progress`."""


class KeptWorker:
    """A worker that outlives the engines that use it, unless it died or has to be killed in the middle of a call.

    start: a new worker.
    """

    def __init__(self, start: Callable[[], BackendWorker]) -> None:
        self._start = start
        self._worker: BackendWorker | None = None
        self._spent = False
        self._seen: set[str] = set()

    def take(self) -> BackendWorker:
        """The worker, started if there is none."""
        if self._worker is None:
            self._worker, self._spent, self._seen = self._start(), False, set()
        return self

    def before(self) -> int:
        """Cases that the worker has run."""
        return len(self._seen)

    def call(self, case: str, backend: str, options: Mapping[str, str], deadline: float) -> CallReply:
        """See `BackendWorker`."""
        assert self._worker is not None
        self._spent = True
        self._seen.add(case)
        reply = self._worker.call(case, backend, options, deadline)
        self._spent = reply.status in DEATHS
        return reply

    def close(self) -> None:
        """An engine lets go: the worker ends only if it is of no further use."""
        if self._spent:
            self.end()

    def end(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
