"""Fuzzing: no fixed plan, but case after case from Hypothesis, which is told the headroom and looks for more of it.

Groups (operation x variant) take turns, ever longer ones up to the examples of a Hypothesis profile (`ci`, `dev`,
`nightly`), until the time is over. Each turn has a seed of its own, derived from the run's, the group and its number.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from threading import Lock

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, settings, target
from hypothesis import seed as seeded
from rich.console import Console

from conformance import corpus, journal, planning
from conformance.discover import UsageError
from conformance.engine import Engine, Limits, RunResult
from conformance.journal import Journal, Key, OutDirectory
from conformance.kept_worker import KeptWorker, Silent
from conformance.ledger import Ledger
from conformance.oracles import Oracles
from conformance.planning import Group
from conformance.progress import Progress
from conformance.run_settings import Settings
from conformance.runs import Run, ask
from conformance.target import Target
from conformance.targets import Fleet
from fuzz.case import Case
from fuzz.strategies import Limits as Sizes
from fuzz.strategies import cases, register_profiles
from reports.record import Record

PROFILES = {"ci": Sizes(2**11), "dev": Sizes(2**13), "nightly": Sizes(2**16)}
"""Hypothesis profile -> how large a case may be."""
FIRST = 8
"""Examples of a group's first turn; each turn doubles them, up to those of the profile."""
BUDGET = 300.0
"""Seconds, unless asked otherwise."""
_TRIES = 8


def fuzz(asked: Settings, profile: str, ledger: Ledger, console: Console) -> int:
    """Fuzz until ``asked.limits.budget`` is over and return the exit code, as ``runs.run`` does; its errors too."""
    if profile not in PROFILES:
        raise UsageError(f"--profile {profile!r} is none of {', '.join(PROFILES)}")
    register_profiles()
    if asked.limits.budget is None:
        asked = replace(asked, limits=replace(asked.limits, budget=BUDGET))
    chosen, _ = ask(asked)
    out = OutDirectory(asked.out)
    fleet = Fleet(asked.plugins, asked.out / journal.LOGS, asked.memory_limit)
    try:
        survey = fleet.survey(asked.backends, asked.devices, asked.limits.jobs)
        targets = [
            Target(description=item.description, start=item.start, ledger=ledger.narrowed(item.description, chosen))
            for item in survey.found
        ]
        groups = [group for group in chosen if any(group in item.groups for item in targets)]
        if not groups:
            reasons = [f"{item.description.backend} claims nothing of what is asked for" for item in targets]
            reasons += [f"{item.backend}: {item.reason}" for item in survey.absent]
            raise UsageError(f"no case to execute: {reasons[0] if reasons else 'there is no backend'}")

        def drive(name: str, oracles: Oracles, book: Journal, progress: Progress) -> RunResult:
            search = _Search(name, targets, oracles, book, asked.limits, progress)
            kept = [] if asked.corpus is None else corpus.replayed(asked.corpus, groups)
            return search.run(groups, asked.seed, profile, kept)

        return Run(asked, [], targets, survey, out, console).execute(fleet.oracle, drive)
    finally:
        fleet.close()
        out.close()


@dataclass
class _Tap:
    """What the engine writes to: marks the records, hands them to the journal and keeps those of one case at hand."""

    book: Journal
    ledgers: dict[tuple[str, str], Ledger]
    latest: list[Record]
    mutex: Lock

    def launching(self, key: Key) -> None:
        self.book.launching(key)

    def write(self, records: Sequence[Record]) -> None:
        called = [record for record in records if record.verdict != "unsupported"]
        marked = [self.ledgers[record.backend, record.device].marked(record) for record in called]
        if marked:
            self.book.write(marked)
        with self.mutex:
            self.latest += marked


class _Search:
    def __init__(
        self,
        name: str,
        targets: Sequence[Target],
        oracles: Oracles,
        book: Journal,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self._name, self._oracles, self._limits, self._progress = name, oracles, limits, progress
        self._targets = list(targets)
        ledgers = {(item.description.backend, item.description.device): item.ledger for item in targets}
        self._tap = _Tap(book, ledgers, [], Lock())
        self._kept = [KeptWorker(item.start) for item in targets]
        self._headrooms: dict[Case, dict[str, float]] = {}
        self._settled = 0
        self._stopped = ""
        self._error: BaseException | None = None

    def run(self, groups: Sequence[Group], seed: int, profile: str, kept: Sequence[corpus.Kept] = ()) -> RunResult:
        """Search until the budget is over, from the ledger's witnesses and kept cases on. Raises `HarnessError`."""
        self._ends = time.monotonic() + (self._limits.budget or math.inf)
        self._progress.start(None)
        try:
            self._witnesses()
            self._replay(kept)
            self._turns(groups, seed, profile)
        except KeyboardInterrupt:
            self._stopped = "interrupted"
        finally:
            self._progress.finish()
            for worker in self._kept:
                worker.end()
        stopped, pairs = self._stopped, self._settled
        # To end with the budget is what was asked for, so that such a run is complete.
        return RunResult(planned=pairs + bool(stopped), settled=pairs, stopped=stopped, left_out={})

    def _turns(self, groups: Sequence[Group], seed: int, profile: str) -> None:
        most = settings.get_profile(profile).max_examples
        for turn in count():
            for group in groups:
                self._turn(group, f"{seed} {group[0]} {group[1]} {turn}", min(most, FIRST << min(turn, 30)), profile)
                if self._over():
                    return

    def _turn(self, group: Group, name: str, examples: int, profile: str) -> None:
        """One burst of examples. The body only records, so that nothing fails or shrinks in the middle."""

        def body(drawn: Case) -> None:
            if self._over():
                return
            case = self._fitting(drawn)
            if case is None:
                reject()
            try:
                headrooms = self._execute(case)
            except BaseException as error:
                self._error = error
                return
            for backend, headroom in headrooms.items():
                target(headroom, label=backend)

        once = settings(
            max_examples=examples,
            derandomize=False,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.target],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            backend="hypothesis",
        )
        derived = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        seeded(derived)(once(given(cases(*group, limits=PROFILES[profile]))(body)))()
        if self._error is not None:
            raise self._error

    def _over(self) -> bool:
        return self._error is not None or bool(self._stopped) or time.monotonic() > self._ends

    def _fitting(self, drawn: Case) -> Case | None:
        """The case, bent to some claim if no target covers it as it is; None where that is impossible."""
        if any(item.covers(drawn) for item in self._targets):
            return drawn
        return next(self._bent(drawn), None)

    def _bent(self, drawn: Case) -> Iterator[Case]:
        claims = [claim for item in self._targets for claim in item.groups.get((drawn.operation, drawn.variant), ())]
        for number in range(min(_TRIES, len(claims))):
            bent = planning.bend(drawn, claims[(drawn.seed + number) % len(claims)], drawn.seed, 0)
            if bent is not None:
                yield bent

    def _witnesses(self) -> None:
        for place, item in enumerate(self._targets):
            witnesses = item.ledger.witnesses()
            if witnesses:
                self._call([place], witnesses)

    def _replay(self, kept: Sequence[corpus.Kept]) -> None:
        for case, devices in kept:
            kinds = [item.description.device.partition(":")[0] for item in self._targets]
            places = [
                place for place, item in enumerate(self._targets) if kinds[place] in devices and item.covers(case)
            ]
            if self._over():
                return
            if places:
                self._call(places, [case])

    def _execute(self, case: Case) -> dict[str, float]:
        """The headroom of each backend that passes the case; of an earlier call, if there was one."""
        if case not in self._headrooms:
            places = [place for place, item in enumerate(self._targets) if item.covers(case)]
            records = self._call(places, [case])
            found: dict[str, float] = {}
            for record in records:
                if record.verdict == "pass" and record.headroom is not None and math.isfinite(record.headroom):
                    found[record.backend] = max(record.headroom, found.get(record.backend, 0.0))
            self._headrooms[case] = found
        return self._headrooms[case]

    def _call(self, places: Sequence[int], plan: Sequence[Case]) -> list[Record]:
        self._tap.latest = []
        alone = [
            replace(
                self._targets[place],
                description=replace(self._targets[place].description, pace=1.0),
                start=self._kept[place].take,
                before=self._kept[place].before,
                ledger=Ledger(),
            )
            for place in places
        ]
        limits = replace(self._limits, budget=None, fail_fast=False)
        result = Engine(self._name, alone, self._oracles, self._tap, limits, Silent()).run(plan).sure()
        records = self._tap.latest
        by_call: dict[Key, list[Record]] = {}
        for record in records:
            by_call.setdefault(journal.key_of(record), []).append(record)
        for mine in by_call.values():
            self._settled += 1
            self._progress.advance(mine)
        if result.stopped == "interrupted":
            raise KeyboardInterrupt
        if self._limits.fail_fast and any(record.failing and not record.ledger_id for record in records):
            self._stopped = "fail-fast"
        return records
