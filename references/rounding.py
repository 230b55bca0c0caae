"""Rounding of FP64 values to FP32, BF16 and FP16, and neighbours in those formats, on the bits.

IEEE 754 round to nearest, ties to even, by integer arithmetic on the FP64 bits: independent of the rounding mode, of
flush-to-zero settings and of any library's casts. Every rounded value is returned in FP64, which holds it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.chunks import pieces

FLOAT64_BIAS = 1023
_FRACTION = 52
_MAGNITUDE = (1 << 63) - 1
_SIGN = -(1 << 63)
_INFINITY = 0x7FF << _FRACTION


@dataclass(frozen=True)
class Binary:
    """An IEEE binary format: stored mantissa bits, exponents of the lowest and highest normal binade, integer view."""

    mantissa_bits: int
    emin: int
    emax: int
    integer: torch.dtype

    @property
    def width(self) -> int:
        """Bits in all."""
        return self.integer.itemsize * 8


BINARY: dict[torch.dtype, Binary] = {
    torch.float64: Binary(52, -1022, 1023, torch.int64),
    torch.float32: Binary(23, -126, 127, torch.int32),
    torch.bfloat16: Binary(7, -126, 127, torch.int16),
    torch.float16: Binary(10, -14, 15, torch.int16),
}
"""The formats that values are rounded to."""


def binary(dtype: torch.dtype) -> Binary:
    """The format of a dtype; ValueError if there is none."""
    if dtype not in BINARY:
        raise ValueError(f"rounding: {dtype} is none of {', '.join(map(str, BINARY))}")
    return BINARY[dtype]


def bits(values: Tensor) -> Tensor:
    """The bits of a float tensor as signed integers of the same width and shape."""
    return values.contiguous().view(binary(values.dtype).integer)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^e in FP64 for integer exponents within -1022..1023."""
    return ((exponents.to(torch.int64) + FLOAT64_BIAS) << _FRACTION).view(torch.float64)


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of ``dtype`` in the binade of each FP64 value, in FP64.

    Zero and subnormal values count to the lowest binade, infinities and NaN to the highest.
    """
    form = binary(dtype)
    exponents = ((bits(values) & _MAGNITUDE) >> _FRACTION) - FLOAT64_BIAS
    # 2^-1075, half of FP64's own smallest step, does not exist in FP64; there the whole step is returned.
    return power_of_two((exponents.clamp(form.emin, form.emax) - form.mantissa_bits - 1).clamp(min=-1022))


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """FP64 ``values`` of any shape rounded to ``dtype``, returned in FP64.

    Round to nearest even, overflow to infinity, gradual underflow; NaN and the sign of zero are kept.
    """
    form = binary(dtype)
    if values.dtype != torch.float64:
        raise ValueError(f"round_to: values are {values.dtype}, expected float64")
    if dtype == torch.float64:
        return values
    source = values.contiguous().view(-1)
    out = torch.empty_like(source)
    for piece in pieces(source.numel(), source.device):
        _round_bits(source[piece].view(torch.int64), form, out[piece].view(torch.int64))
    return out.view(values.shape)


def _round_bits(source: Tensor, form: Binary, out: Tensor) -> None:
    drop = _FRACTION - form.mantissa_bits
    # The sign does not take part. A carry out of the mantissa moves into the exponent field, which is the next binade.
    torch.bitwise_right_shift(source, drop, out=out)
    out.bitwise_and_(1).add_(source).add_((1 << (drop - 1)) - 1).bitwise_and_(-(1 << drop))
    lowest = (form.emin + FLOAT64_BIAS) << _FRACTION
    beyond = ((form.emax + 1 + FLOAT64_BIAS) << _FRACTION) - (1 << (drop - 1))
    magnitude = source & _MAGNITUDE
    special = (magnitude < lowest) & (magnitude != 0) | (magnitude >= beyond)
    if bool(special.any()):
        values = magnitude[special]
        small = _round_subnormal(values.clamp(max=lowest - 1), form)
        large = values.clamp(min=_INFINITY)  # NaN stays as it is
        out[special] = torch.where(values < lowest, small, large) | (source[special] & _SIGN)


def _round_subnormal(magnitude: Tensor, form: Binary) -> Tensor:
    exponent = magnitude >> _FRACTION
    significand = (magnitude & ((1 << _FRACTION) - 1)) | (1 << _FRACTION)
    shift = _FRACTION - form.mantissa_bits + form.emin + FLOAT64_BIAS - exponent
    steps = shift_right_even(significand, shift)
    step = power_of_two(torch.full_like(steps, form.emin - form.mantissa_bits))
    return (steps.to(torch.float64) * step).view(torch.int64)


def shift_right_even(significand: Tensor, shift: Tensor) -> Tensor:
    """int64 significands below 2^53 divided by 2^shift (shift >= 1), to nearest, ties to even."""
    shift = shift.clamp(max=_FRACTION + 3)  # beyond, the quotient is below a half all the same
    quotient = significand >> shift
    rest = significand - (quotient << shift)
    half = torch.ones_like(shift) << (shift - 1)
    return quotient + ((rest > half) | ((rest == half) & ((quotient & 1) == 1))).to(torch.int64)


def next_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of ``dtype`` above each FP64 value, in FP64; inf stays inf, NaN stays NaN."""
    rounded = round_to(values, dtype)
    return torch.where(rounded > values, rounded, _step_up(rounded, dtype))


def next_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of ``dtype`` below each FP64 value, in FP64; -inf stays -inf, NaN stays NaN."""
    return -next_up(-values, dtype)


def _step_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    form = binary(dtype)
    narrow = values.to(dtype)  # exact: the values are of this format
    pattern = narrow.view(form.integer).to(torch.int64)
    magnitude = (1 << (form.width - 1)) - 1
    infinity = ((1 << (form.width - 1 - form.mantissa_bits)) - 1) << form.mantissa_bits
    # Negative patterns run downwards: one up is one less in magnitude. Both zeros step to the smallest subnormal.
    up = torch.where(pattern < 0, pattern - 1, pattern + 1)
    up = torch.where((pattern & magnitude) == 0, torch.ones_like(up), up)
    up = torch.where(pattern == infinity, pattern, up)
    stepped = up.to(form.integer).view(dtype).to(torch.float64)
    return torch.where(values.isnan(), values, stepped)
