"""Published claims of support, and known disagreements, read strictly from ``expected.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from conformance.gating.model import ARCHITECTURES, LIBRARIES, Finding, Observation

DEFAULT = Path(__file__).with_name("expected.toml")
_SUPPORT = {"library", "subject", "variants", "versions", "admits", "refuses", "source"}
_EXPLAINED = {"rule", "library", "subject", "sms", "versions", "reason", "source"}


class ExpectedError(ValueError):
    """A table of claims that cannot be read; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """One claim: which architectures a subject and its variants admit and refuse in a range of versions."""

    library: str
    subject: str
    variants: tuple[str, ...]
    versions: SpecifierSet
    admits: frozenset[int]
    refuses: frozenset[int]
    facts: tuple[str, ...]
    without: tuple[str, ...]
    source: str

    def covers(self, item: Observation, version: str) -> bool:
        """Whether the claim speaks of this observation."""
        return (
            (self.library, self.subject) == (item.library, item.subject)
            and item.variant in self.variants
            and item.sm in self.admits | self.refuses
            and holds(self.versions, version)
        )


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A known disagreement; its finding must lie within its architectures."""

    rule: str
    library: str
    subject: str
    variants: tuple[str, ...]
    sms: frozenset[int]
    versions: SpecifierSet
    reason: str
    source: str

    def explains(self, finding: Finding, version: str) -> bool:
        """Whether the finding is this one."""
        return (
            (self.rule, self.library, self.subject) == (finding.rule, finding.library, finding.subject)
            and (not self.variants or (bool(finding.variants) and set(finding.variants) <= set(self.variants)))
            and set(finding.sms) <= self.sms
            and holds(self.versions, version)
        )


@dataclass(frozen=True, kw_only=True)
class Expected:
    """All claims and all known disagreements."""

    support: tuple[Support, ...] = ()
    explained: tuple[Explained, ...] = ()


def holds(versions: SpecifierSet, version: str) -> bool:
    """Whether a version lies in a range; one that is no version lies in none but the empty one."""
    try:
        return versions.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return not str(versions)


def explained(finding: Finding, version: str, expected: Expected) -> Finding:
    """The finding with the reason and source of the row that explains it, or as it is."""
    row = next((row for row in expected.explained if row.explains(finding, version)), None)
    return replace(finding, explained=row.reason, source=row.source) if row else finding


def load(path: Path = DEFAULT) -> Expected:
    """Read a file of claims. Raises ExpectedError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExpectedError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExpectedError(f"{path}: {error}") from None
    if odd := set(data) - {"support", "explained"}:
        raise ExpectedError(f"{path}: unknown table {sorted(odd)[0]!r}")
    support = [_support(f"{path}: support {number}", row) for number, row in _rows(path, data, "support")]
    explained = [_explained(f"{path}: explained {number}", row) for number, row in _rows(path, data, "explained")]
    return Expected(support=tuple(support), explained=tuple(explained))


def _rows(path: Path, data: Mapping[str, Any], name: str) -> Sequence[tuple[int, dict[str, Any]]]:
    rows = data.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ExpectedError(f"{path}: {name} is no array of tables")
    return list(enumerate(rows, start=1))


def _support(where: str, row: dict[str, Any]) -> Support:
    _keys(where, row, _SUPPORT, {"facts", "without"})
    admits, refuses = _sms(where, row["admits"]), _sms(where, row["refuses"])
    if admits & refuses:
        raise ExpectedError(f"{where}: SM{min(admits & refuses)} is both admitted and refused")
    return Support(
        library=_library(where, row["library"]),
        subject=_text(where, row["subject"]),
        variants=_texts(where, row["variants"]),
        versions=_versions(where, row["versions"]),
        admits=admits,
        refuses=refuses,
        facts=_texts(where, row.get("facts", [])),
        without=_texts(where, row.get("without", [])),
        source=_text(where, row["source"]),
    )


def _explained(where: str, row: dict[str, Any]) -> Explained:
    _keys(where, row, _EXPLAINED, {"variants"})
    return Explained(
        rule=_text(where, row["rule"]),
        library=_library(where, row["library"]),
        subject=_text(where, row["subject"]),
        variants=_texts(where, row.get("variants", [])),
        sms=_sms(where, row["sms"]),
        versions=_versions(where, row["versions"]),
        reason=_text(where, row["reason"]),
        source=_text(where, row["source"]),
    )


def _keys(where: str, row: dict[str, Any], required: set[str], optional: set[str]) -> None:
    if missing := required - set(row):
        raise ExpectedError(f"{where}: no {sorted(missing)[0]}")
    if odd := set(row) - required - optional:
        raise ExpectedError(f"{where}: unknown key {sorted(odd)[0]!r}")


def _library(where: str, value: Any) -> str:
    if value not in LIBRARIES:
        raise ExpectedError(f"{where}: library {value!r} is none of {', '.join(LIBRARIES)}")
    return str(value)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ExpectedError(f"{where}: {value!r} is no text")
    return value


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ExpectedError(f"{where}: {value!r} is no list of texts")
    return tuple(_text(where, item) for item in value)


def _sms(where: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(type(item) is int and item in ARCHITECTURES for item in value):
        raise ExpectedError(
            f"{where}: {value!r} is no list of architectures among {', '.join(map(str, ARCHITECTURES))}"
        )
    return frozenset(value)


def _versions(where: str, value: Any) -> SpecifierSet:
    try:
        return SpecifierSet(value)
    except (InvalidSpecifier, TypeError, AttributeError):
        raise ExpectedError(f"{where}: {value!r} is no range of versions") from None
