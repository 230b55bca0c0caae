"""The other side of detection power: correct implementations under every recipe, and not one alarm among them."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rich.console import Console

from conformance import journal
from conformance.discover import UsageError
from conformance.power import Hunt, clean
from fuzz.mutants import CONFORMANT, LEGAL
from fuzz.mutants.base import Mutant

WEIGHTS = {"moe": 1, "grouped_gemm": 1, "gemm": 2}
"""Share of an operation's variants in the cases; 6 for all others, which cost less."""


def shares(implementations: list[Mutant], total: int) -> list[int]:
    """Cases for each variant of each implementation, at least ``total`` in all, by `WEIGHTS`."""
    weights = [WEIGHTS.get(item.operation, 6) for item in implementations]
    unit = total / sum(weight * len(item.variants) for weight, item in zip(weights, implementations, strict=True))
    return [math.ceil(weight * unit) for weight in weights]


def run(total: int, seed: int, out: Path, console: Console) -> int:
    """0 without an alarm, else 1. Raises `UsageError`."""
    journal.make_writable(out)
    torch.set_num_threads(1)
    implementations = [*CONFORMANT, *LEGAL]
    left, found = total, []
    for round_ in range(20):  # claims leave out part of a plan, so that a round may fall short
        if left <= 0:
            break
        for item, cases in zip(implementations, shares(implementations, left), strict=True):
            result = clean(item, seed + round_, cases=cases)
            found.append(result)
            left -= result.cases
            words = f"ALARM {result.check}: {result.case}: {result.message}" if result.caught else "no alarm"
            text = f"{item.family}: {result.cases} cases in {result.seconds:.0f} s, {words}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    loud = [item for item in found if item.caught]
    count = sum(item.cases for item in found)
    console.print(f"{count} cases of {len(implementations)} correct implementations, {len(loud)} alarms")
    try:
        (out / "alarms.md").write_text(markdown(found, total, seed), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
    console.print(str(out / "alarms.md"), markup=False, highlight=False, soft_wrap=True)
    return 1 if loud else 0


def markdown(found: list[Hunt], total: int, seed: int) -> str:
    """A row for each implementation."""
    rows: dict[str, list[Hunt]] = {}
    for item in found:
        rows.setdefault(item.mutant.family, []).append(item)
    loud = [item for item in found if item.caught]
    lines = [
        "# Correct implementations",
        "",
        f"Made by `python -m conformance power --alarms {total} --seed {seed}` with torch {torch.__version__}.",
        "",
        f"**{sum(item.cases for item in found)} cases, {len(loud)} alarms.**",
        "",
        "| implementation | variants | recipe | cases | seconds | alarms |",
        "|---|---|---|---|---|---|",
    ]
    for family, group in rows.items():
        about = group[0].mutant
        choices = " ".join(f"{key}={value}" for key, value in sorted(about.choices.items())) or "default"
        cells = [family, str(len(about.variants)), choices, str(sum(item.cases for item in group))]
        cells += [f"{sum(item.seconds for item in group):.0f}", str(sum(item.caught for item in group))]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\nAlarm: {item.check}: `{item.case}`: {item.message}" for item in loud]
    return "\n".join(lines) + "\n"
