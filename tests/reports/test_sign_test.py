from itertools import product

import pytest

from reports.sign_test import p_value, signs


@pytest.mark.parametrize("n", range(13))
def test_p_values_are_those_of_all_sequences_of_coin_flips(n):
    """By enumeration: the share of sequences that are split at least as unevenly."""
    heads = [sum(flips) for flips in product((0, 1), repeat=n)]
    for more in range(n + 1):
        uneven = abs(2 * more - n)
        assert p_value(n - more, more) == sum(abs(2 * count - n) >= uneven for count in heads) / 2**n


def test_p_values_by_hand():
    assert p_value(0, 0) == 1.0
    assert p_value(0, 5) == 2 / 32
    assert p_value(1, 9) == 22 / 1024
    assert p_value(0, 5000) == 0.0  # 2^-4999 is below every float
    assert p_value(5000, 5000) == 1.0
    with pytest.raises(ValueError, match="not both"):
        p_value(-1, 2)


def test_signs_leave_ties_apart():
    assert signs([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0), (1.0, float("inf"))]) == (1, 2, 1)
