"""Repro capsules: everything of one failure in two files, ``NAME.json`` and ``NAME.safetensors``.

The JSON says what fails, where and how; the tensors are the explicit inputs, if the case's own are not meant
(``input:NAME``), and what the backend answered (``actual:NAME``). A capsule comes from another machine: every word of
it is checked before anything is done on its account, and it cannot name code to load. docs/repro.md has the fields.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from conformance import tensor_file
from conformance.discover import UsageError
from conformance.messages import INPUT, Wire, as_inputs
from conformance.tensor_file import TensorFileError
from fuzz.case import Case, CaseError
from reports.files import replace_text
from reports.record import FAILING

FORMAT, VERSION = "blockscale-conformance capsule", 1
MAX_JSON = 2**20
"""Largest capsule.json in bytes."""
ACTUAL = "actual:"
_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,64}\Z")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,120}\.safetensors\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_DEVICE = re.compile(r"(cpu|cuda:[0-9]{1,3})\Z")
_OPTIONS = re.compile(r"([a-z_]+=[A-Za-z0-9_.+,:-]+( [a-z_]+=[A-Za-z0-9_.+,:-]+)*)?\Z")


class CapsuleError(UsageError):
    """A capsule that is refused; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """One failure.

    case: with ``explicit`` inputs, its shapes and words; else the whole input. origin: the case before shrinking.
    part, verdict, kind, stage, ledger_id: the cause (``causes.Cause``). plugins: as they were named, for the reader;
    none is loaded because a capsule says so. expected: elements outside of the failing part with ``index``, ``actual``,
    ``admissible``, ``input``. differing, elements: of the inputs, see ``shrink.Shrunk``. times, failed: verdicts that
    were asked for and those that failed. tensors: the inputs and answers that go into the other file.
    """

    case: str
    origin: str
    part: str
    verdict: str
    kind: str = ""
    stage: str = ""
    ledger_id: str = ""
    message: str = ""
    backend: str
    version_of_backend: str = ""
    interpreter: str = ""
    device: str = "cpu"
    device_name: str = ""
    sm: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)
    options: str = ""
    plugins: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    input_sha256: str
    explicit: bool = False
    expected: tuple[Mapping[str, Any], ...] = ()
    differing: int = 0
    elements: int = 0
    note: str = ""
    times: int = 1
    failed: int = 1
    tensors: tuple[Wire, ...] = ()

    @property
    def id(self) -> str:
        """16 hex digits that follow from case, inputs, backend, device, options and cause."""
        words = (self.case, self.input_sha256, self.backend, self.device, self.options, self.part, self.verdict)
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]

    @property
    def inputs(self) -> tuple[Wire, ...]:
        """The explicit inputs under their own names."""
        found = [wire for wire in self.tensors if wire.name.startswith(INPUT)]
        return tuple(Wire(**{**vars(wire), "name": wire.name.removeprefix(INPUT)}) for wire in found)

    @property
    def actual(self) -> tuple[Wire, ...]:
        """What the backend answered, under the names of the parts."""
        found = [wire for wire in self.tensors if wire.name.startswith(ACTUAL)]
        return tuple(Wire(**{**vars(wire), "name": wire.name.removeprefix(ACTUAL)}) for wire in found)

    @property
    def options_dict(self) -> dict[str, str]:
        """The call options."""
        return dict(word.split("=", 1) for word in self.options.split())


def tensors_of(inputs: Sequence[Wire], outputs: Sequence[Wire]) -> tuple[Wire, ...]:
    """Inputs and outputs under the names that a capsule gives them; answers that fit no capsule are left out."""
    kept = [wire for wire in outputs if wire.name.isascii() and len(wire.data) <= tensor_file.MAX_BYTES // 4]
    named = tuple(Wire(**{**vars(wire), "name": ACTUAL + wire.name}) for wire in kept)
    return (*as_inputs(inputs), *(wire for wire in named if len(wire.name) <= 80))


_STORED = [item.name for item in fields(Capsule) if item.name != "tensors"]


def write(folder: Path, capsule: Capsule, name: str = "") -> Path:
    """Write both files and return the JSON's path. Raises OSError, and `TensorFileError` for too large tensors."""
    name = name or capsule.id
    data = {key: value for key, value in asdict(capsule).items() if key in _STORED}
    raw = tensor_file.dump(capsule.tensors)
    described = {"file": f"{name}.safetensors", "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.safetensors").write_bytes(raw)
    whole = {"format": FORMAT, "version": VERSION, "id": capsule.id, "tensors": described, **data}
    path = folder / f"{name}.json"
    replace_text(path, json.dumps(whole, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def read(path: Path) -> Capsule:
    """Read a capsule. Raises `CapsuleError` for a file that is missing, truncated, foreign or hostile."""
    where = f"capsule {path.name}"
    try:
        if path.stat().st_size > MAX_JSON:
            raise CapsuleError(f"{where}: more than {MAX_JSON} bytes")
        data = tensor_file.strict_json(path.read_bytes(), where)
    except OSError as error:
        raise CapsuleError(f"{where}: {error.strerror or error}") from None
    except TensorFileError as error:
        raise CapsuleError(str(error)) from None
    return parse(data, where, path.parent)


def parse(data: Mapping[str, Any], where: str, folder: Path) -> Capsule:
    """The capsule that a JSON object describes; its tensors lie in ``folder``. Raises `CapsuleError`."""
    if data.get("format") != FORMAT:
        raise CapsuleError(f"{where}: not written as a capsule of blockscale-conformance")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise CapsuleError(f"{where}: version {str(data.get('version'))[:20]!r} is unknown; this is {VERSION}")
    wanted = {"format", "version", "id", "tensors", *_STORED}
    if set(data) != wanted:
        odd = sorted(set(data) ^ wanted)[0]
        raise CapsuleError(f"{where}: {str(odd)[:40]!r} is {'unknown' if odd in data else 'missing'}")
    values = {key: data[key] for key in _STORED}
    for name in _STORED:
        _check(where, name, values[name])
    capsule = Capsule(
        **{**values, "plugins": tuple(values["plugins"]), "expected": tuple(values["expected"])},
        tensors=tuple(_tensors(where, folder, data["tensors"])),
    )
    if data["id"] != capsule.id:
        raise CapsuleError(f"{where}: its id is not that of its contents")
    if capsule.explicit != bool(capsule.inputs):
        raise CapsuleError(f"{where}: explicit is {capsule.explicit}, but there are {len(capsule.inputs)} inputs")
    if capsule.explicit and tensor_file.input_sha256(capsule.inputs) != capsule.input_sha256:
        raise CapsuleError(f"{where}: the inputs do not hash to {capsule.input_sha256}")
    return capsule


_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("explicit",), bool),
    **dict.fromkeys(("differing", "elements", "times", "failed"), int),
    **dict.fromkeys(("libraries", "recipe"), dict),
    **dict.fromkeys(("plugins", "expected"), list),
}
_PATTERNS = {"backend": _NAME, "device": _DEVICE, "options": _OPTIONS, "input_sha256": _HASH}


def _check(where: str, name: str, value: Any) -> None:
    wanted = _TYPES.get(name, str)
    kind: type = type(value)
    if kind is not wanted:
        raise CapsuleError(f"{where}: {name} is no {wanted.__name__}")
    if isinstance(value, str) and (not value.isprintable() or len(value) > 4000):
        raise CapsuleError(f"{where}: {name} is no line of printable text")
    if name in _PATTERNS and not _PATTERNS[name].match(value):
        raise CapsuleError(f"{where}: {name} is {value[:80]!r}")
    if name == "options":
        keys = [word.partition("=")[0] for word in value.split()]
        if len(set(keys)) < len(keys) or "poison" in keys:
            raise CapsuleError(f"{where}: options is {value[:80]!r}, where each has a key of its own")
    if name == "verdict" and value not in FAILING:
        raise CapsuleError(f"{where}: verdict {value[:40]!r} is no failure")
    if name in ("case", "origin"):
        try:
            Case.parse(value)
        except CaseError as error:
            raise CapsuleError(f"{where}: {error}") from None
    if isinstance(value, int) and not 0 <= value < 2**63:
        raise CapsuleError(f"{where}: {name} is {str(value)[:40]}")
    if name == "plugins" and not all(isinstance(item, str) and item.isprintable() for item in value):
        raise CapsuleError(f"{where}: plugins is no list of texts")
    if name == "libraries" and not all(isinstance(item, str) and item.isprintable() for item in value.values()):
        raise CapsuleError(f"{where}: libraries is no object of texts")
    if name == "expected" and not all(map(_is_example, value)):
        raise CapsuleError(f"{where}: expected is no list of elements")


def _is_example(item: Any) -> bool:
    if not isinstance(item, dict) or not {"index", "actual", "admissible"} <= set(item):
        return False
    index = item["index"]
    texts = [value for key, value in item.items() if key != "index"]
    return (
        isinstance(index, list)
        and all(type(place) is int and place >= 0 for place in index)
        and all(isinstance(text, str) and text.isprintable() for text in texts)
    )


def _tensors(where: str, folder: Path, described: Any) -> list[Wire]:
    if not isinstance(described, dict) or set(described) != {"file", "sha256", "bytes"}:
        raise CapsuleError(f"{where}: tensors is no object of file, sha256 and bytes")
    name, digest = described["file"], described["sha256"]
    if not isinstance(name, str) or not _FILE.match(name):
        raise CapsuleError(f"{where}: {str(name)[:80]!r} is no name of a tensor file beside it")
    path = folder / name
    try:
        if path.is_symlink() or not path.is_file():
            raise CapsuleError(f"{where}: there is no file {name} beside it")
        if path.stat().st_size > tensor_file.MAX_BYTES:
            raise CapsuleError(f"{where}: {name} has more than {tensor_file.MAX_BYTES} bytes")
        raw = path.read_bytes()
    except OSError as error:
        raise CapsuleError(f"{where}: {name}: {error.strerror or error}") from None
    if len(raw) != described["bytes"] or hashlib.sha256(raw).hexdigest() != digest:
        raise CapsuleError(f"{where}: {name} is not the file that was written with it (its SHA-256 differs)")
    try:
        return tensor_file.parse(raw)
    except TensorFileError as error:
        raise CapsuleError(f"{where}: {name}: {error}") from None
