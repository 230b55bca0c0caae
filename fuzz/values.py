"""Words to numbers, exactly: integer arithmetic and powers of two only.

Nothing here calls a transcendental function or a library's cast, so every platform and version gets the same bits.
Numbers travel as float64 (which holds every value of the narrower formats exactly) until `to_bits` rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from fuzz.philox import Words

Reals = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]

_SQRT_3 = 1.7320508075688772  # RN64(sqrt 3)
_ALTERNATE = np.uint64(0x0000FFFF0000FFFF)
"""The first and the third of a word's four 16-bit parts."""


@dataclass(frozen=True)
class Float:
    """An IEEE interchange format with a sign bit, infinities and NaNs."""

    name: str
    exponent_bits: int
    mantissa_bits: int

    @cached_property
    def bias(self) -> int:
        """The exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest numbers."""
        return self.bias

    @cached_property
    def width(self) -> int:
        """Bits of the format."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def sign(self) -> int:
        """The sign bit, in place."""
        return 1 << (self.width - 1)

    @cached_property
    def inf(self) -> int:
        """Bits of infinity; everything above, below the sign bit, is NaN."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @cached_property
    def mantissa(self) -> int:
        """Mask of the mantissa."""
        return (1 << self.mantissa_bits) - 1


FLOATS = {"fp32": Float("fp32", 8, 23), "bf16": Float("bf16", 8, 7), "fp16": Float("fp16", 5, 10)}


@dataclass(frozen=True)
class Element:
    """A narrow format of a payload. ``top`` is the code of its largest number, ``nans`` its positive NaN codes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: int
    nans: tuple[int, ...] = ()

    @cached_property
    def magnitudes(self) -> Reals:
        """The numbers of the codes 0..top, ascending."""
        codes = np.arange(self.top + 1, dtype=np.int64)
        field, mantissa = codes >> self.mantissa_bits, codes & (2**self.mantissa_bits - 1)
        significand = mantissa + np.where(field > 0, 2**self.mantissa_bits, 0)
        return np.asarray(significand * pow2(np.maximum(field, 1) - self.bias - self.mantissa_bits), dtype=np.float64)

    @cached_property
    def qmax(self) -> float:
        """The largest number."""
        return float(self.magnitudes[-1])

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest number."""
        return (self.top >> self.mantissa_bits) - self.bias

    @cached_property
    def sign(self) -> int:
        """The sign bit, in place."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


ELEMENTS = {
    "e4m3": Element("e4m3", 4, 3, 7, 126, (127,)),
    "e5m2": Element("e5m2", 5, 2, 15, 123, (125, 126, 127)),
    "e2m1": Element("e2m1", 2, 1, 1, 7),
    "e2m3": Element("e2m3", 2, 3, 1, 31),
    "e3m2": Element("e3m2", 3, 2, 3, 31),
}


def pow2(exponent: npt.ArrayLike) -> Reals:
    """2^exponent for integers within -1022..1023, put together from bits."""
    field = np.asarray(exponent, dtype=np.int64) + 1023
    if field.size and (field.min() < 1 or field.max() > 2046):
        raise ValueError("pow2: an exponent is not within -1022..1023")
    return (field << 52).view(np.float64)


def to_bits(numbers: npt.ArrayLike, float_: Float) -> Bits:
    """Round finite float64 numbers to nearest, ties to even; what would overflow becomes the largest number."""
    plain = np.asarray(numbers, dtype=np.float64, order="C")
    raw = plain.reshape(-1).view(np.uint64)
    magnitude = raw & np.uint64(2**63 - 1)
    drop = np.uint64(52 - float_.mantissa_bits)
    rounded = magnitude >> drop
    rounded &= np.uint64(1)
    rounded += magnitude
    rounded += (np.uint64(1) << (drop - np.uint64(1))) - np.uint64(1)
    rounded >>= drop
    # A carry out of the mantissa moves into the exponent field, which is the next binade.
    rounded -= np.uint64((1023 - float_.bias) << float_.mantissa_bits)
    small = magnitude < np.uint64((float_.emin + 1023) << 52)
    if small.any():
        rounded[small] = _subnormal_bits(magnitude[small], float_)
    np.minimum(rounded, np.uint64(float_.inf - 1), out=rounded)
    rounded |= (raw >> np.uint64(63)) << np.uint64(float_.width - 1)
    return rounded.astype(np.uint32).reshape(plain.shape)


def _subnormal_bits(magnitude: Words, float_: Float) -> Words:
    """The same for the bits of float64 numbers below the least normal one, which may round to it."""
    field = (magnitude >> np.uint64(52)).astype(np.int64)
    significand = np.where(field > 0, (magnitude & np.uint64(2**52 - 1)) | np.uint64(2**52), np.uint64(0))
    shift = np.minimum(52 - float_.mantissa_bits + float_.emin - (field - 1023), 54).astype(np.uint64)
    kept = significand >> shift
    rest, half = significand & ((np.uint64(1) << shift) - np.uint64(1)), np.uint64(1) << (shift - np.uint64(1))
    kept += ((rest > half) | ((rest == half) & (kept & np.uint64(1) == 1))).astype(np.uint64)
    return np.asarray(kept, dtype=np.uint64)


def from_bits(bits: npt.ArrayLike, float_: Float) -> Reals:
    """The float64 numbers of finite bit patterns."""
    raw = np.asarray(bits).astype(np.int64)
    field = (raw >> float_.mantissa_bits) & (2**float_.exponent_bits - 1)
    significand = (raw & float_.mantissa) + np.where(field > 0, 2**float_.mantissa_bits, 0)
    magnitude = significand * pow2(np.maximum(field, 1) - float_.bias - float_.mantissa_bits)
    return np.where(raw & float_.sign, -magnitude, magnitude)


def nudge(bits: Bits, ulps: npt.ArrayLike, float_: Float) -> Bits:
    """Move magnitudes by whole ulps, kept within zero and the largest number; signs stay."""
    magnitude = (bits & (float_.sign - 1)).astype(np.int64) + np.asarray(ulps, dtype=np.int64)
    kept = np.clip(magnitude, 0, float_.inf - 1).astype(np.uint32)
    return kept | (bits & np.uint32(float_.sign))


def integer(words: Words, below: npt.ArrayLike) -> Integers:
    """Uniform integers within 0..below-1 (below at most 2^31), from the upper half of each word."""
    return ((words >> 32) * np.asarray(below, dtype=np.uint64) >> 32).astype(np.int64)


def unit(words: Words) -> Reals:
    """Uniform multiples of 2^-32 within [0, 1), from the upper half of each word."""
    return (words >> 32).astype(np.float64) * 2.0**-32


def coin(words: Words, bit: int = 0) -> npt.NDArray[np.bool_]:
    """Fair coins: one bit of each word; bits 0..31 are independent of `integer` and `unit`."""
    return np.asarray((words >> np.uint64(bit)) & np.uint64(1) == 1, dtype=np.bool_)


def signs(words: Words, float_: Float) -> Bits:
    """A random sign bit, in place, from bit 0 of each word."""
    return np.asarray((words & np.uint64(1)).astype(np.uint32) << (float_.width - 1), dtype=np.uint32)


def normal(words: Words) -> Reals:
    """Approximately N(0, 1): the centred sum of a word's four 16-bit parts (Irwin-Hall), within +-3.47."""
    total = words & _ALTERNATE
    total += (words >> np.uint64(16)) & _ALTERNATE
    total += total >> np.uint64(32)  # two sums of two parts, neither of which fills its half
    total &= np.uint64(0xFFFFFFFF)
    return (total.astype(np.float64) - 2.0 * 65535.0) * (_SQRT_3 / 65536.0)


def finite_bits(words: Words, float_: Float) -> Bits:
    """Uniform bit patterns; the lowest exponent bit is cleared where the pattern would be no number."""
    bits = (words >> np.uint64(64 - float_.width)).astype(np.uint32)
    return np.where(bits & float_.inf == float_.inf, bits & ~np.uint32(float_.mantissa + 1), bits)


def nan_bits(words: Words, float_: Float) -> Bits:
    """NaNs of both signs, quiet and signalling, with random payloads."""
    bits = (words >> np.uint64(64 - float_.width)).astype(np.uint32) | np.uint32(float_.inf)
    return np.asarray(bits | (bits & float_.mantissa == 0).astype(np.uint32), dtype=np.uint32)


@lru_cache
def midpoints(element: Element) -> Reals:
    """The numbers halfway between neighbouring magnitudes, ascending."""
    return (element.magnitudes[:-1] + element.magnitudes[1:]) * 0.5
