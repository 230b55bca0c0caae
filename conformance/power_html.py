"""The kill matrix as a picture: families against seeds and against other checks, one HTML file that opens offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from conformance.power import Hunt
from conformance.power_checks import CHECKS
from conformance.power_score import NAMES, Score, by_mutant, slowest, summary
from fuzz.mutants.base import AREAS

ROW, CELL, LABEL, TOP = 17, 88, 350, 46
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem; color: #1d2330;
  background: #fff }
svg { font: 11px system-ui, sans-serif; max-width: 100%; height: auto } svg text { fill: currentColor }
svg .cell { fill: #10151f } svg .area { font-weight: 600 }
.k0 { fill: #0f8a5f } .k1 { fill: #55b98b } .k2 { fill: #a9dcc0 } .missed { fill: #d5483f } .none { fill: #e6e8ee }
.seen { fill: #7d8db5 } .blind { fill: #f3c6a0 }
@media (prefers-color-scheme: dark) { body { color: #dfe3ec; background: #14171e } .none { fill: #2b303b } }
"""


def page(hunts: Sequence[Hunt], score: Score) -> str:
    """The whole file."""
    items = "".join(f"<li>{escape(line)}</li>" for line in summary(score, hunts))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Detection power</title>'
        f"<style>{STYLE}</style></head><body><h1>Detection power</h1><ul>{items}</ul>"
        "<p>Left: cases until the first catch under each seed, the darker the fewer; red escapes. Right: whether other "
        "checks saw the very answer that was caught (blue) or let it pass (orange).</p>"
        f"{matrix(hunts)}</body></html>\n"
    )


def matrix(hunts: Sequence[Hunt]) -> str:
    """The picture alone, SVG: a row for each mutant, a cell for each seed and each other check."""
    groups = sorted(by_mutant(hunts), key=lambda group: AREAS.index(group[0].mutant.area))
    seeds = list(dict.fromkeys(item.seed for item in hunts))
    heads = [f"seed {seed}" for seed in seeds] + [NAMES[name] for name in CHECKS]
    width = LABEL + CELL * len(heads) + 24
    parts = [
        f'<text x="{_x(index, seeds) + CELL / 2 - 2}" y="{TOP - 10}" text-anchor="middle">{escape(head)}</text>'
        for index, head in enumerate(heads)
    ]
    y, area = TOP, ""
    for group in groups:
        about = group[0].mutant
        if about.area != area:
            area = about.area
            y += 6
            parts.append(f'<text class="area" x="0" y="{y + 12}">{escape(area)}</text>')
        parts.append(f'<text x="96" y="{y + 12}">{escape(about.family[:42])}</text>')
        for index, item in enumerate(group):
            parts.append(_cell(index, seeds, y, *_caught(item)))
        worst = slowest(group)
        for index, name in enumerate(CHECKS):
            known = worst.others.get(name)
            kind = "none" if known is None else "seen" if known else "blind"
            said = {None: "no answer to compare", True: "sees it", False: "lets it pass"}[known]
            parts.append(_cell(len(seeds) + index, seeds, y, kind, "", f"{about.family}: {NAMES[name]} {said}"))
        y += ROW
    return f'<svg viewBox="0 0 {width} {y + 6}" width="{width}" role="img">{"".join(parts)}</svg>'


def _caught(item: Hunt) -> tuple[str, str, str]:
    """Class, text and title of a seed's cell."""
    if not item.caught:
        return "missed", "escapes", f"{item.mutant.family}: {item.cases} cases, nothing"
    shade = min(2, int(math.log10(item.cases)))
    return f"k{shade}", str(item.cases), f"{item.mutant.family}: {item.check} after {item.seconds:.2f} s"


def _x(index: int, seeds: Sequence[int]) -> int:
    return LABEL + CELL * index + (18 if index >= len(seeds) else 0)


def _cell(index: int, seeds: Sequence[int], y: int, kind: str, text: str, title: str) -> str:
    x = _x(index, seeds)
    label = f'<text class="cell" x="{x + CELL / 2 - 2}" y="{y + 12}" text-anchor="middle">{text}</text>' if text else ""
    box = f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL - 4}" height="{ROW - 2}" rx="2"/>'
    return f"<g><title>{escape(title)}</title>{box}{label}</g>"
