"""Value profiles of GEMM operands: (site of a matrix) -> numbers, and (site of its scale grid) -> exponents.

Numbers are on the scale of the payload's format and are rounded to it afterwards; each profile is aimed at a kind of
fault, named in its first line. The matrix's name tells the operands apart: ``a`` and ``b``. BF16 and FP16 operands
have no scales, so their numbers stay near 1. No profile makes a NaN, and no order of the arithmetic overflows FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fuzz.sites import Site, ladder
from fuzz.values import (
    ELEMENTS,
    FLOATS,
    Bits,
    Element,
    Integers,
    Reals,
    coin,
    integer,
    normal,
    pow2,
    to_bits,
    unit,
)

BF16 = FLOATS["bf16"]
FP32 = FLOATS["fp32"]
E4M3 = ELEMENTS["e4m3"]


def is_plain(site: Site) -> bool:
    """Whether the operand consists of BF16 or FP16 numbers instead of codes."""
    return site.matrix.float_.name != "fp32"


def is_fp16(site: Site) -> bool:
    """Whether these are FP16."""
    return site.matrix.float_.name == "fp16"


def to_codes(numbers: Reals, element: Element) -> npt.NDArray[np.uint8]:
    """Finite numbers to codes: the nearest (the upper one at a midpoint), the largest beyond; signs are kept."""
    kept = element.mantissa_bits
    magnitude = np.abs(np.asarray(numbers, dtype=np.float64))
    np.minimum(magnitude, element.qmax, out=magnitude)
    # Half of the last kept bit is added; a carry moves into the exponent field, which is the next binade.
    code = magnitude.view(np.uint64) + np.uint64(1 << (51 - kept))
    code >>= np.uint64(52 - kept)
    code -= np.uint64((1023 - element.bias) << kept)
    # Half steps of the subnormal numbers, which are exact; 2^(kept + 1) from the least normal number on.
    np.minimum(magnitude, 2.0 ** (1 - element.bias), out=magnitude)
    magnitude *= 2.0 ** (kept + element.bias)
    steps = magnitude.astype(np.uint64)
    steps += np.uint64(1)
    steps >>= np.uint64(1)
    code = np.where(magnitude < 2.0 ** (kept + 1), steps, code)
    return np.where(np.signbit(numbers), code | np.uint64(element.sign), code).astype(np.uint8)


def _reach(site: Site) -> float:
    return 4.0 if is_plain(site) else site.matrix.element.qmax


def _normal(site: Site) -> Reals:
    """Any gross fault: about N(0, 1), the largest near the format's largest number."""
    return normal(site.words()) * (_reach(site) / 4.0)


def _wide(site: Site) -> Reals:
    """Alignment of exponents: magnitudes over the format's whole range, equally likely in each binade."""
    words = site.words()
    if is_plain(site):
        magnitude = (1.0 + unit(words)) * pow2(
            integer(site.words("exponent"), 25 if is_fp16(site) else 33) - (14 if is_fp16(site) else 16)
        )
    else:
        magnitude = site.matrix.element.magnitudes[integer(words, site.matrix.element.top + 1)]
    return np.where(coin(words), -magnitude, magnitude)


def _codes(site: Site) -> Reals:
    """A wrong code table or nibble order: every finite code in a row, from the seed."""
    if is_plain(site):
        step = (site.index + site.matrix.seed) % 4096
        magnitude = (1.0 + (step % 128) / 128.0) * pow2(step // 128 % 16 - 8)
        return np.where(step >= 2048, -magnitude, magnitude)
    count = site.matrix.element.top + 1
    step = (site.index + site.matrix.seed + (site.row if site.matrix.name == "b" else 0)) % (2 * count)
    magnitude = site.matrix.element.magnitudes[step % count]
    return np.where(step >= count, -magnitude, magnitude)


def _cancellation(site: Site) -> Reals:
    """Absolute errors beside a small sum: products come in pairs that cancel, or nearly so."""
    even = site.col - site.col % 2
    # The words of a pair's first column.
    words = site.words()[:, even[0]]
    numbers = normal(words) * (_reach(site) / 4.0)
    if site.matrix.name == "a":
        return numbers
    off = np.where(integer(site.words("off"), 16) == 0, 1.125, 1.0)
    return np.where(site.col % 2 == 1, -numbers * off, numbers)


def _outliers(site: Site) -> Reals:
    """Small terms lost beside a large one: one code near the largest in every 32 of K, the rest 2^-8 of it."""
    words = site.words()
    group = site.words()[:, (site.col[0] // 32) * 32]
    huge = site.col % 32 == integer(group, 32)
    small = normal(words) * (_reach(site) * 2.0**-8)
    return np.where(huge, np.where(coin(words), -1.0, 1.0) * _reach(site) * (0.5 + 0.5 * unit(words)), small)


def _integer(site: Site) -> Reals:
    """Any rounding at all: integers from -2 to 2, whose sums every accumulator holds exactly."""
    return (integer(site.words(), 5) - 2).astype(np.float64)


def _single(site: Site) -> Reals:
    """A shifted K index, a neighbour's scale: A has one nonzero element a row, so every output is one product."""
    numbers = _normal(site)
    if site.matrix.name != "a":
        return numbers
    first = site.words("place")[:, :1]
    kept = np.where(np.abs(numbers) < _reach(site) / 64.0, _reach(site) / 4.0, numbers)
    return np.where(site.col == integer(first, site.matrix.cols), kept, np.copysign(0.0, numbers))


def _zeros(site: Site) -> Reals:
    """State that is carried over, uninitialised sums: +0 and -0."""
    return np.where(coin(site.words()), -0.0, 0.0)


def _subnormal(site: Site) -> Reals:
    """Flushing: subnormal codes, and outputs among FP32's subnormal numbers."""
    words = site.words()
    if is_plain(site):
        return normal(words) * (2.0**-15 if is_fp16(site) else 2.0**-68)
    element = site.matrix.element
    magnitude = element.magnitudes[integer(words, 2 ** (element.mantissa_bits + 1))]
    return np.where(coin(words), -magnitude, magnitude)


def _end_scales(site: Site) -> Reals:
    """End codes of UE8M0, see `_exponents`: 1/16 to 7/64, so that neither 2^127 times 32 products overflows FP32, nor
    a number times 2^-127 has more bits than BF16's subnormal numbers."""
    words = site.words()
    magnitude = (4 + integer(words, 4)) * 2.0**-6
    return np.where(coin(words), -magnitude, magnitude)


def stored_scales(site: Site, values: str) -> Bits:
    """The bits of a grid's scales in their stored format, never NaN, positive."""
    exponents, exact = _exponents(site, values)
    match site.matrix.scale:
        case "ue8m0":
            return np.asarray(exponents + 127, dtype=np.uint32)
        case "e4m3":
            mantissa = 0 if exact else integer(site.words("mantissa"), 8)
            fields = np.clip(exponents + E4M3.bias, 1, 15) * 8 + mantissa
            subnormal = np.int64(1) << np.clip(exponents + 9, 0, 2)
            return np.asarray(np.where(exponents >= -6, np.minimum(fields, E4M3.top), subnormal), dtype=np.uint32)
        case _:
            odd = 2 * integer(site.words("mantissa"), 2**22) + 1
            # A quarter are powers of two, but never the first.
            power = (integer(site.words("power"), 4) == 0) & (site.index > 0)
            mantissa = np.where(power | exact, 0, odd)
            return to_bits((2**23 + mantissa) * pow2(exponents - 23), FP32)


def _exponents(site: Site, values: str) -> tuple[Integers, bool]:
    """Exponents of a grid's scales, neighbours distinct; and whether scales have to be powers of two."""
    nested = site.matrix.scale == "e4m3"  # a global scale does the rest
    match values:
        case "integer":
            return (site.row + site.col + site.matrix.seed) % 2, True
        case "scale_ladder" if nested:
            return ladder(site, -9, 17), False
        case "scale_ladder":
            lowest, count = ((-6, 13), (-40, 81))[site.matrix.word("range") % 2]
            return ladder(site, lowest, count), False
        case "wide":
            return ladder(site, *((-6, 13) if nested else (-20, 41))), False
        case "end_scales":
            # From one block of K to the next, the operands take turns at the two ends.
            inward = (site.row + site.col // 2 + site.matrix.seed) % 3
            low = site.col % 2 == (0 if site.matrix.name.startswith("a") else 1)
            return np.where(low, -127 + inward, 127 - inward), True
        case "subnormal":
            return ladder(site, *((-9, 5) if nested else (-66, 5))), False
        case _:
            return ladder(site, *((-3, 5) if nested else (-9, 5))), False


def global_exponent(values: str) -> int:
    """Exponent of an operand's global scale."""
    return {"integer": 0, "subnormal": -55}.get(values, -6)


GEMM_PROFILES: Mapping[str, Callable[[Site], Reals]] = {
    "normal": _normal,
    "wide": _wide,
    "codes": _codes,
    "scale_ladder": _normal,
    "cancellation": _cancellation,
    "outliers": _outliers,
    "integer": _integer,
    "single": _single,
    "zeros": _zeros,
    "subnormal": _subnormal,
    "end_scales": _end_scales,
}
"""Profile word -> numbers, for the words of ``fuzz.grammar.GEMM_VALUES`` and ``END_SCALES``."""
