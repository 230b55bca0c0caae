"""Hopper's tensor cores: hand-worked groups, and the vectorised model against plain integers and Fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.tensor_cores import (
    HOPPER_F16,
    HOPPER_FP8,
    HOPPER_FP8_MMA,
    LEAST_NORMAL,
    TensorCore,
    fma_fp32,
    tensor_core_dot,
)


def exponent_of(value: Fraction) -> int:
    """floor(log2 |value|) of a non-zero dyadic number."""
    value = abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """Toward zero to a multiple of unit."""
    quotient = abs(value) // unit
    return (quotient if value >= 0 else -quotient) * unit


def scalar_dot(a: list[float], b: list[float], operand: str, core: TensorCore) -> Fraction:
    stretch = max(core.products, len(core.pattern))
    a, b = a + [0.0] * (-len(a) % stretch), b + [0.0] * (-len(b) % stretch)
    order = [base + k for base in range(0, len(a), stretch) for k in core.pattern or range(stretch)]
    running = Fraction(0)
    for start in range(0, len(order), core.products):
        group = [(Fraction(a[k]), Fraction(b[k])) for k in order[start : start + core.products] if a[k] and b[k]]
        seen = [sum(max(exponent_of(factor), LEAST_NORMAL[operand]) for factor in pair) for pair in group]
        seen += [exponent_of(running)] if running else []
        if not seen:
            continue
        unit = Fraction(2) ** (max(seen) - core.fraction_bits)
        total = sum((cut(x * y, unit) for x, y in group), cut(running, unit))
        if total:
            last = max(exponent_of(total) - core.significand_bits + 1, core.least_exponent)
            total = cut(total, Fraction(2) ** last)
        running = total
    return running


def one(a: list[float], b: list[float], operand: str = "e4m3", core: TensorCore = HOPPER_FP8) -> float:
    to = lambda values: torch.tensor([values], dtype=torch.float64)  # noqa: E731
    return tensor_core_dot(to(a), to(b), operand, core).item()


def test_a_term_thirteen_bits_down_survives_and_the_next_is_lost():
    # 256 * 256 = 2^16: bits below 2^3 are cut.
    assert one([256.0, 8.0], [256.0, 1.0]) == 2.0**16 + 8
    assert one([256.0, 4.0], [256.0, 1.0]) == 2.0**16


def test_truncation_is_toward_zero_for_both_signs():
    assert one([256.0, -12.0], [256.0, 1.0]) == 2.0**16 - 8
    assert one([-256.0, 12.0], [256.0, 1.0]) == -(2.0**16) + 8
    assert one([-256.0, -12.0], [256.0, 1.0]) == -(2.0**16) - 8


def test_exponents_are_not_normalised_after_the_multiplication():
    # 1.75 * 1.75 = 3.0625 has exponent 0 + 0, so E = 0 and 2^-13 is kept, though the product is above 2.
    assert one([1.75, 2.0**-6], [1.75, 2.0**-7]) == 3.0625 + 0.0  # the sum needs 15 bits: cut to 14
    assert one([1.75, -(2.0**-6)], [1.75, 2.0**-7]) == 3.0625 - 2.0**-12
    assert one([1.75, 2.0**-6, 2.0**-6], [1.75, 2.0**-7, 2.0**-7]) == 3.0625 + 2.0**-12


def test_a_subnormal_operand_counts_with_the_smallest_normal_exponent():
    # 2^-9 * 2^-9 has exponent -12 as the multiplier sees it: E - 13 = -25, and 2^-18 survives.
    assert one([2.0**-9], [2.0**-9]) == 2.0**-18
    # Next to 2^7 (E - 13 = -6) only multiples of 2^-6 survive, whatever the operand.
    assert one([128.0, 2.0**-9], [1.0, 8.0]) == 128.0 + 2.0**-6
    assert one([128.0, 2.0**-9], [1.0, 7.0]) == 128.0


def test_a_zero_operand_takes_no_part_in_the_largest_exponent():
    assert one([0.0, 2.0**-6], [448.0, 2.0**-6]) == 2.0**-12


def test_the_running_value_carries_from_group_to_group():
    a = [256.0] + [0.0] * 31 + [4.0] * 32
    assert one(a, [256.0] + [1.0] * 63) == 2.0**16  # each 4 is cut in the second group, though their sum is 128
    assert one([256.0] + [0.0] * 31 + [128.0], [256.0] + [1.0] * 32) == 2.0**16 + 128


def test_f16_keeps_twenty_five_bits_below_the_largest_exponent_and_an_fp32_significand():
    assert one([1.0, 2.0**-12, 2.0**-12], [1.0, 2.0**-13, 2.0**-13], "f16", HOPPER_F16) == 1.0
    assert one([1.0, -(2.0**-12)], [1.0, 2.0**-13], "f16", HOPPER_F16) == 1.0 - 2.0**-24  # 25 bits kept, 24 needed
    assert one([1.0, 2.0**-12], [1.0, 2.0**-11], "f16", HOPPER_F16) == 1.0 + 2.0**-23


codes = st.sampled_from([0.0] + [s * (8 + m) * 2.0 ** (e - 3) for s in (1, -1) for m in range(8) for e in range(-6, 8)])
subnormals = st.sampled_from([s * m * 2.0**-9 for s in (1, -1) for m in range(8)])


@given(st.integers(1, 80).flatmap(lambda k: st.lists(st.tuples(codes | subnormals, codes), min_size=k, max_size=k)))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize(("core", "operand"), [(HOPPER_FP8, "e4m3"), (HOPPER_FP8_MMA, "e4m3"), (HOPPER_F16, "f16")])
def test_vectorised_equals_integers(core, operand, pairs):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    least = "f16" if core is HOPPER_FP8_MMA else operand
    assert Fraction(one(a, b, least, core)) == scalar_dot(a, b, least, core)


def test_rows_and_columns_are_independent():
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-15, 16, (5, 70), generator=generator).double() * 2.0 ** torch.randint(
        -6, 5, (5, 70), generator=generator
    )
    b = torch.randint(-15, 16, (3, 70), generator=generator).double() * 2.0 ** torch.randint(
        -6, 5, (3, 70), generator=generator
    )
    whole = tensor_core_dot(a, b, "e4m3", HOPPER_FP8)
    for m in range(5):
        for n in range(3):
            assert whole[m, n].item() == one(a[m].tolist(), b[n].tolist())


fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@given(fp32, fp32, fp32)
@settings(max_examples=500, deadline=None)
def test_fma_rounds_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = fma_fp32(*(torch.tensor([value], dtype=torch.float64) for value in (a, b, c))).item()
    near = torch.tensor([got], dtype=torch.float32)
    for neighbour in (
        torch.nextafter(near, torch.tensor([torch.inf])),
        torch.nextafter(near, torch.tensor([-torch.inf])),
    ):
        distance, other = abs(Fraction(got) - exact), abs(Fraction(neighbour.item()) - exact)
        assert distance <= other
        if distance == other:
            assert near.view(torch.int32).item() & 1 == 0


def test_fma_where_two_roundings_would_differ():
    # 1 + 2^-24 + 2^-54 lies above a tie of FP32; FP64 alone would round it onto the tie and then to even, to 1.
    a, b, c = (torch.tensor([value], dtype=torch.float64) for value in (2.0**-27, 2.0**-27, 1.0 + 2.0**-23))
    assert fma_fp32(a, b, c).item() == 1.0 + 2.0**-23
    tie = torch.tensor([1.0 + 2.0**-23], dtype=torch.float64), torch.tensor([2.0**-24], dtype=torch.float64)
    assert (
        fma_fp32(
            torch.tensor([2.0**-12], dtype=torch.float64), torch.tensor([2.0**-12], dtype=torch.float64), tie[0]
        ).item()
        == 1.0 + 2.0**-22
    )
    assert (
        fma_fp32(
            torch.tensor([2.0**-12 - 2.0**-36], dtype=torch.float64),
            torch.tensor([2.0**-12], dtype=torch.float64),
            tie[0],
        ).item()
        == 1.0 + 2.0**-23
    )
