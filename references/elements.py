"""Element formats: the codes of FP8, FP6 and FP4, decoded exactly and encoded by round to nearest even.

A code is sign, exponent field, mantissa field, most significant first. Sources: OCP 8-bit Floating Point 1.0 (E4M3FN,
E5M2), OCP Microscaling Formats 1.0 (E2M1, E2M3, E3M2), arXiv 2206.02915 (E4M3FNUZ).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ldexp
from typing import Literal

import torch
from torch import Tensor

from references.chunks import empty, pieces
from references.rounding import FLOAT64_BIAS, shift_right_even

Overflow = Literal["saturate", "nan", "inf"]

NAN_ORDINAL = 32767
"""The ordinal of every NaN code."""


@dataclass(frozen=True)
class Element:
    """An element format.

    bits: width of a code. bias: of the exponent field. max: largest finite value. emax: floor(log2 max).
    has_inf: whether the magnitude above ``max`` is infinity. nan_codes: every NaN code, canonical positive one first.
    has_negative_zero: False where the code of -0 means something else.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    emax: int
    has_inf: bool = False
    nan_codes: tuple[int, ...] = ()
    has_negative_zero: bool = True

    @property
    def count(self) -> int:
        """Number of codes."""
        return 1 << self.bits

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """The code of ``max``."""
        infinities = 1 if self.has_inf else 0
        nans = sum(code < self.sign for code in self.nan_codes)
        return self.sign - 1 - nans - infinities


E4M3FN = Element("e4m3", 8, 4, 3, 7, 448.0, 8, nan_codes=(0x7F, 0xFF))
E4M3FNUZ = Element("e4m3fnuz", 8, 4, 3, 8, 240.0, 7, nan_codes=(0x80,), has_negative_zero=False)
E5M2 = Element("e5m2", 8, 5, 2, 15, 57344.0, 15, has_inf=True, nan_codes=(0x7F, 0x7D, 0x7E, 0xFD, 0xFE, 0xFF))
E2M1 = Element("e2m1", 4, 2, 1, 1, 6.0, 2)
E2M3 = Element("e2m3", 6, 2, 3, 1, 7.5, 2)
E3M2 = Element("e3m2", 6, 3, 2, 3, 28.0, 4)

ELEMENTS: dict[str, Element] = {item.name: item for item in (E4M3FN, E4M3FNUZ, E5M2, E2M1, E2M3, E3M2)}
"""name -> `Element`."""


def _value(code: int, element: Element) -> float:
    if code in element.nan_codes:
        return float("nan")
    sign = -1.0 if code & element.sign else 1.0
    magnitude = code & (element.sign - 1)
    if magnitude > element.max_code:
        return sign * float("inf")
    field, fraction = divmod(magnitude, 1 << element.mantissa_bits)
    if field:
        return sign * ldexp((1 << element.mantissa_bits) + fraction, field - element.bias - element.mantissa_bits)
    return sign * ldexp(fraction, element.emin - element.mantissa_bits)


@lru_cache(maxsize=64)
def _table(element: Element, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Codes of fewer than 8 bits repeat through the 256 entries: bits above them are ignored.
    values = [_value(code % element.count, element) for code in range(256)]
    return torch.tensor(values, dtype=torch.float64, device=device).to(dtype)


@lru_cache(maxsize=16)
def _pair_table(element: Element, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of two codes at once, indexed by low code + 256 * high code, viewed as complex [65536]."""
    table = _table(element, dtype, device)
    low, high = table.repeat(256), table.repeat_interleave(256)
    return torch.view_as_complex(torch.stack((low, high), dim=1))


def decode_table(element: Element, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of every byte in FP64 or FP32 ``[256]``; bits above the element's are ignored."""
    return _table(element, dtype, device)


def table(element: Element) -> Tensor:
    """The values of all codes in code order, FP64 ``[2^bits]``."""
    return _table(element, torch.float64, torch.device("cpu"))[: element.count].clone()


def decode(codes: Tensor, element: Element, dtype: torch.dtype = torch.float64) -> Tensor:
    """Codes uint8 of any shape to their values, exactly; bits above the element's are ignored."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"decode: codes are {codes.dtype}, expected uint8")
    if dtype not in (torch.float64, torch.float32):
        return decode(codes, element, torch.float32).to(dtype)
    out = empty(tuple(codes.shape), dtype, codes.device)
    decode_into(codes, element, out)
    return out


def decode_into(codes: Tensor, element: Element, out: Tensor) -> None:
    """`decode` into a contiguous FP64 or FP32 tensor of the same shape."""
    flat, target = codes.reshape(-1), out.view(-1)
    count = flat.numel()
    even = count // 2 * 2
    if flat.storage_offset() % 2:
        flat = flat.clone()
    if even:
        pairs, values = flat[:even].view(torch.uint16), _pair_table(element, out.dtype, codes.device)
        complex_target = torch.view_as_complex(target[:even].view(-1, 2))
        for piece in pieces(even // 2, codes.device):
            torch.index_select(values, 0, pairs[piece].to(torch.int32), out=complex_target[piece])
    if count > even:
        target[even:] = _table(element, out.dtype, codes.device)[flat[even:].to(torch.int64)]


def e4m3_as_float16(codes: Tensor) -> Tensor:
    """Finite E4M3FN codes uint8 to their values times 2^-8, float16, exact: their bits moved into place.

    A code's subnormal numbers are float16's own. Quicker than `decode` on a GPU.
    """
    flat = codes.reshape(-1)
    if codes.device.type == "cpu" or flat.numel() % 2 or flat.storage_offset() % 2:
        return _moved(codes)
    return pairs_as_float16(flat).view(codes.shape)


def pairs_as_float16(flat: Tensor) -> Tensor:
    """`e4m3_as_float16` of an even number of codes at an even address, two at a time: two passes instead of three."""
    index = flat.view(torch.uint16).to(torch.int32)
    return torch.index_select(_moved_pairs(flat.device), 0, index).view(torch.float16)


def _moved(codes: Tensor) -> Tensor:
    # Bits 6 to 0 go to 13 to 7; of the copies of the sign that a widened byte has, the topmost alone is kept.
    return codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)


@lru_cache(maxsize=4)
def _moved_pairs(device: torch.device) -> Tensor:
    """Two float16 numbers in an int32 for each pair of codes, by low code + 256 * high code."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    pairs = torch.stack((codes.repeat(256), codes.repeat_interleave(256)), dim=1)
    return _moved(pairs).view(torch.int32).view(-1).to(device)


def encode(values: Tensor, element: Element, overflow: Overflow = "saturate") -> Tensor:
    """FP64 or FP32 ``values`` of any shape to codes uint8: round to nearest, ties to the even code.

    overflow: a magnitude, infinity included, that rounds beyond ``max`` becomes the largest finite code
        (``saturate``), the canonical NaN (``nan``) or infinity (``inf``), always with its sign.
    NaN becomes the canonical NaN code with the sign of the NaN (E4M3FNUZ has only one). An element without NaN codes
    gives the positive largest code for it, as PTX ``cvt.rn.satfinite`` does.
    Raises ValueError for an overflow that the element cannot express.
    """
    if values.dtype not in _KEYS:
        raise ValueError(f"encode: values are {values.dtype}, expected float32 or float64")
    out = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    source, target = values.reshape(-1), out.view(-1)
    for piece in pieces(source.numel(), values.device):
        encode_into(source[piece], element, target[piece], overflow)
    return out


@dataclass(frozen=True)
class _Key:
    """How the bits of a float become a table index: sign, exponent and five mantissa bits, the last one sticky."""

    integer: torch.dtype
    shift: int
    size: int


# Three mantissa bits, a round bit and a sticky bit decide any rounding to at most three bits of mantissa.
_KEYS = {torch.float32: _Key(torch.int32, 18, 1 << 14), torch.float64: _Key(torch.int64, 47, 1 << 17)}


def encode_into(values: Tensor, element: Element, out: Tensor, overflow: Overflow = "saturate") -> None:
    """`encode` one contiguous flat piece into ``out``."""
    key = _KEYS[values.dtype]
    pattern = values.view(key.integer)
    below = (1 << key.shift) - 1
    index = pattern & below
    # Adding 2^shift - 1 carries into the lowest kept bit exactly where a bit is lost: that bit becomes sticky.
    index.add_(below).bitwise_or_(pattern).bitwise_right_shift_(key.shift).bitwise_and_(key.size - 1)
    torch.index_select(_encode_table(element, overflow, values.dtype, values.device), 0, index, out=out)


def encode_table(element: Element, device: torch.device) -> tuple[Tensor, int]:
    """What encodes an FP32 number, ties to even and saturating: codes uint8 ``[16384]``, and how an index into them
    comes about: the number's bits shifted right by so many, the last bit that stays set if one that is lost was.
    """
    return _encode_table(element, "saturate", torch.float32, device), _KEYS[torch.float32].shift


@lru_cache(maxsize=64)
def _encode_table(element: Element, overflow: Overflow, dtype: torch.dtype, device: torch.device) -> Tensor:
    key = _KEYS[dtype]
    patterns = torch.arange(key.size, dtype=torch.int64) << key.shift
    if dtype == torch.float32:
        # Signed 32-bit patterns, then exactly into FP64.
        patterns = torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns)
        return encode_bits(patterns.to(torch.int32).view(torch.float32).to(torch.float64), element, overflow).to(device)
    return encode_bits(patterns.view(torch.float64), element, overflow).to(device)


def encode_bits(values: Tensor, element: Element, overflow: Overflow = "saturate") -> Tensor:
    """`encode` for FP64 values, computed on their bits without a table (the table is made by this)."""
    top = _overflow_code(element, overflow)
    pattern = values.view(torch.int64)
    magnitude = pattern & ((1 << 63) - 1)
    field = magnitude >> 52
    significand = (magnitude & ((1 << 52) - 1)) | (1 << 52)
    exponent = (field - FLOAT64_BIAS).clamp(min=element.emin)
    steps = shift_right_even(significand, 52 - element.mantissa_bits + exponent - (field - FLOAT64_BIAS))
    # A carry to 2^(mantissa bits + 1) steps adds one to the exponent field by itself.
    codes = ((exponent - element.emin) << element.mantissa_bits) + steps
    codes = torch.where(codes > element.max_code, torch.full_like(codes, top), codes)
    is_nan = magnitude > 0x7FF << 52
    codes = torch.where(is_nan, torch.full_like(codes, _nan_code(element)), codes)
    negative = pattern < 0
    if not element.has_negative_zero:
        negative &= codes != 0
    if not element.nan_codes:
        negative &= ~is_nan
    return torch.where(negative, codes | element.sign, codes).to(torch.uint8)


def _nan_code(element: Element) -> int:
    return element.nan_codes[0] if element.nan_codes else element.max_code


def _overflow_code(element: Element, overflow: Overflow) -> int:
    if overflow == "saturate":
        return element.max_code
    if overflow == "inf" and element.has_inf:
        return element.max_code + 1
    if overflow == "nan" and element.nan_codes:
        return _nan_code(element)
    raise ValueError(f"encode: {element.name} has no {overflow} to overflow to")


@lru_cache(maxsize=32)
def _ordinal_table(element: Element, device: torch.device) -> Tensor:
    codes = [code % element.count for code in range(256)]
    magnitudes = [code & (element.sign - 1) for code in codes]
    ordinals = [
        NAN_ORDINAL if code in element.nan_codes else -magnitude if code & element.sign else magnitude
        for code, magnitude in zip(codes, magnitudes, strict=True)
    ]
    return torch.tensor(ordinals, dtype=torch.int16, device=device)


def ordinal(codes: Tensor, element: Element) -> Tensor:
    """Codes uint8 to int16 positions on the line of values: monotone, both zeros 0, `NAN_ORDINAL` for NaN."""
    index = codes.reshape(-1).to(torch.int32)
    return torch.index_select(_ordinal_table(element, codes.device), 0, index).view(codes.shape)


def from_ordinal(ordinals: Tensor, element: Element) -> Tensor:
    """The inverse of `ordinal`, uint8: 0 becomes +0, `NAN_ORDINAL` the canonical NaN."""
    wide = ordinals.to(torch.int32)
    codes = torch.where(wide < 0, wide.abs() | element.sign, wide)
    return torch.where(wide == NAN_ORDINAL, torch.full_like(codes, _nan_code(element)), codes).to(torch.uint8)
