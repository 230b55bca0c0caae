"""Inputs of large cases: drawn by one process of a run, read by the others.

Drawing the weights of an expert layer takes seconds, and every backend that runs a case would draw the same ones. Where
`FOLDER` names a folder, the first process that asks for a case writes what it drew there, and the others map the files:
copy-on-write, so that what a backend does to its inputs stays with it. Oracles share with oracles alone, so that the
inputs of a call and those that judge it are still drawn apart and compared. Whatever goes wrong with the files, a
process draws for itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from conformance.inputs_folder import FOLDER
from conformance.operations import OPERATIONS
from fuzz.anatomy import laid_out, problem
from fuzz.case import Case
from fuzz.extent import elements

SHARED = 2**22
"""Elements of the least case that is written."""
MOST_BYTES = 2**34
"""Bytes that are kept in the folder, a quarter of the free disk at most; the oldest go first."""
INDEX = "index.json"
POLL = 0.02


def inputs(case: Case, side: str) -> dict[str, Tensor]:
    """A case's inputs on the CPU, those that another process has drawn where there are any.

    side: ``oracle`` or ``backend``, which do not see each other's files.
    """
    folder = os.environ.get(FOLDER)
    if not folder or elements(case) < SHARED:
        return _drawn(case)
    place = Path(folder) / side / hashlib.sha256(case.text.encode()).hexdigest()[:32]
    lock = place.with_suffix(".lock")
    while True:
        with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
            return _read(case, place)
        try:
            place.parent.mkdir(exist_ok=True)
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if not _owned(lock):
                return _drawn(case)
            time.sleep(POLL)
        except OSError:
            return _drawn(case)
    try:
        lock.write_text(str(os.getpid()))
        with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
            return _read(case, place)  # another one was just writing it
        found = _drawn(case)
        with suppress(OSError):
            _write(found, place)
        return found
    finally:
        lock.unlink(missing_ok=True)


def _drawn(case: Case) -> dict[str, Tensor]:
    return OPERATIONS[case.operation].inputs(case)


def _owned(lock: Path) -> bool:
    """Whether a process that lives is drawing; one that has just taken the lock has not written its number yet."""
    try:
        words = lock.read_text()
        if words:
            os.kill(int(words), 0)
        return bool(words) or time.time() - lock.stat().st_mtime < 5
    except FileNotFoundError:
        return True  # it has just finished
    except (OSError, ValueError):
        return False


def _read(case: Case, place: Path) -> dict[str, Tensor]:
    index = json.loads((place / INDEX).read_text())
    found = {name: _mapped(place / str(number), *index[name]) for number, name in enumerate(index)}
    if trouble := problem(case, found):
        raise ValueError(trouble)
    return laid_out(case, found)


def _mapped(path: Path, dtype: str, shape: list[int]) -> Tensor:
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
    return raw.view(getattr(torch, dtype)).view(shape)


def _write(found: Mapping[str, Tensor], place: Path) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if not _room(place.parent, size):
        return
    part = place.with_suffix(f".{os.getpid()}")
    try:
        part.mkdir()
        for number, tensor in enumerate(found.values()):
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tofile(part / str(number))
        index = {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in found.items()}
        (part / INDEX).write_text(json.dumps(index))
        part.rename(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _room(folder: Path, size: int) -> bool:
    """Make room for so many bytes; whether there is."""
    most = min(MOST_BYTES, shutil.disk_usage(folder).free // 4)
    kept = sorted((path for path in folder.iterdir() if not path.suffix), key=lambda path: path.stat().st_mtime)
    there = {path: sum(part.stat().st_size for part in path.iterdir()) for path in kept}
    for path in kept:
        if sum(there.values()) + size <= most:
            break
        shutil.rmtree(path, ignore_errors=True)
        del there[path]
    return sum(there.values()) + size <= most
