"""Triton kernels of this project: UE8M0 encoding, block quantisation, dequantisation and scale layouts.

Exact by construction: exponents, amax and E2M1 codes are taken by integer arithmetic or comparisons, every quotient is
an IEEE division (``tl.div_rn``; a plain ``/`` would be ``div.full.f32``), every cast rounds to nearest even, and what
the cast saturates is clamped before it. Ragged edges are masked; ``x`` may have any strides; offsets into matrices are
64-bit. The same code runs compiled and under ``TRITON_INTERPRET=1``.

All pointers to 8-bit codes are ``uint8``. One program handles ``TILE_M`` rows of one block of columns, so that blocks
of ``1 x GROUP`` have a scale a row, and blocks of ``TILE_M x GROUP`` (``SQUARE``) share one.
"""

# ruff: noqa: N803 - constexpr parameters in capitals, as Triton kernels have them
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _magnitude_bits(x):
    """The bits of |x| as int32: they order as the magnitudes do, infinities and NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def ue8m0_code(x, POLICY: tl.constexpr, EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """int32 UE8M0 codes of |x|.

    ``ceil``, ``ceil_clamped``, ``floor`` and ``nearest`` with EMAX = 0 take a scale. ``floor``, ``ceil_amax`` and
    ``even`` take a block's amax and the element format's EMAX.
    """
    bits = _magnitude_bits(x)
    nan = bits > 0x7F800000
    if POLICY == "even":
        bits = tl.where(nan, bits, bits + (1 << (22 - MANTISSA_BITS)))
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    if POLICY == "ceil_clamped":
        code = exponent + (mantissa != 0).to(tl.int32)
        code = tl.minimum(tl.maximum(code, 1), 254)
    elif POLICY == "nearest":
        # 2^-127 has no normal FP32 form: its bits are 0x400000.
        up = tl.where(exponent == 0, mantissa > 0x400000, mantissa >= 0x400000)
        code = tl.minimum(exponent + up.to(tl.int32), 255)
    else:
        code = exponent
        if POLICY == "ceil":
            up = tl.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
            code = exponent + up.to(tl.int32)
        elif POLICY == "ceil_amax":
            code = exponent + (mantissa != 0).to(tl.int32)
        code = tl.minimum(tl.maximum(code - EMAX, 0), 254)
        code = tl.where(nan, 255, code)
    return code


@triton.jit
def ue8m0_value(code):
    """FP32 values of int32 UE8M0 codes: 2^(code - 127), NaN for 255."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _divide(x, y, shape: tl.constexpr):
    return tl.div_rn(tl.broadcast_to(x, shape), tl.broadcast_to(y, shape))


@triton.jit
def _clamp(x, LIMIT: tl.constexpr):
    """x within +-LIMIT; NaN stays, which ``tl.minimum`` does not promise."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def _e4m3_code(x):
    return _clamp(x, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _e4m3_value(code):
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1_code(x):
    """int32 nibbles: a code is the number of rounding boundaries below |x|, ties going to the even code."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _e2m1_value(nibble):
    """FP32 values of int32 nibbles: magnitudes 0, 0.5, then 2^(e - 1) * (1 + m / 2)."""
    magnitude = nibble & 7
    bits = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, bits)
    return (bits | ((nibble & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _block_amax(bits, SQUARE: tl.constexpr):
    """FP32 amax per row, or of the whole tile in every row. Maximum of bits, so that a NaN wins."""
    rows = tl.max(bits, axis=1)
    if SQUARE:
        rows = tl.zeros_like(rows) + tl.max(rows, axis=0)
    return rows.to(tl.float32, bitcast=True)


@triton.jit
def _amax_scale_code(amax, POLICY: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """UE8M0 codes of a block's amax: of amax / qmax under the two ceil policies."""
    if POLICY == "ceil" or POLICY == "ceil_clamped":
        code = ue8m0_code(tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32)), POLICY, 0, MANTISSA_BITS)
    else:
        code = ue8m0_code(amax, POLICY, EMAX, MANTISSA_BITS)
    return code


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
        magnitude = _magnitude_bits(x).to(tl.float32, bitcast=True)
        code = _amax_scale_code(magnitude, POLICY, QMAX, EMAX, MANTISSA_BITS)
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
    SQUARE: tl.constexpr,
    TILE_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """E4M3 payload [m, k] and its scales, FP32 (POLICY ``fp32``) or UE8M0 codes under a policy."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    inside = (row < m)[:, None] & (column < k)[None, :]
    at = row.to(tl.int64)[:, None] * stride_m + column.to(tl.int64)[None, :] * stride_k
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    amax = _block_amax(_magnitude_bits(x), SQUARE)
    if POLICY == "fp32":
        scale = tl.div_rn(tl.maximum(amax, amax_floor), tl.full(amax.shape, 448.0, tl.float32))
        stored = scale
    else:
        code = _amax_scale_code(amax, POLICY, 448.0, 8, 3)
        scale = ue8m0_value(code)
        stored = code.to(tl.uint8)
    if SQUARE:
        scale_at = tl.program_id(0) * scale_columns + tl.program_id(1) + tl.zeros_like(row)
        tl.store(scales_ptr + scale_at, stored, mask=tl.arange(0, TILE_M) == 0)
    else:
        tl.store(scales_ptr + row.to(tl.int64) * scale_columns + tl.program_id(1), stored, mask=row < m)
    payload = _e4m3_code(_divide(x, scale[:, None], x.shape))
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
    amax = _block_amax(tl.maximum(_magnitude_bits(low), _magnitude_bits(high)), False)
    if POLICY == "e4m3":
        global_scale = tl.zeros_like(amax) + tl.load(global_scale_ptr)
        block_scale = tl.div_rn(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), global_scale)
        stored = _e4m3_code(tl.maximum(block_scale, scale_floor))
        scale = _e4m3_value(stored) * global_scale
    else:
        code = _amax_scale_code(amax, POLICY, 6.0, 2, 1)
        scale = ue8m0_value(code)
        stored = code.to(tl.uint8)
    tl.store(scales_ptr + row.to(tl.int64) * scale_columns + tl.program_id(1), stored, mask=row < m)
    low_code = _e2m1_code(_divide(low, scale[:, None], low.shape))
    high_code = _e2m1_code(_divide(high, scale[:, None], high.shape))
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
    bits = tl.max(tl.max(_magnitude_bits(x), axis=1), axis=0)
    tl.store(partial_ptr + tl.program_id(0) * partial_columns + tl.program_id(1), bits)


@triton.jit
def tensor_scale_kernel(partial_ptr, scale_ptr, n, amax_floor, BLOCK: tl.constexpr):
    """scale[0] = max(amax, amax_floor) / 448 from the bits of n partial maxima; one program."""
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
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
    payload = _e4m3_code(tl.div_rn(x, tl.zeros_like(x) + tl.load(scale_ptr)))
    tl.store(payload_ptr + row.to(tl.int64)[:, None] * k + column[None, :], payload, mask=inside)


@triton.jit
def _load_scale(scales_ptr, at, inside, global_scale_ptr, SCALE: tl.constexpr):
    """FP32 scales: ``fp32`` as stored, ``ue8m0`` codes, or ``e4m3`` codes times the global scale, rounded once."""
    if SCALE == "fp32":
        scale = tl.load(scales_ptr + at, mask=inside, other=0.0)
    elif SCALE == "ue8m0":
        scale = ue8m0_value(tl.load(scales_ptr + at, mask=inside, other=0).to(tl.int32))
    else:
        scale = _e4m3_value(tl.load(scales_ptr + at, mask=inside, other=0)) * tl.load(global_scale_ptr)
    return scale


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
    scale = _load_scale(scales_ptr, scale_at, inside, scales_ptr, SCALE)
    value = _e4m3_value(tl.load(payload_ptr + at, mask=inside, other=0)) * scale
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
    scale = _load_scale(scales_ptr, scale_at, inside, global_scale_ptr, SCALE)
    element = output_ptr.dtype.element_ty
    tl.store(output_ptr + at * 2, (_e2m1_value(packed & 15) * scale).to(element), mask=inside)
    tl.store(output_ptr + at * 2 + 1, (_e2m1_value(packed >> 4) * scale).to(element), mask=inside)
