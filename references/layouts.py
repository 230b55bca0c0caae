"""The stored orders of scale factors: where a kernel expects the scale of row r and column c.

The plain form is a matrix ``[rows, cols]``. Packing moves bits and computes nothing, so NaN payloads and signs survive.

    interleave_128x4   uint8, flat. Tiles of 128 rows x 4 columns, 512 bytes each, row tiles outermost; within a tile
                       (r%32)*16 + ((r%128)//32)*4 + c%4. cuBLAS "1D block scaling factors layout".
    mn_major           float32 ``[cols, rows to a multiple of 4]``: DeepGEMM on SM90 (16-byte rows for TMA).
    mn_major_packed    int32 ``[ceil(cols/4), rows to a multiple of 4]``, column 4j+i in bits 8i..8i+7: DeepGEMM on
                       SM100.
    k_major            float32 ``[cols, rows]``: FlashInfer's DeepSeek activation scales.

Padding is written as zero bits. A **slot** is the place of one scale; `slots` splits a packed tensor into its slots and
`padding_mask` says which of them no scale owns.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("interleave_128x4", "mn_major", "mn_major_packed", "k_major")

_PLAIN_DTYPE = {
    "interleave_128x4": torch.uint8,
    "mn_major": torch.float32,
    "mn_major_packed": torch.uint8,
    "k_major": torch.float32,
}
_PACKED_DTYPE = {**_PLAIN_DTYPE, "mn_major_packed": torch.int32}


def plain_dtype(layout: str) -> torch.dtype:
    """The dtype of the plain matrix. Raises ValueError for an unknown layout."""
    _known(layout)
    return _PLAIN_DTYPE[layout]


def packed_dtype(layout: str) -> torch.dtype:
    """The dtype of the packed tensor. Raises ValueError for an unknown layout."""
    _known(layout)
    return _PACKED_DTYPE[layout]


def packed_shape(layout: str, rows: int, cols: int) -> tuple[int, ...]:
    """The shape of the packed tensor for a plain ``[rows, cols]``. Raises ValueError for an unknown layout."""
    _known(layout)
    if layout == "interleave_128x4":
        return (_up(rows, 128) * _up(cols, 4),)
    if layout == "mn_major":
        return (cols, _up(rows, 4))
    if layout == "mn_major_packed":
        return (_up(cols, 4) // 4, _up(rows, 4))
    return (cols, rows)


def pack(scales: Tensor, layout: str) -> Tensor:
    """The packed form, contiguous, of plain ``scales`` ``[rows, cols]`` of any strides, on their device.

    Raises ValueError for an unknown layout, another dtype than `plain_dtype`, or another rank than 2.
    """
    _check(scales, plain_dtype(layout), None)
    rows, cols = scales.shape
    if layout == "interleave_128x4":
        padded = _padded(scales, _up(rows, 128), _up(cols, 4))
        tiles = padded.view(_up(rows, 128) // 128, 4, 32, _up(cols, 4) // 4, 4)
        return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
    if layout == "mn_major_packed":
        padded = _padded(scales, _up(rows, 4), _up(cols, 4)).view(_up(rows, 4), -1, 4).to(torch.int64)
        shifts = torch.tensor([0, 8, 16, 24], device=scales.device)
        words = (padded << shifts).sum(2)
        return _wrap_int32(words).t().contiguous()
    bits = scales.view(torch.int32)  # copies of floats may quieten a NaN; copies of integers may not
    padded_rows = _up(rows, 4) if layout == "mn_major" else rows
    return _padded(bits, padded_rows, cols).t().contiguous().view(torch.float32)


def unpack(packed: Tensor, layout: str, rows: int, cols: int) -> Tensor:
    """The plain ``[rows, cols]``, contiguous, of a packed tensor; its padding is not looked at.

    Raises ValueError for an unknown layout, another dtype than `packed_dtype`, or another shape than `packed_shape`.
    """
    shape = packed_shape(layout, rows, cols)
    _check(packed, packed_dtype(layout), shape)
    if layout == "interleave_128x4":
        tiles = packed.reshape(_up(rows, 128) // 128, _up(cols, 4) // 4, 32, 4, 4)
        return tiles.permute(0, 3, 2, 1, 4).reshape(_up(rows, 128), _up(cols, 4))[:rows, :cols].contiguous()
    if layout == "mn_major_packed":
        plain = slots(packed, layout).permute(1, 0, 2).reshape(_up(rows, 4), _up(cols, 4))
        return plain[:rows, :cols].contiguous()
    return packed.view(torch.int32)[:, :rows].t().contiguous().view(torch.float32)


def slots(packed: Tensor, layout: str) -> Tensor:
    """The packed tensor as one bit pattern a slot, to compare with `padding_mask`.

    uint8 flat for ``interleave_128x4``; int32 (float bits) for ``mn_major`` and ``k_major``; uint8 ``[.., .., 4]`` for
    ``mn_major_packed``, last index i for bits 8i..8i+7. Raises ValueError for an unknown layout or another dtype.
    """
    _check(packed, packed_dtype(layout), tuple(packed.shape))
    if layout == "interleave_128x4":
        return packed
    if layout == "mn_major_packed":
        shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=packed.device)
        # The shift is arithmetic: without the mask bit 31 would fill the upper bytes.
        return ((packed[..., None] >> shifts) & 0xFF).to(torch.uint8)
    return packed.view(torch.int32)


def padding_mask(layout: str, rows: int, cols: int, device: torch.device | str = "cpu") -> Tensor:
    """bool of the shape of `slots`: True where a slot belongs to no scale. Raises ValueError for an unknown layout."""
    dtype = plain_dtype(layout)
    if dtype == torch.uint8:
        owned = pack(torch.ones(rows, cols, dtype=dtype, device=device), layout)
    else:
        owned = pack(torch.ones(rows, cols, dtype=torch.int32, device=device).view(dtype), layout)
    return slots(owned, layout) == 0


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(matrix: Tensor, rows: int, cols: int) -> Tensor:
    if tuple(matrix.shape) == (rows, cols):
        return matrix.contiguous()
    padded = matrix.new_zeros(rows, cols)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def _wrap_int32(words: Tensor) -> Tensor:
    """Int64 0..2^32-1 to int32 of the same bits, by arithmetic that stays in range."""
    return ((words ^ 0x80000000) - 0x80000000).to(torch.int32)


def _known(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"dtype is {tensor.dtype}, expected {dtype}")
    if shape is None and tensor.dim() != 2:
        raise ValueError(f"shape is {tuple(tensor.shape)}, expected a matrix")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"shape is {tuple(tensor.shape)}, expected {shape}")
