"""This project's Triton kernels under ``TRITON_INTERPRET=1`` as Triton ships it, on a CPU.

The kernels are those that the ``triton`` backend compiles, so that what fails here and passes there is the
interpreter's casts: to E4M3 they round half up, lose the carry and turn NaN into 384 (triton-lang/triton#8322, #9808,
#11897); from E4M3 a NaN is 480; FP32 to BF16 truncates, and BF16 subnormals lose bits in both directions. Its
``tl.dot`` multiplies the raw words of BF16, so no GEMM is claimed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from conformance.backends._triton_adapter import TritonBackend as TritonBackend

NAMES = ("triton_interpreter",)

if not isinstance(tl.max, InterpretedFunction):
    raise ImportError("triton was imported before TRITON_INTERPRET=1: its own functions are compiled ones")

MAX_SIZE = 512
"""Largest matrix side; a program of the interpreter takes about a millisecond."""


def backends() -> Iterable[TritonBackend]:
    """``triton_interpreter``, on the CPU."""
    return [TritonBackend("triton_interpreter", device="cpu", max_size=MAX_SIZE, tile_rows=128, pace=0.5, dots=False)]
