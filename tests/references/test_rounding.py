"""Rounding on FP64 bits against exact rational arithmetic and hand-worked values."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.rounding import bits, half_ulp, next_down, next_up, round_to

INF, NAN = math.inf, math.nan
FORMS = {torch.float32: (23, -126, 127), torch.bfloat16: (7, -126, 127), torch.float16: (10, -14, 15)}


def scalar_round(value: float, dtype: torch.dtype) -> float:
    """Round to nearest even by exact division: Python's round() of a Fraction is half to even."""
    mantissa, emin, emax = FORMS[dtype]
    if value == 0 or math.isnan(value) or math.isinf(value):
        return value
    exponent = max(math.frexp(value)[1] - 1, emin)
    step = Fraction(2) ** (exponent - mantissa)
    rounded = round(Fraction(value) / step) * step
    if abs(rounded) >= Fraction(2) ** (emax + 1):
        return math.copysign(INF, value)
    return math.copysign(float(rounded), value)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(bits(left.nan_to_num(nan=12345.0)), bits(right.nan_to_num(nan=12345.0)))


def boundary_values(dtype: torch.dtype) -> list[float]:
    mantissa, emin, emax = FORMS[dtype]
    values = [0.0, -0.0, INF, -INF, NAN, 5e-324, 2.0**-1022, 1.7e308]
    for exponent in (emin - mantissa - 2, emin - mantissa - 1, emin - mantissa, emin - 1, emin, emin + 1, 0, 1, emax):
        for fraction in (0, 1, 2, 3, (1 << mantissa) - 2, (1 << mantissa) - 1):
            for half in (Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)):
                centre = float((1 + (fraction + half) / (1 << mantissa)) * Fraction(2) ** exponent)
                values += [centre, math.nextafter(centre, INF), math.nextafter(centre, 0.0), -centre]
    return values


@pytest.mark.parametrize("dtype", FORMS)
def test_boundary_values_round_as_fractions_do(dtype: torch.dtype) -> None:
    values = boundary_values(dtype)
    expected = torch.tensor([scalar_round(value, dtype) for value in values], dtype=torch.float64)
    assert same(round_to(torch.tensor(values, dtype=torch.float64), dtype), expected)


@given(st.lists(st.floats(), min_size=1, max_size=20), st.sampled_from(list(FORMS)))
@settings(max_examples=200, deadline=None)
def test_any_float_rounds_as_fractions_do(values: list[float], dtype: torch.dtype) -> None:
    expected = torch.tensor([scalar_round(value, dtype) for value in values], dtype=torch.float64)
    assert same(round_to(torch.tensor(values, dtype=torch.float64), dtype), expected)


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float32, np.float32), (torch.float16, np.float16)])
def test_random_values_round_as_numpy_casts(dtype: torch.dtype, narrow: type) -> None:
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-170, 135, (300_001,), generator=generator)
    values = torch.randn(300_001, dtype=torch.float64, generator=generator) * torch.exp2(exponents.to(torch.float64))
    with np.errstate(over="ignore"):
        expected = values.numpy().astype(narrow).astype(np.float64)
    assert same(round_to(values, dtype), torch.from_numpy(expected))


def test_hand_worked_values() -> None:
    def one(value: float, dtype: torch.dtype) -> float:
        return float(round_to(torch.tensor(value, dtype=torch.float64), dtype))

    assert one(65519.999, torch.float16) == 65504.0
    assert one(65520.0, torch.float16) == INF  # the tie between 65504 and 2^16 goes to the even one
    assert one(2.0**-25, torch.float16) == 0.0  # the tie between 0 and 2^-24
    assert one(1 + 2.0**-8, torch.bfloat16) == 1.0
    assert one(1 + 3 * 2.0**-8, torch.bfloat16) == 1 + 2.0**-6
    assert one(1 + 2.0**-8 + 2.0**-40, torch.bfloat16) == 1 + 2.0**-7  # FP32 on the way would give 1


def test_strided_input_keeps_its_shape() -> None:
    values = torch.linspace(-3, 3, 35, dtype=torch.float64).view(5, 7).t()
    assert torch.equal(round_to(values, torch.bfloat16), round_to(values.contiguous(), torch.bfloat16))
    with pytest.raises(ValueError, match="float64"):
        round_to(values.float(), torch.bfloat16)
    with pytest.raises(ValueError, match="int8"):
        round_to(values, torch.int8)


@pytest.mark.parametrize("dtype", FORMS)
def test_neighbours_enclose_and_nothing_of_the_format_lies_between(dtype: torch.dtype) -> None:
    values = torch.tensor([value for value in boundary_values(dtype) if math.isfinite(value)], dtype=torch.float64)
    up, down = next_up(values, dtype), next_down(values, dtype)
    assert bool(((up > values) & (down < values)).all())
    assert torch.equal(round_to(up, dtype), up)
    assert torch.equal(round_to(down, dtype), down)
    representable = round_to(values, dtype) == values
    # From a number of the format, up and down again is the same number; from between, one step leads across.
    assert torch.equal(next_down(up, dtype)[representable], values[representable])
    crossed = next_down(up, dtype)[~representable]
    assert torch.equal(crossed, down[~representable])


def test_neighbours_at_the_ends() -> None:
    values = torch.tensor([0.0, -0.0, 3.4028234663852886e38, INF, -INF, NAN, -(2.0**-149)], dtype=torch.float64)
    expected = torch.tensor([2.0**-149, 2.0**-149, INF, INF, -3.4028234663852886e38, NAN, -0.0], dtype=torch.float64)
    assert same(next_up(values, torch.float32), expected)
    wide = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    assert next_up(wide, torch.float64).tolist() == [math.nextafter(v, INF) for v in (1.0, -1.0, 0.0)]


def test_half_ulp_by_hand() -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 0.0, 2.0**-140, INF], dtype=torch.float64)
    assert half_ulp(values, torch.bfloat16).tolist() == [
        2.0**-8, 2.0**-8, 2.0**-7, 2.0**-134, 2.0**-134, 2.0**119
    ]  # fmt: skip
    assert float(half_ulp(torch.tensor(1.0, dtype=torch.float64), torch.float32)) == 2.0**-24
