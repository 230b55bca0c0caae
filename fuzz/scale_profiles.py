"""Value profiles of scale factors: FP32 numbers to be turned into UE8M0 codes, and scales to be laid out.

``ue8m0``: (site of one row, qmax element or None) -> FP32 bits. ``scale_layout``: (site, width in bits) -> bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fuzz.sites import Site
from fuzz.values import FLOATS, Bits, Element, coin, finite_bits, integer, nan_bits, normal, nudge, pow2, to_bits, unit

FP32 = FLOATS["fp32"]
_SIGN = np.uint32(FP32.sign)

BOUNDARY_MANTISSAS = (0, 1, 0x7FFFFF, 0x400000, 0x3FFFFF, 0x400001)
"""0, 1, all ones, a half, and its neighbours: where a policy's rounding of the exponent can turn."""

SPECIAL = (
    *(0x00000000, 0x80000000),  # zeros
    *(0x00000001, 0x00000002, 0x003FFFFF, 0x00400000, 0x00400001, 0x007FFFFF, 0x80000001, 0x807FFFFF),  # subnormals
    *(0x00800000, 0x00800001, 0x00FFFFFF, 0x01000000, 0x80800000),  # least normals
    *(0x7F000000, 0x7F000001, 0x7F3FFFFF, 0x7F400000, 0x7F400001, 0x7F7FFFFF, 0xFF7FFFFF),  # from 2^127
    *(0x7F800000, 0xFF800000),  # infinities
    *(0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF),  # NaNs
    *(0x3F800000, 0xBF800000, 0xC3E00000, 0x3F800001, 0x3FBFFFFF, 0x3FC00000),  # about 1, -1, -448
)


def _boundary(site: Site, element: Element | None) -> Bits:
    """A wrong exponent: all 256 exponent fields x `BOUNDARY_MANTISSAS`; 1536 numbers in a row hold them all."""
    item = site.index + site.matrix.seed
    mantissas = np.array(BOUNDARY_MANTISSAS, dtype=np.uint32)
    return np.asarray((item // 6 % 256 << 23) + mantissas[item % 6], dtype=np.uint32)


def _special(site: Site, element: Element | None) -> Bits:
    """Special cases taken for ordinary numbers: zeros, subnormals, infinities, NaNs, negatives (`SPECIAL`)."""
    return np.array(SPECIAL, dtype=np.uint32)[(site.index + site.matrix.seed) % len(SPECIAL)]


def _pow2_edges(site: Site, element: Element | None) -> Bits:
    """A logarithm that is off by ulps: qmax * 2^k, 2^k and the edge of ``even``, each -3..3 ulp, over all k."""
    anchors = [1.0, 1.5]
    if element is not None:
        anchors = [element.qmax * 2.0**-element.emax, 1.0, 2.0 - 2.0 ** -(element.mantissa_bits + 1)]
    item = site.index + site.matrix.seed
    exponent = FP32.emin + item // (7 * len(anchors)) * 89 % 254  # 89 is coprime to 254: near and far k alternate
    return nudge(
        to_bits(np.array(anchors)[item % len(anchors)] * pow2(exponent), FP32), item // len(anchors) % 7 - 3, FP32
    )


def _uniform_bits(site: Site, element: Element | None) -> Bits:
    """Faults of bit manipulation: every finite pattern, of both signs, is equally likely."""
    return finite_bits(site.words(), FP32)


def _wide(site: Site, element: Element | None) -> Bits:
    """Faults of range: uniform exponents from the least subnormal to the largest number, positive."""
    words = site.words()
    exponent = FP32.emin - 23 + ((words & np.uint64(0xFFFF)) * np.uint64(277) >> np.uint64(16)).astype(np.int64)
    return to_bits((1.0 + unit(words)) * pow2(exponent), FP32)


def _normal(site: Site, element: Element | None) -> Bits:
    """Any gross fault: |N(0, 1)|."""
    return to_bits(np.abs(normal(site.words())), FP32)


SCALE_PROFILES: Mapping[str, Callable[[Site, Element | None], Bits]] = {
    "boundary": _boundary,
    "special": _special,
    "pow2_edges": _pow2_edges,
    "uniform_bits": _uniform_bits,
    "wide": _wide,
    "normal": _normal,
}
"""Profile word -> profile, for the words of ``fuzz.grammar.SCALE_VALUES``."""


def _layout_index(site: Site, width: int) -> Bits:
    """Misplaced scales: bytes count modulo 251 (a prime), floats count upwards from 1."""
    item = site.index + site.matrix.seed % 251
    if width == 8:
        return (item % 251).astype(np.uint32)
    return to_bits((1 + item).astype(np.float64), FP32)


def _layout_uniform_bits(site: Site, width: int) -> Bits:
    """Bits that leak into a neighbour: all bytes, and all finite floats, are equally likely."""
    if width == 8:
        return (site.words() >> np.uint64(56)).astype(np.uint32)
    return finite_bits(site.words(), FP32)


def _layout_nonfinite(site: Site, width: int) -> Bits:
    """Scales that are computed with instead of moved: NaN payloads, infinities, zeros; bytes 255, 254, 128, 0."""
    words = site.words()
    if width == 8:
        return np.array([255, 254, 128, 0], dtype=np.uint32)[integer(words, 4)]
    infinite = np.where(coin(words, 1), np.uint32(FP32.inf), np.uint32(0)) | np.where(
        coin(words, 2), _SIGN, np.uint32(0)
    )
    return np.where(coin(words, 3), nan_bits(words, FP32), infinite)


LAYOUT_PROFILES: Mapping[str, Callable[[Site, int], Bits]] = {
    "index": _layout_index,
    "uniform_bits": _layout_uniform_bits,
    "nonfinite": _layout_nonfinite,
}
"""Profile word -> profile, for the words of ``fuzz.grammar.LAYOUT_VALUES``."""
