"""Conversions are exact: held against fractions, numpy's own formats and ml_dtypes."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import values
from fuzz.philox import words
from fuzz.values import ELEMENTS, FLOATS

NUMPY = {"fp32": (np.float32, np.uint32), "fp16": (np.float16, np.uint16), "bf16": (ml_dtypes.bfloat16, np.uint16)}
KEY = bytes(range(16))
MANY = words(KEY, 0, 2**16)
finite = st.floats(allow_nan=False, allow_infinity=False)


def nearest_even(number: Fraction, float_: values.Float) -> int:
    """Bits of a non-negative fraction by search among neighbours: no shifting, no carries."""
    if number == 0:
        return 0
    exponent = max((number.numerator.bit_length() - number.denominator.bit_length()) - 1, float_.emin)
    while number >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - float_.mantissa_bits)
    steps = round(number / quantum)  # Python rounds a fraction half to even
    base = (exponent - float_.emin) * 2**float_.mantissa_bits
    return min(base + steps, float_.inf - 1)


@pytest.mark.parametrize("name", FLOATS)
@given(number=finite)
def test_rounding_is_to_nearest_even_with_saturation(name, number):
    float_ = FLOATS[name]
    expected = nearest_even(abs(Fraction(number)), float_) | (float_.sign if np.signbit(number) else 0)
    assert int(values.to_bits(number, float_)) == expected


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_rounding_agrees_with_ieee_hardware_beside_every_boundary(name):
    float_, (dtype, bits) = FLOATS[name], NUMPY[name]
    patterns = values.finite_bits(MANY, float_)
    low = values.from_bits(patterns, float_)
    high = values.from_bits(values.nudge(patterns, 1, float_), float_)
    middle = low * 0.5 + high * 0.5
    for numbers in (middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), low):
        expected = numbers.astype(dtype).view(bits)
        np.testing.assert_array_equal(values.to_bits(numbers, float_), expected)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_finite_pattern_survives_the_round_trip(name):
    float_, (dtype, bits) = FLOATS[name], NUMPY[name]
    patterns = np.arange(2**16, dtype=np.uint32)
    patterns = patterns[patterns & (float_.sign - 1) < float_.inf]
    numbers = values.from_bits(patterns, float_)
    np.testing.assert_array_equal(numbers, patterns.astype(bits).view(dtype).astype(np.float64))
    np.testing.assert_array_equal(values.to_bits(numbers, float_), patterns)


def test_constants_of_the_float_formats():
    table = {name: (f.bias, f.emin, f.emax, f.width, f.sign, f.inf, f.mantissa) for name, f in FLOATS.items()}
    assert table == {
        "fp32": (127, -126, 127, 32, 0x80000000, 0x7F800000, 0x7FFFFF),
        "bf16": (127, -126, 127, 16, 0x8000, 0x7F80, 0x7F),
        "fp16": (15, -14, 15, 16, 0x8000, 0x7C00, 0x3FF),
    }


@pytest.mark.parametrize(
    ("name", "dtype", "qmax", "emax"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn, 448.0, 8),
        ("e5m2", ml_dtypes.float8_e5m2, 57344.0, 15),
        ("e2m1", ml_dtypes.float4_e2m1fn, 6.0, 2),
        ("e2m3", ml_dtypes.float6_e2m3fn, 7.5, 2),
        ("e3m2", ml_dtypes.float6_e3m2fn, 28.0, 4),
    ],
)
def test_code_tables_agree_with_ml_dtypes(name, dtype, qmax, emax):
    element = ELEMENTS[name]
    codes = np.arange(element.top + 1, dtype=np.uint8)
    np.testing.assert_array_equal(element.magnitudes, codes.view(dtype).astype(np.float64))
    assert (element.qmax, element.emax) == (qmax, emax)
    assert element.qmax == float(ml_dtypes.finfo(dtype).max)
    for nan in element.nans:
        assert np.isnan(np.uint8(nan).view(dtype).astype(np.float64))
    assert element.sign == {"e4m3": 128, "e5m2": 128, "e2m1": 8, "e2m3": 32, "e3m2": 32}[name]


def test_midpoints_of_e2m1():
    assert values.midpoints(ELEMENTS["e2m1"]).tolist() == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def test_pow2_is_exact_and_refuses_the_rest():
    assert values.pow2([-1022, -1, 0, 10, 1023]).tolist() == [2.0**-1022, 0.5, 1.0, 1024.0, 2.0**1023]
    for exponent in (-1023, 1024):
        with pytest.raises(ValueError, match="pow2"):
            values.pow2(exponent)


@pytest.mark.parametrize("name", FLOATS)
def test_nudge_moves_magnitudes_and_stops_at_the_ends(name):
    float_ = FLOATS[name]
    largest = float_.inf - 1
    bits = np.array([0, 5, largest, float_.sign | 7, float_.sign], dtype=np.uint32)
    assert values.nudge(bits, 1, float_).tolist() == [1, 6, largest, float_.sign | 8, float_.sign | 1]
    assert values.nudge(bits, -1, float_).tolist() == [0, 4, largest - 1, float_.sign | 6, float_.sign]


def test_normal_is_the_centred_sum_of_the_four_parts():
    hand = np.array([0, 2**64 - 1, 0x0001_0000_0000_0000, 0x8000_7FFF_8000_7FFF], dtype=np.uint64)
    edge = 131070 * (1.7320508075688772 / 65536)
    expected = [-edge, edge, -131069 * (1.7320508075688772 / 65536), 0.0]
    assert values.normal(hand).tolist() == expected
    sample = values.normal(MANY)
    # Standard errors at 65536 draws: 1/256 of the mean and about 0.0024 of the deviation; six of them.
    assert abs(sample.mean()) < 6 / 256
    assert abs(sample.std() - 1) < 0.015


def test_unit_and_integer_take_the_upper_half_of_a_word():
    hand = np.array([0, 0xFFFFFFFF, 0x80000000_00000000, 2**64 - 1], dtype=np.uint64)
    assert values.unit(hand).tolist() == [0.0, 0.0, 0.5, 1 - 2.0**-32]
    assert values.integer(hand, 10).tolist() == [0, 0, 5, 9]
    assert values.integer(hand, [1, 2, 3, 2**31]).tolist() == [0, 0, 1, 2**31 - 1]
    assert values.coin(hand).tolist() == [False, True, False, True]


@pytest.mark.parametrize("name", FLOATS)
def test_patterns_are_finite_and_nans_are_nans_of_every_kind(name):
    float_ = FLOATS[name]
    magnitude = values.finite_bits(MANY, float_) & (float_.sign - 1)
    assert (magnitude < float_.inf).all()
    assert len(np.unique(magnitude >> float_.mantissa_bits)) == 2**float_.exponent_bits - 1
    nans = values.nan_bits(MANY, float_)
    assert ((nans & (float_.sign - 1)) > float_.inf).all()
    quiet = nans & ((float_.mantissa + 1) >> 1) != 0
    assert set(zip(quiet.tolist(), (nans & float_.sign != 0).tolist(), strict=True)) == {
        (a, b) for a in (False, True) for b in (False, True)
    }
