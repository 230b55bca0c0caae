"""What the tests of the gates share: stand-in distributions, and what is asked of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.version import Version

from conformance.gating.expected import load
from conformance.gating.model import Finding, Observed
from conformance.gating.observed import observe
from conformance.gating.rules import findings


def installed(name: str, least: str) -> pytest.MarkDecorator:
    try:
        found = Version(importlib.metadata.version(name)) >= Version(least)
    except importlib.metadata.PackageNotFoundError:
        found = False
    return pytest.mark.skipif(not found, reason=f"{name} {least} or newer is not installed")


def site(folder: Path, distribution: str, version: str, files: Mapping[str, str]) -> Path:
    """A folder for PYTHONPATH with one distribution in it."""
    about = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    for path, text in {about: f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"}.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def ask(
    folder: Path, monkeypatch: pytest.MonkeyPatch, library: str = "flashinfer", sms: tuple[int, ...] = (90, 100)
) -> Observed:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return observe(library, sms)


def answers(observed: Observed) -> dict[tuple[str, int], tuple[str, ...]]:
    return {(row.subject, row.sm): tuple(gate.answer for gate in row.gates) for row in observed.observations}


def unexplained(seen: Observed) -> list[Finding]:
    return [item for item in findings(seen, load()) if not item.explained]
