"""Another version of a library in an environment of its own, and what its gates say otherwise.

``--against flashinfer==0.7.2.post1`` makes an environment with that one distribution, which lies over this interpreter;
``--against PATH`` takes another interpreter or virtual environment as it is.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from conformance import environments
from conformance.discover import UsageError
from conformance.gating.expected import Expected
from conformance.gating.model import Finding, Observation, Observed

DISTRIBUTIONS = {"flashinfer": "flashinfer-python", "sglang": "sglang", "torch": "torch", "triton": "triton"}
SAID = {"yes": "yes", "no": "no", "unknown": "?", "error": "raises"}


@dataclass(frozen=True)
class Against:
    """What to compare with: a library's other version (``library`` and ``version``), or an interpreter for all."""

    library: str = ""
    version: str = ""
    python: str = ""

    @property
    def spec(self) -> str:
        """What ``--against`` takes."""
        return self.python or f"{self.library}=={self.version}"


def parse(text: str, libraries: Sequence[str]) -> Against:
    """``LIBRARY==VERSION``, ``VERSION`` where one library is asked, or a path. Raises UsageError."""
    path = Path(text).expanduser()
    if os.sep in text:
        found = path / "bin" / "python" if path.is_dir() else path
        if not found.is_file() or not os.access(found, os.X_OK):
            raise UsageError(f"--against {text}: no Python executable and no virtual environment")
        return Against(python=str(found))
    library, equals, version = text.rpartition("==")
    if not equals:
        if len(libraries) != 1:
            raise UsageError(f"--against {text}: of which library? Name one by --library, or write LIBRARY=={text}")
        library = libraries[0]
    if library not in DISTRIBUTIONS:
        raise UsageError(f"--against {text}: {library!r} is none of {', '.join(DISTRIBUTIONS)}")
    try:
        Version(version)
    except InvalidVersion:
        raise UsageError(f"--against {text}: {version!r} is no version") from None
    return Against(library=library, version=version)


def interpreter(against: Against) -> str:
    """The interpreter to ask: the one that was named, or one that holds the version, made now. Raises UsageError."""
    if against.python:
        return against.python
    release = environments.Release(DISTRIBUTIONS[against.library], Version(against.version))
    return environments.create(release, dependencies=False)


Cells = dict[tuple[str, str], dict[int, Observation]]


def changes(old: Observed, new: Observed, expected: Expected, spec: str) -> list[Finding]:
    """Claims that vanish or appear from one version to another, joined over variants and architectures.

    Where a published row speaks of both sides, or of the new one alone, and agrees, its source explains the change.
    spec: what ``--against`` takes to show it again.
    """
    before, after = _cells(old), _cells(new)
    same: dict[tuple[str, str, str, str, tuple[int, ...]], list[str]] = defaultdict(list)
    for subject, variant in dict.fromkeys([*before, *after]):
        rows = before.get((subject, variant), {}), after.get((subject, variant), {})
        kinds: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for sm in sorted(set(rows[0]) | set(rows[1])):
            was, now = (row[sm].answer if sm in row else None for row in rows)
            if was == now or "unknown" in (was, now) or "yes" not in (was, now):
                continue
            what = "no such runner or format" if None in (was, now) else SAID[(now if was == "yes" else was) or ""]
            rule = "vanished" if was == "yes" else "appeared"
            source = _source(rows[0].get(sm), rows[1].get(sm), old.version, new.version, expected)
            kinds[rule, what, source].append(sm)
        for (rule, what, source), sms in kinds.items():
            same[rule, subject, what, source, tuple(sms)].append(variant)
    found = []
    for (rule, subject, what, source, where), variants in same.items():
        sides = (f"yes in {old.version}", f"{what} in {new.version}")
        if rule == "appeared":
            sides = (f"{what} in {old.version}", f"yes in {new.version}")
        found.append(
            Finding(
                rule=rule,
                library=new.library,
                subject=subject,
                variants=tuple(filter(None, variants)),
                sms=where,
                message=", ".join(sides),
                line=f"python -m conformance gating --library {new.library} --subject {subject} --against {spec}",
                source=source,
                explained=f"as published: {source}" if source else "",
            )
        )
    return sorted(found, key=lambda item: (bool(item.explained), item.rule, item.subject))


def _cells(observed: Observed) -> Cells:
    cells: Cells = defaultdict(dict)
    for item in observed.observations:
        cells[item.subject, item.variant][item.sm] = item
    return cells


def _source(was: Observation | None, now: Observation | None, old: str, new: str, expected: Expected) -> str:
    """Who says so: a claim about the new version that agrees with it; empty if a claim disagrees with either side."""
    sources = []
    for item, version in ((was, old), (now, new)):
        if item is None:
            continue
        for row in expected.support:
            if row.covers(item, version):
                if (item.answer == "yes") != (item.sm in row.admits):
                    return ""
                if item is now:
                    sources.append(row.source)
    return "; ".join(dict.fromkeys(sources))


def same_version(old: Observed, new: Observed) -> bool:
    """Whether two observations are of one version, so that there is nothing to compare."""
    return bool(old.version) and re.sub(r"\s", "", old.version) == re.sub(r"\s", "", new.version)
