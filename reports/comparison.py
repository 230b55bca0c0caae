"""Two runs of the same cases, call by call: what was fixed, what regressed, what drifted inside every tolerance.

A pure function of records and of what the runs say of themselves. Only the standard library and ``reports`` are used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import Any

from reports import text
from reports.frame import order, part_rank
from reports.groups import FAIL, KNOWN, PASS, Call
from reports.record import Record
from reports.sign_test import p_value, signs

Subject = tuple[str, str]
"""A backend and its device."""

SAME, FIXED, REGRESSED, BOTH_WRONG, LOST, GAINED = "both pass", "fixed", "regressed", "both wrong", "lost", "gained"
ALPHA = 0.001
"""Chance of a false word about errors or headroom in a whole comparison: a row's p-value counts below this over the
number of tests that were made."""
WHICH = {"m": "m", "tokens": "tokens", "rows": "rows", "n": "n"}
SIZES = ((1, "one row"), (64, "few rows"))
WIDTHS = ("k", "hidden", "intermediate", "cols", "experts")


class ComparisonError(ValueError):
    """Two runs that cannot be compared; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two runs. label: what the user called it. records, run: as a run leaves them."""

    label: str
    records: Sequence[Record]
    run: Mapping[str, Any]

    @cached_property
    def calls(self) -> dict[Subject, dict[tuple[str, str], Call]]:
        """Backend and device -> (case, options) -> the call; earlier parts first."""

        def place(item: Record) -> tuple[str, str, str, str]:
            return (item.backend, item.device, item.case, item.options)

        found: dict[Subject, dict[tuple[str, str], Call]] = {}
        for (backend, device, case, options), parts in groupby(sorted(order(self.records), key=place), key=place):
            found.setdefault((backend, device), {})[case, options] = Call(tuple(parts))
        return found

    def about(self, subject: Subject) -> Mapping[str, Any]:
        """What the run says of a backend; empty where it says nothing."""
        entries = self.run.get("backends")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, Mapping) and (entry.get("backend"), entry.get("device")) == subject:
                return entry
        return {}


@dataclass(frozen=True)
class Pair:
    """One case on both sides."""

    base: Call
    head: Call

    @cached_property
    def outcome(self) -> str:
        """What became of it; empty where neither side answered."""
        before, after = self.base.status, self.head.status
        if after in (FAIL, KNOWN):
            return BOTH_WRONG if before in (FAIL, KNOWN) else REGRESSED
        if before in (FAIL, KNOWN):
            return FIXED if after == PASS else LOST
        if before == PASS:
            return SAME if after == PASS else LOST
        return GAINED if after == PASS else ""

    @cached_property
    def bits_equal(self) -> bool | None:
        """Whether all parts have equal bits; None where that is not known or an answer varies from call to call."""
        mine, theirs = ({item.part: item.output_sha256 for item in call.parts} for call in (self.base, self.head))
        known = [name for name in mine if mine[name] and theirs.get(name)]
        if any(mine[name] != theirs[name] for name in known):
            return False
        judged = [item.part for item in self.base.parts if not item.part.startswith("property:")]
        return True if known and set(judged) <= set(known) else None

    @cached_property
    def errors(self) -> tuple[float, float] | None:
        """The errors of the last part that has one on both sides."""
        mine, theirs = ({item.part: item.error for item in call.parts} for call in (self.base, self.head))
        for name in sorted(mine, key=part_rank, reverse=True):
            one, other = mine[name], theirs.get(name)
            if one is not None and other is not None and not name.startswith("property:"):
                return one, other
        return None

    @cached_property
    def headrooms(self) -> tuple[float, float] | None:
        """The largest headroom on each side."""
        one, other = self.base.headroom, self.head.headroom
        return None if one is None or other is None else (one, other)

    @cached_property
    def selections(self) -> tuple[int, int] | None:
        """Tokens whose set of experts differs, and all tokens; None where no experts were chosen."""
        mine, theirs = (
            "".join(item.selection for item in call.parts if item.selection) for call in (self.base, self.head)
        )
        if not mine or len(mine) != len(theirs):
            return None
        tokens = range(0, len(mine), 8)
        return sum(mine[at : at + 8] != theirs[at : at + 8] for at in tokens), len(tokens)

    @cached_property
    def seconds(self) -> tuple[float, float] | None:
        """The time of both calls, where both were answered."""
        one, other = (max(item.seconds for item in call.parts) for call in (self.base, self.head))
        return (one, other) if one > 0 and other > 0 else None

    @property
    def case(self) -> str:
        """The case's text."""
        return self.base.parts[0].case


@dataclass(frozen=True)
class Trend:
    """A paired measurement over the cases of a row: how often the head is below and above the base, and by how much.

    ratio: geometric mean of head / base over the pairs where both are finite and positive; None without any.
    """

    less: int
    more: int
    same: int
    ratio: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], *, middle: bool = False) -> Trend:
        """middle: the ratio is the median instead."""
        logs = [math.log(b / a) for a, b in pairs if 0 < a < math.inf and 0 < b < math.inf]
        ratio = math.exp(median(logs) if middle else math.fsum(logs) / len(logs)) if logs else None
        return cls(*signs(pairs), ratio)

    @cached_property
    def p(self) -> float:
        """Of the sign test; 1 where nothing differs."""
        return p_value(self.less, self.more)


@dataclass(frozen=True)
class Row:
    """The pairs of one operation, format and class of shapes on one backend (or pair of backends)."""

    subject: str
    operation: str
    variant: str
    shapes: str
    pairs: tuple[Pair, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """Outcome -> pairs."""
        return Counter(pair.outcome for pair in self.pairs if pair.outcome)

    @cached_property
    def passing(self) -> list[Pair]:
        """Pairs that pass on both sides."""
        return [pair for pair in self.pairs if pair.outcome == SAME]

    @cached_property
    def bits(self) -> tuple[int, int]:
        """Pairs with equal bits, and pairs of which that is known, among those that pass on both sides."""
        known = [pair.bits_equal for pair in self.passing if pair.bits_equal is not None]
        return sum(known), len(known)

    @cached_property
    def error(self) -> Trend:
        """Against FP64, over all pairs that were judged."""
        return Trend.of([pair.errors for pair in self.pairs if pair.errors])

    @cached_property
    def headroom(self) -> Trend:
        """Over the pairs that pass on both sides."""
        return Trend.of([pair.headrooms for pair in self.passing if pair.headrooms])

    @cached_property
    def largest(self) -> tuple[float, float] | None:
        """The largest headroom of each side over the pairs that pass on both."""
        found = [pair.headrooms for pair in self.passing if pair.headrooms]
        return (max(one for one, _ in found), max(other for _, other in found)) if found else None

    @cached_property
    def selections(self) -> tuple[int, int]:
        """Tokens whose experts changed, and all."""
        found = [pair.selections for pair in self.pairs if pair.selections]
        return sum(one for one, _ in found), sum(all_ for _, all_ in found)

    @cached_property
    def time(self) -> Trend:
        """Of the calls; the ratio is the median."""
        return Trend.of([pair.seconds for pair in self.passing if pair.seconds], middle=True)

    @property
    def name(self) -> str:
        """Such as ``quantize mxfp8, one row, aligned``."""
        return f"{self.operation} {self.variant}, {self.shapes}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs amount to.

    rows: those with regressions first. only_base, only_head: cases that the other side lacks. unpaired: backends
    that only one side has. declared: one line for each recipe or claim that differs. gates: the same for what a library
    says of architectures. versions: (what, base, head) that differ. plugins: of the base, and of the head.
    """

    base: str
    head: str
    rows: tuple[Row, ...]
    only_base: int
    only_head: int
    unpaired: tuple[str, ...]
    declared: tuple[str, ...]
    versions: tuple[tuple[str, str, str], ...]
    gates: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    plugins: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @cached_property
    def counts(self) -> Counter[str]:
        """Outcome -> pairs."""
        return sum((row.counts for row in self.rows), Counter())

    @property
    def compared(self) -> int:
        """Calls that one side answered at least."""
        return sum(self.counts.values())

    @cached_property
    def tests(self) -> int:
        """How many sign tests count: of errors and of headroom, in each row where something differs."""
        return sum((trend.less + trend.more > 0) for row in self.rows for trend in (row.error, row.headroom))

    def grows(self, trend: Trend) -> bool:
        """Whether the head is above the base more often than chance explains (`ALPHA`)."""
        return trend.more > trend.less and trend.p * max(1, self.tests) < ALPHA

    @cached_property
    def drift(self) -> tuple[str, ...]:
        """What differs without being wrong, one line each."""
        equal, known = (sum(row.bits[i] for row in self.rows) for i in (0, 1))
        tokens, all_tokens = (sum(row.selections[i] for row in self.rows) for i in (0, 1))
        lines = []
        if known > equal:
            lines.append(f"answers differ in bits in {known - equal:,} of {known:,} calls that pass on both sides")
        if tokens:
            lines.append(f"selected experts differ for {tokens:,} of {all_tokens:,} tokens")
        for word, trends in (
            ("errors against FP64", [(row, row.error) for row in self.rows]),
            ("headroom", [(row, row.headroom) for row in self.rows]),
        ):
            grown = [row.name for row, trend in trends if self.grows(trend)]
            if grown:
                lines.append(f"{word} larger than chance explains: {'; '.join(grown)}")
        if self.counts[LOST]:
            lines.append(f"{self.counts[LOST]:,} calls are no longer answered")
        lines += [f"declared differently: {len(self.declared)} recipes or claims"] * bool(self.declared)
        lines += [f"{len(self.gates)} architecture gates answer differently"] * bool(self.gates)
        return tuple(lines)

    @property
    def verdict(self) -> str:
        """``regressed``, ``drift`` or ``clean``."""
        return "regressed" if self.counts[REGRESSED] else "drift" if self.drift else "clean"

    def pairs(self, outcome: str) -> list[Pair]:
        """All pairs with an outcome, in the order of the rows."""
        return [pair for row in self.rows for pair in row.pairs if pair.outcome == outcome]


def compare(base: Side, head: Side, gates: Sequence[str] = ()) -> Comparison:
    """Compare two runs. Raises `ComparisonError` where they have no backend or no case in common, or other inputs."""
    subjects = _paired(base, head)
    rows: dict[tuple[str, str, str, str], list[Pair]] = {}
    only_base = only_head = 0
    for one, other in subjects:
        mine, theirs = base.calls[one], head.calls[other]
        only_base += len(mine.keys() - theirs.keys())
        only_head += len(theirs.keys() - mine.keys())
        for key in (key for key in mine if key in theirs):
            pair = Pair(mine[key], theirs[key])
            _check_inputs(pair)
            first = pair.base.parts[0]
            place = (_named(one, other), first.operation, first.variant, shape_class(first.case))
            rows.setdefault(place, []).append(pair)
    found = [Row(*place, tuple(pairs)) for place, pairs in sorted(rows.items())]
    if not found:
        raise ComparisonError(f"{base.label} and {head.label} have no case in common")
    used = [{subject for subject, _ in subjects}, {subject for _, subject in subjects}]
    unpaired = [
        f"{' on '.join(subject)} (only in {side.label})"
        for side, paired in zip((base, head), used, strict=True)
        for subject in sorted(side.calls.keys() - paired)
    ]
    return Comparison(
        base=base.label,
        head=head.label,
        rows=tuple(sorted((row for row in found if row.counts), key=_badness)),
        only_base=only_base,
        only_head=only_head,
        unpaired=tuple(unpaired),
        declared=tuple(line for one, other in subjects for line in _declared(base.about(one), head.about(other), one)),
        versions=tuple(dict.fromkeys(item for one, other in subjects for item in _versions(base, head, one, other))),
        gates=tuple(gates),
        plugins=(_plugins(base), _plugins(head)),
    )


def _plugins(side: Side) -> tuple[str, ...]:
    named = side.run.get("plugins")
    return tuple(item for item in named if isinstance(item, str)) if isinstance(named, list) else ()


def shape_class(case: str) -> str:
    """How many rows a case has, and whether its widths are multiples of 128: ``few rows, ragged``."""
    given = dict(word.partition("=")[::2] for word in case.split(" ")[2:])
    rows = next((int(given[key]) for key in WHICH if given.get(key, "").isdecimal()), 1)
    size = next((word for limit, word in SIZES if rows <= limit), "many rows")
    widths = [int(given[key]) for key in WIDTHS if given.get(key, "").isdecimal()]
    if not widths:
        return size
    return f"{size}, {'ragged' if any(width % 128 for width in widths) else 'aligned'}"


def _paired(base: Side, head: Side) -> list[tuple[Subject, Subject]]:
    """Backends of one name and device; else of one name; else, where each side has one backend only, these two."""
    one, other = sorted(base.calls), sorted(head.calls)
    pairs = [(subject, subject) for subject in one if subject in other]
    for name in sorted({name for name, _ in one} & {name for name, _ in other}):
        mine, theirs = ([item for item in side if item[0] == name] for side in (one, other))
        if len(mine) == len(theirs) == 1 and mine != theirs:
            pairs.append((mine[0], theirs[0]))
    if not pairs and len(one) == len(other) == 1:
        pairs = [(one[0], other[0])]
    if not pairs:
        names = [", ".join(" on ".join(subject) for subject in side) or "nothing" for side in (one, other)]
        raise ComparisonError(
            f"no backend in common: {base.label} has {names[0]}; {head.label} has {names[1]}; choose with --backend"
        )
    return pairs


def _named(one: Subject, other: Subject) -> str:
    if one == other:
        return one[0] if one[1] == "cpu" else " on ".join(one)
    if one[1] == other[1]:
        return f"{one[0]} → {other[0]}"
    return f"{' on '.join(one)} → {' on '.join(other)}"


def _check_inputs(pair: Pair) -> None:
    one, other = (
        next((item.input_sha256 for item in call.parts if item.input_sha256), "") for call in (pair.base, pair.head)
    )
    if one and other and one != other:
        raise ComparisonError(f"'{pair.case}' has other inputs on each side: SHA-256 {one[:16]} and {other[:16]}")


def _badness(row: Row) -> tuple[int, int, int, int]:
    different = row.bits[1] - row.bits[0]
    return (-row.counts[REGRESSED], -row.counts[LOST], -row.counts[FIXED] - row.counts[BOTH_WRONG], -different)


def _claims(about: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, set[str]]]:
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for item in about.get("claims") or ():
        entry = found.setdefault(
            (str(item.get("operation")), str(item.get("variant"))), {"claim": set(), "recipe": set()}
        )
        for word in ("claim", "recipe"):
            entry[word].add(str(item.get(word)))
    return found


def _declared(one: Mapping[str, Any], other: Mapping[str, Any], subject: Subject) -> Iterable[str]:
    """One line for each operation and variant that is claimed or declared differently."""
    mine, theirs = _claims(one), _claims(other)
    for group in sorted(mine.keys() | theirs.keys()):
        name = f"{subject[0]}: {' '.join(group)}"
        if group not in mine or group not in theirs:
            yield f"{name}: claimed by the {'base' if group in mine else 'head'} only"
            continue
        for word in ("claim", "recipe"):
            if mine[group][word] != theirs[group][word]:
                before, after = (" | ".join(sorted(side[group][word])) for side in (mine, theirs))
                yield f"{name}: {word} {before} → {after}"


def _versions(base: Side, head: Side, one: Subject, other: Subject) -> Iterable[tuple[str, str, str]]:
    mine, theirs = base.about(one), head.about(other)
    for word in ("backend", "version", "device", "device_name", "interpreter"):
        yield from _differing(word if one[0] != other[0] else f"{one[0]} {word}", mine.get(word), theirs.get(word))
    libraries = [entry.get("libraries") or {} for entry in (mine, theirs)]
    for name in sorted({*libraries[0], *libraries[1]}):
        yield from _differing(name, libraries[0].get(name), libraries[1].get(name))


def _differing(what: str, one: object, other: object) -> Iterable[tuple[str, str, str]]:
    if one != other:
        yield what, str(one or text.NONE), str(other or text.NONE)
