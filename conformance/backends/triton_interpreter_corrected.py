"""This project's Triton kernels in an interpreter whose casts are put right, on a CPU: it tests the kernels' logic.

What is replaced, and why, is in ``conformance/backends/_interpreter_fix.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from conformance.backends.triton_interpreter import MAX_SIZE, TritonBackend

NAMES = ("triton_interpreter_corrected",)


class CorrectedBackend(TritonBackend):
    """The interpreted kernels; the version says what was corrected."""

    def version(self) -> str:
        """Triton's version and ``+corrected``."""
        return f"{super().version()}+corrected"


def backends() -> Iterable[TritonBackend]:
    """``triton_interpreter_corrected``, on the CPU."""
    from conformance.backends._interpreter_fix import correct_interpreter  # after TRITON_INTERPRET is set

    correct_interpreter()
    return [CorrectedBackend("triton_interpreter_corrected", device="cpu", max_size=MAX_SIZE, tile_rows=128, pace=0.5)]
