"""Recorded selections: what a router answered to a case, kept in two files, ``NAME.json`` and ``NAME.safetensors``.

The JSON says which case, backend and recipe it was and what the records of the call said; the tensors are the answer.
A file of tensors alone, ``selection`` and ``weights`` or ``packed``, comes from somebody's own model: nothing is known
of its logits. Both may come from another machine, and every word is checked before anything is done on its account.
Only the standard library is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import tensor_file
from conformance.discover import UsageError
from conformance.messages import Wire
from conformance.tensor_file import TensorFileError
from fuzz.case import Case, CaseError
from references.recipes import Recipe
from reports.record import VERDICTS, Record

FORMAT, VERSION = "blockscale-conformance selection", 1
PARTS = ("selection", "weights", "local", "packed")
LARGEST = 2**20
"""Bytes of one answer up to which it is kept."""
MAX_JSON = 2**20


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One router's answer.

    name: for messages. case: empty for an answer without one. recipe: as plain data. records: (part, verdict, ledger
    id, message) of the call that was recorded. outputs: parts of `PARTS`.
    """

    name: str
    outputs: tuple[Wire, ...]
    case: str = ""
    backend: str = ""
    device: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    input_sha256: str = ""
    records: tuple[tuple[str, str, str, str], ...] = ()


def recording(record: Record, recipe: Mapping[str, Any], outputs: Sequence[Wire], every: Iterable[Record]) -> Recording:
    """What there is to keep of a call. record: any of its records. every: all of them."""
    return Recording(
        name=f"{record.id}-{record.backend}-{record.device.replace(':', '')}",
        outputs=tuple(wire for wire in outputs if wire.name in PARTS),
        case=record.case,
        backend=record.backend,
        device=record.device,
        recipe=dict(recipe),
        input_sha256=record.input_sha256,
        records=tuple((item.part, item.verdict, item.ledger_id, _line(item.message)) for item in every),
    )


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def write(folder: Path, kept: Recording) -> Path | None:
    """Write both files; the JSON's path, or None for an answer that is too large or whose dtypes no file holds."""
    if not kept.outputs or sum(len(wire.data) for wire in kept.outputs) > LARGEST:
        return None
    try:
        raw = tensor_file.dump(kept.outputs)
    except TensorFileError:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{kept.name}.safetensors").write_bytes(raw)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "case": kept.case,
        "backend": kept.backend,
        "device": kept.device,
        "recipe": dict(kept.recipe),
        "input_sha256": kept.input_sha256,
        "records": [list(item) for item in kept.records],
    }
    path = folder / f"{kept.name}.json"
    path.write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> list[Recording]:
    """The recordings of a folder (that of a run too), of a JSON file, or of a bare tensor file. Raises `UsageError`."""
    if path.is_dir():
        folder = path / "selections" if (path / "selections").is_dir() else path
        found = [_read(item) for item in sorted(folder.glob("*.json"))]
        if not found:
            raise UsageError(f"{path}: holds no recorded selections; run --keep-selections writes them")
        return found
    if path.suffix == ".safetensors":
        described = path.with_suffix(".json")
        return [_read(described) if described.is_file() else _bare(path)]
    return [_read(path)]


def _tensors(path: Path, sha256: str = "") -> tuple[Wire, ...]:
    try:
        if path.stat().st_size > tensor_file.MAX_BYTES:
            raise UsageError(f"{path}: more than {tensor_file.MAX_BYTES} bytes")
        raw = path.read_bytes()
        if sha256 and hashlib.sha256(raw).hexdigest() != sha256:
            raise UsageError(f"{path}: not the tensors that the JSON beside it describes")
        found = tuple(tensor_file.parse(raw))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except TensorFileError as error:
        raise UsageError(f"{path}: {error}") from None
    names = sorted(wire.name for wire in found)
    if names not in (["packed"], ["selection", "weights"], ["local", "selection", "weights"]):
        held = ", ".join(names) or "nothing"
        raise UsageError(f"{path}: holds {held[:200]}, expected selection and weights, or packed")
    return found


def _bare(path: Path) -> Recording:
    return Recording(name=path.name, outputs=_tensors(path))


def _read(path: Path) -> Recording:
    try:
        if path.stat().st_size > MAX_JSON:
            raise UsageError(f"{path}: more than {MAX_JSON} bytes")
        data = tensor_file.strict_json(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except TensorFileError as error:
        raise UsageError(str(error)) from None
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise UsageError(f"{path}: no recorded selection of version {VERSION}")
    texts = {key: data.get(key) for key in ("sha256", "case", "backend", "device", "input_sha256")}
    if not all(isinstance(value, str) and value.isprintable() for value in texts.values()):
        raise UsageError(f"{path}: one of {', '.join(texts)} is no line of text")
    records, recipe = data.get("records"), data.get("recipe")
    if not isinstance(records, list) or not all(map(_is_record, records)) or not isinstance(recipe, dict):
        raise UsageError(f"{path}: its records or its recipe are not what they should be")
    try:
        case = Case.parse(str(texts["case"]))
        Recipe.from_json(recipe)
    except (CaseError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    if case.operation != "routing":
        raise UsageError(f"{path}: {case.operation} is no routing case")
    words = {key: str(value) for key, value in texts.items() if key != "sha256"}
    return Recording(
        name=path.stem,
        outputs=_tensors(path.with_suffix(".safetensors"), str(texts["sha256"])),
        recipe=recipe,
        records=tuple((item[0], item[1], item[2], item[3]) for item in records),
        **words,
    )


def _is_record(item: object) -> bool:
    return (
        isinstance(item, list)
        and len(item) == 4
        and all(isinstance(word, str) and word.isprintable() for word in item)
        and item[1] in VERDICTS
    )
