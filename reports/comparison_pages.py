"""A comparison as Markdown that fits a pull-request comment, as one HTML page, and as plain data."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from reports import text
from reports.comparison import (
    BOTH_WRONG,
    FIXED,
    GAINED,
    LOST,
    REGRESSED,
    SAME,
    Comparison,
    Pair,
    Row,
    Trend,
)
from reports.markdown import code, cut, plain, table
from reports.record import repro_line

LIMIT = 60_000
"""Bytes of Markdown: GitHub takes 65,536 characters in a comment."""
MOST_ROWS, MOST_CASES, MOST_LINES = 60, 20, 40
HEAD = (
    "operation",
    "format",
    "shapes",
    "backend",
    "calls",
    "fixed",
    "regressed",
    "both wrong",
    "bits equal",
    "error, head/base",
    "largest headroom",
    "experts changed",
    "time, head/base",
)
RIGHT = "llllrrrrrrrrr"
WORDS = {
    "regressed": ("❌", "DO NOT MERGE"),
    "drift": ("⚠️", "REVIEW BEFORE MERGING"),
    "clean": ("✅", "MERGE"),
}
NOTES = (
    "Both sides saw the same inputs. *Fixed*: wrong before, right now; *regressed*: right or not answered before, "
    "wrong now, whether the ledger knows it or not. *Bits equal* counts calls that pass on both sides. *Error* is the "
    "geometric mean ratio of root-mean-square errors against FP64, with the exact two-sided p-value of a paired sign "
    "test where something differs. *Time* is the median ratio and decides nothing."
)


def headline(found: Comparison) -> list[str]:
    """Plain text: whether to merge, why, and what was compared."""
    counts = found.counts
    words = WORDS[found.verdict][1]
    if found.verdict == "regressed":
        rows = [row.name for row in found.rows if row.counts[REGRESSED]]
        shown = "; ".join(rows[:4]) + (f"; and {len(rows) - 4} more" if len(rows) > 4 else "")
        first = f"{words}: {text.plural(counts[REGRESSED], 'call')} regressed: {shown}"
    elif found.verdict == "drift":
        first = f"{words}: no regression, but " + "; ".join(found.drift)
    else:
        first = f"{words}: no regression, and no answer differs"
    lines = [first]
    if found.verdict == "regressed":
        lines += [f"Also: {line}" for line in found.drift]
    tally = [f"{text.count(counts[outcome])} {outcome}" for outcome in (FIXED, REGRESSED, BOTH_WRONG, SAME)]
    tally += [f"{text.count(counts[outcome])} {outcome}" for outcome in (LOST, GAINED) if counts[outcome]]
    lines.append(f"{found.base} → {found.head}: {text.plural(found.compared, 'call')} compared: {', '.join(tally)}")
    if found.only_base or found.only_head:
        lines.append(
            f"Other plans: {text.plural(found.only_base, 'call')} only in {found.base}, "
            f"{text.count(found.only_head)} only in {found.head}; nothing is said of these"
        )
    lines += [f"Not compared: {name}" for name in found.unpaired]
    return [*lines, *found.notes]


def markdown(found: Comparison, limit: int = LIMIT) -> str:
    """The comparison in at most ``limit`` bytes of UTF-8; details are collapsed, what is left out is said."""
    mark = WORDS[found.verdict][0]
    first, *rest = headline(found)
    lines = [f"### {mark} {plain(first)}", "", *(f"- {plain(line)}" for line in rest), ""]
    shown = found.rows[:MOST_ROWS]
    lines += table(HEAD, [[plain(cell) for cell in cells(row)] for row in shown], RIGHT)
    if len(found.rows) > len(shown):
        lines += ["", f"{len(found.rows) - len(shown)} more rows are in compare.html."]
    lines += ["", NOTES, ""]
    for title, outcome in (
        ("Regressed", REGRESSED),
        ("No longer answered", LOST),
        ("Fixed", FIXED),
        ("Both wrong", BOTH_WRONG),
    ):
        pairs = found.pairs(outcome)
        if pairs:
            lines += _details(f"{title}: {text.plural(len(pairs), 'call')}", _cases(pairs, found.plugins))
    for title, said in (("Recipes and claims", found.declared), ("Architecture gates", found.gates)):
        if said:
            more = [f"- and {len(said) - MOST_LINES} more"] * (len(said) > MOST_LINES)
            lines += _details(
                f"{title}: {text.plural(len(said), 'difference')}",
                [*(f"- {plain(line, 400)}" for line in said[:MOST_LINES]), *more],
            )
    if found.versions:
        lines += _details(
            "Versions that differ", table(("what", "base", "head"), [[*map(plain, row)] for row in found.versions])
        )
    return cut(lines, limit).replace("All of it is in report.html and results.csv.", "All of it is in compare.html.")


def cells(row: Row) -> list[str]:
    """The cells of a row under `HEAD`, as plain text."""
    counts, (equal, known), (changed, tokens) = row.counts, row.bits, row.selections
    largest = row.largest
    return [
        row.operation,
        row.variant,
        row.shapes,
        row.subject,
        text.count(sum(counts.values())),
        _count(counts[FIXED]),
        _count(counts[REGRESSED]),
        _count(counts[BOTH_WRONG]),
        f"{equal}/{known}" if known else text.NONE,
        trend(row.error),
        " → ".join(map(text.headroom, dict.fromkeys(largest))) if largest else text.NONE,
        f"{changed}/{tokens}" if tokens else text.NONE,
        text.NONE if row.time.ratio is None else f"{row.time.ratio:.2f}",
    ]


def trend(found: Trend) -> str:
    """``1.02 (p 0.4)``; ``=`` where nothing differs; a dash where nothing was measured."""
    if not found.less + found.more:
        return "=" if found.same else text.NONE
    ratio = text.NONE if found.ratio is None else f"{found.ratio:.3g}"
    return f"{ratio} ({_p(found.p)})"


def _p(value: float) -> str:
    return f"p {value:.2g}" if value >= 1e-9 else "p < 1e-9"


def _count(number: int) -> str:
    return text.count(number) if number else ""


def _details(title: str, lines: Sequence[str]) -> list[str]:
    return ["<details>", f"<summary>{html.escape(title)}</summary>", "", *lines, "", "</details>", ""]


def _cases(pairs: Sequence[Pair], plugins: tuple[tuple[str, ...], tuple[str, ...]]) -> list[str]:
    """The first case of every kind, then further ones, with the line that shows the head again."""
    lines: list[Pair] = []
    later: list[Pair] = []
    seen: set[tuple[str, ...]] = set()
    for pair in pairs:
        lead = pair.head.lead
        kind = (lead.backend, lead.operation, lead.variant, lead.part, lead.verdict, text.alike(lead.message))
        (later if kind in seen else lines).append(pair)
        seen.add(kind)
    said = []
    for pair in [*lines, *later][:MOST_CASES]:
        of_head = pair.head.lead.failing or not pair.base.lead.failing
        lead = pair.head.lead if of_head else pair.base.lead
        known = f", known as {lead.ledger_id}" if lead.ledger_id else ""
        said.append(f"- {plain(f'{lead.part}: {lead.verdict}{known}: {lead.message}', 300)}  ")
        line = repro_line(lead.case, lead.backend, device=lead.device, options=lead.options, plugins=plugins[of_head])
        said.append(f"  {code(line)}")
    if len(pairs) > MOST_CASES:
        said.append(f"- and {text.count(len(pairs) - MOST_CASES)} more")
    return said


def data(found: Comparison) -> dict[str, Any]:
    """The comparison as plain data for compare.json; a ratio or headroom that is not finite is a string."""
    return {
        "base": found.base,
        "head": found.head,
        "verdict": found.verdict,
        "headline": headline(found),
        "counts": dict(sorted(found.counts.items())),
        "only_base": found.only_base,
        "only_head": found.only_head,
        "unpaired": list(found.unpaired),
        "drift": list(found.drift),
        "declared": list(found.declared),
        "gates": list(found.gates),
        "versions": [list(row) for row in found.versions],
        "rows": [_row(row) for row in found.rows],
        "regressed": sorted({pair.case for pair in found.pairs(REGRESSED)}),
        "fixed": sorted({pair.case for pair in found.pairs(FIXED)}),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "backend": row.subject,
        "operation": row.operation,
        "variant": row.variant,
        "shapes": row.shapes,
        "counts": dict(sorted(row.counts.items())),
        "bits_equal": row.bits[0],
        "bits_known": row.bits[1],
        "error": _trend(row.error),
        "headroom": _trend(row.headroom),
        "largest_headroom": None if row.largest is None else [_number(value) for value in row.largest],
        "tokens_changed": row.selections[0],
        "tokens": row.selections[1],
        "time": _trend(row.time),
    }


def _trend(found: Trend) -> dict[str, Any]:
    return {"less": found.less, "more": found.more, "same": found.same, "ratio": found.ratio, "p": found.p}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def page(found: Comparison) -> str:
    """One self-contained HTML page with every row and every case."""
    first, *rest = headline(found)
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em;color-scheme:light dark}table{border-collapse:collapse}"
        "td,th{border:1px solid #8888;padding:.2em .5em;text-align:left;vertical-align:top}"
        "td.n{text-align:right}.regressed{color:#c22}.drift{color:#a60}.clean{color:#282}code{overflow-wrap:anywhere}"
    )
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Comparison</title><style>{style}</style></head><body>',
        f'<h1 class="{found.verdict}">{html.escape(first)}</h1>',
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in rest) + "</ul>",
        _table(HEAD, [cells(row) for row in found.rows], RIGHT),
    ]
    for title, outcome in (
        ("Regressed", REGRESSED),
        ("No longer answered", LOST),
        ("Fixed", FIXED),
        ("Both wrong", BOTH_WRONG),
    ):
        pairs = found.pairs(outcome)
        rows = [
            [
                pair.case,
                pair.base.lead.verdict,
                pair.head.lead.verdict,
                (pair.head.lead.message or pair.base.lead.message),
            ]
            for pair in pairs
        ]
        if rows:
            parts += [f"<h2>{title}: {len(rows)}</h2>", _table(("case", "base", "head", "message"), rows)]
    for title, said in (("Recipes and claims", found.declared), ("Architecture gates", found.gates)):
        if said:
            parts += [f"<h2>{title}</h2><ul>", *(f"<li>{html.escape(text.clean(line))}</li>" for line in said), "</ul>"]
    if found.versions:
        parts += ["<h2>Versions that differ</h2>", _table(("what", "base", "head"), found.versions)]
    return "\n".join([*parts, "</body></html>", ""])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    def row(cells_: Sequence[str], tag: str) -> str:
        marks = [' class="n"' if right[i : i + 1] == "r" else "" for i in range(len(cells_))]
        return (
            "<tr>"
            + "".join(
                f"<{tag}{mark}>{html.escape(text.clean(cell))}</{tag}>"
                for cell, mark in zip(cells_, marks, strict=True)
            )
            + "</tr>"
        )

    return "<table>" + row(head, "th") + "".join(row(item, "td") for item in rows) + "</table>"
