"""The command line: ``python -m conformance run | fuzz | repro | probe | gating | backends | power | replay | report``.

Exit codes: 0 conformant; 1 non-conformant; 2 a usage error, nothing executed included; 3 the harness itself failed; 130
interrupted by Ctrl-C or SIGTERM (files are written and marked incomplete). Every bad input is one line on stderr that
starts with ``conformance: ``.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import secrets
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance import cli_tools as tools
from conformance import ledger as ledgers
from conformance import units
from conformance.cli_options import (
    DEADLINE,
    MEMORY_LIMIT,
    SEED,
    SHRINK,
    Deadline,
    Devices,
    Environments,
    LedgerFile,
    Memory,
    NoDeps,
    NoLedger,
    Plugins,
    cpus,
    many,
    parsed,
    plain_console,
)
from conformance.discover import UsageError
from conformance.engine import Limits
from conformance.journal import JournalError
from conformance.ledger import Ledger, LedgerError
from conformance.oracles import HarnessError
from conformance.run_settings import HARNESS, INTERRUPTED, USAGE, Settings
from fuzz.case import CaseError

PROGRAM = "python -m conformance"
LONGEST = 2000
"""Characters of a message; an input that is quoted whole may have more."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What a disk says that takes nothing more."""

_STRAY = re.compile(r"Got unexpected extra arguments?\(?s?\)? \((\S+?)[ )]")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Numerical conformance of block-scaled FP8/FP4 kernels and MoE routing.",
)


def _show_version(asked: bool) -> None:
    if asked:
        from conformance.run_description import git_commit, version_of

        number, commit = version_of("blockscale-conformance") or "not installed", git_commit()
        words = [f"blockscale-conformance {number}", *([f"commit {commit}"] * bool(commit))]
        print(", ".join([*words, f"Python {sys.version.split()[0]}"]))
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def run(
    backend: Annotated[list[str] | None, many("--backend", "NAME", "Run this backend only.")] = None,
    operation: Annotated[list[str] | None, many("--operation", "NAME", "Run this operation only.")] = None,
    variant: Annotated[list[str] | None, many("--format", "NAME", "Run this format, policy or layout only.")] = None,
    device: Devices = None,
    cases: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cases for each operation x variant.")] = None,
    least: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Claimed cases for each backend x operation x variant.")
    ] = None,
    most: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Claimed cases of these that a backend is called on at most.")
    ] = None,
    case: Annotated[list[str] | None, many("--case", "TEXT", "Run this case.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Run the cases of a plan file.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Seed of the plan.")] = SEED,
    budget: Annotated[str | None, typer.Option(metavar="DURATION", help="Stop after this time, such as 60s.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers at a time; all CPUs if absent.")] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Most workers of a backend, by its share of the calls.")
    ] = 1,
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
    gates: Annotated[list[str] | None, many("--gates", "LIBRARY", "Also ask its architecture gates, first.")] = None,
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
        jobs=jobs or cpus(),
        workers=workers,
        deadline=parsed("--deadline", units.seconds, deadline),
        budget=None if budget is None else parsed("--budget", units.seconds, budget),
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
        memory_limit=parsed("--memory-limit", units.size, memory_limit),
        resume=resume,
        reverse=order == "reversed",
        keep_selections=keep_selections,
        corpus=None if corpus == "none" else Path(corpus) if corpus else out.parent / "corpus",
        shrink=0.0 if shrink in ("0", "0s") else parsed("--shrink", units.seconds, shrink),
        sweep=sweep,
        gates=tuple(gates or ()),
        shapes=shapes,
        judge=judge,
        limits=limits,
        command=shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
    )
    return runs.run(settings, Ledger() if no_ledger else ledgers.load(ledger), plain_console())


def fuzz(
    backend: Annotated[list[str] | None, many("--backend", "NAME", "Fuzz this backend only.")] = None,
    operation: Annotated[list[str] | None, many("--operation", "NAME", "Fuzz this operation only.")] = None,
    variant: Annotated[list[str] | None, many("--format", "NAME", "Fuzz this format, policy or layout only.")] = None,
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
        memory_limit=parsed("--memory-limit", units.size, memory_limit),
        corpus=None if corpus == "none" else Path(corpus) if corpus else out.parent / "corpus",
        shrink=0.0 if shrink in ("0", "0s") else parsed("--shrink", units.seconds, shrink),
        limits=Limits(
            jobs=jobs or cpus(),
            deadline=parsed("--deadline", units.seconds, deadline),
            budget=parsed("--budget", units.seconds, budget),
            fail_fast=fail_fast,
        ),
        command=shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
    )
    return fuzzing.fuzz(settings, profile, Ledger() if no_ledger else ledgers.load(ledger), plain_console())


def repro(
    subject: Annotated[
        str, typer.Argument(metavar="CASE|ID|CAPSULE|RUN.JSON", help="A case's text in quotes, an id, or a file.")
    ],
    backend: Annotated[str, typer.Option(metavar="NAME", help="The backend to call; a file names its own.")] = "",
    device: Annotated[str, typer.Option(metavar="NAME", help="Such as cuda:0; cpu if nothing says another.")] = "",
    option: Annotated[list[str] | None, many("--option", "KEY=VALUE", "A call option.")] = None,
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
        shrink=parsed("--budget", units.seconds, budget) if shrink else 0.0,
        keep=capsule,
        script=script,
        deadline=parsed("--deadline", units.seconds, deadline),
        memory_limit=parsed("--memory-limit", units.size, memory_limit),
    )
    if bisect is not None:
        from conformance import bisecting

        good, bad = bisect
        bounds = bisecting.Request(of=request, good=good, bad=bad, folder=environments, dependencies=not no_deps)
        return bisecting.bisect(bounds, plain_console())
    return repros.repro(request, ledgers.load(ledgers.DEFAULT), plain_console())


def compare(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="A backend, NAME==VERSION, PLUGIN.py@REV, an interpreter, a run.")
    ],
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The same; what is to be merged.")],
    backend: Annotated[list[str] | None, many("--backend", "NAME", "Compare this backend only.")] = None,
    operation: Annotated[list[str] | None, many("--operation", "NAME", "Compare this operation only.")] = None,
    variant: Annotated[list[str] | None, many("--format", "NAME", "Compare this format only.")] = None,
    device: Devices = None,
    cases: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cases for each operation x variant.")] = None,
    case: Annotated[list[str] | None, many("--case", "TEXT", "Compare on this case.")] = None,
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
        memory_limit=parsed("--memory-limit", units.size, memory_limit),
        gates=not no_gates,
        fail_on=fail_on,
        limits=Limits(jobs=jobs or cpus(), deadline=parsed("--deadline", units.seconds, deadline)),
        command=shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
    )
    return comparing.compare(settings, ledgers.load(ledger), plain_console())


class _Interrupted(Exception):  # noqa: N818 - what happened
    """Ctrl-C or SIGTERM inside of a command."""


def _told(command: Callable[..., int]) -> Callable[..., int]:
    """The command, whose KeyboardInterrupt typer would turn into a silent exit."""

    @functools.wraps(command)
    def told(*arguments: Any, **options: Any) -> int:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            raise _Interrupted from None

    return told


for command in (
    run,
    fuzz,
    repro,
    tools.probe,
    compare,
    tools.gating,
    tools.backends,
    tools.power,
    tools.replay,
    tools.environments,
    tools.report,
):
    app.command()(_told(command))


def _say(message: str) -> None:
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(message.split()))
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]} ... ({len(line)} characters)"
    print(f"conformance: {line}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; nothing is raised."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a message may hold what this terminal's encoding lacks
    try:
        return int(app(args=arguments, prog_name=PROGRAM, standalone_mode=False) or 0)
    except (UsageError, CaseError, LedgerError, JournalError) as error:
        _say(str(error))
        return USAGE
    except HarnessError as error:
        _say(f"the harness failed: {error}")
        return HARNESS
    except (_Interrupted, KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_stdout()
        return INTERRUPTED
    except OSError as error:
        if error.errno not in FULL:
            return _failed(error)
        what = f" {error.filename}" if error.filename else ""
        _say(f"cannot write{what}: {error.strerror}; what was written stays, and a run goes on with --resume")
        _give_up_stdout()
        return USAGE
    except Exception as error:
        # typer brings its own copy of click, so that its usage errors are known by what they can do.
        message = getattr(error, "format_message", None)
        if message is not None:
            text = _explained(str(message()), sys.argv[1:] if arguments is None else arguments)
            _say(text or f"no command; try {PROGRAM} --help")
            return USAGE
        return _failed(error)


def _give_up_stdout() -> None:
    """Let what stdout still holds go where it does not fail, or Python complains again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: Exception) -> int:
    """A fault of ours, which is told in one line and kept whole in a file."""
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
    try:
        with tempfile.NamedTemporaryFile("w", prefix="conformance-", suffix=".traceback.txt", delete=False) as file:
            traceback.print_exc(file=file)
            return file.name
    except OSError as error:
        return f"no file: {error.strerror or error}"
