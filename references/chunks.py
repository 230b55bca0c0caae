"""Walks over large tensors in pieces that stay in a cache while several operations pass over them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 17
"""Elements in a piece on a CPU for each thread: 512 KiB in FP32, so that a second-level cache holds some of them."""

DEVICE_ELEMENTS = 1 << 25
"""Elements in a piece elsewhere: bounds the memory for intermediates, large enough to fill the device."""


STRIPES_FROM = 1 << 22
"""Elements of a matrix on a CPU from which threads of Python share its rows."""

STRIPE_ELEMENTS = 1 << 20
"""Elements in a piece of a stripe: with smaller ones the threads of Python wait for each other too often."""

HUGE_PAGES_FROM = 1 << 25
"""Bytes of a tensor for which huge pages are asked: what malloc maps anew for every call (see the end of this file)."""

_madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, in huge pages if it is large and on a CPU: by 4 KiB, page faults cost more than the arithmetic."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if _madvise is not None and device.type == "cpu" and out.nbytes >= HUGE_PAGES_FROM:
        start = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(start, (out.data_ptr() + out.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return out


def limit(device: torch.device) -> int:
    """Elements in a piece on ``device``; what is computed does not depend on it."""
    return CPU_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else DEVICE_ELEMENTS


def pieces(count: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover ``range(count)``; all but the last have an even length."""
    step = limit(device)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def row_pieces(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows that cover a ``[rows, columns]`` matrix; all but the last have an even number of rows."""
    return _row_slices(0, rows, limit(device) // max(columns, 1))


def _row_slices(start: int, stop: int, height: int) -> Iterator[slice]:
    step = max(2, height // 2 * 2)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def in_stripes(
    work: Callable[[Iterator[slice]], None], rows: int, columns: int, device: torch.device, *, one_pass: bool = False
) -> None:
    """``work`` on the row pieces of a ``[rows, columns]`` matrix, in stripes for torch's threads if it is large.

    torch looks one-dimensional tables up on one thread, whatever else it does on several.
    one_pass: whether the work passes over its pieces once, so that small ones have no use in a cache.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or rows * columns < STRIPES_FROM:
        work(_row_slices(0, rows, STRIPE_ELEMENTS // columns) if one_pass else row_pieces(rows, columns, device))
        return
    height = -(-rows // threads // 2) * 2
    stripes = [(start, min(start + height, rows)) for start in range(0, rows, height)]

    def stripe(bounds: tuple[int, int]) -> None:
        work(_row_slices(*bounds, STRIPE_ELEMENTS // columns))

    list(_threads(threads).map(stripe, stripes))


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "stripe")


# glibc returns freed memory at once from a size on that the largest buffer freed so far sets, up to 32 MiB. Without one
# such buffer every piece is paid for again in page faults, which cost more than the arithmetic.
torch.empty(31 * 2**20, dtype=torch.uint8)
