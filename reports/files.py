"""Writing files so that a reader never sees half of one. Only the standard library is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``.

    The temporary file is removed when ``write`` raises; whatever lay at ``path`` before then stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def replace_text(path: Path, text: str) -> Path:
    """Write UTF-8 text with ``\\n`` line ends, by way of `replace`."""
    return replace(path, lambda temporary: temporary.write_bytes(text.encode("utf-8", "replace")))


def append_text(path: Path, text: str) -> None:
    """Append UTF-8 text in one write, as GitHub's step summary wants it."""
    with path.open("ab") as file:
        file.write(text.encode("utf-8", "replace"))
