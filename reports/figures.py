"""The pictures of report.html as inline SVG: headroom histograms, and maps of shapes against failures.

They are drawn here and not by a plotting library, so that they follow the page's light or dark colours, weigh a few
hundred bytes each, and carry a text for every bar and cell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from reports import text
from reports.groups import FAIL, KNOWN, PASS, STATUSES, Call, Group
from reports.summary import Summary

BINS = 20
MOST = 48
"""Pictures of a kind; failing ones come first."""
SHAPES = (("m", "n"), ("m", "k"), ("rows", "cols"), ("n", "k"), ("tokens", "experts"), ("tokens", "hidden"))
"""Parameters that a map puts down and across: the first pair that a case has."""


@dataclass(frozen=True)
class Figure:
    """A picture. svg: safe markup. note: a line below it."""

    title: str
    note: str
    svg: str


def gather(summary: Summary) -> list[tuple[str, list[Call]]]:
    """(title, judged calls) for each operation on each backend and device, those that fail first."""
    merged: dict[tuple[str, str, str], list[Group]] = {}
    for group in summary.groups:
        merged.setdefault((group.operation, text.line(group.backend), text.line(group.device)), []).append(group)
    found = []
    for (operation, backend, device), groups in sorted(merged.items()):
        calls = [call for group in groups for call in group.calls if call.status in (FAIL, KNOWN, PASS)]
        if calls:
            found.append((f"{operation} · {backend} · {device}", calls))
    return sorted(found, key=lambda item: min(STATUSES.index(call.status) for call in item[1]))


def histograms(summary: Summary) -> tuple[list[Figure], list[str], int]:
    """(pictures, titles where every answer is the only admissible one, pictures left out)."""
    drawn, exact = [], []
    for title, calls in gather(summary):
        values = [call.headroom for call in calls if call.headroom is not None]
        if not values:
            continue
        if not any(values):
            exact.append(f"{title} ({text.count(len(values))})")
        else:
            drawn.append((title, calls))
    return [_histogram(title, calls) for title, calls in drawn[:MOST]], exact, max(0, len(drawn) - MOST)


def _histogram(title: str, calls: Sequence[Call]) -> Figure:
    bins: dict[int, Counter[str]] = {}
    for call in calls:
        if call.headroom is not None:
            bins.setdefault(_bin(call.headroom), Counter())[call.status] += 1
    most = max(bin_.total() for bin_ in bins.values())
    bars = []
    for number, tally in sorted(bins.items()):
        # A logarithm, so that one failure among thousands still has a bar.
        height = 4 + 56 * math.log(tally.total()) / max(math.log(most), 1)
        left = 6 + number * 10 + (0 if number < BINS else 6)
        status = next(name for name in STATUSES if tally[name])
        width = 9 if number < BINS else 15
        left += 0 if number <= BINS else 8
        told = f"headroom {_bin_name(number)}: {text.counts(tally)}"
        bars.append(
            f'<rect class="f-{status}" x="{left}" y="{70 - height:.1f}" width="{width}" height="{height:.1f}">'
            f"<title>{escape(told)}</title></rect>"
        )
    ticks = "".join(
        f'<text x="{x}" y="83" text-anchor="middle">{name}</text>'
        for x, name in ((6, "0"), (106, "½"), (206, "1"), (219.5, "&gt;1"), (238, "∞"))
    )
    judged = sum(bin_.total() for bin_ in bins.values())
    outside = sum(bins.get(number, Counter()).total() for number in (BINS, BINS + 1))
    passing = max((call.headroom or 0.0 for call in calls if call.status == PASS), default=None)
    note = f"{text.plural(judged, 'call')}; largest that passes {text.headroom(passing)}"
    note += f"; {text.count(outside)} above 1" if outside else ""
    note += f"; {text.count(len(calls) - judged)} without a headroom" if judged < len(calls) else ""
    svg = (
        f'<svg viewBox="0 0 248 88" role="img" aria-label="{escape(f"Histogram of headroom, {title}: {note}")}">'
        f'<line class="axis" x1="4" y1="70.5" x2="244" y2="70.5"/><line class="edge" x1="208" y1="6" x2="208" y2="70"/>'
        f'{"".join(bars)}{ticks}<text class="most" x="4" y="9">{text.count(most)}</text></svg>'
    )
    return Figure(title, note, svg)


def _bin(headroom: float) -> int:
    if math.isinf(headroom):
        return BINS + 1
    return BINS if headroom > 1 else min(BINS - 1, int(headroom * BINS))


def _bin_name(number: int) -> str:
    if number >= BINS:
        return "above 1" if number == BINS else "infinite"
    return f"{number / BINS:g} to {(number + 1) / BINS:g}"


def maps(summary: Summary) -> tuple[list[Figure], int]:
    """(pictures, pictures left out)."""
    drawn = []
    for title, calls in gather(summary):
        cells: dict[tuple[int, int], list[Call]] = {}
        names: tuple[str, str] | None = None
        for call in calls:
            shape = _shape(call.lead.case)
            if shape:
                names = names or shape[0]
                if shape[0] == names:
                    cells.setdefault(shape[1], []).append(call)
        if names and len(cells) > 1:
            drawn.append((title, names, cells))
    return [_map(*item) for item in drawn[:MOST]], max(0, len(drawn) - MOST)


def _shape(case: str) -> tuple[tuple[str, str], tuple[int, int]] | None:
    """The names and the buckets (floor of log2) of a case's shape."""
    given = dict(word.split("=", 1) for word in case.split(" ")[3:] if "=" in word)
    for names in SHAPES:
        sizes = [given.get(name, "") for name in names]
        if all(size.isdecimal() and len(size) < 12 for size in sizes):
            down, across = (int(size).bit_length() - 1 for size in sizes)
            return names, (down, across)
    return None


def _map(title: str, names: tuple[str, str], cells: dict[tuple[int, int], list[Call]]) -> Figure:
    rows = _range(row for row, _ in cells)
    columns = _range(column for _, column in cells)
    wide, high, left, top = 30, 20, 42, 18
    parts = [f'<text x="{left - 6}" y="11" text-anchor="end">{escape(names[0])} \\ {escape(names[1])}</text>']
    for index, column in enumerate(columns):
        parts.append(f'<text x="{left + index * wide + wide / 2:g}" y="11" text-anchor="middle">{_size(column)}</text>')
    for down, row in enumerate(rows):
        parts.append(f'<text x="{left - 6}" y="{top + down * high + 14}" text-anchor="end">{_size(row)}</text>')
        for across, column in enumerate(columns):
            calls = cells.get((row, column))
            if calls:
                place = f"{names[0]} {_span(row)}, {names[1]} {_span(column)}"
                parts.append(_cell(calls, left + across * wide, top + down * high, place))
    width, height = left + wide * len(columns) + 2, top + high * len(rows) + 2
    tally = Counter(call.status for calls in cells.values() for call in calls)
    worst = max(cells.items(), key=lambda item: (_bad(item[1]), item[0]))
    note = text.counts({_WORDS[status]: number for status, number in tally.items()})
    if _bad(worst[1]):
        note += f"; most at {names[0]} {_span(worst[0][0])}, {names[1]} {_span(worst[0][1])}"
    svg = (
        f'<svg class="map" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(f"Shapes tried, {title}: {note}")}">{"".join(parts)}</svg>'
    )
    return Figure(title, note, svg)


_WORDS = {FAIL: "unexplained", KNOWN: "known", PASS: "passed"}


def _bad(calls: Sequence[Call]) -> float:
    return sum(call.status == FAIL for call in calls) / len(calls)


def _cell(calls: Sequence[Call], x: int, y: int, place: str) -> str:
    tally = Counter(call.status for call in calls)
    worst = max((call.headroom for call in calls if call.headroom is not None and call.status == PASS), default=None)
    told = f"{place}: " + text.counts({_WORDS[status]: number for status, number in tally.items()})
    told += f"; largest headroom that passes {text.headroom(worst)}" if worst is not None else ""
    label = ""
    if tally[FAIL]:
        shade = f"bad{min(3, math.floor(4 * tally[FAIL] / len(calls)))}"
        label = f"{tally[FAIL]}/{len(calls)}"
    elif tally[KNOWN]:
        shade, label = "warn", f"{tally[KNOWN]}/{len(calls)}"
    else:
        shade = f"ok{min(4, math.floor(5 * min(worst or 0.0, 0.999)))}"
    said = f'<text x="{x + 14.5:g}" y="{y + 13}" text-anchor="middle">{label}</text>' if label else ""
    return f'<g class="{shade}"><title>{escape(told)}</title><rect x="{x}" y="{y}" width="29" height="19"/>{said}</g>'


def _range(values: Iterable[int]) -> list[int]:
    found = set(values)
    return list(range(min(found), max(found) + 1))


def _size(bucket: int) -> str:
    for power, letter in ((30, "G"), (20, "M"), (10, "k")):
        if bucket >= power:
            return f"{2 ** (bucket - power)}{letter}"
    return str(2**bucket)


def _span(bucket: int) -> str:
    return "1" if bucket == 0 else f"{2**bucket} to {2 ** (bucket + 1) - 1}"
