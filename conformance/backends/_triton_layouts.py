"""Triton kernels that move scale factors between their plain and their stored orders, bit for bit."""

# ruff: noqa: N803 - constexpr parameters in capitals, as Triton kernels have them
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def interleave_128x4_kernel(source_ptr, target_ptr, rows, cols, n, UNPACK: tl.constexpr, BLOCK: tl.constexpr):
    """uint8 plain [rows, cols] to flat tiles of 128 x 4 (n bytes, padding zero), or back.

    Byte o of the packed form lies in tile o // 512, there at row (o % 512) // 16 + 32 * ((o % 16) // 4), column o % 4.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile_columns = (cols + 3) // 4
    tile, byte = offset // 512, offset % 512
    row = (tile // tile_columns) * 128 + ((byte % 16) // 4) * 32 + byte // 16
    column = (tile % tile_columns) * 4 + byte % 4
    real = (offset < n) & (row < rows) & (column < cols)
    plain_at = row * cols + column
    if UNPACK:
        tl.store(target_ptr + plain_at, tl.load(source_ptr + offset, mask=real, other=0), mask=real)
    else:
        tl.store(target_ptr + offset, tl.load(source_ptr + plain_at, mask=real, other=0), mask=offset < n)


@triton.jit
def transpose_kernel(
    source_ptr,
    target_ptr,
    source_rows,
    source_columns,
    target_rows,
    target_columns,
    source_stride,
    TILE: tl.constexpr,
):
    """32-bit target[target_rows, target_columns] = source transposed; zero where the source has no element."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < target_rows)[:, None] & (column < target_columns)[None, :]
    real = inside & (row < source_columns)[:, None] & (column < source_rows)[None, :]
    source_at = column.to(tl.int64)[None, :] * source_stride + row[:, None]
    value = tl.load(source_ptr + source_at, mask=real, other=0)
    tl.store(target_ptr + row.to(tl.int64)[:, None] * target_columns + column[None, :], value, mask=inside)


@triton.jit
def pack_mn_major_kernel(source_ptr, target_ptr, rows, cols, target_columns, TILE: tl.constexpr):
    """uint8 [rows, cols] to int32 [ceil(cols / 4), target_columns]: column 4j + i of a row in bits 8i to 8i + 7."""
    word = tl.program_id(0)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    packed = tl.zeros([TILE], tl.int32)
    for i in tl.static_range(4):
        column = tl.zeros_like(row) + (word * 4 + i)  # a vector: the interpreter cannot `&` a mask with a scalar
        at = source_ptr + row.to(tl.int64) * cols + column
        byte = tl.load(at, mask=(row < rows) & (column < cols), other=0)
        packed = packed | (byte.to(tl.int32) << (8 * i))
    tl.store(target_ptr + word.to(tl.int64) * target_columns + row, packed, mask=row < target_columns)


@triton.jit
def unpack_mn_major_kernel(source_ptr, target_ptr, rows, cols, source_columns, TILE: tl.constexpr):
    """The inverse of `pack_mn_major_kernel`; padding is not read."""
    word = tl.program_id(0)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    packed = tl.load(source_ptr + word.to(tl.int64) * source_columns + row, mask=row < rows, other=0)
    for i in tl.static_range(4):
        column = tl.zeros_like(row) + (word * 4 + i)
        byte = ((packed >> (8 * i)) & 0xFF).to(tl.uint8)
        tl.store(target_ptr + row.to(tl.int64) * cols + column, byte, mask=(row < rows) & (column < cols))
