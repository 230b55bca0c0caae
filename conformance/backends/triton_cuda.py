"""This project's Triton kernels, compiled for the GPU."""

from __future__ import annotations

from collections.abc import Iterable

from conformance.backends._triton_adapter import TritonBackend

NAMES = ("triton",)


def backends() -> Iterable[TritonBackend]:
    """``triton``, on CUDA devices only."""
    return [TritonBackend("triton", device="cuda", max_size=None, tile_rows=16, pace=1.0)]
