"""Triton kernels of this project: UE8M0 encoding, block quantisation, dequantisation and scale layouts.

Exact by construction: exponents, amax and E2M1 codes are taken by integer arithmetic or comparisons, every quotient is
an IEEE division (``tl.div_rn``; a plain ``/`` would be ``div.full.f32``), every cast rounds to nearest even, and what
the cast saturates is clamped before it. Ragged edges are masked; ``x`` may have any strides; offsets into matrices are
64-bit. The same code runs compiled and under ``TRITON_INTERPRET=1``.

All pointers to 8-bit codes are ``uint8``. A block's amax is the maximum of bits, so that a NaN wins.
"""

# ruff: noqa: N803 - constexpr parameters in capitals, as Triton kernels have them
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from conformance.backends._triton_numbers import (
    amax_scale_code,
    divide,
    e2m1_code,
    e2m1_value,
    e4m3_block_scale,
    e4m3_code,
    e4m3_value,
    load_scale,
    magnitude_bits,
    ue8m0_code,
    ue8m0_value,
)


@triton.jit
def ue8m0_kernel(
    x_ptr,
    codes_ptr,
    n,
    POLICY: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    QMAX: tl.constexpr,
    EMAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """codes[i] = the UE8M0 code of |x[i]|, a scale or (FROM_AMAX) a block's amax."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    if FROM_AMAX:
        magnitude = magnitude_bits(x).to(tl.float32, bitcast=True)
        code = amax_scale_code(magnitude, POLICY, QMAX, EMAX, MANTISSA_BITS)
    else:
        code = ue8m0_code(x, POLICY, 0, MANTISSA_BITS)
    tl.store(codes_ptr + offsets, code.to(tl.uint8), mask=offsets < n)


@triton.jit
def quantize_e4m3_kernel(
    x_ptr,
    payload_ptr,
    scales_ptr,
    m,
    k,
    stride_m,
    stride_k,
    scale_columns,
    amax_floor,
    POLICY: tl.constexpr,
    TILE_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """E4M3 payload [m, k] of 1 x GROUP blocks and their scales; TILE_M rows of one block column a program."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    inside = (row < m)[:, None] & (column < k)[None, :]
    at = row.to(tl.int64)[:, None] * stride_m + column.to(tl.int64)[None, :] * stride_k
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(magnitude_bits(x), axis=1).to(tl.float32, bitcast=True)
    scale, stored = e4m3_block_scale(amax, amax_floor, POLICY)
    tl.store(scales_ptr + row.to(tl.int64) * scale_columns + tl.program_id(1), stored, mask=row < m)
    payload = e4m3_code(divide(x, scale[:, None], x.shape))
    tl.store(payload_ptr + row.to(tl.int64)[:, None] * k + column[None, :], payload, mask=inside)


@triton.jit
def quantize_e4m3_square_kernel(
    x_ptr,
    payload_ptr,
    scales_ptr,
    m,
    k,
    stride_m,
    stride_k,
    scale_columns,
    amax_floor,
    POLICY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """E4M3 payload [m, k] of BLOCK_M x GROUP blocks; a block a program, read twice, TILE_M rows at a time."""
    first = tl.program_id(0) * BLOCK_M
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    largest = tl.zeros([TILE_M], tl.int32)
    for start in range(0, BLOCK_M, TILE_M):
        row = first + start + tl.arange(0, TILE_M)
        inside = (row < m)[:, None] & (column < k)[None, :]
        at = row.to(tl.int64)[:, None] * stride_m + column.to(tl.int64)[None, :] * stride_k
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(magnitude_bits(x), axis=1))
    amax = (tl.zeros([1], tl.int32) + tl.max(largest, axis=0)).to(tl.float32, bitcast=True)
    scale, stored = e4m3_block_scale(amax, amax_floor, POLICY)
    tl.store(scales_ptr + tl.program_id(0) * scale_columns + tl.program_id(1) + tl.arange(0, 1), stored)
    for start in range(0, BLOCK_M, TILE_M):
        row = first + start + tl.arange(0, TILE_M)
        inside = (row < m)[:, None] & (column < k)[None, :]
        at = row.to(tl.int64)[:, None] * stride_m + column.to(tl.int64)[None, :] * stride_k
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        payload = e4m3_code(divide(x, scale[:, None], x.shape))
        tl.store(payload_ptr + row.to(tl.int64)[:, None] * k + column[None, :], payload, mask=inside)


@triton.jit
def quantize_e2m1_kernel(
    x_ptr,
    payload_ptr,
    scales_ptr,
    global_scale_ptr,
    m,
    k,
    stride_m,
    stride_k,
    scale_columns,
    scale_floor,
    POLICY: tl.constexpr,
    TILE_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Packed E2M1 payload [m, k / 2] of 1 x GROUP blocks; scales UE8M0 under a policy, or E4M3 (POLICY ``e4m3``)."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    pair = tl.program_id(1) * (GROUP // 2) + tl.arange(0, GROUP // 2)
    inside = (row < m)[:, None] & (pair * 2 < k)[None, :]
    at = row.to(tl.int64)[:, None] * stride_m + pair.to(tl.int64)[None, :] * 2 * stride_k
    low = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + at + stride_k, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), axis=1)
    amax = bits.to(tl.float32, bitcast=True)
    if POLICY == "e4m3":
        global_scale = tl.zeros_like(amax) + tl.load(global_scale_ptr)
        block_scale = tl.div_rn(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), global_scale)
        stored = e4m3_code(tl.maximum(block_scale, scale_floor))
        scale = e4m3_value(stored) * global_scale
    else:
        code = amax_scale_code(amax, POLICY, 6.0, 2, 1)
        scale = ue8m0_value(code)
        stored = code.to(tl.uint8)
    tl.store(scales_ptr + row.to(tl.int64) * scale_columns + tl.program_id(1), stored, mask=row < m)
    low_code = e2m1_code(divide(low, scale[:, None], low.shape))
    high_code = e2m1_code(divide(high, scale[:, None], high.shape))
    packed = (low_code | (high_code << 4)).to(tl.uint8)
    tl.store(payload_ptr + row.to(tl.int64)[:, None] * (k // 2) + pair[None, :], packed, mask=inside)


@triton.jit
def tile_amax_kernel(
    x_ptr, partial_ptr, m, k, stride_m, stride_k, partial_columns, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    """The bits of each tile's amax, int32."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    at = row.to(tl.int64)[:, None] * stride_m + column.to(tl.int64)[None, :] * stride_k
    x = tl.load(x_ptr + at, mask=(row < m)[:, None] & (column < k)[None, :], other=0.0).to(tl.float32)
    bits = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    tl.store(partial_ptr + tl.program_id(0) * partial_columns + tl.program_id(1), bits)


@triton.jit
def tensor_scale_kernel(partial_ptr, scale_ptr, n, amax_floor, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """scale[0] = max(amax, amax_floor) / 448 from the bits of n <= STEPS * BLOCK partial maxima; one program.

    The trip count is constant: Triton 3.6's interpreter cannot evaluate range(n) with numpy 2.5.
    """
    largest = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        offsets = step * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(partial_ptr + offsets, mask=offsets < n, other=0))
    amax = (tl.zeros([1], tl.int32) + tl.max(largest, axis=0)).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(amax, amax_floor), tl.full([1], 448.0, tl.float32))
    tl.store(scale_ptr + tl.arange(0, 1), scale)


@triton.jit
def quantize_by_scale_kernel(
    x_ptr, scale_ptr, payload_ptr, m, k, stride_m, stride_k, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    """E4M3 payload [m, k] under one given FP32 scale."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < m)[:, None] & (column < k)[None, :]
    at = row.to(tl.int64)[:, None] * stride_m + column.to(tl.int64)[None, :] * stride_k
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    payload = e4m3_code(tl.div_rn(x, tl.zeros_like(x) + tl.load(scale_ptr)))
    tl.store(payload_ptr + row.to(tl.int64)[:, None] * k + column[None, :], payload, mask=inside)


@triton.jit
def dequantize_e4m3_kernel(
    payload_ptr,
    scales_ptr,
    output_ptr,
    m,
    k,
    block_m,
    block_k,
    scale_columns,
    SCALE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """output[m, k] = payload * scale, in FP32, then in the output's dtype."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < m)[:, None] & (column < k)[None, :]
    at = row.to(tl.int64)[:, None] * k + column[None, :]
    scale_at = (row // block_m).to(tl.int64)[:, None] * scale_columns + (column // block_k)[None, :]
    scale = load_scale(scales_ptr, scale_at, inside, scales_ptr, SCALE)
    value = e4m3_value(tl.load(payload_ptr + at, mask=inside, other=0)) * scale
    tl.store(output_ptr + at, value.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_e2m1_kernel(
    payload_ptr,
    scales_ptr,
    global_scale_ptr,
    output_ptr,
    m,
    k,
    scale_columns,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """output[m, k] of a packed payload [m, k / 2] with 1 x GROUP blocks."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    pair = tl.program_id(1) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    inside = (row < m)[:, None] & (pair * 2 < k)[None, :]
    at = row.to(tl.int64)[:, None] * (k // 2) + pair[None, :]
    packed = tl.load(payload_ptr + at, mask=inside, other=0).to(tl.int32)
    scale_at = row.to(tl.int64)[:, None] * scale_columns + (pair * 2 // GROUP)[None, :]
    scale = load_scale(scales_ptr, scale_at, inside, global_scale_ptr, SCALE)
    element = output_ptr.dtype.element_ty
    tl.store(output_ptr + at * 2, (e2m1_value(packed & 15) * scale).to(element), mask=inside)
    tl.store(output_ptr + at * 2 + 1, (e2m1_value(packed >> 4) * scale).to(element), mask=inside)
