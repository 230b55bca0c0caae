"""Scale layouts by torch's own operators: the stored orders of ``docs/operations.md`` and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def interleave(plain: Tensor, rows: int, cols: int) -> Tensor:
    """``[rows, cols]`` uint8 to 128x4 tiles, flat."""
    padded = F.pad(plain, (0, -cols % 4, 0, -rows % 128))
    return padded.view(-(-rows // 128), 4, 32, -(-cols // 4), 4).permute(0, 3, 2, 1, 4).flatten()


def deinterleave(packed: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `interleave`."""
    tiles = packed.view(-(-rows // 128), -(-cols // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :cols].contiguous()


def to_mn_major(plain: Tensor, rows: int, cols: int) -> Tensor:
    """``[rows, cols]`` to ``[cols, rows to a multiple of 4]``."""
    return F.pad(plain.t(), (0, -rows % 4)).contiguous()


def from_mn_major(packed: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `to_mn_major`."""
    return packed[:, :rows].t().contiguous()


def to_mn_major_packed(plain: Tensor, rows: int, cols: int) -> Tensor:
    """``[rows, cols]`` uint8 to int32 ``[ceil(cols/4), rows to a multiple of 4]``."""
    padded = F.pad(plain, (0, -cols % 4, 0, -rows % 4))
    return padded.view(padded.shape[0], -1, 4).view(torch.int32).squeeze(-1).t().contiguous()


def from_mn_major_packed(packed: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `to_mn_major_packed`."""
    # A copy: contiguous() leaves the strides of a single word alone, which then cannot be viewed as bytes.
    words = packed.t().clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)[:rows, :cols].contiguous()
