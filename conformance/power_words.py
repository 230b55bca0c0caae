"""The words of ``power``, checked in the mutants' source: importing them imports torch, which takes seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from conformance import planning
from conformance.launch import package_roots

PROBE = "probe-"
"""What the families of probes begin with; their names are made when they are imported, and are checked then."""


def check(areas: Sequence[str], families: Sequence[str]) -> None:
    """Raises `UsageError` for a word that no mutant has."""
    written = areas_and_families()
    planning.check("area", areas, written[0])
    planning.check("family", [name for name in families if not name.startswith(PROBE)], written[1])


def areas_and_families() -> tuple[list[str], list[str]]:
    """The areas, and the families but those of probes, sorted."""
    folder = Path(package_roots()["fuzz"], "mutants")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    areas, families = (set(re.findall(rf'\b{word}="([a-z0-9-]+)"', text)) for word in ("area", "family"))
    return sorted(areas - {"none"}), sorted(families)
