"""Walks over large tensors in pieces that stay in a cache while several operations pass over them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_ELEMENTS = 1 << 18
"""Elements in a piece on a CPU: an FP32 piece is 1 MiB, within a second-level cache, and still feeds some threads."""

DEVICE_ELEMENTS = 1 << 25
"""Elements in a piece elsewhere: bounds the memory for intermediates, large enough to fill the device."""


def limit(device: torch.device) -> int:
    """Elements in a piece on ``device``."""
    return CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS


def pieces(count: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover ``range(count)``; all but the last have an even length."""
    step = limit(device)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def row_pieces(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows that cover a ``[rows, columns]`` matrix; all but the last have an even number of rows."""
    step = max(2, limit(device) // max(columns, 1) // 2 * 2)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


# glibc returns freed memory at once from a size on that the largest buffer freed so far sets, up to 32 MiB. Without one
# such buffer every piece is paid for again in page faults, which cost more than the arithmetic.
torch.empty(31 * 2**20, dtype=torch.uint8)
