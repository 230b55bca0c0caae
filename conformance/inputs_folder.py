"""The folder of ``conformance.shared_inputs``, for those who make it without torch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "CONFORMANCE_SHARED_INPUTS"
"""The environment variable that names it."""
PREFIX = "conformance-inputs-"
"""What its name starts with; the number of the process that made it comes next."""


@contextmanager
def shared() -> Iterator[None]:
    """Let the processes that are started within share what they draw, where there is a folder for it."""
    _clear()
    try:
        held = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True)
    except OSError:
        yield
        return
    with held as folder:
        before = os.environ.get(FOLDER)
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            os.environ.pop(FOLDER)
            if before is not None:
                os.environ[FOLDER] = before


def _clear() -> None:
    """Remove the folders of processes that were killed."""
    found: list[Path] = []
    with suppress(OSError):
        found = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    for left in found:
        with suppress(OSError, ValueError, OverflowError):
            if left.stat().st_uid == os.getuid() and not _alive(int(left.name.removeprefix(PREFIX).split("-")[0])):
                shutil.rmtree(left, ignore_errors=True)


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True
