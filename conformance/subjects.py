"""What ``repro`` is asked to show: a case's text, a record's id, a capsule, or a run's ``run.json``.

A file may come from another machine. It says which case, backend, device and options are meant; it never says which
code to load: a backend that came from ``--plugin`` must be named again, except for our own mutants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import capsule as capsules
from conformance.capsule import Capsule, CapsuleError
from conformance.discover import UsageError
from conformance.journal import RECORDS, TOOL, read_records
from conformance.tensor_file import TensorFileError, strict_json
from fuzz.case import Case
from reports.record import Record

ID = re.compile(r"[0-9a-f]{16}\Z")
MAX_RUN = 2**26
"""Largest run.json in bytes."""
MOST = 8
"""Failures of a run.json that are shown."""
OWN_PLUGINS = ("conformance.mutant_backends",)
"""Plugins that a file may name: ours, without side effects."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One thing to show. backend: empty where the user must name it. capsule: None for a bare case."""

    case: str
    backend: str = ""
    device: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    input_sha256: str = ""
    capsule: Capsule | None = None


def subjects(text: str, folder: Path) -> list[Subject]:
    """What a text means. Raises `UsageError`, `CapsuleError`, ``CaseError`` and ``JournalError``.

    folder: the ``--out`` of a run, where ids are looked up.
    """
    if ID.match(text) and not Path(text).exists():
        return _recorded(text, folder)
    path = Path(text).expanduser()
    if not text or not text.isprintable() or not (path.exists() or path.suffix in (".json", ".safetensors")):
        Case.parse(text)  # raises what is wrong with it
        return [Subject(case=text)]
    if path.is_dir():
        return _of_run(path / "run.json")
    if path.suffix == ".safetensors":
        path = path.with_suffix(".json")
    if not path.is_file():
        raise UsageError(f"{text}: no such file")
    data = _object(path)
    return _of_run(path) if data.get("tool") == TOOL else [of_capsule(capsules.read(path))]


def of_capsule(capsule: Capsule) -> Subject:
    """A capsule as a subject."""
    return Subject(
        case=capsule.case,
        backend=capsule.backend,
        device=capsule.device,
        options=capsule.options_dict,
        plugins=capsule.plugins,
        input_sha256=capsule.input_sha256,
        capsule=capsule,
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_RUN:
            raise CapsuleError(f"{path}: more than {MAX_RUN} bytes")
        return strict_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CapsuleError(f"{path}: {error.strerror or error}") from None
    except TensorFileError as error:
        raise CapsuleError(str(error)) from None


def _recorded(name: str, folder: Path) -> list[Subject]:
    """The failing records of a case id in a run, else a capsule of that id."""
    held = folder / "capsules" / f"{name}.json"
    if held.is_file():
        return [of_capsule(capsules.read(held))]
    if not (folder / RECORDS).is_file():
        raise UsageError(f"{name}: {folder} holds no {RECORDS} to look it up in; name the run's folder with --in")
    records = [record for record in read_records(folder / RECORDS) if record.id == name]
    if not records:
        raise UsageError(f"{name}: no record of {folder / RECORDS} has this id")
    failing = [record for record in records if record.failing]
    plugins = _object(folder / "run.json").get("plugins", ()) if (folder / "run.json").is_file() else ()
    return _distinct(_of_record(record, plugins) for record in failing or records[:1])


def _of_record(record: Record, plugins: Any) -> Subject:
    return Subject(
        case=record.case,
        backend=record.backend,
        device=record.device,
        options=dict(word.split("=", 1) for word in record.options.split()),
        plugins=tuple(item for item in plugins if isinstance(item, str)),
        input_sha256=record.input_sha256,
    )


def _of_run(path: Path) -> list[Subject]:
    """The failures that a run.json lists; capsules beside it where they are there."""
    data = _object(path)
    if data.get("tool") != TOOL:
        raise CapsuleError(f"{path}: not written by {TOOL}")
    listed = data.get("failures", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise CapsuleError(f"{path}: failures is no list of objects")
    found = []
    for item in listed[:MOST]:
        held = path.parent / str(item.get("capsule", ""))
        name = str(item.get("capsule", ""))
        if re.match(r"capsules/[0-9a-f]{16}\.json\Z", name) and held.is_file():
            found.append(of_capsule(capsules.read(held)))
            continue
        texts = {key: item.get(key, "") for key in ("case", "backend", "device", "options", "input_sha256")}
        if not all(isinstance(value, str) and value.isprintable() for value in texts.values()):
            raise CapsuleError(f"{path}: a failure has a field that is no line of text")
        Case.parse(texts["case"])
        words = texts.pop("options").split()
        if not all(re.match(r"[a-z_]+=[A-Za-z0-9_.+,:-]+\Z", word) for word in words):
            raise CapsuleError(f"{path}: {' '.join(words)[:80]!r} are no options")
        plugins = tuple(item for item in data.get("plugins", ()) if isinstance(item, str))
        found.append(Subject(**texts, options=dict(word.split("=", 1) for word in words), plugins=plugins))
    if not found:
        raise UsageError(f"{path}: the run lists no unexplained failure")
    return _distinct(found)


def _distinct(found: Iterable[Subject]) -> list[Subject]:
    kept: dict[str, Subject] = {}
    for item in found:
        key = json.dumps([item.case, item.backend, item.device, sorted(item.options.items()), item.input_sha256])
        kept.setdefault(key, item)
    return list(kept.values())
