"""The ledger of known failures: entries that are bound to a reason and to a witness case.

An entry explains failing records; it is proved on every run by its witness, which is executed first and must fail in
the way that the entry says. The file is read strictly: anything odd in it is one line and exit code 2.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from conformance.messages import Description
from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR
from reports.record import FAILING, Record

DEFAULT = Path(__file__).with_name("ledger.toml")
_ISSUE = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+#[0-9]+\Z")
_TEXTS = ("id", "backend", "versions", "operation", "part", "verdict", "message", "reason", "issue", "witness")
_OPTIONAL = ("issue", "libraries", "devices", "sm", "where")
_KEYS = (*_TEXTS, "libraries", "devices", "sm", "variants", "where")


class LedgerError(ValueError):
    """A ledger that cannot be read; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One known failure.

    versions: PEP 440 range of the backend's version, empty for any. libraries: library -> range, all of which must
    hold. devices: patterns such as ``cuda:*``. sm: patterns of architectures such as ``90``. where: parameter -> values
    of the cases concerned, any if absent. message: regular expression that is searched for in a record's message.
    witness: text of a case that fails so.
    """

    id: str
    backend: str
    versions: SpecifierSet
    operation: str
    variants: tuple[str, ...]
    part: str
    verdict: str
    message: re.Pattern[str]
    reason: str
    witness: str
    issue: str = ""
    libraries: Mapping[str, SpecifierSet]
    devices: tuple[str, ...] = ("*",)
    sm: tuple[str, ...] = ("*",)
    where: Mapping[str, tuple[str, ...]]

    def applies(self, description: Description) -> bool:
        """Whether the entry speaks of this backend, version, device, architecture and set of libraries."""
        return self._concerns(description) and all(
            name in description.libraries and _within(description.libraries[name], versions)
            for name, versions in self.libraries.items()
        )

    def _concerns(self, what: Description | Record) -> bool:
        """Whether the entry speaks of this backend, version, device and architecture, whatever the libraries."""
        return (
            what.backend == self.backend
            and _within(what.version, self.versions)
            and any(fnmatchcase(what.device, pattern) for pattern in self.devices)
            and any(fnmatchcase(what.sm, pattern) for pattern in self.sm)
        )

    def covers_case(self, case: Case) -> bool:
        """Whether the entry speaks of this case."""
        return (
            case.operation == self.operation
            and case.variant in self.variants
            and all(case[key] in values for key, values in self.where.items())
        )

    def covers(self, record: Record) -> bool:
        """Whether the entry explains this failing record."""
        return (
            record.failing
            and record.verdict == self.verdict
            and (record.part == self.part or self._is_twins(record))
            and self._concerns(record)
            and self.message.search(record.message) is not None
            and self.covers_case(Case.parse(record.case))
        )

    def _is_twins(self, record: Record) -> bool:
        """Whether a property failed by this part of the twin's answer (``conformance/relations.py``)."""
        return record.part.startswith("property:") and f": {self.part}: " in record.message

    def to_json(self) -> dict[str, str]:
        """What run.json and the reports say of an entry."""
        names = ("id", "backend", "operation", "part", "verdict", "reason", "issue", "witness")
        return {**{name: getattr(self, name) for name in names}, "versions": str(self.versions)}


def _within(version: str, versions: SpecifierSet) -> bool:
    if not str(versions):
        return True
    try:
        return versions.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


@dataclass(frozen=True)
class Ledger:
    """Entries with distinct ids."""

    entries: tuple[Entry, ...] = ()

    def narrowed(self, description: Description, groups: Iterable[tuple[str, str]]) -> Ledger:
        """The entries that apply to a target and speak of one of the (operation, variant) groups.

        The witness of an entry need not be of those groups: it is replayed all the same.
        """
        wanted = set(groups)
        return Ledger(
            tuple(
                entry
                for entry in self.entries
                if entry.applies(description)
                and wanted.intersection((entry.operation, name) for name in entry.variants)
            )
        )

    def match(self, record: Record) -> str | None:
        """The id of the first entry that explains a failing record."""
        return next((entry.id for entry in self.entries if entry.covers(record)), None)

    def marked(self, record: Record) -> Record:
        """The record with its ledger id."""
        return replace(record, ledger_id=self.match(record) or "") if record.failing else record

    def witnesses(self) -> list[Case]:
        """The witness cases in the order of the entries, without repetition."""
        return [Case.parse(text) for text in dict.fromkeys(entry.witness for entry in self.entries)]

    def problems(self, records: Iterable[Record]) -> list[str]:
        """One line for each entry whose witness did not fail in the way that the entry says.

        records: those of one target, of its witnesses at least.
        """
        found: dict[str, list[Record]] = {entry.witness: [] for entry in self.entries}
        for record in records:
            if record.case in found:
                found[record.case].append(record)
        lines = [_witness_problem(entry, found[entry.witness]) for entry in self.entries]
        return [line for line in lines if line]


def _witness_problem(entry: Entry, records: Sequence[Record]) -> str | None:
    if any(entry.covers(record) for record in records):
        return None
    prefix = f"ledger {entry.id}: the witness"
    failing = [record for record in records if record.failing]
    if failing:
        record = failing[0]
        return f"{prefix} fails in another way: {record.part} is {record.verdict}: {record.message}"
    if any(record.verdict == "pass" for record in records):
        return f"{prefix} passes: remove the entry or narrow its versions"
    why = next((record.message for record in records), "it was not executed")
    return f"{prefix} cannot run: {why}"


def load(path: Path) -> Ledger:
    """Read a ledger. Raises `LedgerError`."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LedgerError(f"ledger: cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LedgerError(f"ledger: {path}: {error}") from None
    rows = data.pop("entry", [])
    if data or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise LedgerError(f"ledger: {path}: expected [[entry]] tables only, found {', '.join(data) or 'entry'}")
    entries = tuple(_entry(row, f"ledger: {path}: entry {row.get('id', number)!r}") for number, row in enumerate(rows))
    ids = [entry.id for entry in entries]
    for name in ids:
        if ids.count(name) > 1:
            raise LedgerError(f"ledger: {path}: two entries have the id {name!r}")
    return Ledger(entries)


def _entry(row: Mapping[str, Any], place: str) -> Entry:
    extra = sorted(set(row) - set(_KEYS))
    missing = sorted(set(_KEYS) - set(_OPTIONAL) - set(row))
    if extra or missing:
        what = [f"unknown {', '.join(extra)}"] * bool(extra) + [f"lacks {', '.join(missing)}"] * bool(missing)
        raise LedgerError(f"{place}: {'; '.join(what)}")
    texts = {key: row.get(key, "") for key in _TEXTS}
    for key, value in texts.items():
        if not isinstance(value, str) or (not value.strip() and key not in ("issue", "versions", "message")):
            raise LedgerError(f"{place}: {key} is not a text")
    where, libraries = row.get("where", {}), row.get("libraries", {})
    if not isinstance(where, dict) or not isinstance(libraries, dict):
        raise LedgerError(f"{place}: where and libraries are tables")
    try:
        entry = Entry(
            **{
                **texts,
                "versions": SpecifierSet(texts["versions"]),
                "message": re.compile(texts["message"]),
                "variants": _words(row["variants"], f"{place}: variants"),
                "devices": _words(row.get("devices", ["*"]), f"{place}: devices"),
                "sm": _words(row.get("sm", ["*"]), f"{place}: sm"),
                "libraries": {name: SpecifierSet(str(value)) for name, value in libraries.items()},
                "where": {key: _words(values, f"{place}: where.{key}") for key, values in where.items()},
            }
        )
    except re.error as error:
        raise LedgerError(f"{place}: message is not a regular expression: {error}") from None
    except InvalidSpecifier as error:
        raise LedgerError(f"{place}: {error}") from None
    problem = _problem(entry)
    if problem:
        raise LedgerError(f"{place}: {problem}")
    return entry


def _words(value: object, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise LedgerError(f"{place} is not a list of texts")
    return tuple(value)


def _problem(entry: Entry) -> str | None:
    if entry.verdict not in FAILING:
        return f"verdict {entry.verdict!r} is none of {', '.join(FAILING)}"
    if entry.issue and not _ISSUE.match(entry.issue):
        return f"issue {entry.issue!r} is not owner/repository#number"
    rules = GRAMMAR.get(entry.operation)
    if rules is None:
        return f"unknown operation {entry.operation!r}"
    for variant in entry.variants:
        if variant not in rules:
            return f"{entry.operation} has no variant {variant!r}"
        unknown = sorted(set(entry.where) - set(rules[variant].keys))
        if unknown:
            return f"{entry.operation} {variant} has no key {', '.join(unknown)}"
    try:
        witness = Case.parse(entry.witness)
    except CaseError as error:
        return f"witness: {error}"
    return None if entry.covers_case(witness) else "the witness is not one of the cases that the entry covers"
