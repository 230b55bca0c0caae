"""One run from its settings to its exit code: targets, plan, engine, files, and what is said about it."""

from __future__ import annotations

import platform
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from conformance import corpus, failures, journal, planning, sanitizer, sweeps
from conformance.discover import UsageError
from conformance.engine import Engine, Limits, RunResult
from conformance.journal import Journal, OutDirectory
from conformance.ledger import Entry, Ledger
from conformance.messages import Description
from conformance.oracles import HarnessError, Oracles
from conformance.progress import Progress, progress_on
from conformance.target import Target
from conformance.targets import Fleet, Survey
from fuzz import plan as plans
from fuzz.case import Case
from references.backend import Claim
from reports.record import Record, repro_line

OK, FAILED, USAGE, HARNESS, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes: conformant; non-conformant; usage error, nothing executed included; harness failure; Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for; see ``conformance.cli`` for the meaning of each option.

    corpus: a folder of kept cases beside those that ship; no case is replayed if None. shrink: seconds for making
    failures smaller. gates: libraries whose architecture gates are asked first, and are a section of the reports.
    """

    backends: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    cases: int | None = None
    least: int | None = None
    most: int | None = None
    texts: tuple[str, ...] = ()
    plan: Path | None = None
    seed: int = 0
    out: Path = Path("out/conformance")
    plugins: tuple[str, ...] = ()
    memory_limit: int | None = None
    resume: bool = False
    reverse: bool = False
    corpus: Path | None = None
    shrink: float = 0.0
    sweep: str = sweeps.ALL
    gates: tuple[str, ...] = ()
    shapes: str = "drawn"
    judge: str = "cpu"
    keep_selections: bool = False
    limits: Limits = field(default_factory=Limits)
    command: str = ""


def run(settings: Settings, ledger: Ledger, console: Console) -> int:
    """Run and return the exit code. Raises `UsageError`, `JournalError` or `HarnessError`."""
    asked = ask(settings)
    _check_gates(settings)
    out = OutDirectory(settings.out)
    logs = settings.out / journal.LOGS
    fleet = Fleet(settings.plugins, logs, settings.memory_limit, judge_device=settings.judge)
    try:
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
    _check_something_runs(plan, targets, survey)
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


def _check_something_runs(plan: Sequence[Case], targets: Sequence[Target], survey: Survey) -> None:
    reasons = []
    for target in targets:
        for case in (*target.ledger.witnesses(), *plan):
            claimed = target.claimed(case)
            if not isinstance(claimed, str):
                return
            reasons.append(f"{target.description.backend} on {target.description.device}: {claimed}")
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
            journal.write_run(out, {**self._description, "exit_code": HARNESS, "ended": _now()})
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

        self._description = concluded(self._description, self._targets, records, result)
        self._description["failures"] = self._keep(records, result, start_oracle)
        paths = write_all(self._out.path, records, self._description)
        for line in headline(records, self._description):
            self._say(line)
        if result.stopped:
            far = f"after {result.settled} of {result.planned} (case, backend) pairs"
            self._say(f"stopped ({result.stopped}) {far}; go on with --resume")
        for line in failure_lines(records, self._settings.plugins):
            self._say(line)
        for line in kept_lines(self._description["failures"]):
            self._say(line)
        for line in sanitizer.after_crashes(records, self._out.path, self._settings.plugins):
            self._say(line)
        for path in [self._out.path / journal.RECORDS, *paths.values()]:
            self._say(str(path))
        code = int(self._description["exit_code"])
        if not any(record.verdict != "unsupported" for record in records):
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


def concluded(
    description: Mapping[str, Any], targets: Sequence[Target], records: Sequence[Record], result: RunResult
) -> dict[str, Any]:
    """The contents of run.json after the run, the exit code included.

    description: as `describe_run` gave it. targets: with the ledger's entries that the run was to prove.
    """
    problems = [*description["problems"], *_problems(targets, records, result)]
    executed = any(record.verdict != "unsupported" for record in records)
    unexplained = any(record.failing and not record.ledger_id for record in records)
    code = FAILED if problems or unexplained else OK if executed else USAGE
    if result.stopped == "interrupted":
        code = INTERRUPTED
    return {
        **description,
        "complete": result.complete,
        "stopped": result.stopped,
        "pairs": {"planned": result.planned, "settled": result.settled},
        "left_out": [{"backend": name, "device": on, "cases": n} for (name, on), n in result.left_out.items()],
        "problems": problems,
        "exit_code": code,
        "ended": _now(),
        "ledger": [{**entry, "witness_verdict": _witness_verdict(entry, records)} for entry in description["ledger"]],
    }


def _problems(targets: Sequence[Target], records: Sequence[Record], result: RunResult) -> list[str]:
    lines: list[str] = []
    for target in targets:
        if target.swept:
            continue
        description = target.description
        mine = [item for item in records if (item.backend, item.device) == (description.backend, description.device)]
        reached = {item.case for item in mine}
        entries = [entry for entry in target.ledger.entries if result.complete or entry.witness in reached]
        lines += Ledger(tuple(entries)).problems(mine)
    return list(dict.fromkeys(lines))


def _witness_verdict(entry: Mapping[str, Any], records: Sequence[Record]) -> str:
    its = [item for item in records if (item.case, item.backend) == (entry["witness"], entry["backend"])]
    return next((item.verdict for item in its if item.failing), its[0].verdict if its else "")


def failure_lines(records: Sequence[Record], plugins: tuple[str, ...]) -> Iterator[str]:
    """One unexplained failure of each cause with its repro line, and how many there are like it."""
    for group in failures.by_cause(records):
        record = group[0]
        yield f"{record.verdict}: {record.backend} on {record.device}: {record.part}: {record.message}"
        line = repro_line(record.case, record.backend, device=record.device, options=record.options, plugins=plugins)
        yield f"    {line}"
        if len(group) > 1:
            yield f"    and {len(group) - 1} more like it of {record.operation} {record.variant}"


def kept_lines(listed: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Where the capsules of failures are, and how small they became."""
    for item in listed:
        if item["capsule"]:
            counts = f"{item['differing']} of {item['elements']} elements differ from the simplest value"
            yield f"kept: {item['backend']}: {item['part']} {item['verdict']}: {item['shrunk']}; {counts}"
            yield f"    {item['repro']}"


def describe_run(settings: Settings, plan: Sequence[Case], targets: Sequence[Target], survey: Survey) -> dict[str, Any]:
    """The contents of run.json before the run: not complete."""
    entries: dict[str, Entry] = {entry.id: entry for target in targets for entry in target.ledger.entries}
    descriptions = [target.description for target in targets if not target.swept]
    libraries: dict[str, set[str]] = {}
    for description in descriptions:
        for name, number in description.libraries.items():
            libraries.setdefault(name, set()).add(number)
    return {
        "tool": journal.TOOL,
        "run": f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}",
        "command": settings.command,
        "seed": settings.seed,
        "plan": described_plan(plan),
        "started": _now(),
        "ended": "",
        "complete": False,
        "exit_code": None,
        "problems": [],
        "plugins": list(settings.plugins),
        "jobs": settings.limits.jobs,
        "workers": settings.limits.workers,
        "judge": settings.judge,
        "deadline": settings.limits.deadline,
        "sweep": settings.sweep,
        "budget": settings.limits.budget,
        "version": _version("blockscale-conformance"),
        "git_commit": git_commit(),
        "hypothesis": _version("hypothesis"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "devices": survey.devices,
        "driver": ", ".join(sorted(libraries.pop("driver", set()))),
        "libraries": {name: ", ".join(sorted(numbers)) for name, numbers in sorted(libraries.items())},
        "backends": [_backend(description) for description in descriptions],
        "not_run": [vars(item) for item in survey.absent],
        "ledger": [{**entry.to_json(), "witness_verdict": ""} for entry in entries.values()],
    }


def described_plan(plan: Sequence[Case]) -> dict[str, Any]:
    """The entry of run.json that tells one plan from another."""
    return {"cases": len(plan), "sha256": planning.digest(plan)}


def _backend(description: Description) -> dict[str, Any]:
    claims = [
        {
            "operation": item.claim["operation"],
            "variant": item.claim["variant"],
            "claim": item.claim_text,
            "recipe": item.recipe_text,
            "source": item.recipe.get("source") or item.claim["source"],
        }
        for item in description.claims
    ]
    return {**vars(description), "claims": claims}


def difference_between(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What keeps a run from being resumed: another plan or another version of anything. None if nothing does."""
    for key in ("plan", "version", "git_commit", "python"):
        if earlier.get(key) != now[key]:
            return f"its {key.replace('_', ' ')} is {_shown(earlier.get(key))}, not {_shown(now[key])}"
    mine, theirs = ({(item["backend"], item["device"]): item for item in run["backends"]} for run in (now, earlier))
    for name in sorted(set(mine) | set(theirs)):
        one, other = mine.get(name), theirs.get(name)
        if one is None or other is None:
            return f"{name[0]} on {name[1]} is only in {'this run' if one else 'the journal'}"
        for key in sorted(set(one) | set(other)):
            if one.get(key) != other.get(key):
                return f"{name[0]} on {name[1]}: its {key} was {_shown(other.get(key))}, not {_shown(one.get(key))}"
    return None


def _shown(value: object) -> str:
    if isinstance(value, Mapping) and "sha256" in value:
        return str(value["sha256"])[:16]
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def git_commit() -> str:
    """The commit of this checkout, with ``+changes`` if the tree differs from it; empty outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        words = ("git", "-C", str(root))
        commit = subprocess.run([*words, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run(
            [*words, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.stdout.strip() + "+changes" * bool(status.stdout.strip())


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


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
