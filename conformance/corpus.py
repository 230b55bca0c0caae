"""The corpus: failing cases that are kept, one JSON file each, and replayed first in every run.

A file is named by its cause (operation, variant, backend, verdict, part, kind, stage, sizes of the shrunk case), so
that one cause is kept once. ``conformance/corpus`` ships with the project; a run adds its own to ``--corpus DIR``. A
folder of such files can be copied, committed or uploaded as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from conformance import tensor_file
from conformance.discover import UsageError
from conformance.tensor_file import TensorFileError
from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR, Size
from reports.files import replace_text

FORMAT, VERSION = "blockscale-conformance corpus", 1
SHIPPED = Path(__file__).with_name("corpus")
MAX_BYTES = 2**16
_DEVICE = re.compile(r"(cpu|cuda)\Z")


Kept = tuple[Case, tuple[str, ...]]
"""A case and the kinds of devices on which it is replayed."""


class CorpusError(UsageError):
    """A corpus that cannot be read; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One kept case.

    case: its text. devices: ``cpu``, ``cuda`` or both: where it is replayed (a large case has no place on a CPU).
    backend, verdict, part, kind, stage: how it failed; empty for a case that is kept for its shape. source: where it
    comes from: ``owner/repo#number``, or the case before shrinking.
    """

    case: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    backend: str = ""
    verdict: str = ""
    part: str = ""
    kind: str = ""
    stage: str = ""
    source: str = ""

    @property
    def shape(self) -> str:
        """The sizes of the case as ``key=value`` words."""
        case = Case.parse(self.case)
        keys = GRAMMAR[case.operation][case.variant].keys
        return " ".join(f"{key}={case[key]}" for key, domain in keys.items() if isinstance(domain, Size))

    @property
    def name(self) -> str:
        """The name of its file, the same for one cause."""
        case = Case.parse(self.case)
        cause = (case.operation, case.variant, self.backend, self.verdict, self.part, self.kind, self.stage, self.shape)
        digest = hashlib.sha256("\n".join((*cause, *([] if self.backend else [self.case]))).encode()).hexdigest()[:12]
        return f"{case.operation}-{self.backend or 'any'}-{self.verdict or 'shape'}-{digest}.json"


def write(folder: Path, entry: Entry) -> Path:
    """Keep an entry unless its cause is kept already; the file's path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / entry.name
    if not path.exists():
        whole = {"format": FORMAT, "version": VERSION, **asdict(entry)}
        replace_text(path, json.dumps(whole, indent=1, sort_keys=True) + "\n")
    return path


def keep(folder: Path, failures: Iterable[Mapping[str, Any]], say: Callable[[str], None]) -> None:
    """Keep the failures of a run that have a capsule, and say so, since the folder lies outside of the run's own.

    Where nothing can be kept that is said instead: the run's reports matter more.
    """
    new = 0
    try:
        for item in failures:
            if item["capsule"]:
                entry = of_failure(item)
                fresh = not (folder / entry.name).exists()
                write(folder, entry)
                new += fresh
    except OSError as error:
        say(f"corpus {folder}: nothing can be kept there ({error.strerror or error})")
    if new:
        say(f"corpus {folder}: {new} new case{'s' * (new > 1)}, which later runs replay first (--corpus)")


def read(folder: Path) -> list[Entry]:
    """The entries of a folder by name; none if there is no folder. Raises `CorpusError`."""
    if not folder.is_dir():
        if folder.exists():
            raise CorpusError(f"corpus {folder}: not a directory")
        return []
    return [_entry(path) for path in sorted(folder.glob("*.json"))]


def _entry(path: Path) -> Entry:
    where = f"corpus {path.name}"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CorpusError(f"{where}: more than {MAX_BYTES} bytes")
        data = tensor_file.strict_json(path.read_bytes(), where)
    except OSError as error:
        raise CorpusError(f"{where}: {error.strerror or error}") from None
    except TensorFileError as error:
        raise CorpusError(str(error)) from None
    if data.pop("format", None) != FORMAT or data.pop("version", None) != VERSION:
        raise CorpusError(f"{where}: not of format {FORMAT!r}, version {VERSION}")
    names = {item.name for item in fields(Entry)}
    if set(data) != names:
        raise CorpusError(f"{where}: {sorted(set(data) ^ names)[0]!r} is unknown or missing")
    devices = data.pop("devices")
    if not isinstance(devices, list) or not devices or not all(map(_is_device, devices)):
        raise CorpusError(f"{where}: devices is no list of cpu and cuda")
    if not all(isinstance(value, str) and value.isprintable() and len(value) < 2000 for value in data.values()):
        raise CorpusError(f"{where}: a field is no line of text")
    try:
        Case.parse(data["case"])
    except CaseError as error:
        raise CorpusError(f"{where}: {error}") from None
    return Entry(**data, devices=tuple(devices))


def _is_device(word: Any) -> bool:
    return isinstance(word, str) and _DEVICE.match(word) is not None


def replayed(folder: Path | None, groups: Iterable[tuple[str, str]]) -> list[Kept]:
    """The cases to replay with their devices, those that ship first, in some groups. Raises `CorpusError`."""
    wanted = set(groups)
    found: dict[str, Kept] = {}
    for entry in (*read(SHIPPED), *(read(folder) if folder else [])):
        case = Case.parse(entry.case)
        if (case.operation, case.variant) in wanted:
            found.setdefault(case.text, (case, entry.devices))
    return list(found.values())


def of_failure(item: Mapping[str, Any]) -> Entry:
    """The entry of a failure as run.json lists it (`conformance.failures`)."""
    device = str(item["device"]).partition(":")[0]
    names = ("backend", "verdict", "part", "kind", "stage")
    source = item["case"] if item["case"] != item["smallest"] else ""
    return Entry(
        case=item["smallest"], devices=(device,), **{name: str(item[name]) for name in names}, source=str(source)
    )
