"""The pytest process that owns a run: it surveys the backends, draws the plan, and writes records and reports.

Without xdist it executes the checks as well; with it, the xdist workers do, by its blueprint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance import corpus, failures, journal, runs
from conformance.engine import RunResult
from conformance.journal import Journal, Key, OutDirectory
from conformance.ledger import Ledger, load
from conformance.plugin_bench import Bench, Blueprint
from conformance.plugin_checks import Check
from conformance.run_description import concluded, describe_run
from conformance.run_settings import HARNESS, Settings
from conformance.targets import Fleet
from fuzz import plan as plans
from reports.record import Record


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for.

    ledger: None for none. write: whether files go to ``settings.out``. processes: of pytest that execute.
    """

    settings: Settings
    ledger: Path | None
    write: bool
    processes: int


class Controller:
    """Made before pytest collects; `close` ends what it has started.

    Raises `UsageError`, `CaseError`, `LedgerError`, `JournalError` or `HarnessError`.
    """

    def __init__(self, request: Request) -> None:
        settings = request.settings
        asked = runs.ask(settings)
        ledger = load(request.ledger) if request.ledger else Ledger()
        self._settings = settings
        self._out = OutDirectory(settings.out) if request.write else None
        logs = settings.out / journal.LOGS if request.write else None
        self._fleet = Fleet(settings.plugins, logs, settings.memory_limit)
        self._journal: Journal | None = None
        self._bench: Bench | None = None
        try:
            plan, targets, self.survey = runs.prepare(settings, asked, ledger, self._fleet)
            self.description = describe_run(settings, plan, targets, self.survey) | {"jobs": request.processes}
            if self._out:
                self._out.clear(self.description)
                plans.write_plan(self._out.path / journal.PLAN, plan)
                self._journal = Journal(self._out.path)
        except BaseException:
            self.close()
            raise
        self.blueprint = Blueprint(
            run=self.description["run"],
            plan=tuple(plan),
            targets=tuple(targets),
            sources=tuple(item.source for item in self.survey.found),
            plugins=settings.plugins,
            ledger=request.ledger,
            logs=logs,
            limits=settings.limits,
            memory_limit=settings.memory_limit,
        )
        self.checks = self.blueprint.checks()
        self.records: list[Record] = []
        self.failure = ""  # of the harness
        self.stopped = ""  # why pytest ended early
        self._seen: set[Key] = set()
        self.selected: dict[str, Check] = {}

    @property
    def bench(self) -> Bench:
        """The bench of this process; made by the first use, so never under xdist."""
        self._bench = self._bench or Bench(self.blueprint, self._fleet.oracle)
        return self._bench

    def header(self) -> list[str]:
        """What pytest prints before it collects."""
        plan = self.description["plan"]
        said = [
            f"conformance: seed {self._settings.seed}, plan of {plan['cases']} cases (SHA-256 {plan['sha256'][:16]})"
        ]
        for item in self.survey.absent:
            said.append(f"does not run: {item.backend}{' on ' * bool(item.device)}{item.device}: {item.reason}")
        return said

    def hand_over(self) -> str:
        """The blueprint for another process. This one then needs its own workers no more."""
        self._fleet.close()
        return self.blueprint.to_json()

    def select(self, ids: Iterable[str]) -> None:
        """Note which checks are going to run."""
        self.selected |= {name: self.checks[name] for name in ids if name in self.checks}

    def receive(self, records: Sequence[Record]) -> None:
        """Take records; those of a case that is settled already (a witness belongs to two checks) are dropped."""
        fresh = [record for record in records if journal.key_of(record) not in self._seen]
        self._seen |= {journal.key_of(record) for record in fresh}
        self.records += fresh
        if self._journal and fresh:
            self._journal.write(fresh)

    def conclude(self) -> int:
        """Complete the description of the run and give the command line's exit code for it."""
        checks = self.selected.values()
        planned = {key for check in checks for key in check.keys}
        settled = len(planned & self._seen)
        result = RunResult(
            planned=len(planned), settled=settled, stopped=self.stopped, left_out=self._left_out(planned)
        )
        targets = [
            replace(target, ledger=Ledger(tuple(entry for entry in target.ledger.entries if entry.id in proved)))
            for target in self.blueprint.targets
            for proved in [_witnessed(target.description.backend, target.description.device, planned, target.ledger)]
        ]
        self.description = concluded(self.description, targets, self.records, result)
        met = {entry.id for target in targets for entry in target.ledger.entries}
        met |= {record.ledger_id for record in self.records}
        self.description["ledger"] = [entry for entry in self.description["ledger"] if entry["id"] in met]
        if self.failure:
            self.description |= {"exit_code": HARNESS, "stopped": "the harness failed"}
        return int(self.description["exit_code"])

    def _left_out(self, planned: set[Key]) -> dict[tuple[str, str], int]:
        """Cases beyond the pace of a slow backend, in the groups that were selected."""
        left_out = {}
        for target in self.blueprint.targets:
            about = target.description
            groups = {
                (check.operation, check.variant)
                for check in self.selected.values()
                if check.target is target and check.entry is None
            }
            cases = [case for case in self.blueprint.plan if (case.operation, case.variant) in groups]
            left_out[about.backend, about.device] = sum(target.key(case) not in planned for case in cases)
        return {name: count for name, count in left_out.items() if count}

    def keep(self, say: Callable[[str], None]) -> None:
        """List the failures by cause, smaller and in capsules where files are written; after `conclude`.

        This is the one thing for which a process of pytest imports torch. say: gets a line before time is spent.
        """
        if self._out is None or self.failure:
            return
        settings = self._settings
        seconds = settings.shrink
        if self.stopped == "interrupted" or not failures.by_cause(self.records):
            seconds = 0.0  # what is at hand is listed all the same
        plan, fleet = Blueprint.from_json(self.blueprint.to_json())  # of its own: xdist has closed this process's
        try:
            listed = failures.keep(
                self.records,
                plan.targets,
                fleet.oracle,
                self._out.path,
                plugins=settings.plugins,
                seconds=seconds,
                deadline=settings.limits.deadline,
                say=say,
            )
        finally:
            fleet.close()
        if settings.corpus is not None and self.description["complete"]:
            corpus.keep(settings.corpus, listed, say)
        self.description["failures"] = listed

    def write(self) -> list[Path]:
        """Write the reports and return their paths, none without ``--conformance-out``. Raises OSError."""
        if self._out is None:
            return []
        from reports.build import write_all

        return [self._out.path / journal.RECORDS, *write_all(self._out.path, self.records, self.description).values()]

    def summary(self) -> list[str]:
        """What pytest prints at the end."""
        from reports.summary import headline

        return [*headline(self.records, self.description), *runs.kept_lines(self.description.get("failures", ()))]

    def close(self) -> None:
        """End the workers and let others have the directory."""
        if self._bench:
            self._bench.close()
        self._fleet.close()
        if self._journal:
            self._journal.close()
        if self._out:
            self._out.close()
            self._out = None


class Executor:
    """What an xdist worker has: a bench, and nothing to decide.

    blueprint: as the controller's `hand_over` gave it.
    """

    def __init__(self, blueprint: str) -> None:
        plan, self._fleet = Blueprint.from_json(blueprint)
        self.checks = plan.checks()
        self.blueprint = plan
        self.bench = Bench(plan, self._fleet.oracle)

    def close(self) -> None:
        """End the workers."""
        self.bench.close()
        self._fleet.close()


def _witnessed(backend: str, device: str, planned: set[Key], ledger: Ledger) -> set[str]:
    cases = {case for case, *place in planned if place[:2] == [backend, device]}
    return {entry.id for entry in ledger.entries if entry.witness in cases}


def lines_of(records: Iterable[Record]) -> list[str]:
    """Records as they travel in a report of pytest."""
    return [record.to_line() for record in records]


def records_of(lines: Any) -> list[Record]:
    """The inverse of `lines_of`."""
    return [Record.from_line(line) for line in lines]
