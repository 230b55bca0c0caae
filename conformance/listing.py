"""The table of backends: version, devices, claims and recipes of each, or why it does not run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from conformance.targets import Fleet, Found


def show(devices: Sequence[str], plugins: Sequence[str], jobs: int, console: Console) -> None:
    """Describe every source and print what it offers. Raises `UsageError` for a device or plugin that is no good."""
    fleet = Fleet(plugins, None, None)
    try:
        survey = fleet.survey((), devices, jobs)
    finally:
        fleet.close()
    for item in survey.found:
        console.print(_table(item))
    for absent in survey.absent:
        where = f" on {absent.device}" if absent.device else ""
        _say(console, f"{absent.backend}{where} does not run: {absent.reason}")
    _say(console, f"devices: {', '.join(survey.devices)}")


def _table(item: Found) -> Table:
    about = item.description
    device = " ".join(word for word in (about.device, about.device_name, about.sm and f"sm{about.sm}") if word)
    pace = f", {about.pace:.0%} of a plan" if about.pace < 1 else ""
    table = Table(
        title=f"{about.backend} {about.version} on {device}{pace}; {item.source.label}; {about.interpreter}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    for name in ("operation", "variants", "claim", "recipe", "source"):
        table.add_column(name, overflow="fold")
    rows: dict[tuple[str, ...], list[str]] = {}
    for claimed in about.claims:
        source = claimed.recipe.get("source") or claimed.claim["source"]
        key = (claimed.claim["operation"], claimed.claim_text, claimed.recipe_text, source)
        rows.setdefault(key, []).append(claimed.claim["variant"])
    for (operation, claim, recipe, source), variants in rows.items():
        table.add_row(operation, ", ".join(variants), claim, recipe, source)
    return table


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
