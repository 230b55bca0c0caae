"""Element formats against ml_dtypes, exact rational arithmetic and hand-worked values."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.chunks import HUGE_PAGES_FROM
from references.elements import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    ELEMENTS,
    NAN_ORDINAL,
    Element,
    Overflow,
    decode,
    e4m3_as_float16,
    encode,
    encode_bits,
    from_ordinal,
    ordinal,
    pairs_as_float16,
    table,
)

INF, NAN = math.inf, math.nan
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
EACH = pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))


@lru_cache
def magnitudes(element: Element) -> list[Fraction]:
    return [Fraction(v) for v in table(element).tolist()[: element.max_code + 1]]


def scalar_encode(value: float, element: Element) -> int:
    """Saturating encode by search: the nearest of all finite magnitudes, the even code on a tie."""
    if math.isnan(value):
        if not element.nan_codes:
            return element.max_code
        canonical = element.nan_codes[0]
        return canonical | (element.sign if math.copysign(1.0, value) < 0 else 0)
    values = magnitudes(element)
    size = values[-1] if math.isinf(value) else min(abs(Fraction(value)), values[-1])
    above = bisect_left(values, size)
    code = min({max(above - 1, 0), above}, key=lambda c: (abs(values[c] - size), c & 1))
    negative = math.copysign(1.0, value) < 0 and (code != 0 or element.has_negative_zero)
    return code | (element.sign if negative else 0)


def boundary_values(element: Element) -> list[float]:
    """Every value and midpoint with its FP32 and FP64 neighbours, thresholds of overflow, specials."""
    values = table(element).tolist()[: element.max_code + 1]
    values += [(low + high) / 2 for low, high in pairwise(values)]
    step = values[element.max_code] - values[element.max_code - 1]
    values += [element.max + step / 2, element.max + step, 2 * element.max, 2.0**-149, 2.0**-126, 3.4e38, INF]
    near = [float(np.nextafter(np.float32(v), np.float32(to))) for v in values for to in (0, INF)]
    near += [math.nextafter(v, to) for v in values for to in (0.0, INF)]
    return [sign * v for v in values + near for sign in (1.0, -1.0)]


@EACH
def test_all_codes_decode_as_ml_dtypes_does(element: Element) -> None:
    codes = np.arange(element.count, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[element.name]).astype(np.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        found = decode(torch.from_numpy(codes), element, dtype).to(torch.float64).numpy()
        np.testing.assert_array_equal(found, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))
    np.testing.assert_array_equal(table(element).numpy(), expected)
    assert element.max == np.nanmax(expected[~np.isinf(expected)])
    assert element.emax == math.floor(math.log2(element.max))
    assert element.nan_codes == () or set(element.nan_codes) == set(np.flatnonzero(np.isnan(expected)))


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_code_encodes_back(element: Element, dtype: torch.dtype) -> None:
    codes = torch.arange(element.count, dtype=torch.uint8)
    values = decode(codes, element, dtype)
    finite = values.isfinite()
    assert torch.equal(encode(values, element)[finite], codes[finite])
    if element.has_inf:
        assert torch.equal(encode(values, element, "inf")[values.isinf()], codes[values.isinf()])


@EACH
def test_boundary_values_encode_as_fractions_do(element: Element) -> None:
    values = boundary_values(element)
    wide = torch.tensor(values, dtype=torch.float64)
    expected = torch.tensor([scalar_encode(v, element) for v in values], dtype=torch.uint8)
    assert torch.equal(encode(wide, element), expected)
    assert torch.equal(encode_bits(wide, element), expected)
    narrow = wide.to(torch.float32)
    expected = torch.tensor([scalar_encode(v, element) for v in narrow.tolist()], dtype=torch.uint8)
    assert torch.equal(encode(narrow, element), expected)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.sampled_from(list(ELEMENTS)))
@settings(max_examples=100, deadline=None)
def test_any_float_encodes_as_fractions_do(values: list[float], name: str) -> None:
    expected = [scalar_encode(v, ELEMENTS[name]) for v in values]
    assert encode(torch.tensor(values, dtype=torch.float32), ELEMENTS[name]).tolist() == expected


@EACH
def test_the_table_gives_what_the_bits_give(element: Element) -> None:
    generator = torch.Generator().manual_seed(2)
    pattern = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32)
    narrow = pattern.view(torch.float32)
    assert torch.equal(encode(narrow, element), encode_bits(narrow.to(torch.float64), element))
    exponents = torch.randint(-30, 20, (1 << 18,), generator=generator).to(torch.float64)
    wide = torch.randn(1 << 18, dtype=torch.float64, generator=generator) * torch.exp2(exponents)
    assert torch.equal(encode(wide, element), encode_bits(wide, element))


@pytest.mark.parametrize(
    ("element", "overflow", "value", "code"),
    [
        (E4M3FN, "saturate", 464.0, 0x7E),
        (E4M3FN, "saturate", 465.0, 0x7E),
        (E4M3FN, "saturate", -INF, 0xFE),
        (E4M3FN, "nan", 464.0, 0x7E),  # the tie between 448 and 480 goes down to the even code
        (E4M3FN, "nan", 464.00003, 0x7F),
        (E4M3FN, "nan", -INF, 0xFF),
        (E4M3FN, "saturate", NAN, 0x7F),
        (E4M3FN, "saturate", -NAN, 0xFF),
        (E5M2, "inf", 61439.99, 0x7B),
        (E5M2, "inf", 61440.0, 0x7C),  # the tie goes up: 57344 has an odd code
        (E5M2, "inf", -INF, 0xFC),
        (E5M2, "nan", 61440.0, 0x7F),
        (E5M2, "saturate", INF, 0x7B),
        (E4M3FNUZ, "saturate", -0.0, 0x00),
        (E4M3FNUZ, "saturate", -(2.0**-12), 0x00),
        (E4M3FNUZ, "nan", -1000.0, 0x80),
        (E4M3FNUZ, "saturate", NAN, 0x80),
        (E2M1, "saturate", 2.5, 4),
        (E2M1, "saturate", 5.0, 6),
        (E2M1, "saturate", -0.25, 8),
        (E2M1, "saturate", 0.75, 2),
        (E2M1, "saturate", NAN, 7),
        (E2M1, "saturate", -NAN, 7),
    ],
)
def test_hand_worked_codes(element: Element, overflow: Overflow, value: float, code: int) -> None:
    for dtype in (torch.float32, torch.float64):
        # Python's -nan keeps its sign through a tensor.
        assert encode(torch.tensor([value], dtype=dtype), element, overflow).tolist() == [code]


def test_an_overflow_that_the_element_lacks_is_refused() -> None:
    for element, overflow in ((E4M3FN, "inf"), (E2M1, "nan"), (E2M1, "inf")):
        with pytest.raises(ValueError, match=element.name):
            encode(torch.zeros(1), element, overflow)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bfloat16"):
        encode(torch.zeros(1, dtype=torch.bfloat16), E4M3FN)


@EACH
def test_ordinals_are_monotone_and_invert(element: Element) -> None:
    codes = torch.arange(element.count, dtype=torch.uint8)
    ordinals, values = ordinal(codes, element), table(element)
    assert bool((ordinals[values.isnan()] == NAN_ORDINAL).all())
    number = ~values.isnan()
    order = ordinals[number].argsort(stable=True)
    assert bool((values[number][order].diff() >= 0).all())
    assert int((ordinals[number] == 0).sum()) == int((values[number] == 0).sum())
    back = from_ordinal(ordinals, element)
    regular = number & ~((values == 0) & values.signbit())
    assert torch.equal(back[regular], codes[regular])
    assert bool((back[(values == 0)] == 0).all())
    assert bool((back[~number] == element.nan_codes[0]).all()) if element.nan_codes else bool(number.all())


def test_strides_and_odd_offsets() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(3)
    expected = table(E4M3FN).repeat(3)
    for start, stop in ((0, 767), (1, 768), (1, 2), (3, 700)):
        torch.testing.assert_close(decode(codes[start:stop], E4M3FN), expected[start:stop], equal_nan=True)
    square = codes[:256].view(16, 16)
    assert torch.equal(ordinal(square.t(), E4M3FN), ordinal(square, E4M3FN).t())
    values = torch.linspace(-500, 500, 256).view(16, 16)
    assert torch.equal(encode(values.t(), E4M3FN), encode(values, E4M3FN).t())
    assert torch.equal(encode(values[:, 1::2], E4M3FN), encode(values, E4M3FN)[:, 1::2])


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_finite_e4m3_codes_as_float16(device):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].to(device)
    for some in (finite, finite[1:], finite[2:-1], finite[:250].view(50, 5)):
        found = e4m3_as_float16(some).to(torch.float64) * 2.0**8
        expected = decode(some, E4M3FN)
        assert torch.equal(found, expected)
        assert torch.equal(found.signbit(), expected.signbit())


def test_pairs_of_e4m3_codes_as_float16():
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    assert torch.equal(pairs_as_float16(codes).view(torch.int16), e4m3_as_float16(codes).view(torch.int16))


def test_large_results_have_pages_of_their_own() -> None:
    """34 MB, from an address that need not begin a page."""
    codes = torch.arange(256, dtype=torch.uint8).repeat((1 << 14) + 1)[: (1 << 22) + 2]
    found = decode(codes, E5M2)
    assert found.nbytes > HUGE_PAGES_FROM
    assert torch.equal(found[:256].nan_to_num(1.0), found[1 << 21 : (1 << 21) + 256].nan_to_num(1.0))
    assert found[-1] == table(E5M2)[1]
