"""UE8M0 policies against scalar rational arithmetic, hand values, and the sources that they are named after."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from references import ue8m0
from references.elements import E4M3FN, ELEMENTS, Element
from references.rounding import round_to

NUMBERS = [name for name in ELEMENTS if name != "e4m3fnuz"]
LOWEST, HIGHEST = Fraction(1, 2**127), Fraction(2) ** 127


def boundary_bits() -> torch.Tensor:
    """Every exponent with mantissas 0, 1, half - 1, half, half + 1, max and the ties of the elements; both signs."""
    half = 1 << 22
    mantissas = [0, 1, 2, half - 1, half, half + 1, (1 << 23) - 1]
    for kept in (1, 2, 3):  # where adding half an element ulp carries into the next exponent
        mantissas += [(1 << 23) - (1 << (22 - kept)) + offset for offset in (-1, 0, 1)]
    mantissas += [0x600000, 0x600001, 0x5FFFFF, 0x400000 >> 1]  # 1.75 = 448 / 256
    exponents = torch.arange(256, dtype=torch.int64).view(-1, 1) << 23
    positive = (exponents | torch.tensor(mantissas)).view(-1)
    return torch.cat((positive, positive - (1 << 31))).to(torch.int32)


VALUES = boundary_bits().view(torch.float32)


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def ceil_log2(value: Fraction) -> int:
    exponent = floor_log2(value)
    return exponent if Fraction(2) ** exponent == value else exponent + 1


def scalar_encode(value: float, policy: str) -> int:
    size = abs(value)
    if policy == "ceil_clamped":
        if math.isnan(size) or math.isinf(size):
            return 254
        return min(max(ceil_log2(max(Fraction(size), Fraction(2) ** -126)) + 127, 1), 254)
    if math.isnan(size):
        return 255
    if policy == "nearest":
        if math.isinf(size) or Fraction(size) >= Fraction(3, 2) * HIGHEST:
            return 255
        exact = Fraction(size)
        if exact <= LOWEST:
            return 0
        if exact < 2 * LOWEST:
            return 1
        low = Fraction(2) ** floor_log2(exact)
        return floor_log2(low) + 127 + (exact >= Fraction(3, 2) * low)
    if size == 0:
        return 0
    if math.isinf(size):
        return 254
    exponent = ceil_log2(Fraction(size)) if policy == "ceil" else floor_log2(Fraction(size))
    return min(max(exponent, -127), 127) + 127


def fp32(exact: Fraction) -> float:
    """Round to FP32, ties to even, as a Python float."""
    if exact == 0:
        return 0.0
    step = Fraction(2) ** (max(floor_log2(exact), -126) - 23)
    rounded = round(exact / step) * step
    return math.inf if rounded >= 2 * HIGHEST else float(rounded)


def scalar_from_amax(value: float, element: Element, policy: str, arithmetic: str) -> int:
    size = abs(value)
    if policy in ("ceil", "ceil_clamped"):
        if not math.isfinite(size):
            return scalar_encode(size, policy)
        qmax = Fraction(element.max)
        factor = 1 / qmax if arithmetic == "divide" else Fraction(fp32(1 / qmax))
        return scalar_encode(fp32(Fraction(size) * factor), policy)
    if math.isnan(size):
        return 255
    if size == 0:
        return 0
    exact = 2 * HIGHEST if math.isinf(size) else Fraction(size)
    if policy == "even" and math.isfinite(size):
        # Half a mantissa ulp of the element at amax's own binade (FP32 subnormals share the lowest one).
        exact += Fraction(2) ** (max(floor_log2(exact), -126) - element.mantissa_bits - 1)
    exponent = ceil_log2(exact) if policy == "ceil_amax" else floor_log2(exact)
    return min(max(exponent - element.emax + 127, 0), 254)


@pytest.mark.parametrize("policy", ue8m0.SCALE_POLICIES)
def test_encode_agrees_with_rational_arithmetic(policy: str) -> None:
    expected = [scalar_encode(value, policy) for value in VALUES.tolist()]
    assert ue8m0.encode(VALUES, policy).tolist() == expected


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("policy", ue8m0.AMAX_POLICIES)
def test_from_amax_agrees_with_rational_arithmetic(name: str, policy: str) -> None:
    element, values = ELEMENTS[name], VALUES[::3]
    for arithmetic in ("divide", "reciprocal"):
        expected = [scalar_from_amax(value, element, policy, arithmetic) for value in values.tolist()]
        assert ue8m0.from_amax(values, element, policy, arithmetic).tolist() == expected


@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        ("floor", [127, 127, 127]),
        ("ceil_amax", [128, 128, 128]),
        ("even", [127, 127, 128]),
        ("ceil", [127, 128, 128]),
        ("ceil_clamped", [127, 128, 128]),
    ],
)
def test_448_449_511(policy: str, codes: list[int]) -> None:
    assert ue8m0.from_amax(torch.tensor([448.0, 449.0, 511.0]), E4M3FN, policy).tolist() == codes


def test_the_table_of_specials() -> None:
    specials = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -3.0])
    assert ue8m0.encode(specials, "ceil").tolist() == [0, 0, 254, 254, 255, 129]
    assert ue8m0.encode(specials, "ceil_clamped").tolist() == [1, 1, 254, 254, 254, 129]
    assert ue8m0.encode(specials, "floor").tolist() == [0, 0, 254, 254, 255, 128]
    assert ue8m0.encode(specials, "nearest").tolist() == [0, 0, 255, 255, 255, 129]
    for policy in ("floor", "ceil_amax", "even"):
        assert ue8m0.from_amax(specials[:5], E4M3FN, policy).tolist() == [0, 0, 247, 247, 255]


def test_one_ulp_above_a_power_of_two_goes_up() -> None:
    one_above = torch.tensor([0x3C000001, 0x3F800001, 0x00800001, 0x00400001], dtype=torch.int32).view(torch.float32)
    assert ue8m0.encode(one_above, "ceil").tolist() == [121, 128, 2, 1]


def test_division_and_reciprocal_give_one_ceil_code_but_not_one_scale() -> None:
    generator = torch.Generator().manual_seed(3)
    amax = torch.randint(1, 0x7F800000, (1 << 16,), generator=generator).to(torch.int32).view(torch.float32)
    divided, multiplied = (ue8m0.scale_from_amax(amax, E4M3FN, how) for how in ("divide", "reciprocal"))
    assert not torch.equal(divided, multiplied)
    wide = amax.to(torch.float64)  # a quotient or product in FP64 rounds as the exact one does: 53 >= 2 * 24 + 2
    assert torch.equal(divided.to(torch.float64), round_to(wide / 448, torch.float32))
    inverse = Fraction(0x924925, 1 << 32)  # 8 / 7 = 1.001001... in binary, to 24 bits, times 2^-9
    assert torch.equal(multiplied.to(torch.float64), round_to(wide * float(inverse), torch.float32))
    assert torch.equal(ue8m0.encode(divided, "ceil"), ue8m0.encode(multiplied, "ceil"))


def test_subnormal_scales_are_not_lost() -> None:
    """2^-149 * 448 / 448; half a step rounds to even, one bit more than half goes up."""
    step = 2.0**-149
    amax = torch.tensor([448 * step, 224 * step, 225 * step, 672 * step, step])
    assert (ue8m0.scale_from_amax(amax, E4M3FN).to(torch.float64) / step).tolist() == [1, 0, 1, 2, 0]


def test_decode_is_exact_and_inverts() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = [math.ldexp(1.0, code - 127) for code in range(255)]
    assert ue8m0.decode(codes)[:255].tolist() == expected
    narrow = ue8m0.decode(codes, torch.float32)
    assert narrow[:255].tolist() == expected
    assert struct.pack("<f", float(narrow[0])) == struct.pack("<I", 0x00400000)
    assert math.isnan(float(narrow[255]))
    assert math.isnan(float(ue8m0.decode(codes)[255]))
    for policy in ("ceil", "floor", "nearest"):
        assert torch.equal(ue8m0.encode(narrow, policy), codes)


def test_bad_arguments_are_refused() -> None:
    for call in (
        lambda: ue8m0.encode(VALUES, "even"),
        lambda: ue8m0.encode(VALUES.to(torch.float64), "ceil"),
        lambda: ue8m0.from_amax(VALUES, E4M3FN, "nearest"),
        lambda: ue8m0.from_amax(VALUES, E4M3FN, "ceil", "approximate"),
        lambda: ue8m0.decode(VALUES),
    ):
        with pytest.raises(ValueError, match="ue8m0"):
            call()


def test_torch_cast_is_nearest() -> None:
    cast = VALUES.to(torch.float8_e8m0fnu).view(torch.uint8)
    assert torch.equal(ue8m0.encode(VALUES, "nearest"), cast)


def test_deepgemm_rule_is_ceil_clamped() -> None:
    """The published rule: exponent field, plus one for any mantissa bit, clamped to 1..254."""
    words = [struct.unpack("<I", struct.pack("<f", abs(value)))[0] for value in VALUES.tolist()]
    finite = [(code, word) for code, word in zip(ue8m0.encode(VALUES, "ceil_clamped").tolist(), words, strict=True)]
    assert all(code == min(max((word >> 23) + bool(word & 0x7FFFFF), 1), 254) for code, word in finite)


TORCHAO = {"floor": "FLOOR", "ceil_amax": "CEIL", "even": "EVEN"}


@pytest.fixture
def torchao_scales() -> Callable[[torch.Tensor, str], torch.Tensor]:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def scales(amax: torch.Tensor, mode: str) -> torch.Tensor:
        blocks = torch.zeros(amax.numel(), 32)
        blocks[:, 5] = amax
        codes, _ = to_mx(blocks, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode])
        return codes.view(torch.uint8).view(-1)

    return scales


@pytest.mark.parametrize("policy", TORCHAO)
def test_torchao_gives_the_policy_named_after_it(policy: str, torchao_scales: Callable[..., torch.Tensor]) -> None:
    assert torch.equal(ue8m0.from_amax(VALUES, E4M3FN, policy), torchao_scales(VALUES, TORCHAO[policy]))


def test_torchao_rceil_is_ceil_away_from_powers_of_two(torchao_scales: Callable[..., torch.Tensor]) -> None:
    """In eager mode it takes a float log2, so quotients within a few ulp above a power of two are left out."""
    amax = torch.cat([torch.tensor([0.0, math.inf, math.nan]), torch.tensor([448.0, 600.0, 1.0, 7e30, 3e-30])])
    assert torch.equal(ue8m0.from_amax(amax, E4M3FN, "ceil"), torchao_scales(amax, "RCEIL"))
