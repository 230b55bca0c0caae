"""The command line: ``python -m conformance run | fuzz | repro | probe | gating | backends | power | replay | report``.

Exit codes: 0 conformant; 1 non-conformant; 2 a usage error, nothing executed included; 3 the harness itself failed; 130
interrupted by Ctrl-C or SIGTERM (files are written and marked incomplete). Every bad input is one line on stderr that
starts with ``conformance: ``.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from conformance import ledger as ledgers
from conformance import planning, units
from conformance.discover import UsageError, check_names, sources
from conformance.engine import Limits
from conformance.journal import RECORDS, JournalError, read_records, read_run
from conformance.ledger import Ledger, LedgerError
from conformance.oracles import HarnessError
from conformance.run_settings import HARNESS, INTERRUPTED, USAGE, Settings
from fuzz.case import CaseError
from fuzz.grammar import GRAMMAR

PROGRAM = "python -m conformance"
SEED = 20261130
"""The seed of a plan unless another is given: the same on every machine and day."""
MEMORY_LIMIT = "8GiB"
DEADLINE = "30s"
SHRINK = "60s"
"""For making the failures of a run smaller."""
WIDTH = 160
"""Columns of a table where the output is no terminal."""

_STRAY = re.compile(r"Got unexpected extra arguments?\(?s?\)? \((\S+?)[ )]")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Numerical conformance of block-scaled FP8/FP4 kernels and MoE routing.",
)


def _many(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=f"{text} Repeatable.")


Devices = Annotated[list[str] | None, _many("--device", "NAME", "Use this device only, such as cuda:1.")]
Plugins = Annotated[list[str] | None, _many("--plugin", "FILE|MODULE", "Load further backends.")]
Memory = Annotated[str, typer.Option("--memory-limit", metavar="SIZE", help="Resident memory of a worker.")]
Deadline = Annotated[str, typer.Option(metavar="DURATION", help="Longest time for one call.")]
LedgerFile = Annotated[Path, typer.Option("--ledger", metavar="FILE", help="Known failures.")]
Environments = Annotated[Path, typer.Option(metavar="DIR", help="Where releases are installed.")]
NoDeps = Annotated[bool, typer.Option("--no-deps", help="Install releases without what they ask for.")]
NoLedger = Annotated[bool, typer.Option("--no-ledger", help="Take no failure as known.")]


@app.command()
def run(
    backend: Annotated[list[str] | None, _many("--backend", "NAME", "Run this backend only.")] = None,
    operation: Annotated[list[str] | None, _many("--operation", "NAME", "Run this operation only.")] = None,
    variant: Annotated[list[str] | None, _many("--format", "NAME", "Run this format, policy or layout only.")] = None,
    device: Devices = None,
    cases: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cases for each operation x variant.")] = None,
    least: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Claimed cases for each backend x operation x variant.")
    ] = None,
    most: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Claimed cases of these that a backend is called on at most.")
    ] = None,
    case: Annotated[list[str] | None, _many("--case", "TEXT", "Run this case.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Run the cases of a plan file.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Seed of the plan.")] = SEED,
    budget: Annotated[str | None, typer.Option(metavar="DURATION", help="Stop after this time, such as 60s.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers at a time; all CPUs if absent.")] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Workers for each backend on a device.")] = 1,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("out/conformance"),
    plugin: Plugins = None,
    ledger: LedgerFile = ledgers.DEFAULT,
    no_ledger: NoLedger = False,
    deadline: Deadline = DEADLINE,
    memory_limit: Memory = MEMORY_LIMIT,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    order: Annotated[str, typer.Option(metavar="plan|reversed", help="Order of the cases.")] = "plan",
    keep_selections: Annotated[
        bool, typer.Option("--keep-selections", help="Keep what routers answer, for replay --selections.")
    ] = False,
    shapes: Annotated[str, typer.Option(metavar="drawn|real|all", help="Which sizes the plan's cases have.")] = "drawn",
    judge: Annotated[str, typer.Option(metavar="DEVICE", help="Where the references compute.")] = "cpu",
    sweep: Annotated[
        str, typer.Option(metavar="all|none|KEY=WORD,...", help="Call options to run some cases under again.")
    ] = "all",
    corpus: Annotated[
        str, typer.Option(metavar="DIR|none", help="Kept cases, replayed first; corpus beside --out if absent.")
    ] = "",
    shrink: Annotated[str, typer.Option(metavar="DURATION", help="For making failures smaller; 0s for none.")] = SHRINK,
    gates: Annotated[list[str] | None, _many("--gates", "LIBRARY", "Also ask its architecture gates, first.")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first unexplained failure.")] = False,
) -> int:
    """Run every operation against every backend at hand and write the reports."""
    from conformance import runs

    if order not in ("plan", "reversed"):
        raise UsageError(f"--order {order!r} is neither plan nor reversed")
    if case and plan:
        raise UsageError("--case and --plan exclude each other")
    if shapes not in ("drawn", "real", "all"):
        raise UsageError(f"--shapes {shapes!r} is none of drawn, real, all")
    limits = Limits(
        jobs=jobs or _cpus(),
        workers=workers,
        deadline=_parsed("--deadline", units.seconds, deadline),
        budget=None if budget is None else _parsed("--budget", units.seconds, budget),
        fail_fast=fail_fast,
    )
    settings = Settings(
        backends=tuple(backend or ()),
        operations=tuple(operation or ()),
        formats=tuple(variant or ()),
        devices=tuple(device or ()),
        cases=cases,
        least=least,
        most=most,
        texts=tuple(case or ()),
        plan=plan,
        seed=seed,
        out=out,
        plugins=tuple(plugin or ()),
        memory_limit=_parsed("--memory-limit", units.size, memory_limit),
        resume=resume,
        reverse=order == "reversed",
        keep_selections=keep_selections,
        corpus=None if corpus == "none" else Path(corpus) if corpus else out.parent / "corpus",
        shrink=0.0 if shrink in ("0", "0s") else _parsed("--shrink", units.seconds, shrink),
        sweep=sweep,
        gates=tuple(gates or ()),
        shapes=shapes,
        judge=judge,
        limits=limits,
        command=shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
    )
    return runs.run(settings, Ledger() if no_ledger else ledgers.load(ledger), Console())


@app.command()
def fuzz(
    backend: Annotated[list[str] | None, _many("--backend", "NAME", "Fuzz this backend only.")] = None,
    operation: Annotated[list[str] | None, _many("--operation", "NAME", "Fuzz this operation only.")] = None,
    variant: Annotated[list[str] | None, _many("--format", "NAME", "Fuzz this format, policy or layout only.")] = None,
    device: Devices = None,
    profile: Annotated[str, typer.Option(metavar="ci|dev|nightly", help="Length of a turn, size of a case.")] = "dev",
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, metavar="N", help="New each time if absent.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="DURATION", help="Stop after this time.")] = "5m",
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers at a time; all CPUs if absent.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("out/fuzz"),
    plugin: Plugins = None,
    ledger: LedgerFile = ledgers.DEFAULT,
    no_ledger: NoLedger = False,
    deadline: Deadline = DEADLINE,
    memory_limit: Memory = MEMORY_LIMIT,
    corpus: Annotated[
        str, typer.Option(metavar="DIR|none", help="Kept cases, tried first; corpus beside --out if absent.")
    ] = "",
    shrink: Annotated[str, typer.Option(metavar="DURATION", help="For making failures smaller; 0s for none.")] = SHRINK,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first unexplained failure.")] = False,
) -> int:
    """Search for failures with ever new cases, towards the edge of what is admissible, and write the reports."""
    from conformance import fuzzing

    settings = Settings(
        backends=tuple(backend or ()),
        operations=tuple(operation or ()),
        formats=tuple(variant or ()),
        devices=tuple(device or ()),
        seed=secrets.randbits(32) if seed is None else seed,
        out=out,
        plugins=tuple(plugin or ()),
        memory_limit=_parsed("--memory-limit", units.size, memory_limit),
        corpus=None if corpus == "none" else Path(corpus) if corpus else out.parent / "corpus",
        shrink=0.0 if shrink in ("0", "0s") else _parsed("--shrink", units.seconds, shrink),
        limits=Limits(
            jobs=jobs or _cpus(),
            deadline=_parsed("--deadline", units.seconds, deadline),
            budget=_parsed("--budget", units.seconds, budget),
            fail_fast=fail_fast,
        ),
        command=shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
    )
    return fuzzing.fuzz(settings, profile, Ledger() if no_ledger else ledgers.load(ledger), Console())


@app.command()
def repro(
    subject: Annotated[
        str, typer.Argument(metavar="CASE|ID|CAPSULE|RUN.JSON", help="A case's text in quotes, an id, or a file.")
    ],
    backend: Annotated[str, typer.Option(metavar="NAME", help="The backend to call; a file names its own.")] = "",
    device: Annotated[str, typer.Option(metavar="NAME", help="Such as cuda:0; cpu if nothing says another.")] = "",
    option: Annotated[list[str] | None, _many("--option", "KEY=VALUE", "A call option.")] = None,
    plugin: Plugins = None,
    folder: Annotated[Path, typer.Option("--in", metavar="DIR", help="The run in which an id is looked up.")] = Path(
        "out/conformance"
    ),
    times: Annotated[int, typer.Option(min=1, metavar="N", help="Repeat it in one worker: how often it fails.")] = 1,
    shrink: Annotated[bool, typer.Option("--shrink", help="Make it smaller and write a capsule.")] = False,
    budget: Annotated[str, typer.Option(metavar="DURATION", help="For shrinking.")] = "60s",
    capsule: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a capsule there.")] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a script that needs torch and the library only.")
    ] = None,
    expect_sha256: Annotated[str, typer.Option(metavar="HASH", help="What the inputs must hash to.")] = "",
    bisect: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="GOOD BAD", help="Name the first bad release between two, such as torchao==0.15.0 0.18.0."
        ),
    ] = None,
    environments: Environments = Path("out/environments"),
    no_deps: NoDeps = False,
    deadline: Deadline = DEADLINE,
    memory_limit: Memory = MEMORY_LIMIT,
) -> int:
    """Show one failure again, with the elements that differ; make it smaller, keep it, export it."""
    from conformance import repro as repros

    request = repros.Request(
        subject=subject,
        backend=backend,
        device=device,
        options=repros.parse_options(option or ()),
        plugins=tuple(plugin or ()),
        folder=folder,
        times=times,
        expected=expect_sha256,
        shrink=_parsed("--budget", units.seconds, budget) if shrink else 0.0,
        keep=capsule,
        script=script,
        deadline=_parsed("--deadline", units.seconds, deadline),
        memory_limit=_parsed("--memory-limit", units.size, memory_limit),
    )
    if bisect is not None:
        from conformance import bisecting

        good, bad = bisect
        bounds = bisecting.Request(of=request, good=good, bad=bad, folder=environments, dependencies=not no_deps)
        return bisecting.bisect(bounds, Console())
    return repros.repro(request, ledgers.load(ledgers.DEFAULT), Console())


@app.command()
def probe(
    backend: Annotated[list[str] | None, _many("--backend", "NAME", "Probe this backend only.")] = None,
    operation: Annotated[list[str] | None, _many("--operation", "NAME", "ue8m0, quantize or gemm.")] = None,
    variant: Annotated[list[str] | None, _many("--format", "NAME", "Probe this format or policy only.")] = None,
    device: Devices = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers that start at a time.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where probe.md and probe.csv go.")] = Path("out/probe"),
    plugin: Plugins = None,
    deadline: Deadline = "60s",
    memory_limit: Memory = MEMORY_LIMIT,
) -> int:
    """Measure what backends do where recipes leave a choice, and compare it with what theirs declare."""
    planning.probed(operation or (), variant or ())
    check_names(backend or (), sources(plugin or ()))
    from conformance import fingerprint  # torch comes with it: words are checked before

    settings = fingerprint.Settings(
        backends=tuple(backend or ()),
        operations=tuple(operation or ()),
        formats=tuple(variant or ()),
        devices=tuple(device or ()),
        plugins=tuple(plugin or ()),
        out=out,
        deadline=_parsed("--deadline", units.seconds, deadline),
        memory_limit=_parsed("--memory-limit", units.size, memory_limit),
        jobs=jobs or _cpus(),
    )
    return fingerprint.probe(settings, _wide_console())


@app.command()
def compare(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="A backend, NAME==VERSION, PLUGIN.py@REV, an interpreter, a run.")
    ],
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The same; what is to be merged.")],
    backend: Annotated[list[str] | None, _many("--backend", "NAME", "Compare this backend only.")] = None,
    operation: Annotated[list[str] | None, _many("--operation", "NAME", "Compare this operation only.")] = None,
    variant: Annotated[list[str] | None, _many("--format", "NAME", "Compare this format only.")] = None,
    device: Devices = None,
    cases: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cases for each operation x variant.")] = None,
    case: Annotated[list[str] | None, _many("--case", "TEXT", "Compare on this case.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Compare on the cases of a plan file.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Seed of the plan.")] = SEED,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers at a time; all CPUs if absent.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("out/compare"),
    fail_on: Annotated[
        str, typer.Option(metavar="regression|drift|never", help="What makes exit code 1.")
    ] = "regression",
    environments: Environments = Path("out/environments"),
    no_deps: NoDeps = False,
    no_gates: Annotated[bool, typer.Option("--no-gates", help="Do not compare architecture gates.")] = False,
    plugin: Plugins = None,
    ledger: LedgerFile = ledgers.DEFAULT,
    deadline: Deadline = DEADLINE,
    memory_limit: Memory = MEMORY_LIMIT,
) -> int:
    """Compare two versions, revisions or backends on the same cases, and say whether to merge."""
    from conformance import compare as comparing
    from conformance import sides

    settings = comparing.Settings(
        base=base,
        head=head,
        options=sides.Options(
            backends=tuple(backend or ()),
            devices=tuple(device or ()),
            plugins=tuple(plugin or ()),
            environments=environments,
            dependencies=not no_deps,
        ),
        operations=tuple(operation or ()),
        formats=tuple(variant or ()),
        cases=cases,
        texts=tuple(case or ()),
        plan=plan,
        seed=seed,
        out=out,
        memory_limit=_parsed("--memory-limit", units.size, memory_limit),
        gates=not no_gates,
        fail_on=fail_on,
        limits=Limits(jobs=jobs or _cpus(), deadline=_parsed("--deadline", units.seconds, deadline)),
        command=shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
    )
    return comparing.compare(settings, ledgers.load(ledger), Console())


@app.command()
def gating(
    library: Annotated[list[str] | None, _many("--library", "NAME", "flashinfer, sglang, vllm, torch, ...")] = None,
    subject: Annotated[list[str] | None, _many("--subject", "TEXT", "Part of a runner, function or kernel.")] = None,
    sm: Annotated[list[str] | None, _many("--sm", "NUMBER", "This architecture only, such as 90.")] = None,
    expected: Annotated[Path | None, typer.Option(metavar="FILE", help="Published claims.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("out/gating"),
    strict: Annotated[bool, typer.Option("--strict", help="What cannot be observed counts too.")] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="Also call what is at hand on this GPU.")] = "",
    against: Annotated[
        list[str] | None, _many("--against", "VERSION|PATH", "List changes from this LIBRARY==VERSION or interpreter.")
    ] = None,
) -> int:
    """Compare what libraries say of each GPU architecture with what is published, without a GPU."""
    from conformance.gating import command
    from conformance.gating import expected as claims

    settings = command.Settings(
        libraries=tuple(library or ()),
        subjects=tuple(subject or ()),
        sms=command.parse_sms(sm or ()),
        expected=expected or claims.DEFAULT,
        out=out,
        strict=strict,
        device=device,
        against=tuple(against or ()),
    )
    return command.gating(settings, Console())


@app.command()
def backends(
    device: Devices = None,
    plugin: Plugins = None,
) -> int:
    """List every backend with its version, device, claims and recipes, or why it does not run."""
    from conformance import listing

    listing.show(tuple(device or ()), tuple(plugin or ()), _cpus(), _wide_console())
    return 0


@app.command()
def power(
    area: Annotated[list[str] | None, _many("--area", "NAME", "Mutants of this area only.")] = None,
    family: Annotated[list[str] | None, _many("--family", "NAME", "Mutants of this family only.")] = None,
    seed: Annotated[list[int] | None, _many("--seed", "N", "Seed of a plan; 1, 2 and 3 if absent.")] = None,
    cases: Annotated[int, typer.Option(min=1, metavar="N", help="Cases for each operation x variant.")] = 200,
    budget: Annotated[str, typer.Option(metavar="DURATION", help="For one mutant under one seed.")] = "20s",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where power.md goes.")] = Path("out/power"),
    score: Annotated[Path | None, typer.Option(metavar="FILE", help="The recorded score.")] = None,
    shrink: Annotated[str, typer.Option(metavar="DURATION", help="For making one catch smaller; 0s for none.")] = "5s",
    record: Annotated[bool, typer.Option("--record", help="Record the score instead of comparing with it.")] = False,
    alarms: Annotated[int, typer.Option(min=0, metavar="N", help="Only run N cases of correct implementations.")] = 0,
) -> int:
    """Search for mutants that re-create historical bugs; fail if one escapes that the record says is caught."""
    from conformance import power_words

    power_words.check(area or (), family or ())
    from conformance import power_alarms, power_run, power_score

    if alarms:
        return power_alarms.run(alarms, (seed or [1])[0], out, _wide_console())
    settings = power_run.Settings(
        areas=tuple(area or ()),
        families=tuple(family or ()),
        seeds=tuple(dict.fromkeys(seed or (1, 2, 3))),
        cases=cases,
        budget=_parsed("--budget", units.seconds, budget),
        out=out,
        shrink=0.0 if shrink in ("0", "0s") else _parsed("--shrink", units.seconds, shrink),
        score=score or power_score.DEFAULT,
        record=record,
    )
    return power_run.run(settings, _wide_console())


@app.command()
def replay(
    router: Annotated[
        list[str] | None, _many("--router", "NAME", "Take selections of this backend; all if absent.")
    ] = None,
    backend: Annotated[list[str] | None, _many("--backend", "NAME", "Feed them to this one; all if absent.")] = None,
    method: Annotated[list[str] | None, _many("--method", "NAME", "This routing method only.")] = None,
    variant: Annotated[list[str] | None, _many("--format", "NAME", "Expert layers of this format only.")] = None,
    device: Devices = None,
    cases: Annotated[int, typer.Option(min=1, metavar="N", help="For each routing method.")] = 10,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the plan.")] = SEED,
    selections: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Recorded ones: a run, a folder, a file; no router is called."),
    ] = None,
    experts: Annotated[int, typer.Option(min=0, metavar="N", help="Experts of a bare tensor file.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where replay.md and capsules go.")] = Path("out/replay"),
    plugin: Plugins = None,
    deadline: Deadline = DEADLINE,
    memory_limit: Memory = MEMORY_LIMIT,
) -> int:
    """Feed the selections that routers record to every backend's expert layer: two verdicts, one for each."""
    planning.check("method", method or (), GRAMMAR["routing"])
    planning.check("format", variant or (), GRAMMAR["moe"])
    check_names([*((router or ()) if selections is None else ()), *(backend or ())], sources(plugin or ()))
    from conformance import replay_run

    settings = replay_run.Settings(
        routers=tuple(router or ()),
        backends=tuple(backend or ()),
        methods=tuple(method or ()),
        formats=tuple(variant or ()),
        devices=tuple(device or ()),
        plugins=tuple(plugin or ()),
        cases=cases,
        seed=seed,
        out=out,
        deadline=_parsed("--deadline", units.seconds, deadline),
        memory_limit=_parsed("--memory-limit", units.size, memory_limit),
        selections=selections,
        experts=experts,
    )
    return replay_run.run(settings, ledgers.load(ledgers.DEFAULT), _wide_console())


@app.command()
def environments(
    library: Annotated[list[str], typer.Argument(metavar="NAME[==VERSION]...", help="Such as sglang, flashinfer.")],
) -> int:
    """Make an interpreter with a library from the package index, and enter it in conformance.toml."""
    from conformance import environment_table

    for name, python in environment_table.make(library).items():
        print(f'{name} = "{python}"')
    return 0


@app.command()
def report(directory: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of a run.")]) -> int:
    """Make every file of a run again from its records.jsonl."""
    described = read_run(directory)
    records = read_records(directory / RECORDS)
    from reports.build import write_all
    from reports.summary import headline

    try:
        paths = write_all(directory, records, described)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror or error}") from None
    console = Console()
    for line in (*headline(records, described), *map(str, paths.values())):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _wide_console() -> Console:
    """For tables: a terminal's own width, else room for every column."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)


def _parsed(option: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(message: str) -> None:
    print(f"conformance: {' '.join(message.split())}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; nothing is raised."""
    try:
        return int(app(args=arguments, prog_name=PROGRAM, standalone_mode=False) or 0)
    except (UsageError, CaseError, LedgerError, JournalError) as error:
        _say(str(error))
        return USAGE
    except HarnessError as error:
        _say(f"the harness failed: {error}")
        return HARNESS
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it ends
        return INTERRUPTED
    except Exception as error:
        # typer brings its own copy of click, so that its usage errors are known by what they can do.
        message = getattr(error, "format_message", None)
        if message is not None:
            text = _explained(str(message()), sys.argv[1:] if arguments is None else arguments)
            _say(text or f"no command; try {PROGRAM} --help")
            return USAGE
        _say(f"the harness failed: {type(error).__name__}: {error} (traceback in {_keep_traceback()})")
        return HARNESS


def _explained(message: str, arguments: Sequence[str]) -> str:
    """A usage error; where a flag was given a value, which reads as a stray argument, it says so."""
    stray = _STRAY.match(message)
    before = dict(zip(arguments[1:], arguments, strict=False)).get(stray[1], "") if stray else ""
    if not before.startswith("--"):
        return message
    hint = "; it goes on with the run in the folder that --out names" if before == "--resume" else ""
    return f"{before} takes no value, {stray[1]!r} follows it{hint}" if stray else message


def _keep_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="conformance-", suffix=".traceback.txt", delete=False) as file:
        traceback.print_exc(file=file)
        return file.name
