"""Tensor-parallel shards of a block-quantised weight: each rank's payload with scales that are its own.

A rank's share is a **cut**: one or more ranges of rows or columns of the whole weight, stored one after the other (a
gated FC1 is cut in each half, so a rank holds two ranges). Where a range starts inside a stored block, or a later
range begins inside a block of the shard's own grid, no grid of the stored block size can describe the shard: its first
block would take a neighbour's scale. Such shards get a finer block and repeated scales. The dequantised shard is
the cut of the dequantised whole, bit for bit; nothing is requantised. Fault class: sgl-project/sglang#42566,
vllm-project/vllm#52997.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from references.blocks import expand

Cut = tuple[range, ...]
"""Ranges of rows or columns (elements, step 1) that one rank holds, in the order in which it stores them."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of a weight.

    payload: codes ``[m, k]``, or ``[m, k / per_byte]`` if packed.
    scales: ``[ceil(m / block rows), ceil(k / block columns)]``.
    block: rows and columns of this shard's scale blocks, in elements. shape: ``(m, k)`` in elements.
    """

    payload: Tensor
    scales: Tensor
    block: tuple[int, int]
    shape: tuple[int, int]

    def element_scales(self) -> Tensor:
        """The scale of each element, ``[m, k]``."""
        if 0 in self.shape:  # a rank beyond the last row or column
            return self.scales.new_empty(self.shape)
        return expand(self.scales, self.block, self.shape)


def even_cuts(size: int, ranks: int, multiple: int = 1) -> list[Cut]:
    """One contiguous range a rank, as equal as whole multiples allow; the last takes a remainder.

    Raises ValueError for ``ranks`` or ``multiple`` below 1.
    """
    if ranks < 1 or multiple < 1:
        raise ValueError(f"ranks={ranks} and multiple={multiple} must be positive")
    units = -(-size // multiple)
    edges = [min(size, units * rank // ranks * multiple) for rank in range(ranks + 1)]
    return [(range(start, stop),) for start, stop in pairwise(edges)]


def gated_cuts(size: int, ranks: int, multiple: int = 1) -> list[Cut]:
    """Each half of a gated FC1's rows cut evenly; a rank stores its part of the first half, then of the second.

    Raises ValueError for an odd ``size``.
    """
    if size % 2:
        raise ValueError(f"{size} rows have no halves")
    half = size // 2
    return [(part, range(part.start + half, part.stop + half)) for (part,) in even_cuts(half, ranks, multiple)]


def refined_block(block: int, cuts: Sequence[Cut]) -> int:
    """The largest block size, a divisor of ``block``, whose grids describe every cut: the same one for all ranks.

    It divides each range's start in the whole weight (no cell straddles a stored block) and its offset in the shard
    (no cell straddles two ranges).
    """
    common = block
    for cut in cuts:
        offset = 0
        for part in cut:
            if len(part):
                common = math.gcd(common, part.start, offset)
            offset += len(part)
    return common


def shard(
    payload: Tensor,
    scales: Tensor,
    *,
    block: tuple[int, int],
    cuts: Sequence[Cut],
    dim: int,
    per_byte: int = 1,
    shard_block: int | None = None,
) -> list[Shard]:
    """Cut a weight for each rank.

    payload: codes ``[n, k]`` or ``[n, k / per_byte]``. scales: any dtype, one for each ``block`` (rows, columns).
    dim: 0 to cut rows (outputs), 1 to cut columns (inputs). per_byte: elements a byte of the payload.
    shard_block: block size along ``dim`` of the shards' grids; `refined_block` unless given, a divisor of that.
    Raises ValueError where the scales do not fit the weight, a range leaves it, a cut splits a byte, or
    ``shard_block`` cannot describe a cut.
    """
    shape = (payload.shape[0], payload.shape[1] * per_byte)
    expected = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    if tuple(scales.shape) != expected:
        raise ValueError(f"scales are {tuple(scales.shape)}, expected {expected} for a weight of {shape}")
    if dim not in (0, 1):
        raise ValueError(f"dim={dim} is neither 0 (rows) nor 1 (columns)")
    finest = refined_block(block[dim], cuts)
    cell = finest if shard_block is None else shard_block
    if cell < 1 or finest % cell:
        raise ValueError(f"block {cell} straddles a cut: it must divide {finest}")
    return [_cut(payload, scales, block, cut, dim, per_byte if dim == 1 else 1, cell, shape) for cut in cuts]


def misplaced(candidate: Shard, expected: Shard) -> Tensor:
    """bool ``[m, k]``: elements whose code byte or scale bits differ from the expected shard's.

    The grids may differ: a candidate may repeat scales more or less often, and may be padded below and to the right.
    Codes of a packed payload are compared byte by byte. Raises ValueError for a candidate that is too small.
    """
    rows, columns = expected.shape
    per_byte = columns // max(expected.payload.shape[1], 1) or 1
    if candidate.shape[0] < rows or candidate.shape[1] < columns:
        raise ValueError(f"the candidate is {candidate.shape}, smaller than {expected.shape}")
    codes = candidate.payload[:rows, : expected.payload.shape[1]] != expected.payload
    theirs, ours = candidate.element_scales()[:rows, :columns], expected.element_scales()
    return codes.repeat_interleave(per_byte, 1) | (_bits(theirs) != _bits(ours))


def _cut(
    payload: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    cut: Cut,
    dim: int,
    per_byte: int,
    cell: int,
    shape: tuple[int, int],
) -> Shard:
    for part in cut:
        if part.step != 1 or (len(part) and not 0 <= part.start <= part.stop <= shape[dim]):
            raise ValueError(f"{part} is no range within 0..{shape[dim]}")
        if part.start % per_byte or part.stop % per_byte:
            raise ValueError(f"{part} splits a byte of {per_byte} elements")
    bytes_ = [torch.arange(p.start // per_byte, p.stop // per_byte, device=payload.device) for p in cut]
    elements = torch.cat([torch.arange(part.start, part.stop, device=scales.device) for part in cut])
    grid = elements[::cell] // block[dim]  # each cell lies in one stored block: the block of its first element
    sizes = (len(elements), shape[1]) if dim == 0 else (shape[0], len(elements))
    blocks = (cell, block[1]) if dim == 0 else (block[0], cell)
    return Shard(
        payload.index_select(dim, torch.cat(bytes_)), scales.index_select(dim, grid), block=blocks, shape=sizes
    )


def _bits(scales: Tensor) -> Tensor:
    return scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[scales.element_size()])
