"""The score of a search: which families are caught, area by area, beside the score that the repository records."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

from conformance.discover import UsageError
from conformance.power import Hunt
from conformance.power_checks import CHECKS

NAMES = {"allclose": "allclose 1e-2", "flashinfer": "FlashInfer fuzz", "calc_diff": "calc_diff", "cosine": "cosine"}
"""What tables call the other checks."""
DEFAULT = Path(__file__).parent / "power_score.toml"


PROBES = "probe"
"""The area that does not count."""


@dataclass(frozen=True)
class Score:
    """What the recorded search found.

    settings: its seeds, cases and budget. areas: area -> family -> caught under every seed.
    """

    settings: Mapping[str, Any]
    areas: Mapping[str, Mapping[str, bool]]


def score_of(hunts: Iterable[Hunt], settings: Mapping[str, Any]) -> Score:
    """A family is caught if every mutant of it is, under every seed."""
    areas: dict[str, dict[str, bool]] = {}
    for item in hunts:
        families = areas.setdefault(item.mutant.area, {})
        families[item.mutant.family] = families.get(item.mutant.family, True) and item.caught
    return Score(dict(settings), areas)


def losses(now: Score, recorded: Score, areas: Sequence[str] = ()) -> list[str]:
    """One line for each family that was caught and no longer is, or that the record lacks; empty if nothing is lost.

    areas: compare these areas only; all that were searched if empty. A family that was not searched counts for nothing.
    """
    lines = []
    for area, families in now.areas.items():
        if areas and area not in areas:
            continue
        known = recorded.areas.get(area, {})
        for family, caught in families.items():
            if family not in known:
                lines.append(f"{area}: {family} is not in the record; add it with --record")
            elif known[family] and not caught:
                lines.append(f"{area}: {family} was caught and escapes now")
    return lines


def read(path: Path) -> Score:
    """Read a record. Raises `UsageError`."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        areas = {
            area: {**dict.fromkeys(found["caught"], True), **dict.fromkeys(found["escaped"], False)}
            for area, found in data["area"].items()
        }
        return Score(data["settings"], areas)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: no record of a score: {error}") from None


def to_toml(score: Score) -> str:
    """The text of a record; names are plain words."""
    lines = ["# Which families of mutants are caught under every seed: python -m conformance power --record", ""]
    lines += ["[settings]", *(f"{key} = {_value(value)}" for key, value in score.settings.items())]
    for area, families in score.areas.items():
        lines += ["", f"[area.{area}]", f'score = "{tally(families)}"']
        for word, wanted in (("caught", True), ("escaped", False)):
            names = [f'  "{family}",' for family, caught in families.items() if caught == wanted]
            lines += [f"{word} = [", *names, "]"] if names else [f"{word} = []"]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, Sequence) else str(value)


def tally(families: Mapping[str, bool]) -> str:
    """``caught/all``."""
    return f"{sum(families.values())}/{len(families)}"


def summary(score: Score, hunts: Sequence[Hunt] = ()) -> list[str]:
    """One line an area, one for all of them (probes apart), and from hunts the median time and the other checks."""
    counted = {area: found for area, found in score.areas.items() if area != PROBES}
    total = {f"{area} {family}": caught for area, found in counted.items() for family, caught in found.items()}
    lines = [f"{area}: {tally(found)}" for area, found in score.areas.items()]
    share = f" ({sum(total.values()) / len(total):.1%})" if total else ""
    lines.append(f"all{' but probes' if PROBES in score.areas else ''}: {tally(total)}{share}")
    caught = [item for item in hunts if item.caught and item.mutant.area != PROBES]
    if caught:
        seconds, cases = [item.seconds for item in caught], [item.cases for item in caught]
        typical = f"median {median(seconds):.2f} s and case {median_low(cases)}"
        lines.append(f"first catch: {typical}, slowest {max(seconds):.1f} s and case {max(cases)}")
        known = [item for item in caught if item.others]
        seen_ = (f"{NAMES[name]} {sum(item.others.get(name, False) for item in known)}" for name in CHECKS)
        lines.append(f"of {len(known)} answers that were caught other checks saw: {', '.join(seen_)}")
    return lines


def markdown(hunts: Sequence[Hunt], alarms: Sequence[Hunt], score: Score) -> str:
    """The whole table: a row for each family, its slowest seed where it is caught."""
    seeds = len({item.seed for item in hunts})
    lines = ["# Detection power", "", *(f"- {line}" for line in summary(score, hunts)), ""]
    head = [
        "family",
        "area",
        "source",
        "caught",
        "cases",
        "seconds",
        "check",
        *(NAMES[name] for name in CHECKS),
        "smaller case",
        "elements that differ",
    ]
    lines += [_row(head), _row(["---"] * len(head))]
    for group in by_mutant(hunts):
        worst, about = slowest(group), group[0].mutant
        found = [item for item in group if item.caught]
        cells = [about.family, about.area, about.source, f"{len(found)} of {seeds}", str(worst.cases)]
        cells += [f"{worst.seconds:.2f}", worst.check or "-", *(seen(worst, name) for name in CHECKS)]
        cells.append(f"`{worst.smallest or worst.case}`" if worst.case else "-")
        lines.append(_row([*cells, f"{worst.differing} of {worst.elements}" if worst.smallest else "-"]))
    lines += [
        "",
        "A line that shows a row again: `nox -s repro -- 'CASE' --plugin conformance.mutant_backends --backend",
    ]
    lines[-1] += " mutant_FAMILY`."
    lines += ["", "Conformant implementations under the same budgets:", ""]
    lines += [_row(["operation", "seed", "cases", "seconds", "alarm"]), _row(["---"] * 5)]
    for item in alarms:
        words = f"{item.check}: `{item.case}`" if item.caught else "none"
        lines.append(_row([item.mutant.operation, str(item.seed), str(item.cases), f"{item.seconds:.1f}", words]))
    return "\n".join(lines) + "\n"


def by_mutant(hunts: Iterable[Hunt]) -> list[list[Hunt]]:
    """The hunts of each mutant."""
    groups: dict[str, list[Hunt]] = {}
    for item in hunts:
        groups.setdefault(f"{item.mutant.area} {item.mutant.family} {item.mutant.operation}", []).append(item)
    return list(groups.values())


def slowest(group: Sequence[Hunt]) -> Hunt:
    """The hunt that missed or, if none did, took the most cases."""
    return max(group, key=lambda item: (not item.caught, item.cases))


def seen(item: Hunt, name: str) -> str:
    """Whether another check saw the answer that was caught."""
    return {True: "yes", False: "no"}[item.others[name]] if name in item.others else "-"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"
