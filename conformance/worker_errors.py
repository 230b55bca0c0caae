"""Exceptions in a worker, as the one line that the parent reports."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

LIMIT = 400
"""Longest line, in characters."""

_NO_MEMORY = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "RESOURCE_EXHAUSTED: Out of memory",
)
"""What torch, and XLA, say in a plain RuntimeError when memory ran out."""


class ReportedError(Exception):
    """A problem that is told to the parent as it stands: one line, no traceback."""


def flat(text: str) -> str:
    """Text on one line of printable characters, cut to `LIMIT`."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= LIMIT else line[: LIMIT - 3] + "..."


def one_line(error: BaseException) -> str:
    """Type, message and innermost frame: ``ValueError: bad block (in run, mine.py:12)``."""
    try:
        message = str(error)
    except Exception as problem:  # an exception whose text raises is a backend's fault as well
        message = f"(its text raises {type(problem).__name__})"
    line = flat(f"{type(error).__name__}: {message}" if message else type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return line
    return f"{line} (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, the host's or a device's, ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
