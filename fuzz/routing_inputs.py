"""The inputs of ``routing`` cases: profiles of router logits, and the correction bias.

A profile gives the bits of its site's logits in their own format. Every token stands alone, so a profile that needs a
token's own level takes it from a stream beside the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.philox import key_of, word, words
from fuzz.sites import Matrix, Site
from fuzz.values import (
    FLOATS,
    Bits,
    Reals,
    coin,
    finite_bits,
    from_bits,
    integer,
    nan_bits,
    normal,
    nudge,
    to_bits,
    unit,
)

Profile = Callable[[Site], Bits]

BIASES = {"0": 0.0, "0.1": 0.1, "12": 12.0, "1e4": 1e4}


def logits_matrix(case: Case) -> Matrix:
    """The logits as their profile sees them; a block is one token's group of experts."""
    experts = case.integer("experts")
    groups = case.integer("groups") if "groups" in dict(case.params) else _divisor(experts)
    return Matrix(
        text=case.text,
        name="logits",
        seed=case.seed,
        rows=case.integer("tokens"),
        cols=experts,
        block=(1, experts // groups),
        float_=FLOATS[case["dtype"]],
    )


def bias_of(case: Case) -> Tensor | None:
    """The correction bias ``[experts]``, None for a method without one.

    Half of the cases spread it over -b..b, the others put it near b alone, b (1 + n / 2^14) for a normal n, so that at
    ``1e4`` it is as wide as the scores, which have a grid of 2^-10 left. At ``0`` it is zero.
    """
    if "bias" not in dict(case.params):
        return None
    float_ = FLOATS[case["bias_dtype"]]
    key = key_of(case.text, "bias")
    drawn = words(key, 4, case.integer("experts"))
    spread = 2.0 * unit(drawn) - 1.0 if bool(coin(words(key, 0, 1))[0]) else 1.0 + normal(drawn) / 16384.0
    bits = to_bits(BIASES[case["bias"]] * spread, float_)
    if float_.width == 32:
        return torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def _divisor(experts: int) -> int:
    return next(count for count in (8, 4, 3, 2, 1) if experts % count == 0)


def _per_token(site: Site, salt: str, count: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """``count`` words of each token, ``[tokens, count]``."""
    return words(site.matrix.key(salt), site.start * count, site.shape[0] * count).reshape(-1, count)


def _level(site: Site) -> Reals:
    """A level for each token, -4..4, ``[tokens, 1]``."""
    return 8.0 * unit(_per_token(site, "level")) - 4.0


def _normal(site: Site) -> Bits:
    """N(0, s) with s 1/4, 1 or 4 by case."""
    width = (0.25, 1.0, 4.0)[site.matrix.word("width") % 3]
    return to_bits(normal(site.words()) * width, site.matrix.float_)


def _ties(site: Site) -> Bits:
    """Each token has 2, 3 or 5 numbers, and every expert one of them."""
    count = np.array([2, 3, 5])[integer(_per_token(site, "count"), 3)]
    numbers = to_bits(2.0 * normal(_per_token(site, "numbers", 5)), site.matrix.float_)
    return np.take_along_axis(numbers, integer(site.words(), count), axis=1)


def _all_equal(site: Site) -> Bits:
    """One number a token."""
    return np.broadcast_to(to_bits(_level(site), site.matrix.float_), site.shape).copy()


def _all_negative(site: Site) -> Bits:
    """Below zero, down to -14: scores are small, and a bias outweighs them."""
    return to_bits(-np.abs(normal(site.words())) * 4.0 - 2.0**-10, site.matrix.float_)


def _saturated(site: Site) -> Bits:
    """+-8 to +-128, where FP32 sigmoids reach 1 and 0; one expert in sixteen up to +-2^14; some tokens are all low."""
    drawn = site.words()
    magnitude = 8.0 + 120.0 * unit(drawn)
    magnitude = np.where(integer(site.words("far"), 16) == 0, magnitude * 128.0, magnitude)
    low = integer(_per_token(site, "low"), 4) == 0
    return to_bits(np.where(low | coin(drawn), -magnitude, magnitude), site.matrix.float_)


def _wide(site: Site) -> Bits:
    """Uniform bit patterns: every exponent, subnormals too."""
    return finite_bits(site.words(), site.matrix.float_)


def _near_ties(site: Site) -> Bits:
    """Half of the experts within 2 ulp of the token's level, the others well below."""
    float_, drawn = site.matrix.float_, site.words()
    level = _level(site)
    near = nudge(np.broadcast_to(to_bits(level, float_), site.shape), integer(drawn, 5) - 2, float_)
    far = to_bits(level - 6.0 + normal(site.words("far")), float_)
    return np.where(coin(drawn), near, far)


def _group_ties(site: Site) -> Bits:
    """A token's groups hold the same numbers, each group in an order of its own; every fourth token has one raised."""
    size, float_ = site.matrix.block[1], site.matrix.float_
    groups = site.matrix.grid[1]
    numbers = to_bits(normal(_per_token(site, "numbers", size)), float_)
    turn = integer(site.block_words("turn"), size)
    place = (site.col % size + turn[:, np.arange(groups).repeat(size)]) % size
    found = np.take_along_axis(numbers, place, axis=1)
    chosen = integer(_per_token(site, "raised"), site.matrix.cols)
    raised = (site.col == chosen) & (integer(_per_token(site, "raise"), 4) == 0)
    return np.where(raised, to_bits(from_bits(found, float_) + 0.5, float_), found)


def _nonfinite(site: Site) -> Bits:
    """By token: one NaN, many, NaN alone; one +inf, many; -inf alone, all but a few -inf; all of it at once."""
    float_, drawn = site.matrix.float_, site.words()
    plain = to_bits(normal(drawn), float_)
    mode = integer(_per_token(site, "mode"), 8)
    one = site.col == integer(_per_token(site, "place"), site.matrix.cols)
    many, few = integer(site.words("many"), 3) == 0, integer(site.words("few"), 16) == 0
    nan, inf = nan_bits(site.words("nan"), float_), np.uint32(float_.inf)
    minus = np.uint32(float_.inf | float_.sign)
    every = np.ones_like(many)
    found = plain
    for number, where, bits in (
        (0, one, nan),
        (1, many, nan),
        (2, every, nan),
        (3, one, inf),
        (4, many, inf),
        (5, every, minus),
        (6, ~few, minus),
        (7, many, np.where(coin(drawn, 1), nan, np.where(coin(drawn, 2), inf, minus))),
    ):
        found = np.where((mode == number) & where, bits, found)
    return np.asarray(found, dtype=np.uint32)


def _zero(site: Site) -> Bits:
    """Zeros; by case +0, or of both signs."""
    drawn = site.words()
    negative = coin(drawn) & (word(site.matrix.key("signs")) % 2 == 1)
    return np.where(negative, np.uint32(site.matrix.float_.sign), np.uint32(0))


LOGIT_PROFILES: Mapping[str, Profile] = {
    "normal": _normal,
    "ties": _ties,
    "all_equal": _all_equal,
    "all_negative": _all_negative,
    "saturated": _saturated,
    "wide": _wide,
    "near_ties": _near_ties,
    "group_ties": _group_ties,
    "nonfinite": _nonfinite,
    "zero": _zero,
}
