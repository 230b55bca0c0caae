"""The commands beside runs: probe, gating, backends, power, replay, environments and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conformance import ledger as ledgers
from conformance import planning, units
from conformance.cli_options import (
    DEADLINE,
    MEMORY_LIMIT,
    SEED,
    Deadline,
    Devices,
    Memory,
    Plugins,
    cpus,
    many,
    parsed,
    plain_console,
    wide_console,
)
from conformance.discover import UsageError, check_names, sources
from conformance.journal import RECORDS, read_records, read_run
from fuzz.grammar import GRAMMAR


def probe(
    backend: Annotated[list[str] | None, many("--backend", "NAME", "Probe this backend only.")] = None,
    operation: Annotated[list[str] | None, many("--operation", "NAME", "ue8m0, quantize or gemm.")] = None,
    variant: Annotated[list[str] | None, many("--format", "NAME", "Probe this format or policy only.")] = None,
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
        deadline=parsed("--deadline", units.seconds, deadline),
        memory_limit=parsed("--memory-limit", units.size, memory_limit),
        jobs=jobs or cpus(),
    )
    return fingerprint.probe(settings, wide_console())


def gating(
    library: Annotated[list[str] | None, many("--library", "NAME", "flashinfer, sglang, vllm, torch, ...")] = None,
    subject: Annotated[list[str] | None, many("--subject", "TEXT", "Part of a runner, function or kernel.")] = None,
    sm: Annotated[list[str] | None, many("--sm", "NUMBER", "This architecture only, such as 90.")] = None,
    expected: Annotated[Path | None, typer.Option(metavar="FILE", help="Published claims.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("out/gating"),
    strict: Annotated[bool, typer.Option("--strict", help="What cannot be observed counts too.")] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="Also call what is at hand on this GPU.")] = "",
    against: Annotated[
        list[str] | None, many("--against", "VERSION|PATH", "List changes from this LIBRARY==VERSION or interpreter.")
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
    return command.gating(settings, plain_console())


def backends(
    device: Devices = None,
    plugin: Plugins = None,
) -> int:
    """List every backend with its version, device, claims and recipes, or why it does not run."""
    from conformance import listing

    listing.show(tuple(device or ()), tuple(plugin or ()), cpus(), wide_console())
    return 0


def power(
    area: Annotated[list[str] | None, many("--area", "NAME", "Mutants of this area only.")] = None,
    family: Annotated[list[str] | None, many("--family", "NAME", "Mutants of this family only.")] = None,
    seed: Annotated[list[int] | None, many("--seed", "N", "Seed of a plan; 1, 2 and 3 if absent.")] = None,
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
        return power_alarms.run(alarms, (seed or [1])[0], out, wide_console())
    settings = power_run.Settings(
        areas=tuple(area or ()),
        families=tuple(family or ()),
        seeds=tuple(dict.fromkeys(seed or (1, 2, 3))),
        cases=cases,
        budget=parsed("--budget", units.seconds, budget),
        out=out,
        shrink=0.0 if shrink in ("0", "0s") else parsed("--shrink", units.seconds, shrink),
        score=score or power_score.DEFAULT,
        record=record,
    )
    return power_run.run(settings, wide_console())


def replay(
    router: Annotated[
        list[str] | None, many("--router", "NAME", "Take selections of this backend; all if absent.")
    ] = None,
    backend: Annotated[list[str] | None, many("--backend", "NAME", "Feed them to this one; all if absent.")] = None,
    method: Annotated[list[str] | None, many("--method", "NAME", "This routing method only.")] = None,
    variant: Annotated[list[str] | None, many("--format", "NAME", "Expert layers of this format only.")] = None,
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
        deadline=parsed("--deadline", units.seconds, deadline),
        memory_limit=parsed("--memory-limit", units.size, memory_limit),
        selections=selections,
        experts=experts,
    )
    return replay_run.run(settings, ledgers.load(ledgers.DEFAULT), wide_console())


def environments(
    library: Annotated[list[str], typer.Argument(metavar="NAME[==VERSION]...", help="Such as sglang, flashinfer.")],
) -> int:
    """Make an interpreter with a library from the package index, and enter it in conformance.toml."""
    from conformance import environment_table

    for name, python in environment_table.make(library).items():
        print(f'{name} = "{python}"')
    return 0


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
    console = plain_console()
    for line in (*headline(records, described), *map(str, paths.values())):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
