"""The stream is Philox4x64-10, word by word."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.philox import key_of, word, words

MASK = 2**64 - 1


def philox4x64_10(counter, key):
    """The generator as the paper states it, on Python integers: counter of four words, key of two, low word first."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * x0, 0xCA5A826395121157 * x2
        x0, x1, x2, x3 = (second >> 64) ^ x1 ^ k0, second & MASK, (first >> 64) ^ x3 ^ k1, first & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return x0, x1, x2, x3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123, tests/kat_vectors
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (MASK,) * 4,
            (MASK,) * 2,
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
)
def test_the_plain_generator_gives_the_published_vectors(counter, key, expected):
    assert philox4x64_10(counter, key) == expected


def test_the_first_block_of_the_zero_key_is_the_first_published_vector():
    assert words(bytes(16), 0, 4).tolist() == list(philox4x64_10((0, 0, 0, 0), (0, 0)))


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**80), st.integers(0, 9))
def test_every_word_is_a_lane_of_the_block_that_its_number_counts(key, start, count):
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    expected = []
    for index in range(start, start + count):
        counter = tuple(index // 4 >> 64 * place & MASK for place in range(4))
        expected.append(philox4x64_10(counter, (low, high))[index % 4])
    actual = words(key, start, count)
    assert actual.dtype == np.uint64
    assert actual.tolist() == expected


def test_a_key_is_the_head_of_the_sha256_of_text_and_name():
    assert key_of("a case", "x") == hashlib.sha256(b"a case\nx").digest()[:16]


def test_word_is_one_of_the_words():
    assert word(bytes(range(16)), 11) == int(words(bytes(range(16)), 11, 1)[0])


@pytest.mark.parametrize(("key", "start", "count"), [(bytes(15), 0, 1), (bytes(16), -1, 1), (bytes(16), 0, -1)])
def test_what_is_no_stream_is_refused(key, start, count):
    with pytest.raises(ValueError, match=r"key has|must be >= 0"):
        words(key, start, count)
