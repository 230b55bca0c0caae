"""Every mutant of the areas ue8m0 and dequant is wrong on the small input of its own bug report."""

from __future__ import annotations

import math

import pytest
import torch

from fuzz.case import Case
from fuzz.mutants import MUTANTS, correct

FAULTY = {mutant.family: mutant.answer for mutant in MUTANTS}
NAN = float("nan")


def words(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def codes(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.uint8)


def encoded(family: str, policy: str, x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Codes of the mutant and of a correct implementation."""
    case = Case.make("ue8m0", policy, seed=0, **{"from": "scale", "n": len(x), "values": "normal"})
    mutant = FAULTY[family](case, {"x": x})["scales"]
    return mutant.tolist(), correct.encode_ue8m0(case, {"x": x})["scales"].tolist()


def dequantised(family: str, text: str, **inputs: torch.Tensor) -> tuple[list[float], list[float]]:
    case = Case.parse(text)
    mutant = FAULTY[family](case, inputs)["output"]
    return mutant.view(-1).tolist(), correct.dequantise(case, inputs)["output"].view(-1).tolist()


def mxfp8(family: str, scale: int, *payload: int) -> tuple[list[float], list[float]]:
    text = f"dequantize mxfp8 v=1 block=1x32 k={len(payload)} m=1 out=fp32 scale=ue8m0 values=codes seed=0"
    return dequantised(family, text, payload=codes(*payload), scales=codes(scale))


def test_float_log2_loses_the_last_bit_far_from_1() -> None:
    x = words(0x3C000001, 0x3F800001, 0)
    assert encoded("ue8m0-ceil-via-float-log2", "ceil_clamped", x) == ([120, 128, 0], [121, 128, 1])


def test_a_scale_is_inflated_after_the_payload() -> None:
    text = "quantize deepseek_fp8 v=1 block=1x128 dtype=fp32 k=3 m=1 scale=ceil stride=contiguous values=normal seed=0"
    case, inputs = Case.parse(text), {"x": torch.tensor([[500.0, 100.0, -7.0]])}
    values = []
    for answer in (FAULTY["scale-inflated-vs-data"](case, inputs), correct.quantize(case, inputs)):
        back = Case.parse("dequantize deepseek_fp8 v=1 block=1x128 k=3 m=1 out=fp32 scale=ue8m0 values=codes seed=0")
        values.append(correct.dequantise(back, answer)["output"].tolist())
    assert values == [[[896.0, 176.0, -13.0]], [[512.0, 96.0, -7.0]]]


def test_fp32_scales_are_read_as_exponents() -> None:
    text = "dequantize deepseek_fp8 v=1 block=1x128 k=512 m=1 out=fp32 scale=fp32 values=codes seed=0"
    ones = torch.full((1, 512), 0x38, dtype=torch.uint8)
    mutant, right = dequantised("fp32-scale-read-as-packed", text, payload=ones, scales=torch.ones(1, 4))
    assert mutant[::128] == [2.0**-127, 2.0**-127, 2.0, 2.0**-64]
    assert right[::128] == [1.0] * 4


def test_a_pack_without_a_mask_leaks_into_the_byte_before() -> None:
    x = torch.tensor([1.0, 1.5, 1.0, 1.0])
    assert encoded("pack-without-mask", "floor", x) == ([0xFF, 0x7F, 0x7F, 0x7F], [0x7F] * 4)


@pytest.mark.parametrize(("amax", "mutant", "right"), [(5.5, (126, 3.0), (127, 6.0)), (3.0, (126, 3.0), (126, 3.0))])
def test_the_exponent_of_amax_over_6_is_one_low(
    amax: float, mutant: tuple[int, float], right: tuple[int, float]
) -> None:
    case = Case.parse("quantize mxfp4 v=1 block=1x32 dtype=fp32 k=2 m=1 scale=floor stride=padded values=zeros seed=0")
    inputs = {"x": torch.tensor([[amax, 0.0]])}
    back = Case.parse("dequantize mxfp4 v=1 block=1x32 k=2 m=1 out=fp32 scale=ue8m0 values=codes seed=0")
    for answer, wanted in ((FAULTY["mx-scale-one-low"](case, inputs), mutant), (correct.quantize(case, inputs), right)):
        assert (int(answer["scales"]), float(correct.dequantise(back, answer)["output"][0, 0])) == wanted


def test_exponent_254_is_incremented_into_nan() -> None:
    x = torch.tensor([3.0e38, 2.0**127, 1.5])
    assert encoded("ue8m0-exponent-increment-into-nan", "ceil", x) == ([255, 254, 128], [254, 254, 128])


def test_the_nan_scale_is_infinity() -> None:
    mutant, right = mxfp8("e8m0-nan-becomes-inf", 0xFF, 0x38, 0x00)
    assert mutant[0] == math.inf
    assert math.isnan(mutant[1])
    assert all(map(math.isnan, right))


def test_the_inverse_of_254_is_zero() -> None:
    case = Case.parse("requantize deepseek_fp8 v=1 k=2 n=1 scale=ceil values=codes seed=0")
    inputs = {"payload": codes(0x7E, 0x00), "scales": torch.tensor([[3.0e38]])}
    mutant, right = FAULTY["e8m0-inverse-of-254-flushes-to-zero"](case, inputs), correct.requantise(case, inputs)
    assert int(mutant["scales"]) == int(right["scales"]) == 254
    assert (int(mutant["payload"][0, 0]) & 0x7F, int(right["payload"][0, 0])) == (0x7F, 0x7E)


@pytest.mark.parametrize(("element", "most"), [("e4m3", 247), ("e2m1", 253)])
def test_no_finite_maximum_has_the_scale_code_254(element: str, most: int) -> None:
    x = torch.tensor([torch.finfo(torch.float32).max])
    for policy in ("ceil", "ceil_clamped", "floor", "ceil_amax", "even"):
        case = Case.make("ue8m0", policy, seed=0, **{"from": f"amax_{element}", "n": 1, "values": "normal"})
        assert int(correct.encode_ue8m0(case, {"x": x})["scales"]) <= most


def test_code_0_is_lost() -> None:
    assert mxfp8("e8m0-code-0-lost", 0, 0x38) == ([0.0], [2.0**-127])


def test_128_is_taken_for_nan() -> None:
    mutant, right = mxfp8("e8m0-nan-sentinel-compared-after-decode", 134, 0x38)
    assert math.isnan(mutant[0])
    assert right == [128.0]
    mutant, right = mxfp8("e8m0-nan-sentinel-compared-after-decode", 255, 0x38)
    assert mutant == [math.inf]
    assert math.isnan(right[0])


@pytest.mark.parametrize(("scale", "mutant", "right"), [(0x3C, 1.0, 1.5), (0x00, 2.0**-7, 0.0)])
def test_an_e4m3_scale_is_its_exponent(scale: int, mutant: float, right: float) -> None:
    text = "dequantize nvfp4 v=1 block=1x16 k=2 m=1 out=fp32 scale=e4m3 values=codes seed=0"
    inputs = {"payload": codes(0x02), "scales": codes(scale), "global_scale": torch.ones(1)}
    found = dequantised("e4m3-scale-decoded-as-exponent-only", text, **inputs)
    assert (found[0][0], found[1][0]) == (mutant, right)


def test_a_nan_code_is_480() -> None:
    mutant, right = mxfp8("fp8-nan-decodes-to-480", 127, 0x7F, 0xFF)
    assert mutant == [480.0, -480.0]
    assert all(map(math.isnan, right))


def test_ocp_codes_are_read_as_fnuz() -> None:
    mutant, right = mxfp8("ocp-bits-read-as-fnuz", 127, 0x38, 0x80)
    assert mutant[0] == 0.5
    assert math.isnan(mutant[1])
    assert right == [1.0, -0.0]


def test_a_block_is_as_high_as_the_shapes_suggest() -> None:
    text = "dequantize deepseek_fp8 v=1 block=128x128 k=1 m=1000 out=fp32 scale=fp32 values=codes seed=0"
    inputs = {"payload": torch.full((1000, 1), 0x38, dtype=torch.uint8), "scales": torch.arange(1.0, 9.0).view(8, 1)}
    mutant, right = dequantised("dequant-block-size-derived-from-shapes", text, **inputs)
    assert (mutant[124], mutant[125]) == (1.0, 2.0)
    assert (right[125], right[128]) == (1.0, 2.0)
