"""``python -m conformance power``: search for the mutants, print the table, hold the score against the record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from conformance import journal, power_html, power_score
from conformance.discover import UsageError
from conformance.power import Hunt, hunts, shrunk
from conformance.power_checks import CHECKS
from fuzz.mutants import CONFORMANT, MUTANTS, PROBES
from fuzz.mutants.base import Mutant


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to search for, and how long.

    areas, families: restrict to these; all if empty. seeds: of the plans. cases: for each operation x variant.
    budget: seconds for one mutant under one seed. shrink: seconds for one catch, none if 0. out: where power.md and
    power.html go. record: write the score to ``score``.
    """

    areas: tuple[str, ...]
    families: tuple[str, ...]
    seeds: tuple[int, ...]
    cases: int
    budget: float
    shrink: float
    out: Path
    score: Path
    record: bool


def chosen(settings: Settings) -> list[Mutant]:
    """The mutants to search for. Raises `UsageError`."""
    for word, wanted, known in (
        ("area", settings.areas, {mutant.area for mutant in (*MUTANTS, *PROBES)}),
        ("family", settings.families, {mutant.family for mutant in (*MUTANTS, *PROBES)}),
    ):
        for name in wanted:
            if name not in known:
                raise UsageError(f"unknown {word} {name!r}; known: {', '.join(sorted(known))}")
    found = [
        mutant
        for mutant in (*MUTANTS, *PROBES)
        if (not settings.areas or mutant.area in settings.areas)
        and (not settings.families or mutant.family in settings.families)
    ]
    if not found:
        raise UsageError(f"no family {', '.join(settings.families)} in area {', '.join(settings.areas)}")
    return found


def run(settings: Settings, console: Console) -> int:
    """0 if nothing is lost and nothing conformant raises an alarm, else 1."""
    mutants = chosen(settings)
    if settings.record and len(mutants) < len(MUTANTS) + len(PROBES):
        raise UsageError("--record takes every area and family, so that the record stays whole")
    journal.make_writable(settings.out)
    recorded = None if settings.record else power_score.read(settings.score)
    torch.set_num_threads(1)
    operations = {mutant.operation for mutant in mutants}
    limits = {"cases": settings.cases, "budget": settings.budget}
    found: list[Hunt] = []
    for mutant in mutants:
        group = hunts([mutant], settings.seeds, cases=settings.cases, budget=settings.budget)
        worst = power_score.slowest(group)
        found += [shrunk(item, settings.shrink) if item is worst else item for item in group]
        missed = [str(item.seed) for item in group if not item.caught]
        outcome = f"escapes under seed {', '.join(missed)}" if missed else f"caught by {group[-1].check}"
        console.print(f"{mutant.area} {mutant.family}: {outcome}", markup=False, highlight=False, soft_wrap=True)
    controls = [item for item in CONFORMANT if item.operation in operations]
    alarms = hunts(controls, settings.seeds, cases=settings.cases, budget=settings.budget)
    score = power_score.score_of(found, {"seeds": list(settings.seeds), **limits})
    _write(settings.out, "power.md", power_score.markdown(found, alarms, score))
    _write(settings.out, "power.html", power_html.page(found, score))
    console.print(_table(found))
    loud = [item for item in alarms if item.caught]
    problems = [f"alarm on a correct {item.mutant.operation}: {item.case}: {item.message}" for item in loud]
    if recorded is not None:
        problems += power_score.losses(score, recorded)
    elif not problems:
        settings.score.write_text(power_score.to_toml(score), encoding="utf-8")
    count = sum(item.cases for item in alarms)
    for line in (
        *power_score.summary(score, found),
        f"{count} cases of correct implementations, {len(loud)} alarms",
        *problems,
        str(settings.out / "power.md"),
        str(settings.out / "power.html"),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if problems else 0


def _write(out: Path, name: str, text: str) -> None:
    try:
        (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None


def _table(found: list[Hunt]) -> Table:
    table = Table(title="Mutants: the seed that took longest; whether other checks saw the answer that was caught")
    for name in ("family", "area", "caught", "cases", "seconds", "check", *CHECKS):
        table.add_column(name, overflow="fold")
    for group in power_score.by_mutant(found):
        worst = power_score.slowest(group)
        count = sum(item.caught for item in group)
        cells = [worst.mutant.family, worst.mutant.area, f"{count} of {len(group)}", str(worst.cases)]
        cells += [f"{worst.seconds:.2f}", worst.check or "-", *(power_score.seen(worst, name) for name in CHECKS)]
        table.add_row(*cells)
    return table
