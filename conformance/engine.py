"""The engine: runs every target over its share of a plan, judges the answers and journals the records.

One thread drives each worker; answers are judged by a pool of oracle workers. What is recorded depends neither on the
number of jobs nor on the order of the plan; with several workers for a backend, neither do the cases it is called on.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import Protocol

from conformance import selection_file, verdicts
from conformance.journal import Key
from conformance.messages import CallReply, Claimed, JudgeReply
from conformance.oracles import HarnessError, Oracles, one_line
from conformance.process import WorkerFailed
from conformance.progress import Progress
from conformance.slots import Slots
from conformance.target import BackendWorker, Dared, Target
from conformance.verdicts import Replies, Subject
from fuzz.case import Case
from reports.record import Record


class Book(Protocol):
    """The part of ``journal.Journal`` that the engine writes to, from several threads."""

    def launching(self, key: Key) -> None:
        """A worker is about to run this case."""

    def write(self, records: Sequence[Record]) -> None:
        """The records of one case."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """jobs: workers that run at a time. workers: the most that each backend has on a device, by its share of the calls.

    deadline, judge_deadline: seconds for one call. budget: seconds for the run.
    """

    jobs: int = 1
    workers: int = 1
    deadline: float = 30.0
    judge_deadline: float = 600.0
    budget: float | None = None
    fail_fast: bool = False


AHEAD = 4
"""Workers beside the jobs that run at a time: a backend that has all calls to itself gets four for each."""
MOST_UNJUDGED = 3
"""Calls on which the harness may fail before it takes itself to be broken and the run ends."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What came of a run beside its records.

    planned, settled: (case, target) pairs, those resumed or unsupported included.
    stopped: why the run ended early (``budget``, ``fail-fast``, ``interrupted``), empty if it did not.
    left_out: (backend, device) -> cases beyond the pace that it asks for. unjudged: a line for each call of which
    nothing can be said, since the harness itself failed on it; it is not settled.
    """

    planned: int
    settled: int
    stopped: str
    left_out: dict[tuple[str, str], int]
    unjudged: tuple[str, ...] = ()

    def sure(self) -> RunResult:
        """This result. Raises `HarnessError` if a call is without a judgement."""
        if self.unjudged:
            raise HarnessError(self.unjudged[0])
        return self

    @property
    def complete(self) -> bool:
        """Whether every pair was settled."""
        return self.settled == self.planned


class Engine:
    """One run. Make it, call `run` once; the records are in the journal."""

    def __init__(
        self, run_id: str, targets: Sequence[Target], oracles: Oracles, journal: Book, limits: Limits, bar: Progress
    ) -> None:
        self.run_id, self._targets, self._oracles, self.journal = run_id, targets, oracles, journal
        self.limits, self._progress = limits, bar
        self.slots = Slots(limits.jobs)
        self._backlog = BoundedSemaphore(4 * limits.jobs)  # answers that wait for the judge hold their outputs
        self._judges = ThreadPoolExecutor(limits.jobs, thread_name_prefix="judge")
        self._mutex = Lock()
        self._stop = Event()
        self._stopped = ""
        self._failure: BaseException | None = None
        self._settled = 0
        self._unjudged: list[str] = []
        self.selections: Path | None = None
        """Where the answers of routers are kept, if anywhere."""

    def run(self, plan: Sequence[Case], done: frozenset[Key] = frozenset()) -> RunResult:
        """Execute the plan on every target. done: what a resumed run has already settled.

        Raises `HarnessError` where the harness fails on more than `MOST_UNJUDGED` calls, or beside them.
        """
        shares = [target.share(plan) for target in self._targets]
        planned = sum(map(len, shares))
        todo = [(target, case) for target, share in zip(self._targets, shares, strict=True) for case in share]
        self._progress.start(sum(target.key(case) not in done and target.covers(case) for target, case in todo))
        self._ends = math.inf  # until the first call
        drivers = self._drivers(shares, done)
        threads = [Thread(target=self._guarded, args=(driver.drive,), daemon=True) for driver in drivers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # a plain join would not notice Ctrl-C everywhere
            self._judges.shutdown(wait=True)
        except KeyboardInterrupt:
            self.stop("interrupted")
            for driver in drivers:
                driver.close()
            self._judges.shutdown(wait=True, cancel_futures=True)
            for thread in threads:
                thread.join(5)
        finally:
            self._progress.finish()
        if self._failure is not None:
            if isinstance(self._failure, HarnessError | OSError):  # a full disk is no fault of ours
                raise self._failure
            if isinstance(self._failure, WorkerFailed):
                raise HarnessError(str(self._failure)) from self._failure
            raise HarnessError(f"the engine failed: {one_line(self._failure)}") from self._failure
        left_out = {
            (target.description.backend, target.description.device): target.left_out(plan, share)
            for target, share in zip(self._targets, shares, strict=True)
            if not target.swept
        }
        return RunResult(
            planned=planned,
            settled=self._settled,
            stopped=self._stopped,
            left_out={name: count for name, count in left_out.items() if count},
            unjudged=tuple(self._unjudged),
        )

    def _drivers(self, shares: Sequence[Sequence[Case]], done: frozenset[Key]) -> list[_Driver]:
        """For each backend on a device as many workers as its share of the calls asks for, with one queue."""
        work: dict[tuple[str, str], list[tuple[Target, Sequence[Case], Dared]]] = {}
        for target, share in zip(self._targets, shares, strict=True):
            name = target.description.backend, target.description.device
            work.setdefault(name, []).append((target, share, target.dared(share)))
        sizes = {
            name: sum(
                target.key(case) not in done and (target.covers(case) or case in dared)
                for target, share, dared in targets
                for case in share
            )
            for name, targets in work.items()
        }
        drivers = []
        for name, targets in work.items():
            deaths: Counter[tuple[str, str]] = Counter()
            queue = _Queue((target, dared, case) for target, share, dared in targets for case in share)
            wanted = math.ceil(AHEAD * self.limits.jobs * sizes[name] / max(1, sum(sizes.values())))
            for _ in range(max(1, min(self.limits.workers, wanted, sizes[name]))):  # one settles what is not called
                drivers.append(_Driver(self, queue, done, deaths))
        return drivers

    def stop(self, why: str) -> None:
        """Let nothing new start; the first reason counts."""
        with self._mutex:
            self._stopped = self._stopped or why
        self._stop.set()

    def calling(self) -> None:
        """A backend is about to be called; the budget counts from the first time on."""
        with self._mutex:
            if self.limits.budget is not None and math.isinf(self._ends):
                self._ends = time.monotonic() + self.limits.budget

    def stopping(self) -> bool:
        """Whether nothing new may start."""
        if time.monotonic() > self._ends:
            self.stop("budget")
        return self._stop.is_set()

    @property
    def interrupted(self) -> bool:
        """Whether workers are being ended from outside, so that what they reply means nothing."""
        return self._stopped == "interrupted"

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._mutex:
                if not self.interrupted:  # else a worker that was just starting says that it was closed
                    self._failure = self._failure or error
            self._stop.set()

    def settle(self, target: Target, records: Sequence[Record]) -> None:
        """Journal the records of one case and count it."""
        marked = [target.ledger.marked(record) for record in records]
        self.journal.write(marked)
        with self._mutex:
            self._settled += 1
        if any(record.verdict != "unsupported" for record in marked):
            self._progress.advance(marked)
        if self.limits.fail_fast and any(record.failing and not record.ledger_id for record in marked):
            self.stop("fail-fast")

    def resume(self) -> None:
        """Count a case that an earlier run has settled."""
        with self._mutex:
            self._settled += 1

    def judge_later(self, target: Target, subject: Subject, claimed: Claimed, calls: _Calls) -> None:
        """Have the calls of a case judged and settled by the pool, when it gets to them."""
        self._backlog.acquire()
        future: Future[None] = self._judges.submit(self._guarded, lambda: self._judge(target, subject, claimed, calls))
        future.add_done_callback(lambda _: self._backlog.release())

    def _judged(self, subject: Subject, claimed: Claimed, counted: Replies) -> list[JudgeReply]:
        """The judge's answers to the distinct outputs of a case. Raises `HarnessError`."""
        judged = [self._oracles.judge(subject.case, claimed.recipe, outputs) for outputs in verdicts.to_judge(counted)]
        problem = verdicts.input_mismatch(counted, judged)
        if problem:
            raise HarnessError(f"{subject.backend} on {subject.device}, '{subject.case}': {problem}")
        return judged

    def _judge(self, target: Target, subject: Subject, claimed: Claimed, calls: _Calls) -> None:
        if self._failure is not None or self.interrupted:
            return
        counted = calls.alone or calls.replies
        try:
            judged = self._judged(subject, claimed, counted)
        except HarnessError as error:
            if self._stopped == "interrupted":  # meanwhile: the oracle was ended
                return
            self._unjudged.append(str(error))
            if len(self._unjudged) > MOST_UNJUDGED:
                raise HarnessError(self._unjudged[0]) from error
            return  # one odd case is no reason to say nothing of all the others
        records = verdicts.decide(
            subject,
            calls.replies,
            judged,
            run_to_run=bool(claimed.recipe.get("run_to_run", True)),
            alone=calls.alone,
            before=calls.before,
        )
        if calls.beyond:
            records = verdicts.beyond_claims(records, calls.beyond)
        self.settle(target, records)
        if self.selections is not None and records[0].operation == "routing" and not target.swept:
            marked = [target.ledger.marked(record) for record in records]
            kept = selection_file.recording(marked[0], claimed.recipe, counted[0].outputs, marked)
            selection_file.write(self.selections, kept)


@dataclass(frozen=True)
class _Calls:
    """beyond: why no claim covers the case, empty where one does."""

    replies: Replies
    alone: Replies
    before: int
    beyond: str = ""

    @property
    def out_of_memory(self) -> bool:
        """Whether that is how it ended."""
        return (self.alone or self.replies)[-1].status == "oom"


class _Queue:
    """The calls to make of a backend on a device, one target after another; each is given to one worker."""

    def __init__(self, items: Iterator[tuple[Target, Dared, Case]]) -> None:
        self._items, self._mutex = items, Lock()

    def __iter__(self) -> Iterator[tuple[Target, Dared, Case]]:
        """Until there are none."""
        while True:
            with self._mutex:
                item = next(self._items, None)
            if item is None:
                return
            yield item


class _Driver:
    """Drives one worker through what it gets from the queue of a backend on a device.

    deaths: of all of the backend's workers on the device.
    """

    def __init__(self, engine: Engine, queue: _Queue, done: frozenset[Key], deaths: Counter[tuple[str, str]]) -> None:
        self._engine, self._queue, self._done, self._deaths = engine, queue, done, deaths
        self._target: Target
        self._dared: Dared
        self._worker: BackendWorker | None = None
        self._before = 0

    def drive(self) -> None:
        """Settle one case after the other until the engine stops."""
        try:
            for target, dared, case in self._queue:
                self._target, self._dared = target, dared
                if self._engine.stopping():
                    return
                self._case(case)
        finally:
            self.close()

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _case(self, case: Case) -> None:
        engine, target = self._engine, self._target
        if target.key(case) in self._done:
            engine.resume()
            return
        claimed = target.claimed(case)
        group = (case.operation, case.variant)
        dared = self._dared.get(case) if isinstance(claimed, str) else None
        reason = claimed if isinstance(claimed, str) and dared is not None else ""
        claimed = dared or claimed
        subject = self._subject(case, claimed)
        if isinstance(claimed, str):
            engine.settle(target, [verdicts.unsupported(subject, claimed)])
        elif self._deaths[group] >= verdicts.MAX_DEATHS:
            engine.settle(target, [verdicts.not_run(subject)])
        else:
            with engine.slots.one():
                if engine.stopping():
                    return
                engine.calling()
                engine.journal.launching(target.key(case))
                calls = self._call(case)
            if calls is None:
                return
            self._deaths[group] += verdicts.died(calls.replies)
            if not engine.interrupted:
                engine.judge_later(target, subject, claimed, replace(calls, beyond=reason))

    def _call(self, case: Case) -> _Calls | None:
        """The calls of a case; None where they would have to be made again alone and the run is ending."""
        engine, calls = self._engine, self._attempt(case)
        shared = self._target.description.device != "cpu" and engine.limits.jobs > 1
        if not (shared and calls.out_of_memory):
            return calls
        with engine.slots.alone():  # others may have had what was lacking
            if engine.stopping():
                return None
            self.close()
            self._before = 0
            return replace(calls, alone=self._sequence(case)) if calls.alone else self._attempt(case)

    def _attempt(self, case: Case) -> _Calls:
        before = self._before
        replies = self._sequence(case)
        alone = self._sequence(case) if verdicts.died(replies) and not self._engine.interrupted else ()
        return _Calls(replies, alone, before)

    def _sequence(self, case: Case) -> Replies:
        target, deadline = self._target, self._engine.limits.deadline

        def call(poison: str) -> CallReply:
            if self._worker is None:
                self._worker, self._before = target.start(), target.before()
            options = {**target.options, "poison": poison}
            return self._worker.call(case.text, target.description.backend, options, deadline)

        replies = verdicts.call_sequence(call)
        self._before += 1
        if verdicts.died(replies):
            self.close()
            self._before = 0
        return replies

    def _subject(self, case: Case, claimed: Claimed | str) -> Subject:
        description = self._target.description
        return Subject(
            run=self._engine.run_id,
            case=case.text,
            id=case.id,
            backend=description.backend,
            version=description.version,
            interpreter=description.interpreter,
            device=description.device,
            sm=description.sm,
            options=self._target.options_text,
            recipe="" if isinstance(claimed, str) else claimed.recipe_text,
        )
