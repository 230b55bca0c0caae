"""The failures that a run made smaller and kept: what run.json lists under ``failures``, cleaned for the reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reports import text

_FILE = re.compile(r"capsules/[0-9a-f]{16}\.json\Z")


@dataclass(frozen=True)
class Kept:
    """One failure. link: of its capsule, relative to the report; empty without one. size: differing of all elements."""

    what: str
    calls: int
    smallest: str
    size: str
    link: str
    repro: str
    note: str


def kept(run: Mapping[str, Any]) -> list[Kept]:
    """The failures that have a capsule, or a word on why they have none."""
    listed = run.get("failures")
    if not isinstance(listed, list):
        return []
    found = []
    for item in listed:
        if not isinstance(item, Mapping) or not (item.get("capsule") or item.get("note")):
            continue
        words = {
            key: text.line(item.get(key, "")) for key in ("backend", "device", "part", "verdict", "shrunk", "note")
        }
        link = str(item.get("capsule", ""))
        size = f"{item.get('differing')} of {item.get('elements')}" if link else ""
        calls = item.get("calls")
        found.append(
            Kept(
                what=f"{words['backend']} on {words['device']}: {words['part']} {words['verdict']}",
                calls=calls if isinstance(calls, int) else 1,
                smallest=words["shrunk"] or text.line(item.get("case", "")),
                size=text.line(size),
                link=link if _FILE.match(link) else "",
                repro=text.line(item.get("repro", "")),
                note=words["note"],
            )
        )
    return found
