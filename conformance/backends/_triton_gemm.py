"""Triton GEMM kernels of this project: DeepSeek's block-scaled FP8 and BF16, plain or by groups.

Rows of A belong to groups, each with a B of its own; a plain GEMM is the case of one group. A program makes one tile of
one group; group g's rows are ``starts[g] .. starts[g] + counts[g]``. K is taken 128 at a time: each tensor-core dot
product starts from zero and joins an FP32 accumulator, scaled (the promotion that FP8 on Hopper needs).
"""

# ruff: noqa: N803 - constexpr parameters in capitals, as Triton kernels have them
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from conformance.backends._triton_numbers import ue8m0_value


@triton.jit
def fp8_gemm_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    output_ptr,
    starts_ptr,
    scale_starts_ptr,
    counts_ptr,
    n,
    k,
    a_scale_group,
    a_scale_row,
    a_scale_block,
    b_scale_rows,
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """output[row, n] = sum over blocks of dot(a, b) * a_scale * b_scale, for 1 x GROUP times GROUP x GROUP blocks.

    Scales of A lie at group * a_scale_group + row * a_scale_row + block * a_scale_block; PACKED ones are bytes of
    int32 words, four blocks a word. B is ``[groups, n, k]`` with scales ``[groups, b_scale_rows, blocks]``.
    """
    group = tl.program_id(2)
    start = tl.load(starts_ptr + group).to(tl.int64)
    scale_start = tl.load(scale_starts_ptr + group).to(tl.int64)
    count = tl.load(counts_ptr + group)
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, GROUP)
    blocks = tl.cdiv(k, GROUP)
    b_group = group.to(tl.int64) * n
    a_scale_at = a_scales_ptr + group.to(tl.int64) * a_scale_group + (scale_start + row) * a_scale_row
    b_scale_at = b_scales_ptr + (group.to(tl.int64) * b_scale_rows + column // GROUP) * blocks
    accumulator = tl.zeros([TILE_M, TILE_N], tl.float32)
    for block in range(0, blocks):
        depth = block * GROUP + inner
        a_at = (start + row)[:, None] * k + depth[None, :]
        b_at = (b_group + column)[None, :] * k + depth[:, None]
        a = tl.load(a_ptr + a_at, mask=(row < count)[:, None] & (depth < k)[None, :], other=0)
        b = tl.load(b_ptr + b_at, mask=(column < n)[None, :] & (depth < k)[:, None], other=0)
        if PACKED:
            word = tl.load(a_scale_at + (block // 4) * a_scale_block, mask=row < count, other=0)
            a_scale = ue8m0_value((word >> ((block % 4) * 8)) & 255)
        elif SCALE == "ue8m0":
            a_scale = ue8m0_value(tl.load(a_scale_at + block * a_scale_block, mask=row < count, other=0).to(tl.int32))
        else:
            a_scale = tl.load(a_scale_at + block * a_scale_block, mask=row < count, other=0.0)
        if SCALE == "ue8m0":
            b_scale = ue8m0_value(tl.load(b_scale_at + block, mask=column < n, other=0).to(tl.int32))
        else:
            b_scale = tl.load(b_scale_at + block, mask=column < n, other=0.0)
        dot = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
        # Spelled out: whether a * b + c is contracted depends on the version (TRITON_DEFAULT_FP_FUSION).
        factor = tl.broadcast_to(b_scale[None, :], [TILE_M, TILE_N])
        accumulator = tl.fma(dot * a_scale[:, None], factor, accumulator)
    at = (start + row)[:, None] * n + column[None, :]
    inside = (row < count)[:, None] & (column < n)[None, :]
    tl.store(output_ptr + at, accumulator.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def bf16_gemm_kernel(
    a_ptr,
    b_ptr,
    output_ptr,
    starts_ptr,
    counts_ptr,
    n,
    k,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """output[row, n] = sum over k of a[row, k] * b[group, n, k], one running FP32 accumulator over all of K."""
    group = tl.program_id(2)
    start = tl.load(starts_ptr + group).to(tl.int64)
    count = tl.load(counts_ptr + group)
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    b_group = group.to(tl.int64) * n
    accumulator = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, k, TILE_K):
        depth = first + inner
        a_at = (start + row)[:, None] * k + depth[None, :]
        b_at = (b_group + column)[None, :] * k + depth[:, None]
        a = tl.load(a_ptr + a_at, mask=(row < count)[:, None] & (depth < k)[None, :], other=0.0)
        b = tl.load(b_ptr + b_at, mask=(column < n)[None, :] & (depth < k)[:, None], other=0.0)
        accumulator = tl.dot(a, b, accumulator)
    at = (start + row)[:, None] * n + column[None, :]
    inside = (row < count)[:, None] & (column < n)[None, :]
    tl.store(output_ptr + at, accumulator.to(output_ptr.dtype.element_ty), mask=inside)
