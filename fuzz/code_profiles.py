"""Value profiles of quantised matrices: payload codes, one a byte, and the bits of their stored scales.

A profile is a pair: (site of the payload) -> codes, and (site of the scale grid) -> bits of the scale's format (FP32,
UE8M0 or E4M3). Neighbouring scales differ in every profile, and stored FP32 scales are never all powers of two.

A scale grid may have blocks of its own (128 x 4 where 1x32 scales merge into 128x128 ones): the exponents then differ
from block to block, and by less within one, so that most codes survive the merger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fuzz.philox import Words
from fuzz.sites import Matrix, Site, ladder
from fuzz.values import ELEMENTS, FLOATS, Bits, Integers, coin, integer, pow2, to_bits, unit

FP32 = FLOATS["fp32"]
E4M3 = ELEMENTS["e4m3"]
Codes = npt.NDArray[np.uint8]

VARIED = (-6, 13)
"""Lowest exponent and number of exponents of the scales where nothing else is asked for."""


def all_codes(matrix: Matrix) -> Integers:
    """Every code of the element in ascending order, NaNs only where the matrix may hold them."""
    element = matrix.element
    positive = [*range(element.top + 1), *(element.nans if matrix.nans else ())]
    return np.array([*positive, *(code | element.sign for code in positive)], dtype=np.int64)


def _finite(site: Site, words: Words) -> Integers:
    count = site.matrix.element.top + 1
    code = integer(words, count)
    return np.where(coin(words), code | site.matrix.element.sign, code)


def _walk(site: Site) -> Codes:
    table = all_codes(site.matrix)
    return table[(site.index + site.matrix.seed) % len(table)].astype(np.uint8)


def _random(site: Site) -> Codes:
    return _finite(site, site.words()).astype(np.uint8)


def _zero(site: Site) -> Codes:
    return np.where(coin(site.words()), site.matrix.element.sign, 0).astype(np.uint8)


def _sprinkled(site: Site) -> Codes:
    words = site.words()
    codes = _finite(site, words)
    nans = site.matrix.element.nans
    if nans:
        last = site.matrix.rows * site.matrix.cols - 1
        hit = (integer(site.words("choice"), 16) == 0) | (site.index == last)
        nan = np.array(nans, dtype=np.int64)[integer(site.words("nan"), len(nans))]
        codes = np.where(hit, np.where(coin(words), nan | site.matrix.element.sign, nan), codes)
    return codes.astype(np.uint8)


def _small(site: Site) -> Codes:
    words = site.words()
    subnormals = 2**site.matrix.element.mantissa_bits
    code = integer(words, subnormals)
    code = np.where(coin(words, 1), code + integer(site.words("choice"), 2 * subnormals), code)
    return np.where(coin(words), code | site.matrix.element.sign, code).astype(np.uint8)


def _stored(site: Site, exponents: Integers) -> Bits:
    """Scales of these exponents in the stored format, with random mantissas where it has any."""
    words = site.words("mantissa")
    match site.matrix.scale:
        case "ue8m0":
            return np.clip(exponents + 127, 0, 254).astype(np.uint32)
        case "e4m3":
            normal = (exponents + E4M3.bias) * 8 + integer(words, 8)
            subnormal = np.int64(1) << np.clip(exponents + 9, 0, 2)
            return np.clip(np.where(exponents >= -6, normal, subnormal), 1, E4M3.top).astype(np.uint32)
        case _:
            odd = 2 * integer(words, 2**22) + 1
            # A quarter are powers of two, but never the first.
            mantissa = np.where((integer(site.words("power"), 4) == 0) & (site.index > 0), 0, odd)
            return to_bits((2**23 + mantissa) * pow2(exponents - 23), FP32)


def _exponents(site: Site, lowest: int, count: int) -> Integers:
    exponents = site.spread(ladder(site, lowest, count))
    if site.matrix.block == (1, 1):
        return exponents
    return exponents + (site.row + 2 * site.col) % 7


def _varied(site: Site) -> Bits:
    return _stored(site, _exponents(site, *VARIED))


def _laddered(site: Site) -> Bits:
    """Half of the cases use a moderate range of exponents, the others nearly all."""
    lowest, count = VARIED
    if site.matrix.scale == "e4m3":
        lowest, count = -9, 17
    elif site.matrix.word("range") % 2:
        lowest, count = -100, 201
    return _stored(site, _exponents(site, lowest, count))


def _extreme(site: Site) -> Bits:
    """The ends of the stored format, side by side."""
    tables = {
        "ue8m0": (0, 254, 1, 253, 2, 252, 127),
        "e4m3": (0x01, 0x7E, 0x00, 0x08, 0x07, 0x7D, 0x38),
        # least subnormal, 2^127, largest, least normal, largest subnormal, 1.5 * 2^127, 2^-127, 1/3 rounded
        "fp32": (0x1, 0x7F000000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x7F400000, 0x00400000, 0x3EAAAAAB),
        # the same where 448 times a scale has to stay finite: up to 2^119
        "fp32_finite": (0x1, 0x7AFFFFFF, 0x7B000000, 0x00800000, 0x007FFFFF, 0x7AC00001, 0x00400000, 0x3EAAAAAB),
    }
    if site.matrix.block != (1, 1):
        # The merged scale is the largest / 2^6, which has to be a code.
        low = np.array((6, 0, 1, 7, 2, 3, 5))[(site.row * 3 + site.col) % 7]
        high = site.spread((site.block_index + site.matrix.seed) % 2) == 1
        return np.asarray(np.where(high, 254 - low, low), dtype=np.uint32)
    kind = site.matrix.scale if site.matrix.nans or site.matrix.scale != "fp32" else "fp32_finite"
    table = np.array(tables[kind])
    return np.asarray(table[(site.row * 3 + site.col + site.matrix.seed) % len(table)], dtype=np.uint32)


def _with_nans(site: Site) -> Bits:
    """NaN for an eighth of the scales and at least for one; where there is only one, under odd seeds."""
    nan = {"ue8m0": 255, "e4m3": 127, "fp32": 0x7FC00000}[site.matrix.scale]
    count = site.matrix.rows * site.matrix.cols
    hit = (integer(site.words("choice"), 8) == 0) | (site.index == site.matrix.seed % count)
    hit &= np.bool_(count > 1 or site.matrix.seed % 2 == 1)
    return np.where(hit, np.uint32(nan), _varied(site))


def _tiny(site: Site) -> Bits:
    """Scales that bring small codes below the output's least normal number (``Matrix.float_`` of the grid)."""
    if site.matrix.scale == "e4m3":
        return np.asarray(1 + ladder(site, 0, 17), dtype=np.uint32)
    return _stored(site, _exponents(site, max(site.matrix.float_.emin - 4, -127), 13))


def _overflowing(site: Site) -> Bits:
    """Scales from 2^120 on, where 256 and more overflow, for half of the blocks; the first under even seeds."""
    high = (site.index + site.matrix.seed) % 2 == 0
    bits = to_bits((1.0 + unit(site.words("mantissa"))) * pow2(120 + integer(site.words("choice"), 8)), FP32)
    return np.where(high, bits, _varied(site))


CODE_PROFILES: Mapping[str, tuple[Callable[[Site], Codes], Callable[[Site], Bits]]] = {
    "codes": (_walk, _varied),  # a wrong code table or nibble order: all codes in a row
    "random_codes": (_random, _varied),  # any gross fault
    "scale_ladder": (_random, _laddered),  # swapped, shared, shifted or transposed scales
    "extreme_scales": (_random, _extreme),  # 2^-127, 2^127, subnormal and zero scales taken for ordinary ones
    "zeros": (_zero, _varied),  # signs of zero, division by a zero amax
    "nonfinite": (_sprinkled, _with_nans),  # NaN codes and NaN scales lost or spread
    "subnormal": (_small, _tiny),  # flushing: subnormal codes, subnormal products
    "overflow": (_random, _overflowing),  # infinities on the way, under the largest scale
}
"""Profile word -> (payload, scales), for the words of ``fuzz.grammar.OVERFLOWING``."""
