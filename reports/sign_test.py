"""The paired sign test: whether one of two measurements of the same things tends to be the larger one."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import comb


def p_value(less: int, more: int) -> float:
    """Two-sided exact p-value of ``less`` against ``more`` differing pairs under even odds; ties are left out before.

    The probability of a split at least as uneven: min(1, 2 * sum of C(n, i) / 2^n for i up to the smaller of both).
    Integers throughout, rounded once.
    """
    if less < 0 or more < 0:
        raise ValueError(f"sign test: counts {less} and {more} are not both 0 or more")
    n, few = less + more, min(less, more)
    term = total = 1
    for i in range(1, few + 1):
        term = term * (n - i + 1) // i
        total += term
    assert term == comb(n, few)
    return float(min(Fraction(1), Fraction(2 * total, 2**n)))


def signs(pairs: Iterable[tuple[float, float]]) -> tuple[int, int, int]:
    """How many second members are less than, more than and equal to the first."""
    less = more = same = 0
    for first, second in pairs:
        less += second < first
        more += second > first
        same += second == first
    return less, more, same
