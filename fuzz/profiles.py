"""Value profiles of a matrix that is to be quantised: (site) -> bits of its dtype.

Each is aimed at a kind of fault, named in its first line. An element depends on the case and its own position alone.
A profile that steers a block's scale plants the block's amax at one position (the *peak*) and keeps the rest below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fuzz.sites import Matrix, Site, ladder
from fuzz.values import (
    ELEMENTS,
    FLOATS,
    Bits,
    Integers,
    Reals,
    coin,
    finite_bits,
    from_bits,
    integer,
    midpoints,
    nan_bits,
    normal,
    nudge,
    pow2,
    signs,
    to_bits,
    unit,
)

Profile = Callable[[Site], Bits]

MODERATE = (-12, 24)
"""Exponents that every dtype but fp16 (up to 15) holds and that stay above the usual amax floor of 1e-4."""


def top_exponent(matrix: Matrix, values: str) -> int:
    """About the exponent of the largest magnitude of a profile: what a sensible given scale is derived from."""
    match values:
        case "wide" | "uniform_bits":
            return matrix.float_.emax
        case "subnormal":
            return matrix.float_.emin - 1
        case "scale_ladder" | "pow2_edges" | "rounding" | "codes":
            return 2 + matrix.word("top") % 10
        case "outliers":
            return 14
        case "cancellation":
            return 10
        case _:
            return 1


def _normal(site: Site) -> Bits:
    """Any gross fault: approximately N(0, 1)."""
    return to_bits(normal(site.words()), site.matrix.float_)


def _uniform_bits(site: Site) -> Bits:
    """Faults of range and of bit manipulation: every finite pattern is equally likely."""
    return finite_bits(site.words(), site.matrix.float_)


def _wide(site: Site) -> Bits:
    """Scales that must saturate, and subnormal amax: block exponents over the dtype's whole range."""
    float_ = site.matrix.float_
    block = site.block_words("wide")
    exponents = (
        float_.emin - float_.mantissa_bits + integer(block, float_.emax - float_.emin + float_.mantissa_bits + 1)
    )
    return _peaked(site, to_bits((1.0 + unit(site.block_words("fraction"))) * pow2(exponents), float_))


def _scale_ladder(site: Site) -> Bits:
    """Swapped, shared, shifted or transposed scales: a distinct scale exponent in every block.

    Every amax is 1.125, 1.25 or 1.375 times a power of two: no policy moves one of those to the next exponent alone.
    """
    exponents = ladder(site, *_ladder_range(site.matrix))
    eighths = 9 + integer(site.block_words("eighths"), 3)
    return _peaked(site, to_bits(eighths * pow2(exponents - 3), site.matrix.float_))


def _pow2_edges(site: Site) -> Bits:
    """A scale one step off: every amax is qmax * 2^k, 2^k or another edge of a policy, or one ulp beside it."""
    return _peaked(site, edge_amax(site))


def edge_amax(site: Site) -> Bits:
    """The amax of every block under ``pow2_edges``: anchors x (-1, 0, +1 ulp) x exponents, cycling from the seed."""
    matrix = site.matrix
    anchors = np.array(_anchors(matrix))
    lowest, count = _edge_range(matrix)
    item = site.block_index + matrix.seed
    step = item // (3 * len(anchors)) + matrix.word("edges") % count
    amax = anchors[item % len(anchors)] * pow2(lowest + step % count)
    return nudge(to_bits(amax, matrix.float_), item // len(anchors) % 3 - 1, matrix.float_)


def _rounding(site: Site) -> Bits:
    """Rounding of the payload: midpoints between neighbouring codes times the block's scale, -1, 0, +1 ulp."""
    mids = midpoints(site.matrix.element)
    table = mids[mids < _reach(site.matrix)]
    item = _cycle(site)
    sign = item // (3 * len(table)) % 2
    numbers = np.where(sign == 1, -1.0, 1.0) * table[item // 3 % len(table)]
    return _on_grid(site, numbers, item % 3 - 1)


def _codes(site: Site) -> Bits:
    """A wrong code table: every finite code of the element, exactly, times the block's scale."""
    magnitudes = site.matrix.element.magnitudes
    table = magnitudes[magnitudes <= _reach(site.matrix)]
    item = _cycle(site)
    sign = item // len(table) % 2
    return _on_grid(site, np.where(sign == 1, -1.0, 1.0) * table[item % len(table)], np.int64(0))


def _outliers(site: Site) -> Bits:
    """An amax that misses lanes or edges: one huge element a block, first, last or anywhere, among N(0, 1)."""
    huge = (1.0 + unit(site.block_words("fraction"))) * pow2(6 + integer(site.block_words("exponent"), 9))
    where = (site.block_row + site.block_col + site.matrix.seed) % 4
    last = site.block_size - 1
    peak = np.where(where == 0, last, np.where(where == 1, 0, _peak(site)))
    sign = np.where(coin(site.block_words("sign")), -1.0, 1.0)
    numbers = np.where(site.inside == site.spread(peak), site.spread(huge * sign), normal(site.words()))
    return to_bits(numbers, site.matrix.float_)


def _cancellation(site: Site) -> Bits:
    """Sums instead of maxima, lost signs: 1024..2048 with alternating signs."""
    magnitude = 1024.0 + 8.0 * integer(site.words(), 128)
    return to_bits(np.where((site.row + site.col) % 2 == 1, -magnitude, magnitude), site.matrix.float_)


def _zeros(site: Site) -> Bits:
    """Division by a zero amax, signs of zero: +0 and -0."""
    return signs(site.words(), site.matrix.float_)


def _zero_blocks(site: Site) -> Bits:
    """State carried from one block to the next: blocks of +-0 between N(0, 1), as on a chessboard."""
    zero = site.spread((site.block_row + site.block_col + site.matrix.seed) % 2 == 0)
    words = site.words()
    return np.where(zero, signs(words, site.matrix.float_), to_bits(normal(words), site.matrix.float_))


def _subnormal(site: Site) -> Bits:
    """Flushing and wrong exponents of subnormals: every magnitude is subnormal in the dtype."""
    float_ = site.matrix.float_
    words = site.words()
    shift = site.spread(integer(site.block_words("shift"), float_.mantissa_bits))
    return (integer(words, float_.mantissa + 1) >> shift).astype(np.uint32) | signs(words, float_)


def _negative(site: Site) -> Bits:
    """An amax without the absolute value: all elements below zero."""
    return to_bits(-(np.abs(normal(site.words())) + 2.0**-10), site.matrix.float_)


def _constant(site: Site) -> Bits:
    """An amax taken before a maximum is known, reductions over equal values: one value throughout."""
    float_ = site.matrix.float_
    pick = np.array([site.matrix.word("constant")], dtype=np.uint64)
    number = (1.0 + unit(pick)) * pow2(site.matrix.seed % 17 - 8) * np.where(coin(pick), -1.0, 1.0)
    return np.broadcast_to(to_bits(number, float_), site.shape).copy()


def _overflow(site: Site) -> Bits:
    """Wrap-around, NaN or infinity instead of saturation: from below qmax * scale to the dtype's largest number.

    464 lies halfway from 448 to the 480 that E4M3 would hold next, so a cast that does not saturate turns there.
    """
    matrix = site.matrix
    largest = float(from_bits(np.array(matrix.float_.inf - 1), matrix.float_)) / matrix.static
    anchors = np.minimum(np.array([448.0, 464.0, 480.0, 512.0, 896.0, 2.0**12, 2.0**20, largest]), largest)
    item = site.index // 2 + matrix.seed
    sign = np.where(item // (3 * len(anchors)) % 2 == 1, -1.0, 1.0)
    far = nudge(
        to_bits(sign * anchors[item // 3 % len(anchors)] * matrix.static, matrix.float_), item % 3 - 1, matrix.float_
    )
    near = to_bits(normal(site.words()) * (256.0 * matrix.static), matrix.float_)
    return np.where(site.index % 2 == 0, far, near)


def _nonfinite(site: Site) -> Bits:
    """NaN and infinity lost or spread: sprinkled among N(0, 1); the last element is NaN, the first infinite."""
    float_ = site.matrix.float_
    choice = integer(site.words("choice"), 16)
    last = site.matrix.rows * site.matrix.cols - 1
    nan = (choice == 0) | (site.index == last)
    infinite = ((choice == 1) | (site.index == 0)) & ~nan
    words = site.words()
    bits = np.where(infinite, signs(words, float_) | np.uint32(float_.inf), to_bits(normal(words), float_))
    return np.where(nan, nan_bits(words, float_), bits)


def _peak(site: Site) -> Integers:
    """A random position in every block, of whatever size."""
    return integer(site.block_words("peak"), site.block_size)


def _peaked(site: Site, amax: Bits) -> Bits:
    """Blocks with exactly these amax (an array of blocks), at the peak, with a random sign; the rest is below."""
    float_ = site.matrix.float_
    words = site.words()
    top = from_bits(amax, float_)
    rest = to_bits(unit(words) * site.spread(top), float_) | signs(words, float_)
    peak = amax | signs(site.block_words("sign"), float_)
    return np.where(site.inside == site.spread(_peak(site)), site.spread(peak), rest)


def _ladder_range(matrix: Matrix) -> tuple[int, int]:
    """Lowest exponent and number of exponents of an amax: moderate for half of the cases, else nearly all."""
    if matrix.scale == "e4m3":
        return top_exponent(matrix, "scale_ladder") - 16, 17
    lowest, highest = MODERATE
    if matrix.word("range") % 2:
        lowest, highest = -126 + matrix.element.emax + 1, matrix.float_.emax
    lowest, highest = max(lowest, matrix.float_.emin), min(highest, matrix.float_.emax)
    return lowest, highest - lowest + 1


def _edge_range(matrix: Matrix) -> tuple[int, int]:
    if matrix.scale == "e4m3":
        return top_exponent(matrix, "pow2_edges") - 16, 16
    lowest, highest = matrix.float_.emin, matrix.float_.emax
    if matrix.word("range") % 2:
        lowest, highest = max(lowest, MODERATE[0]), min(highest, MODERATE[1])
    return lowest, highest - lowest + 1


def _anchors(matrix: Matrix) -> list[float]:
    """Significands where a scale may turn.

    qmax for ``ceil``, 1 for ``floor`` and ``ceil_amax``, the least number that half an ulp of the element carries to
    the next power of two for ``even``; for E4M3 scales also qmax times the midpoints between them.
    """
    qmax = matrix.element.qmax * 2.0**-matrix.element.emax
    if matrix.scale == "e4m3":
        return [qmax, 1.0, *(qmax * (1.0 + (2 * step + 1) / 16) for step in range(8))]
    return [qmax, 1.0, 2.0 - 2.0 ** -(matrix.element.mantissa_bits + 1)]


def _reach(matrix: Matrix) -> float:
    """The largest amax / scale that leaves a power-of-two scale alone: ``ceil_amax`` doubles it above 2^emax."""
    return 2.0**matrix.element.emax if matrix.scale == "ceil_amax" else matrix.element.qmax


def _cycle(site: Site) -> Integers:
    """Numbers that count the elements beside the peaks, from the seed: what walks through a table without gaps."""
    if site.matrix.scale == "static":
        return site.index + site.matrix.seed
    full = site.matrix.block[0] * site.matrix.block[1] - 1
    after = (site.inside > site.spread(_peak(site))).astype(np.int64)
    return site.spread(site.block_index * full) + site.inside - after + site.matrix.seed


def _on_grid(site: Site, numbers: Reals, ulps: npt.NDArray[np.int64] | np.int64) -> Bits:
    """Elements ``numbers`` times their block's scale, moved by ulps; the peak makes the scale what it is."""
    matrix = site.matrix
    if matrix.scale == "static":
        return nudge(to_bits(numbers * matrix.static, matrix.float_), ulps, matrix.float_)
    scale, amax = _grid_scales(site)
    elements = nudge(to_bits(numbers * site.spread(scale), matrix.float_), ulps, matrix.float_)
    limit = to_bits(amax, matrix.float_)
    magnitude = np.minimum(elements & np.uint32(matrix.float_.sign - 1), site.spread(limit))
    kept = magnitude | (elements & np.uint32(matrix.float_.sign))
    peak = limit | signs(site.block_words("sign"), matrix.float_)
    return np.where(site.inside == site.spread(_peak(site)), site.spread(peak), kept)


def _grid_scales(site: Site) -> tuple[Reals, Reals]:
    """The scale and the amax of every block.

    Scales are powers of two; under ``fp32`` half of the blocks have RN(amax / qmax) of any amax instead, under ``e4m3``
    they walk down the E4M3 codes from 448 (so that amax / (448 * 6) of the whole is the power of two as well).
    """
    matrix, fp32 = site.matrix, FLOATS["fp32"]
    if matrix.scale == "e4m3":
        stored = ELEMENTS["e4m3"].magnitudes[126 - site.block_index % 126]
        scale = stored * pow2(top_exponent(matrix, "codes") - 11)
        return scale, scale * matrix.element.qmax
    exponent = integer(site.block_words("exponent"), 13) - 6
    scale = pow2(exponent)
    amax = scale * _reach(matrix)
    if matrix.scale == "fp32":
        # By a coin: every other block would be in step with the walk through the codes.
        uneven = coin(site.block_words("uneven"))
        free = to_bits((1.0 + unit(site.block_words("fraction"))) * pow2(exponent + matrix.element.emax), matrix.float_)
        amax = np.where(uneven, from_bits(free, matrix.float_), amax)
        scale = np.where(uneven, from_bits(to_bits(amax / matrix.element.qmax, fp32), fp32), scale)
    return scale, amax


MATRIX_PROFILES: Mapping[str, Profile] = {
    "normal": _normal,
    "uniform_bits": _uniform_bits,
    "wide": _wide,
    "scale_ladder": _scale_ladder,
    "pow2_edges": _pow2_edges,
    "rounding": _rounding,
    "outliers": _outliers,
    "cancellation": _cancellation,
    "codes": _codes,
    "zeros": _zeros,
    "zero_blocks": _zero_blocks,
    "subnormal": _subnormal,
    "negative": _negative,
    "constant": _constant,
    "overflow": _overflow,
    "nonfinite": _nonfinite,
}
"""Profile word -> profile, for the words of ``fuzz.grammar.STATIC_VALUES``."""
