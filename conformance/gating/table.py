"""The files of a run of `gating`: one page for people, twice, and one row an answer for machines."""

from __future__ import annotations

from html import escape
from pathlib import Path

from conformance.gating.result import Result, frame
from conformance.gating.section import section
from reports.markdown import section_lines
from reports.sections import Table

FILES = ("gating.md", "gating.csv", "gating.html")
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}summary{cursor:pointer}"
    "td,th{border:1px solid #8888;padding:.2em .5em;text-align:left;vertical-align:top}"
)


def markdown(result: Result) -> str:
    """The whole report: disagreements with their repro lines, what was not observed, then a table for each library."""
    return "\n".join(section_lines(section(result), level=1))


def html(result: Result) -> str:
    """One self-contained page."""
    shown = section(result)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(shown.title)}</title><style>{STYLE}</style></head>",
        f"<body><h1>{escape(shown.title)}</h1><p>{escape(shown.headline)}</p>",
        *(_table(item) for item in shown.tables),
        *(f"<p>{escape(note)}</p>" for note in shown.notes),
        "<details><summary>Everything</summary>",
        frame(result).to_html(index=False, escape=True),
        "</details></body></html>",
    ]
    return "\n".join(parts)


def _table(item: Table) -> str:
    rows = "".join(
        f"<tr>{''.join(_cell(item, place, cell) for place, cell in enumerate(row))}</tr>" for row in item.rows
    )
    head = "".join(f"<th>{escape(cell)}</th>" for cell in item.head)
    notes = "".join(f"<p>{escape(note)}.</p>" for note in item.notes)
    return f"<h2>{escape(item.title)}</h2>{notes}<table><tr>{head}</tr>{rows}</table>"


def _cell(item: Table, place: int, cell: str) -> str:
    shown = escape(cell)
    return f"<td>{f'<code>{shown}</code>' if place in (*item.code, *item.lines) else shown}</td>"


def write(result: Result, out: Path) -> list[Path]:
    """Write gating.md, gating.csv and gating.html; their paths. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name for name in FILES]
    paths[0].write_text(markdown(result), encoding="utf-8")
    frame(result).to_csv(paths[1], index=False)
    paths[2].write_text(html(result), encoding="utf-8")
    return paths
