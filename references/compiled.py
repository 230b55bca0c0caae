"""Passes over large matrices on a CPU, compiled by Numba where it is installed: the same bits as torch's way, sooner.

Torch takes a dozen passes for what is one here. Nothing else depends on it: a matrix that is small or on a GPU, and any
matrix where Numba is missing, takes torch's way in `references.blocks`, and the tests hold one against the other.
`row_maxima`, `encode_quotients` and `decode_products` are plain functions over NumPy arrays that run uncompiled too:
integer operations on the bits, and quotients and products as IEEE 754 rounds them, fast math off.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from references.chunks import in_stripes

LEAST_ELEMENTS = 1 << 22
"""Elements of a matrix from which the kernels are used: importing Numba and compiling take a process about a second."""

SEGMENT = 4096
"""Columns that go through both loops of `encode_quotients` in turn: 16 KiB of indices, for a first-level cache."""

Bits = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Reals = npt.NDArray[np.float64] | npt.NDArray[np.float32]


def row_maxima(bits: Bits, width: int, out: Bits) -> None:
    """The bits of the largest magnitude in every ``width`` columns of FP32 bits; NaN is above infinity.

    bits: ``[r, gk * width]``. out: ``[r, gk]``.
    """
    for row in range(out.shape[0]):
        for block in range(out.shape[1]):
            largest = np.uint32(0)
            for column in range(width):
                largest = max(largest, bits[row, block * width + column] & np.uint32(0x7FFFFFFF))
            out[row, block] = largest


def encode_quotients(
    x: Floats, factors: Floats, width: int, multiply: bool, keep_zeros: bool, table: Codes, shift: int, out: Codes
) -> None:
    """Codes of x divided (or multiplied) by the factor of its block.

    x: ``[r, gk * width]``. factors: ``[r, gk]``. keep_zeros: whether a zero stays one whatever its factor.
    table, shift: see `references.elements.encode_table`. out: ``[r, k]``, k within the last block.
    """
    below, down = np.uint32((1 << shift) - 1), np.uint32(shift)
    blocks = max(SEGMENT // width, 1)
    index = np.empty(blocks * width, np.uint32)
    for row in range(out.shape[0]):
        for first in range(0, factors.shape[1], blocks):
            some = factors[row, first : first + blocks]
            values = x[row, first * width : (first + blocks) * width]
            codes = out[row, first * width : (first + blocks) * width]
            # Two loops: the first one is vectorised, which a look-up among its steps would prevent.
            for block in range(some.shape[0]):
                factor = some[block]
                for column in range(width):
                    value = values[block * width + column]
                    scaled = value * factor if multiply else value / factor
                    if keep_zeros and value == 0:
                        scaled = value
                    pattern = np.float32(scaled).view(np.uint32)
                    # The sum carries into the lowest bit that stays exactly where a bit is lost.
                    index[block * width + column] = (((pattern & below) + below) | pattern) >> down
            for column in range(codes.shape[0]):
                codes[column] = table[index[column]]


def decode_products(codes: Codes, table: Reals, factors: Reals, width: int, out: Reals) -> None:
    """Values of codes times the factor of their block.

    codes, out: ``[r, k]``. table: the values of all 256 codes. factors: ``[r, gk]``. All but codes: FP64, or all FP32.
    """
    for row in range(out.shape[0]):
        for block in range(factors.shape[1]):
            factor = factors[row, block]
            some = codes[row, block * width : (block + 1) * width]
            products = out[row, block * width : (block + 1) * width]
            for column in range(some.shape[0]):
                products[column] = table[some[column]] * factor


Kernel = Callable[..., None]


def _signatures(function: Kernel, kind: Any) -> list[Any]:
    """The types that one of the functions above is compiled for; kind: ``numba.types``."""
    number, flag = kind.int64, kind.boolean
    bits, codes, table = kind.Array(kind.uint32, 2, "C"), kind.Array(kind.uint8, 2, "C"), kind.Array(kind.uint8, 1, "C")
    floats = kind.Array(kind.float32, 2, "C")
    if function is row_maxima:
        return [kind.void(bits, number, bits)]
    if function is encode_quotients:
        return [kind.void(floats, floats, number, flag, flag, table, number, codes)]
    reals = [(kind.Array(real, 1, "C"), kind.Array(real, 2, "C")) for real in (kind.float64, kind.float32)]
    return [kind.void(codes, values, matrix, number, matrix) for values, matrix in reals]


@lru_cache(maxsize=8)
def kernel(function: Kernel) -> Kernel | None:
    """One of the functions above, compiled so that other threads of Python run beside it.

    None where Numba is missing, switched off (``NUMBA_DISABLE_JIT``) or does not work.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        numba: Any = importlib.import_module("numba")
        if numba.config.DISABLE_JIT:
            return None
        # No cache on disk: it goes by a file's size and time, and a reference must be what its source says.
        options = {"nogil": True, "error_model": "numpy", "fastmath": False}
        compiled: Kernel = numba.njit(_signatures(function, numba.types), **options)(function)
        return compiled
    except Exception as error:  # whatever a Numba does that does not go with this NumPy or this LLVM
        warnings.warn(f"Numba is installed, but does not work: {error}".splitlines()[0], RuntimeWarning, stacklevel=2)
        return None


def pays(function: Kernel, matrix: Tensor) -> bool:
    """Whether a matrix takes the compiled way through one of the functions above."""
    return matrix.device.type == "cpu" and matrix.numel() >= LEAST_ELEMENTS and kernel(function) is not None


def _required(function: Kernel) -> Kernel:
    found = kernel(function)
    if found is None:
        raise RuntimeError(f"compiled: {function.__name__} needs Numba")
    return found


def block_maxima(x: Tensor, width: int, out: Tensor) -> None:
    """`row_maxima` of an fp32, bf16 or fp16 matrix ``[m, k]`` of any strides into int32 ``[m, gk]``."""
    maxima = _required(row_maxima)

    def fill(pieces: Iterator[slice]) -> None:
        for rows in pieces:
            maxima(_full_blocks(x[rows], width).view(np.uint32), width, out[rows].numpy().view(np.uint32))

    in_stripes(fill, x.shape[0], x.shape[1], x.device, one_pass=True)


def payload(
    x: Tensor, factors: Tensor, width: int, table: Tensor, shift: int, out: Tensor, *, multiply: bool, keep_zeros: bool
) -> None:
    """`encode_quotients` of an fp32, bf16 or fp16 matrix ``[m, k]`` of any strides into uint8 ``[m, k]``.

    factors: float32, those of each row ``[m, gk]``. The product of a NaN with a NaN has the sign of either.
    """
    quotients, numbers, codes = _required(encode_quotients), factors.contiguous().numpy(), table.numpy()

    def fill(pieces: Iterator[slice]) -> None:
        for rows in pieces:
            values, target = _full_blocks(x[rows], width), out[rows].numpy()
            quotients(values, numbers[rows], width, multiply, keep_zeros, codes, shift, target)

    in_stripes(fill, x.shape[0], x.shape[1], x.device, one_pass=True)


def products(codes: Tensor, table: Tensor, factors: Tensor, width: int, out: Tensor) -> None:
    """`decode_products` of codes uint8 ``[m, k]`` of any strides into FP64 or FP32 ``[m, k]``.

    table: the values of all codes ``[256]``. factors: those of each row ``[m, gk]``. Both of the dtype of ``out``.
    """
    multiplied, numbers, values = _required(decode_products), factors.contiguous().numpy(), table.numpy()

    def fill(pieces: Iterator[slice]) -> None:
        for rows in pieces:
            multiplied(codes[rows].contiguous().numpy(), values, numbers[rows], width, out[rows].numpy())

    in_stripes(fill, codes.shape[0], codes.shape[1], codes.device, one_pass=True)


def _full_blocks(rows: Tensor, width: int) -> Floats:
    """FP32 rows, contiguous, zeros up to the end of the last block."""
    missing = -rows.shape[1] % width
    values = rows.to(torch.float32)
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.contiguous().numpy()
