"""Inputs of large cases: drawn by one process of a run, read by the others.

Drawing the weights of an expert layer takes seconds, and every backend that runs a case would draw the same ones. Where
`FOLDER` names a folder, the first process that asks for a case writes what it drew there, and the others map the files:
copy-on-write, so that what a backend does to its inputs stays with it. Oracles share with oracles alone, so that the
inputs of a call and those that judge it are still drawn apart and compared. Whatever goes wrong with the files, a
process draws for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
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
"""Bytes that are kept of each side, a quarter of the free disk at most; the oldest go first."""
INDEX = "index.json"
TROUBLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError)
"""What may come of odd files and full disks."""


def inputs(case: Case, side: str) -> dict[str, Tensor]:
    """A case's inputs on the CPU, those that another process has drawn where there are any.

    side: ``oracle`` or ``backend``, which do not see each other's files.
    """
    folder = os.environ.get(FOLDER)
    if not folder or elements(case) < SHARED:
        return _drawn(case)
    place = Path(folder) / side / hashlib.sha256(case.text.encode()).hexdigest()[:32]
    with suppress(*TROUBLE):
        return _read(case, place)
    try:
        place.parent.mkdir(exist_ok=True)
        lock = place.with_suffix(".lock").open("ab")
    except OSError:
        return _drawn(case)
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)  # until whoever draws is done, or is gone
        with suppress(*TROUBLE):
            return _read(case, place)
        found = _drawn(case)
        with suppress(*TROUBLE):
            _write(found, place)
        return found


def _drawn(case: Case) -> dict[str, Tensor]:
    return OPERATIONS[case.operation].inputs(case)


def _read(case: Case, place: Path) -> dict[str, Tensor]:
    index = json.loads((place / INDEX).read_text())
    found = {name: _mapped(place / str(number), *index[name]) for number, name in enumerate(index)}
    if trouble := problem(case, found):
        raise ValueError(trouble)
    return laid_out(case, found)


def _mapped(path: Path, dtype: str, shape: list[int], stride: list[int] | None) -> Tensor:
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
    found = raw.view(getattr(torch, dtype)).view(shape)
    return found if stride is None else found.as_strided(shape, stride)


def _write(found: Mapping[str, Tensor], place: Path) -> None:
    part = place.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # of one that was killed: the lock is ours
    if not _room(place.parent, sum(tensor.numel() * tensor.element_size() for tensor in found.values())):
        return
    try:
        part.mkdir()
        for number, tensor in enumerate(found.values()):
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tofile(part / str(number))
        (part / INDEX).write_text(json.dumps({name: _described(tensor) for name, tensor in found.items()}))
        part.rename(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _described(tensor: Tensor) -> tuple[str, list[int], list[int] | None]:
    """Dtype, shape, and strides where they are those of the bytes in order: a side of one element may have any."""
    strides = list(tensor.stride()) if tensor.is_contiguous() else None
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), strides


def _room(folder: Path, size: int) -> bool:
    """Make room for so many bytes; whether there is."""
    most = min(MOST_BYTES, shutil.disk_usage(folder).free // 4)
    if size > most:
        return False
    kept = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    there = {path: sum(part.stat().st_size for part in path.iterdir()) for path in kept}
    for path in kept:
        if sum(there.values()) + size <= most:
            break
        if path.suffix != ".part":  # those are being written, or were when their process was killed
            shutil.rmtree(path, ignore_errors=True)
            del there[path]
    return sum(there.values()) + size <= most
