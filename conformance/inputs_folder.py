"""The folder of ``conformance.shared_inputs``, for those who make it without torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

FOLDER = "CONFORMANCE_SHARED_INPUTS"
"""The environment variable that names it."""


@contextmanager
def shared() -> Iterator[None]:
    """Let the processes that are started within share what they draw."""
    with tempfile.TemporaryDirectory(prefix="conformance-inputs-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get(FOLDER)
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            os.environ.pop(FOLDER)
            if before is not None:
                os.environ[FOLDER] = before
