"""Device functions in Triton: UE8M0, E4M3 and E2M1 codes and values, and the scales of blocks.

Exponents and maxima are taken from bits, E2M1 codes by comparisons, quotients by ``tl.div_rn``.
"""

from __future__ import annotations

# ruff: noqa: N803 - constexpr parameters in capitals, as Triton kernels have them
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as int32: they order as the magnitudes do, infinities and NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def ue8m0_code(x, POLICY: tl.constexpr, EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """int32 UE8M0 codes of |x|.

    ``ceil``, ``ceil_clamped``, ``floor`` and ``nearest`` with EMAX = 0 take a scale. ``floor``, ``ceil_amax`` and
    ``even`` take a block's amax and the element format's EMAX.
    """
    bits = magnitude_bits(x)
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
def divide(x, y, shape: tl.constexpr):
    return tl.div_rn(tl.broadcast_to(x, shape), tl.broadcast_to(y, shape))


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    """x within +-LIMIT; NaN stays, which ``tl.minimum`` does not promise."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def e4m3_code(x):
    return clamp(x, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(code):
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_code(x):
    """int32 nibbles: a code is the number of rounding boundaries below |x|, ties going to the even code."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(nibble):
    """FP32 values of int32 nibbles: magnitudes 0, 0.5, then 2^(e - 1) * (1 + m / 2)."""
    magnitude = nibble & 7
    bits = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, bits)
    return (bits | ((nibble & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def amax_scale_code(amax, POLICY: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """UE8M0 codes of a block's amax: of amax / qmax under the two ceil policies."""
    if POLICY == "ceil" or POLICY == "ceil_clamped":
        code = ue8m0_code(tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32)), POLICY, 0, MANTISSA_BITS)
    else:
        code = ue8m0_code(amax, POLICY, EMAX, MANTISSA_BITS)
    return code


@triton.jit
def e4m3_block_scale(amax, amax_floor, POLICY: tl.constexpr):
    """FP32 scales of E4M3 blocks and their stored form: the same (POLICY ``fp32``) or UE8M0 codes under a policy."""
    if POLICY == "fp32":
        scale = tl.div_rn(tl.maximum(amax, amax_floor), tl.full(amax.shape, 448.0, tl.float32))
        stored = scale
    else:
        code = amax_scale_code(amax, POLICY, 448.0, 8, 3)
        scale = ue8m0_value(code)
        stored = code.to(tl.uint8)
    return scale, stored


@triton.jit
def load_scale(scales_ptr, at, inside, global_scale_ptr, SCALE: tl.constexpr):
    """FP32 scales: ``fp32`` as stored, ``ue8m0`` codes, or ``e4m3`` codes times the global scale, rounded once."""
    if SCALE == "fp32":
        scale = tl.load(scales_ptr + at, mask=inside, other=0.0)
    elif SCALE == "ue8m0":
        scale = ue8m0_value(tl.load(scales_ptr + at, mask=inside, other=0).to(tl.int32))
    else:
        scale = e4m3_value(tl.load(scales_ptr + at, mask=inside, other=0)) * tl.load(global_scale_ptr)
    return scale
