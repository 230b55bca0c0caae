"""The command ``compare``: two sides on one plan, and whether the head may be merged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from conformance import discover, journal, planning, run_settings, sides
from conformance.discover import UsageError
from conformance.engine import Engine, Limits
from conformance.journal import Journal, OutDirectory
from conformance.ledger import Ledger
from conformance.messages import Description
from conformance.oracles import HarnessError, Oracles
from conformance.progress import progress_on
from conformance.run_description import concluded, describe_run
from conformance.run_settings import FAILED, OK
from conformance.sides import Finished, Live, Side
from conformance.target import Target
from conformance.targets import Fleet, Survey
from fuzz import plan as plans
from fuzz.case import Case, CaseError
from fuzz.extent import LARGE, extent
from reports import comparison, comparison_pages, files
from reports.comparison import Comparison, ComparisonError

COMPARED = 40
"""Cases of a drawn plan that each backend claims of each operation x format, if so many can be had."""
FAIL_ON = ("regression", "drift", "never")
GATED = {"flashinfer-python": "flashinfer", "sglang": "sglang", "triton": "triton"}
"""Distribution -> the library whose architecture gates can be asked."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for. base, head: see `sides.parse`. gates: ask libraries for their gates too."""

    base: str
    head: str
    options: sides.Options = field(default_factory=sides.Options)
    operations: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    cases: int | None = None
    texts: tuple[str, ...] = ()
    plan: Path | None = None
    seed: int = 0
    out: Path = Path("out/compare")
    memory_limit: int | None = None
    gates: bool = True
    fail_on: str = "regression"
    limits: Limits = field(default_factory=Limits)
    command: str = ""


@dataclass(frozen=True)
class _Opened:
    side: Live
    out: OutDirectory
    fleet: Fleet
    survey: Survey

    @property
    def descriptions(self) -> list[Description]:
        return [item.description for item in self.survey.found]


def compare(settings: Settings, ledger: Ledger, console: Console) -> int:
    """Compare and return the exit code: 0, or 1 as `Settings.fail_on` says. Raises `UsageError` or `HarnessError`."""
    if settings.fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on {settings.fail_on!r} is none of {', '.join(FAIL_ON)}")
    asked = set(planning.groups(settings.operations, settings.formats))
    both = sides.both(settings.base, settings.head, settings.options)
    finished = _answered(both, settings, ledger, asked, console)
    try:
        found = comparison.compare(_side(finished[0], asked), _side(finished[1], asked), _gates(both, settings))
    except ComparisonError as error:
        raise UsageError(str(error)) from None
    if not found.compared:
        raise UsageError(f"nothing to compare: neither {found.base} nor {found.head} answers a case")
    paths = _write(settings.out, found)
    for line in (*comparison_pages.headline(found), *map(str, paths)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    bad = {"regression": ("regressed",), "drift": ("regressed", "drift"), "never": ()}[settings.fail_on]
    return FAILED if found.verdict in bad else OK


def _side(side: Finished, asked: set[tuple[str, str]]) -> comparison.Side:
    records = [record for record in side.records if (record.operation, record.variant) in asked]
    backends = [
        {**entry, "claims": [item for item in entry["claims"] if (item["operation"], item["variant"]) in asked]}
        for entry in side.run.get("backends", ())
    ]
    return comparison.Side(label=side.label, records=records, run={**side.run, "backends": backends})


def _answered(
    both: Sequence[Side], settings: Settings, ledger: Ledger, asked: set[tuple[str, str]], console: Console
) -> list[Finished]:
    """Both sides with their answers; those that are not finished are run, one after the other, on one plan."""
    given = [*planning.parse(settings.texts), *(planning.read(settings.plan) if settings.plan else [])]
    done = [_replayable(side) for side in both if isinstance(side, Finished)]
    for side in both:
        if isinstance(side, Live) and side.alone is None:  # before anything of the other side runs
            discover.check_names(side.backends, discover.sources(side.plugins))
    with ExitStack() as stack:
        opened: list[_Opened | Finished] = []
        for side, name in zip(both, ("base", "head"), strict=True):
            opened.append(side if isinstance(side, Finished) else _open(side, name, settings, stack))
        live = [item for item in opened if isinstance(item, _Opened)]
        if not live:
            return [item for item in opened if isinstance(item, Finished)]
        plan = given or (done[0] if done else _drawn(live, settings, ledger, asked))
        plan = [case for case in dict.fromkeys(plan) if (case.operation, case.variant) in asked]
        if not plan:
            raise UsageError("no case of the plan is of the operations and formats asked for")
        oracles = Oracles(live[0].fleet.oracle, settings.limits.jobs, settings.limits.judge_deadline)
        stack.callback(oracles.close)
        pace = min(about.pace for item in live for about in item.descriptions) if _single(live) else None
        return [
            item if isinstance(item, Finished) else _run(item, plan, pace, oracles, settings, ledger, console)
            for item in opened
        ]


def _open(side: Live, name: str, settings: Settings, stack: ExitStack) -> _Opened:
    out = OutDirectory(settings.out / name)
    stack.callback(out.close)
    # One oracle pool serves both sides; it is the base's, where that is run.
    judges = name == "base" or (Path(settings.base) / journal.RUN).exists()
    fleet = side.fleet(out.path / journal.LOGS, settings.memory_limit, judges=judges)
    stack.callback(fleet.close)
    survey = fleet.survey(side.backends, side.devices, settings.limits.jobs)
    if not survey.found:
        reasons = [f"{item.backend}: {item.reason}" for item in survey.absent]
        raise UsageError(f"{side.label}: no backend runs: {reasons[0] if reasons else 'there is none'}")
    return _Opened(side, out, fleet, survey)


def _single(live: Sequence[_Opened]) -> bool:
    return all(len(item.descriptions) == 1 for item in live)


def _replayable(side: Finished) -> list[Case]:
    """The cases that a finished run has executed. Raises `UsageError` where this version does not know one."""
    texts = dict.fromkeys(record.case for record in side.records if record.verdict != "unsupported")
    try:
        return [Case.parse(text) for text in texts]
    except CaseError as error:
        raise UsageError(f"{side.label}: {error}") from None


def _drawn(live: Sequence[_Opened], settings: Settings, ledger: Ledger, asked: set[tuple[str, str]]) -> list[Case]:
    """The ledger's witnesses for the backends at hand, then a plan of what both sides claim."""
    claimed = [
        {(item.claim["operation"], item.claim["variant"]) for about in opened.descriptions for item in about.claims}
        for opened in live
    ]
    common = [group for group in planning.groups((), ()) if group in asked and all(group in side for side in claimed)]
    if not common:
        raise UsageError(f"{settings.base} and {settings.head} claim no operation and format in common")
    descriptions = [about for opened in live for about in opened.descriptions]
    known = [case for about in descriptions for case in ledger.narrowed(about, common).witnesses()]
    large = all(about.device != "cpu" for about in descriptions)  # else one side has no memory, or no time, for them
    witnesses = [case for case in dict.fromkeys(known) if large or extent(case) <= LARGE]
    # The words of a case are bent to what a narrow side claims, so that both sides answer enough of each format.
    least = COMPARED if settings.cases is None else min(COMPARED, settings.cases)
    drawn = planning.draw(common, descriptions, settings.seed, settings.cases, least)
    return [*(case for case in witnesses if (case.operation, case.variant) in common), *drawn]


def _run(
    opened: _Opened,
    plan: Sequence[Case],
    pace: float | None,
    oracles: Oracles,
    settings: Settings,
    ledger: Ledger,
    console: Console,
) -> Finished:
    """Run one side; its journal is left in its directory as that of any run. Raises `HarnessError`."""
    out, limits = opened.out, settings.limits
    groups = list(dict.fromkeys((case.operation, case.variant) for case in plan))
    targets = []
    for item in opened.survey.found:
        about = item.description if pace is None else replace(item.description, pace=pace)
        # The witnesses are in the plan of both sides already; the ledger only names what it knows.
        known = _NoWitnesses(ledger.narrowed(item.description, groups).entries)
        targets.append(Target(description=about, start=item.start, ledger=known))
    alone = opened.side.alone
    plugins = opened.side.plugins if alone is None else (alone.location,)
    own = run_settings.Settings(seed=settings.seed, limits=limits, command=settings.command, plugins=plugins)
    description = describe_run(own, plan, targets, opened.survey)
    out.clear(description)
    plans.write_plan(out.path / journal.PLAN, plan)
    console.print(f"running {opened.side.label}: {len(plan)} cases", markup=False, highlight=False, soft_wrap=True)
    book = Journal(out.path)
    try:
        engine = Engine(description["run"], targets, oracles, book, limits, progress_on(console))
        result = engine.run(plan).sure()
    finally:
        book.close()
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    if not result.complete:
        raise HarnessError(f"{opened.side.label}: stopped after {result.settled} of {result.planned} cases")
    description = concluded(description, (), book.records, result)
    journal.write_run(out.path, description)
    return Finished(label=opened.side.label, records=tuple(book.records), run=description)


class _NoWitnesses(Ledger):
    """A ledger that explains failures and asks for no case of its own."""

    def witnesses(self) -> list[Case]:
        """None."""
        return []


def _gates(both: Sequence[Side], settings: Settings) -> list[str]:
    """One line for each gate that two releases of a library answer differently."""
    if not settings.gates or not all(isinstance(side, Live) and side.python for side in both):
        return []
    names = {GATED.get(side.package) for side in both if isinstance(side, Live)}
    library = names.pop() if len(names) == 1 else None
    if library is None:
        return []
    from conformance.gating.observed import observe

    said: list[dict[tuple[str, str, int], str]] = []
    for side in both:
        assert isinstance(side, Live)
        part = observe(library, python=side.python or "")
        if not part.observations:
            return [f"{side.label}: not observed: {gap.reason}" for gap in part.gaps[:1]]
        said.append({(item.subject, item.variant, item.sm): item.answer for item in part.observations})
    where: dict[tuple[str, str, str, str], list[int]] = {}
    for subject, variant, sm in sorted(said[0].keys() | said[1].keys()):
        one, other = (answers.get((subject, variant, sm), "absent") for answers in said)
        if one != other and "unknown" not in (one, other):  # a gate that cannot tell here differs from none
            where.setdefault((subject, variant, one, other), []).append(sm)
    return [
        f"{library} {subject} {variant} on SM{', SM'.join(map(str, sms))}: {one} → {other}"
        for (subject, variant, one, other), sms in where.items()
    ]


def _write(out: Path, found: Comparison) -> list[Path]:
    page = comparison_pages.markdown(found)
    plain: dict[str, Any] = comparison_pages.data(found)
    texts = {
        "compare.md": page,
        "compare.html": comparison_pages.page(found),
        "compare.json": json.dumps(plain, indent=2, sort_keys=True) + "\n",
    }
    try:
        paths = [files.replace_text(out / name, text) for name, text in texts.items()]
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            files.append_text(Path(summary), page)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror or error}") from None
    return paths
