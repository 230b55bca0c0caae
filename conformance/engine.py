"""The engine: runs every target over its share of a plan, judges the answers and journals the records.

One thread drives each worker; answers are judged by a pool of oracle workers. What is recorded depends neither on the
number of jobs nor on the order of the plan; with several workers for a backend, neither do the cases it is called on.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import Any, Protocol

from conformance import selection_file, verdicts
from conformance.journal import Key
from conformance.ledger import Ledger
from conformance.messages import CallReply, Claimed, Description, JudgeReply, Wire
from conformance.process import WorkerFailed
from conformance.progress import Progress
from conformance.verdicts import Replies, Subject
from fuzz.case import Case
from fuzz.plan import first, pace
from references.backend import Claim
from reports.record import Record

SWEPT_SHARE = 0.25
"""Share of a backend's cases that is run again under each of its call options."""
MAX_BEYOND = 24
"""Calls beyond the claims of one target on one operation x variant."""


Dared = Mapping[Case, Claimed]


class HarnessError(Exception):
    """The harness itself failed, so that no verdict can be given; the message is one line."""


class BackendWorker(Protocol):
    """The part of ``process.Worker`` that calls a backend."""

    def call(self, case: str, backend: str, options: Mapping[str, str], deadline: float) -> CallReply:
        """Call a backend on a case's inputs; a failure of any kind is a reply."""

    def close(self) -> None:
        """End the process."""


class OracleWorker(Protocol):
    """The part of ``process.Worker`` that judges."""

    def judge(self, case: str, recipe: Mapping[str, Any], outputs: Sequence[Wire], deadline: float) -> JudgeReply:
        """Judge the outputs of a call."""

    def close(self) -> None:
        """End the process."""


class Book(Protocol):
    """The part of ``journal.Journal`` that the engine writes to, from several threads."""

    def launching(self, key: Key) -> None:
        """A worker is about to run this case."""

    def write(self, records: Sequence[Record]) -> None:
        """The records of one case."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A backend on a device.

    start: a worker, new unless ``before`` says how many cases it has run. options: call options, which are part of a
    record's identity. swept: a target of ``conformance.sweeps``, run on some of the cases whose claim lists its option.
    ledger: the entries that apply. most: claimed cases of each operation x variant, all if None.
    """

    description: Description
    start: Callable[[], BackendWorker]
    before: Callable[[], int] = lambda: 0
    options: Mapping[str, str] = field(default_factory=dict)
    swept: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    most: int | None = None

    @cached_property
    def _claims(self) -> dict[tuple[str, str], list[tuple[Claim, Claimed]]]:
        claims: dict[tuple[str, str], list[tuple[Claim, Claimed]]] = {}
        for claimed in self.description.claims:
            claim = Claim.from_json(claimed.claim)
            claims.setdefault((claim.operation, claim.variant), []).append((claim, claimed))
        return claims

    @property
    def groups(self) -> dict[tuple[str, str], list[Claim]]:
        """(operation, variant) -> the claims on it."""
        return {group: [claim for claim, _ in claims] for group, claims in self._claims.items()}

    @property
    def options_text(self) -> str:
        """The options as sorted ``key=value`` words."""
        return " ".join(f"{key}={value}" for key, value in sorted(self.options.items()))

    def claimed(self, case: Case) -> Claimed | str:
        """The first claim that covers a case, or the reason why none does."""
        reasons = []
        for claim, claimed in self._claims.get((case.operation, case.variant), []):
            reason = claim.refusal(case)
            if reason is None:
                return claimed
            reasons.append(reason)
        return "; ".join(dict.fromkeys(reasons)) or f"no claim for {case.operation} {case.variant}"

    def covers(self, case: Case) -> bool:
        """Whether some claim covers a case."""
        return not isinstance(self.claimed(case), str)

    def beyond(self, case: Case) -> Claimed | None:
        """The first claim that a case oversteps in nothing but limits that the library promises to enforce."""
        claims = self._claims.get((case.operation, case.variant), [])
        return next((claimed for claim, claimed in claims if claim.dares(case)), None)

    def left_out(self, plan: Sequence[Case], share: Sequence[Case]) -> int:
        """How many claimed cases of the plan the share lacks."""
        return sum(self.covers(case) for case in set(plan).difference(share))

    def dared(self, share: Sequence[Case]) -> Dared:
        """The cases beyond the claims that are called all the same: the first `MAX_BEYOND` of each group."""
        dared: dict[Case, Claimed] = {}
        counted: Counter[tuple[str, str]] = Counter()
        for case in share:
            group = (case.operation, case.variant)
            if group in self._claims and counted[group] < MAX_BEYOND and not self.covers(case):
                claimed = self.beyond(case)
                if claimed is not None:
                    dared[case] = claimed
                    counted[group] += 1
        return dared

    def _offers(self, case: Case) -> bool:
        """Whether the claim that covers a case lists this target's options."""
        claimed = self.claimed(case)
        listed = {} if isinstance(claimed, str) else claimed.claim.get("options", {})
        return not isinstance(claimed, str) and all(word in listed.get(key, ()) for key, word in self.options.items())

    def key(self, case: Case) -> Key:
        """What identifies the case's records on this target."""
        return (case.text, self.description.backend, self.description.device, self.options_text)

    def share(self, plan: Sequence[Case]) -> list[Case]:
        """The ledger's witnesses, then the plan without claimed cases beyond ``most`` or the pace of a slow backend.

        Of the claimed cases in each group (operation x variant) the first are kept, at least one. Under ``most``, of
        those beyond the claims one of each group is left to say why, and those that are called all the same.
        """
        if self.swept:
            offered = first([case for case in plan if self._offers(case)], self.most)
            return list(dict.fromkeys(pace(offered, SWEPT_SHARE * self.description.pace)))
        claimed = [case for case in plan if self.covers(case)]
        left_out = set(claimed).difference(pace(first(claimed, self.most), self.description.pace))
        if self.most is not None:
            unclaimed = [case for case in plan if not self.covers(case)]
            left_out |= set(unclaimed).difference(self.dared(unclaimed), first(unclaimed, 1))
        cases = [*self.ledger.witnesses(), *(case for case in plan if case not in left_out)]
        return list(dict.fromkeys(cases))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """jobs: workers that run at a time. workers: those among which each backend's cases on a device are divided.

    deadline, judge_deadline: seconds for one call. budget: seconds for the run.
    """

    jobs: int = 1
    workers: int = 1
    deadline: float = 30.0
    judge_deadline: float = 600.0
    budget: float | None = None
    fail_fast: bool = False


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What came of a run beside its records.

    planned, settled: (case, target) pairs, those resumed or unsupported included.
    stopped: why the run ended early (``budget``, ``fail-fast``, ``interrupted``), empty if it did not.
    left_out: (backend, device) -> cases beyond the pace that it asks for.
    """

    planned: int
    settled: int
    stopped: str
    left_out: dict[tuple[str, str], int]

    @property
    def complete(self) -> bool:
        """Whether every pair was settled."""
        return self.settled == self.planned


class Oracles:
    """A pool of oracle workers, with the judgements of identical answers kept for the run."""

    def __init__(self, start: Callable[[], OracleWorker], count: int, deadline: float) -> None:
        self._start, self._deadline = start, deadline
        self._idle: SimpleQueue[OracleWorker | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(None)
        self._count = count
        self._known: dict[bytes, JudgeReply] = {}

    def judge(self, case: str, recipe: Mapping[str, Any], outputs: Sequence[Wire]) -> JudgeReply:
        """Judge outputs with the next idle worker; a worker that fails is replaced once. Raises `HarnessError`."""
        key = _fingerprint(case, recipe, outputs)
        if key in self._known:
            return self._known[key]
        worker = self._idle.get()
        try:
            for last in (False, True):
                try:
                    worker = worker or self._start()
                    reply = worker.judge(case, recipe, outputs, self._deadline)
                    break
                except Exception as error:
                    if worker is not None:
                        worker.close()
                        worker = None
                    if last:
                        raise HarnessError(f"the oracle failed on '{case}': {_one_line(error)}") from error
        finally:
            self._idle.put(worker)
        self._known[key] = reply
        return reply

    def close(self) -> None:
        """End the idle workers; all of them, once nothing is being judged."""
        for _ in range(self._count):
            worker = self._idle.get()
            if worker is not None:
                worker.close()


def _fingerprint(case: str, recipe: Mapping[str, Any], outputs: Sequence[Wire]) -> bytes:
    digest = hashlib.sha256(case.encode())
    choices = {key: value for key, value in recipe.items() if key != "source"}
    digest.update(json.dumps(choices, sort_keys=True).encode())
    for wire in outputs:
        digest.update(f"\n{wire.name} {wire.dtype} {wire.shape}\n".encode())
        digest.update(wire.data)
    return digest.digest()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Engine:
    """One run. Make it, call `run` once; the records are in the journal."""

    def __init__(
        self, run_id: str, targets: Sequence[Target], oracles: Oracles, journal: Book, limits: Limits, bar: Progress
    ) -> None:
        self.run_id, self._targets, self._oracles, self.journal = run_id, targets, oracles, journal
        self.limits, self._progress = limits, bar
        self.slots = BoundedSemaphore(limits.jobs)
        self._backlog = BoundedSemaphore(4 * limits.jobs)  # answers that wait for the judge hold their outputs
        self._judges = ThreadPoolExecutor(limits.jobs, thread_name_prefix="judge")
        self._mutex = Lock()
        self._stop = Event()
        self._stopped = ""
        self._failure: BaseException | None = None
        self._settled = 0
        self.selections: Path | None = None
        """Where the answers of routers are kept, if anywhere."""

    def run(self, plan: Sequence[Case], done: frozenset[Key] = frozenset()) -> RunResult:
        """Execute the plan on every target. done: what a resumed run has already settled. Raises `HarnessError`."""
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
            if isinstance(self._failure, HarnessError):
                raise self._failure
            if isinstance(self._failure, WorkerFailed):
                raise HarnessError(str(self._failure)) from self._failure
            raise HarnessError(f"the engine failed: {_one_line(self._failure)}") from self._failure
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
        )

    def _drivers(self, shares: Sequence[Sequence[Case]], done: frozenset[Key]) -> list[_Driver]:
        """``Limits.workers`` for each backend on a device, each with every so manieth of its targets' cases."""
        work: dict[tuple[str, str], list[tuple[Target, Sequence[Case], Dared]]] = {}
        for target, share in zip(self._targets, shares, strict=True):
            name = target.description.backend, target.description.device
            work.setdefault(name, []).append((target, share, target.dared(share)))
        drivers = []
        for targets in work.values():
            deaths: Counter[tuple[str, str]] = Counter()
            for turn in range(min(self.limits.workers, max(len(share) for _, share, _ in targets))):
                mine = [(target, share[turn :: self.limits.workers], dared) for target, share, dared in targets]
                drivers.append(_Driver(self, mine, done, deaths))
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

    def _judge(self, target: Target, subject: Subject, claimed: Claimed, calls: _Calls) -> None:
        if self._failure is not None or self.interrupted:
            return
        counted = calls.alone or calls.replies
        judged = [self._oracles.judge(subject.case, claimed.recipe, outputs) for outputs in verdicts.to_judge(counted)]
        problem = verdicts.input_mismatch(counted, judged)
        if problem:
            raise HarnessError(f"{subject.backend} on {subject.device}, '{subject.case}': {problem}")
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


class _Driver:
    """Drives one worker through its part of the shares of a backend's targets on a device, one target after another.

    deaths: of all of the backend's workers on the device.
    """

    def __init__(
        self,
        engine: Engine,
        work: Sequence[tuple[Target, Sequence[Case], Dared]],
        done: frozenset[Key],
        deaths: Counter[tuple[str, str]],
    ) -> None:
        self._engine, self._work, self._done, self._deaths = engine, work, done, deaths
        self._target, _, self._dared = work[0]
        self._worker: BackendWorker | None = None
        self._before = 0

    def drive(self) -> None:
        """Settle one case after the other until the engine stops."""
        try:
            for target, share, dared in self._work:
                self._target, self._dared = target, dared
                for case in share:
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
            with engine.slots:
                if engine.stopping():
                    return
                engine.calling()
                engine.journal.launching(target.key(case))
                calls = self._call(case)
            self._deaths[group] += verdicts.died(calls.replies)
            if not engine.interrupted:
                engine.judge_later(target, subject, claimed, replace(calls, beyond=reason))

    def _call(self, case: Case) -> _Calls:
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
