"""report.html: one self-contained page, readable from a file, in light or dark, on paper or a phone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from reports import figures, tables, text
from reports.groups import FAIL, KNOWN, PASS, REFUSED, UNSUPPORTED
from reports.kept import kept
from reports.summary import Summary, lines, stop_line

CAUSES, ROWS, MOST = 10, 5, 200
"""Kinds of failure that are shown of a group, calls of a kind, and kinds of all groups."""
OUTCOMES = {
    "failed": ("bad", "Not conformant"),
    "empty": ("bad", "Nothing ran"),
    "incomplete": ("warn", "Incomplete"),
    "conformant": ("ok", "Conformant"),
}


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=text.count,
        headroom=text.headroom,
        ratio=text.ratio,
        share=text.share,
        seconds=text.seconds,
        plural=text.plural,
    )
    return environment.get_template("report.html.j2")


def render(summary: Summary) -> str:
    """The whole page. Everything that comes from records or the run is escaped by the template."""
    tone, outcome = OUTCOMES[summary.outcome]
    first, *rest = lines(summary)
    histograms, exact, histograms_hidden = figures.histograms(summary)
    maps, maps_hidden = figures.maps(summary)
    tiles = [
        ("bad", "unexplained", summary.counts[FAIL]),
        ("warn", "known failures", summary.counts[KNOWN]),
        ("ok", "passed", summary.counts[PASS]),
        ("mute", "refused", summary.counts[REFUSED]),
    ]
    return _template().render(
        tone=tone,
        outcome=outcome,
        first=first.split(": ", 1)[-1],
        lines=[
            item
            for item in rest
            if not item.startswith(
                ("Known to fail: ", "Did not run: ", "Ran in part: ", "Problem: ", "The run stopped")
            )
        ],
        stopped="" if summary.complete else stop_line(summary),
        tiles=tiles,
        absent=tables.absent(summary),
        not_run=[name for name, _ in summary.not_run],
        unclaimed_calls=summary.counts[UNSUPPORTED],
        summary=summary,
        results=tables.results(summary),
        ranks=tables.RANK,
        failures=tables.failures(summary, causes=CAUSES, rows=ROWS, most=MOST),
        kept=kept(summary.run),
        known=tables.known(summary),
        sections=summary.sections,
        unclaimed=tables.unclaimed(summary),
        backends=tables.backends(summary),
        facts=tables.facts(summary),
        words=tables.words(),
        notes=tables.NOTES,
        histograms=histograms,
        histograms_hidden=histograms_hidden,
        exact=exact,
        maps=maps,
        maps_hidden=maps_hidden,
    )
