"""UE8M0: a scale that is a power of two, one byte of exponent, and the policies that round a scale to it.

Code b stands for 2^(b - 127), b = 0..254; 255 is NaN; there is no sign, no zero and no infinity (OCP Microscaling
Formats 1.0, section 5.4). Every policy works on the bits of an FP32 number; its sign is ignored.

| policy | source |
|---|---|
| ``ceil`` | CUDA ``cvt.rp.satfinite.ue8m0x2.f32``; torchao ``RCEIL``; of amax / qmax |
| ``ceil_clamped`` | DeepGEMM and SGLang ``ceil_to_ue8m0``: exponent field + (mantissa != 0), clamped to 1..254 |
| ``floor`` | OCP MX section 6.3; torchao ``FLOOR`` |
| ``ceil_amax`` | torchao ``CEIL`` |
| ``even`` | torchao ``EVEN`` |
| ``nearest`` | torch's cast to ``float8_e8m0fnu`` |
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from references.elements import Element
from references.rounding import round_to

SCALE_POLICIES = ("ceil", "ceil_clamped", "floor", "nearest")
"""Policies from a scale."""
AMAX_POLICIES = ("ceil", "ceil_clamped", "floor", "ceil_amax", "even")
"""Policies from a block's amax."""
POLICIES = ("ceil", "ceil_clamped", "floor", "ceil_amax", "even", "nearest")
NAN = 255

_MANTISSA = (1 << 23) - 1
_INFINITY = 255 << 23


def decode(codes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Codes uint8 of any shape to 2^(code - 127) in FP64 or FP32, exactly (code 0 is an FP32 subnormal); 255 to NaN."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"ue8m0: codes are {codes.dtype}, expected uint8")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"ue8m0: cannot decode to {dtype}")
    return torch.take(_values(dtype, codes.device), codes.to(torch.int64))


@lru_cache(maxsize=16)
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of all codes."""
    wide = torch.arange(256, dtype=torch.int64, device=device)
    if dtype == torch.float64:
        values = ((wide + (1023 - 127)) << 52).view(torch.float64)
    else:
        values = torch.where(wide == 0, 1 << 22, wide << 23).to(torch.int32).view(torch.float32)
    return values.masked_fill(wide == NAN, float("nan"))


def _magnitude(values: Tensor) -> Tensor:
    if values.dtype != torch.float32:
        raise ValueError(f"ue8m0: values are {values.dtype}, expected float32")
    return values.contiguous().view(torch.int32) & 0x7FFFFFFF


def encode(scale: Tensor, policy: str) -> Tensor:
    """FP32 scales of any shape to codes uint8 under one of `SCALE_POLICIES`."""
    magnitude = _magnitude(scale)
    if policy == "ceil":
        code = _exponent_up(magnitude).clamp_(max=254)
        code.masked_fill_(magnitude <= 1 << 22, 0)  # up to 2^-127, code 0
    elif policy == "ceil_clamped":
        return _exponent_up(magnitude).clamp_(1, 254).to(torch.uint8)
    elif policy == "floor":
        code = (magnitude >> 23).clamp_(max=254)
    elif policy == "nearest":
        exponent, mantissa = magnitude >> 23, magnitude & _MANTISSA
        code = exponent + (mantissa >= 1 << 22)
        # Not nearest below 2^-126, but what torch does: everything above 2^-127 is 1.
        code = torch.where(exponent == 0, (mantissa > 1 << 22).to(code.dtype), code).clamp(max=NAN)
    else:
        raise ValueError(f"ue8m0: policy {policy!r} is none of {', '.join(SCALE_POLICIES)}")
    return code.masked_fill_(magnitude > _INFINITY, NAN).to(torch.uint8)


def _exponent_up(magnitude: Tensor) -> Tensor:
    """The exponent field of FP32 magnitude bits, one more where the mantissa is not zero; 255 for infinity and NaN."""
    return magnitude.clamp(max=_INFINITY).add_(_MANTISSA).bitwise_right_shift_(23)


def from_amax(amax: Tensor, element: Element, policy: str, arithmetic: str = "divide") -> Tensor:
    """FP32 block maxima of any shape to codes uint8 under one of `AMAX_POLICIES`.

    arithmetic: how ``ceil`` and ``ceil_clamped`` bring amax to a scale in FP32, ``divide`` RN(amax / qmax) or
    ``reciprocal`` RN(amax * RN(1 / qmax)); the other policies read the bits of amax.
    """
    if policy in ("ceil", "ceil_clamped"):
        return encode(scale_from_amax(amax, element, arithmetic), policy)
    magnitude = _magnitude(amax)
    if policy == "floor":
        code = magnitude.clamp(max=_INFINITY).bitwise_right_shift_(23)
    elif policy == "ceil_amax":
        code = _exponent_up(magnitude)
    elif policy == "even":
        code = magnitude.clamp(max=_INFINITY).add_(1 << (22 - element.mantissa_bits)).bitwise_right_shift_(23)
    else:
        raise ValueError(f"ue8m0: policy {policy!r} is none of {', '.join(AMAX_POLICIES)}")
    # A subnormal amax has exponent field 0 instead of its true exponent: code 0 either way, since emax >= 2.
    code.sub_(element.emax).clamp_(0, 254)
    return code.masked_fill_(magnitude > _INFINITY, NAN).to(torch.uint8)


def scale_from_amax(amax: Tensor, element: Element, arithmetic: str = "divide") -> Tensor:
    """RN32(amax / qmax) or RN32(amax * RN32(1 / qmax)) of FP32 block maxima, FP32; the sign of amax is dropped.

    FP32 division and multiplication of tensors are correctly rounded, subnormal numbers included, on CPU and CUDA.
    """
    # A tensor and not a Python number: CUDA kernels divide by a number through its reciprocal.
    qmax = torch.full((), element.max, dtype=torch.float64, device=amax.device)
    if arithmetic == "divide":
        return amax.abs() / qmax.to(torch.float32)  # exact: qmax has few bits
    if arithmetic == "reciprocal":
        return amax.abs() * round_to(1.0 / qmax, torch.float32).to(torch.float32)
    raise ValueError(f"ue8m0: arithmetic {arithmetic!r} is neither divide nor reciprocal")
