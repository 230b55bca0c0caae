"""One run from its settings to its exit code: targets, plan, engine, files, and what is said about it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from conformance import corpus, failures, inputs_folder, journal, planning, sanitizer, sweeps
from conformance.discover import UsageError
from conformance.engine import Engine, RunResult
from conformance.journal import Journal, OutDirectory
from conformance.ledger import Ledger
from conformance.messages import Description
from conformance.oracles import HarnessError, Oracles
from conformance.progress import Progress, progress_on
from conformance.run_description import concluded, describe_run, described_plan, difference_between, now
from conformance.run_settings import HARNESS, INTERRUPTED, Settings
from conformance.target import Target
from conformance.targets import Fleet, Survey
from fuzz import plan as plans
from fuzz.case import Case
from references.backend import Claim
from reports.record import Record, repro_line


def run(settings: Settings, ledger: Ledger, console: Console) -> int:
    """Run and return the exit code. Raises `UsageError`, `JournalError` or `HarnessError`."""
    asked = ask(settings)
    _check_gates(settings)
    out = OutDirectory(settings.out)
    logs = settings.out / journal.LOGS
    fleet = Fleet(settings.plugins, logs, settings.memory_limit, judge_device=settings.judge)
    try:
        with inputs_folder.shared():
            plan, targets, survey = prepare(settings, asked, ledger, fleet)
            targets = [*targets, *sweeps.swept_targets(targets, settings.sweep)]
            return Run(settings, plan, targets, survey, out, console).execute(fleet.oracle)
    finally:
        fleet.close()
        out.close()


def _check_gates(settings: Settings) -> None:
    if settings.gates:
        from conformance.gating import command

        command.check_libraries("--gates", settings.gates)


Asked = tuple[list[planning.Group], list[Case]]
"""The groups that are asked for, and the cases that are given; without any, a plan is drawn."""


def ask(settings: Settings) -> Asked:
    """What the settings ask for, before anything is started. Raises `UsageError` and ``CorpusError``."""
    if settings.corpus is not None:
        corpus.read(settings.corpus)
    if settings.resume and not all((settings.out / name).exists() for name in (journal.RUN, journal.RECORDS)):
        raise UsageError(f"--resume: {settings.out} holds no journal")
    chosen = planning.groups(settings.operations, settings.formats)
    given = [*planning.parse(settings.texts), *(planning.read(settings.plan) if settings.plan else [])]
    given = [case for case in given if (case.operation, case.variant) in chosen]
    if (settings.texts or settings.plan) and not given:
        raise UsageError("no case of the plan is of the operations and formats asked for")
    return chosen, given


def prepare(settings: Settings, asked: Asked, ledger: Ledger, fleet: Fleet) -> tuple[list[Case], list[Target], Survey]:
    """The plan, and a target for each of the survey's finds. Raises `UsageError` where nothing would run."""
    chosen, given = asked
    survey = fleet.survey(settings.backends, settings.devices, settings.limits.jobs)
    descriptions = [item.description for item in survey.found]
    plan = list(dict.fromkeys(given)) or planned(settings, chosen, descriptions)
    groups = list(dict.fromkeys((case.operation, case.variant) for case in plan))
    targets = [
        Target(
            description=item.description,
            start=item.start,
            ledger=ledger.narrowed(item.description, groups),
            most=settings.most,
        )
        for item in survey.found
    ]
    drawn = settings.cases if not given else None
    _check_something_runs(
        plan, targets, survey, "" if drawn is None else f"; --least {drawn} adds cases that are claimed"
    )
    return plan, targets, survey


def planned(settings: Settings, chosen: list[planning.Group], descriptions: list[Description]) -> list[Case]:
    """The plan where no cases are given: drawn, of real shapes, or both. Raises `UsageError`."""
    drawn = []
    if settings.shapes != "real":
        drawn = planning.draw(chosen, descriptions, settings.seed, settings.cases, settings.least)
    real = planning.real(chosen, descriptions) if settings.shapes != "drawn" else ()
    return list(dict.fromkeys((*_replayed(settings, chosen, descriptions), *drawn, *real)))


def _replayed(settings: Settings, chosen: list[planning.Group], descriptions: list[Description]) -> list[Case]:
    """The kept cases that some backend claims on a device of their kind."""
    if settings.corpus is None:
        return []
    kinds = {description.device.partition(":")[0] for description in descriptions}
    claims = [Claim.from_json(item.claim) for description in descriptions for item in description.claims]
    return [
        case
        for case, devices in corpus.replayed(settings.corpus, chosen)
        if kinds & set(devices) and any(claim.refusal(case) is None for claim in claims)
    ]


def _check_something_runs(plan: Sequence[Case], targets: Sequence[Target], survey: Survey, hint: str) -> None:
    """Raises `UsageError` where no target claims any case. hint: what would help if there are targets."""
    reasons = []
    for target in targets:
        for case in (*target.ledger.witnesses(), *plan):
            claimed = target.claimed(case)
            if not isinstance(claimed, str):
                return
            reasons.append(f"{target.description.backend} on {target.description.device}: {claimed}{hint}")
    reasons += [f"{item.backend}: {item.reason}" for item in survey.absent]
    raise UsageError(f"no case to execute: {reasons[0] if reasons else 'there is no backend'}")


Drive = Callable[[str, Oracles, Journal, Progress], RunResult]
"""Runs cases of its own choice, given the run's id; what they gave is in the journal afterwards."""


class Run:
    """The files and the words of one run; `execute` runs its plan, another driver may stand in for that."""

    def __init__(
        self,
        settings: Settings,
        plan: list[Case],
        targets: list[Target],
        survey: Survey,
        out: OutDirectory,
        console: Console,
    ) -> None:
        self._settings, self._plan, self._targets, self._survey = settings, plan, targets, survey
        self._out, self._console = out, console
        self._description = describe_run(settings, plan, targets, survey)

    def execute(self, start_oracle: Any, drive: Drive | None = None) -> int:
        """See `run`.

        start_oracle: a worker that judges. drive: what to do in place of the plan.
        """
        settings, out = self._settings, self._out.path
        kept = self._kept() if settings.resume else []
        self._out.clear(self._description, resume=settings.resume)
        plans.write_plan(out / journal.PLAN, self._plan)
        self._say_first(planned=drive is None)
        self._ask_gates()
        book = Journal(out, kept)
        oracles = Oracles(start_oracle, settings.limits.jobs, settings.limits.judge_deadline)
        name, progress = self._description["run"], progress_on(self._console)
        order = self._plan[::-1] if settings.reverse else self._plan
        try:
            with _terminable():
                if drive is None:
                    engine = Engine(name, self._targets, oracles, book, settings.limits, progress)
                    engine.selections = out / journal.SELECTIONS if settings.keep_selections else None
                    result = engine.run(order, frozenset(map(journal.key_of, kept)))
                else:
                    result = drive(name, oracles, book, progress)
                    self._plan = list(dict.fromkeys(Case.parse(record.case) for record in book.records))
                    plans.write_plan(out / journal.PLAN, self._plan)
                    self._description["plan"] = described_plan(self._plan)
        except HarnessError:
            journal.write_run(out, {**self._description, "exit_code": HARNESS, "ended": now()})
            raise
        finally:
            oracles.close()
            book.close()
        return self._finish(book.records, result, start_oracle)

    def _ask_gates(self) -> None:
        """Architecture gates: a section of the reports, and a problem of the run where they disagree."""
        if not self._settings.gates:
            return
        from conformance.gating import command, section

        out = self._out.path / command.FOLDER
        result = command.survey(command.Settings(libraries=self._settings.gates, twins=False), self._console)
        command.write(result, out)
        self._description["sections"] = [section.section(result, "Architecture gates").to_json()]
        for finding in result.disagreements:
            self._say(command.line(finding))
            self._say(f"    {finding.repro}")
        if count := len(result.disagreements):
            what = f"{count} disagreement{'s' * (count > 1)}"
            self._description["problems"] = [f"architecture gates: {what}, see {command.FOLDER}/gating.md"]

    def _kept(self) -> list[Record]:
        out = self._out.path
        earlier = journal.read_run(out)
        difference = difference_between(earlier, self._description)
        if difference:
            raise UsageError(f"--resume: the journal in {out} belongs to another run: {difference}")
        records = journal.read_records(out / journal.RECORDS)
        self._description = {**self._description, "run": earlier["run"], "started": earlier["started"]}
        ledgers = {(item.description.backend, item.description.device): item.ledger for item in self._targets}
        whole = records if earlier["complete"] else journal.whole_cases(records)
        return [ledgers[record.backend, record.device].marked(replace(record, ledger_id="")) for record in whole]

    def _say_first(self, planned: bool) -> None:
        plan = self._description["plan"]
        say = self._say
        what = (
            f"plan of {plan['cases']} cases (SHA-256 {plan['sha256'][:16]})" if planned else "no plan, cases as drawn"
        )
        say(f"seed {self._settings.seed}, {what}")
        for target in self._targets:
            description, option = target.description, f" with {target.options_text}" * target.swept
            count = sum(map(target.covers, target.share(self._plan)))
            work = f"{count} cases to run" if planned else f"{len(target.groups)} operations x variants claimed"
            say(f"{description.backend} {description.version} on {description.device}{option}: {work}")
        for entry in self._description["ledger"]:
            issue = f" ({entry['issue']})" if entry["issue"] else ""
            say(f"known to fail: {entry['id']}: {entry['backend']}: {entry['reason']}{issue}")
        for item in self._survey.absent:
            say(f"does not run: {item.backend}{' on ' * bool(item.device)}{item.device}: {item.reason}")

    def _finish(self, records: list[Record], result: RunResult, start_oracle: Any) -> int:
        from reports.build import write_all
        from reports.summary import headline

        if result.stopped == "interrupted":
            self._say("interrupted: writing the reports")
        self._description = concluded(self._description, self._targets, records, result)
        self._description["failures"] = self._keep(records, result, start_oracle)
        paths = write_all(self._out.path, records, self._description)
        for line in headline(records, self._description):
            self._say(line)
        if result.stopped:
            far = f"after {result.settled} of {result.planned} (case, backend) pairs"
            self._say(f"stopped ({result.stopped}) {far}; go on with --resume")
        lines = list(failure_lines(records, self._settings.plugins))
        for line in (*lines, *([WITHOUT_NOX] if lines and not nox_is_here() else [])):
            self._say(line)
        for line in kept_lines(self._description["failures"]):
            self._say(line)
        for line in sanitizer.after_crashes(records, self._out.path, self._settings.plugins):
            self._say(line)
        for path in [self._out.path / journal.RECORDS, *paths.values()]:
            self._say(str(path))
        code = int(self._description["exit_code"])
        for line in result.unjudged:
            self._say(f"not judged: {line}")
        if code == HARNESS:
            result.sure()
        if code != INTERRUPTED and not any(record.verdict != "unsupported" for record in records):
            raise UsageError("no case was executed")
        return code

    def _keep(self, records: list[Record], result: RunResult, start_oracle: Any) -> list[dict[str, Any]]:
        """The failures by cause, smaller and in capsules where there is time for it; new ones join the corpus."""
        settings = self._settings
        seconds = 0.0 if result.stopped == "interrupted" else settings.shrink
        with _terminable():
            try:
                listed = failures.keep(
                    records,
                    self._targets,
                    start_oracle,
                    self._out.path,
                    plugins=settings.plugins,
                    seconds=seconds,
                    deadline=settings.limits.deadline,
                    say=self._say,
                )
            except KeyboardInterrupt:
                self._say("shrinking was interrupted")
                return []
        if settings.corpus is not None and result.complete:
            corpus.keep(settings.corpus, listed, self._say)
        return listed

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def failure_lines(records: Sequence[Record], plugins: tuple[str, ...]) -> Iterator[str]:
    """One unexplained failure of each cause with its repro line, and how many there are like it."""
    for group in failures.by_cause(records):
        record = group[0]
        yield f"{record.verdict}: {record.backend} on {record.device}: {record.part}: {record.message}"
        line = repro_line(record.case, record.backend, device=record.device, options=record.options, plugins=plugins)
        yield f"    {line}"
        if len(group) > 1:
            yield f"    and {len(group) - 1} more like it of {record.operation} {record.variant}"


WITHOUT_NOX = "    (nox or its noxfile.py is not here: python -m conformance repro takes the same words)"


def nox_is_here() -> bool:
    """Whether the repro lines can be pasted as they are into the shell that this run was started from."""
    return shutil.which("nox") is not None and Path("noxfile.py").is_file()


def kept_lines(listed: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Where the capsules of failures are, and how small they became; why there is none."""
    for item in listed:
        if item["capsule"]:
            counts = f"{item['differing']} of {item['elements']} elements differ from the simplest value"
            yield f"kept: {item['backend']}: {item['part']} {item['verdict']}: {item['shrunk']}; {counts}"
            yield f"    {item['repro']}"
        elif item["note"]:
            yield f"not made smaller: {item['backend']}: {item['part']} {item['verdict']}: {item['note']}"


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM, which a cancelled CI job gets, as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
