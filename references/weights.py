"""Orders in which kernels store weights: row shuffles, gate/up interleaving, K blocks; each with its inverse.

A row order is an int64 index vector: row j of the stored weight is row ``indices[j]`` of the plain one. Every order
here is a permutation, so `invert` undoes it and `compose` chains two. From the formulas of FlashInfer's TRTLLM weight
preparation; the same order applies to a weight, to its block scales (before any 128x4 interleave) and to its bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_LAYOUTS = ("MajorK", "MajorMn", "BlockMajorK")
"""``MajorK`` ``[m, k]``; ``MajorMn`` ``[k, m]``; ``BlockMajorK`` ``[k / block, m, block]``."""


def row_shuffle_indices(rows: int, tile: int, device: torch.device | str = "cpu") -> Tensor:
    """The row order that an epilogue tile of ``tile`` rows wants, int64 ``[rows]``.

    Tiles that are multiples of 128 shuffle within 32 rows, others (64: DeepSeek FP8 gated) within 16: the 8 rows that
    one group of a fragment holds come from places 4 (or 2) rows apart.
    Raises ValueError where ``rows`` is not a multiple of that block, or ``tile`` not a positive multiple of 8.
    """
    if tile <= 0 or tile % 8:
        raise ValueError(f"epilogue tile {tile} is no positive multiple of 8")
    block = 32 if tile % 128 == 0 else 16
    if rows % block:
        raise ValueError(f"{rows} rows are no multiple of {block}, the shuffle block of epilogue tile {tile}")
    j = torch.arange(rows, device=device)
    return (j // block) * block + (j % 8) * (block // 8) + (j % block) // 8


def gated_row_indices(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """The order that alternates the two halves of a gated FC1, int64 ``[rows]``: 0, h, 1, h + 1, ... with h = rows / 2.

    Raises ValueError for an odd number of rows.
    """
    _even(rows)
    j = torch.arange(rows, device=device)
    return (j % 2) * (rows // 2) + j // 2


def swapped_halves_indices(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """The order that exchanges the halves: ``[gate; up]`` to ``[up; gate]`` and back, int64 ``[rows]``.

    Raises ValueError for an odd number of rows.
    """
    _even(rows)
    return (torch.arange(rows, device=device) + rows // 2) % max(rows, 1)


def gated_shuffle_indices(rows: int, tile: int, device: torch.device | str = "cpu") -> Tensor:
    """The order of a gated FC1 in TRTLLM kernels, int64 ``[rows]``: halves alternated, then shuffled for the tile."""
    return compose(gated_row_indices(rows, device), row_shuffle_indices(rows, tile, device))


def apply(tensor: Tensor, indices: Tensor, dim: int = -2) -> Tensor:
    """``tensor`` with ``dim`` put into the order ``indices``; batch dimensions (experts) come along."""
    if tensor.shape[dim] != indices.numel():
        raise ValueError(f"dimension {dim} has {tensor.shape[dim]} entries, the order {indices.numel()}")
    return tensor.index_select(dim, indices)


def invert(indices: Tensor) -> Tensor:
    """The order that undoes ``indices``: ``apply(apply(x, p), invert(p)) == x``."""
    inverse = torch.empty_like(indices)
    inverse[indices] = torch.arange(indices.numel(), device=indices.device)
    return inverse


def compose(first: Tensor, second: Tensor) -> Tensor:
    """One order for two: ``apply(x, compose(p, q)) == apply(apply(x, p), q)``."""
    return first[second]


def to_layout(weight: Tensor, layout: str, block: int | None = None) -> Tensor:
    """A plain weight ``[..., m, k]`` in a stored layout, contiguous. ``block``: columns a block, ``BlockMajorK`` only.

    FlashInfer's kernels take blocks of 128 bytes: 128 columns of FP8, 64 of BF16, 256 of packed FP4 (128 bytes here).
    Raises ValueError for an unknown layout, a missing or needless ``block``, or one that does not divide k.
    """
    _check_layout(layout, block)
    if layout == "MajorK":
        return weight.contiguous()
    if layout == "MajorMn":
        return weight.transpose(-1, -2).contiguous()
    assert block is not None
    if weight.shape[-1] % block:
        raise ValueError(f"{weight.shape[-1]} columns are no multiple of the block {block}")
    return weight.reshape(*weight.shape[:-1], -1, block).transpose(-2, -3).contiguous()


def from_layout(stored: Tensor, layout: str) -> Tensor:
    """The plain weight ``[..., m, k]`` of a stored one, contiguous. Raises ValueError for an unknown layout."""
    _check_layout(layout, 1 if layout == "BlockMajorK" else None)
    if layout == "MajorK":
        return stored.contiguous()
    if layout == "MajorMn":
        return stored.transpose(-1, -2).contiguous()
    return stored.transpose(-2, -3).flatten(-2).contiguous()


def _even(rows: int) -> None:
    if rows % 2:
        raise ValueError(f"{rows} rows have no halves")


def _check_layout(layout: str, block: int | None) -> None:
    if layout not in WEIGHT_LAYOUTS:
        raise ValueError(f"weight layout {layout!r} is none of {', '.join(WEIGHT_LAYOUTS)}")
    if (layout == "BlockMajorK") != (block is not None) or (block is not None and block < 1):
        raise ValueError(f"block={block}: BlockMajorK takes a positive block, the other layouts none")
