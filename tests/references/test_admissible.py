"""Admissible sets hold every legal variant and none of the planted faults; headroom says how close to the edge."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from references import ue8m0
from references.admissible import (
    Codes,
    Interval,
    admissible_output,
    admissible_payload,
    admissible_scales,
    judge_codes,
    judge_interval,
    judge_payload,
)
from references.blocks import block_amax, dequantize, expand, quantize, scale_values
from references.elements import E2M1, E4M3FN, encode, ordinal, table
from references.recipes import Recipe
from references.rounding import round_to
from references.schemes import Scheme, scheme

INF, NAN = math.inf, math.nan
DEFAULT = Recipe(source="test")
FLUSH = replace(DEFAULT, subnormals="flush")
DEEPSEEK = scheme("deepseek_fp8", "1x128", "ceil")
FP32 = scheme("deepseek_fp8", "1x128", "fp32")
NVFP4 = scheme("nvfp4", "1x16", "e4m3")
MXFP4 = scheme("mxfp4", "1x32", "ceil")
ALL = [DEEPSEEK, FP32, NVFP4, MXFP4, scheme("mxfp8", "1x32", "even"), scheme("fp8_per_tensor", "tensor", "fp32")]
GLOBAL = torch.tensor([0.0371], dtype=torch.float32)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(torch.arange(rows).view(-1, 1) % 19 - 9.0)


def codes_of(x: torch.Tensor, chosen: Scheme, recipe: Recipe, outer: torch.Tensor = GLOBAL) -> Codes:
    found = admissible_scales(x, chosen, recipe, global_scale=outer)
    assert isinstance(found, Codes)
    return found


def interval_of(x: torch.Tensor, chosen: Scheme, recipe: Recipe) -> Interval:
    found = admissible_scales(x, chosen, recipe)
    assert isinstance(found, Interval)
    return found


@pytest.mark.parametrize("chosen", ALL, ids=lambda item: f"{item.format} {item.policy or item.scale}")
@pytest.mark.parametrize(
    "recipe",
    [
        DEFAULT,
        FLUSH,
        replace(DEFAULT, scale_arithmetic="reciprocal", payload_arithmetic="reciprocal"),
        replace(
            DEFAULT,
            scale_arithmetic="approximate",
            scale_error=1e-6,
            payload_arithmetic="approximate",
            payload_error=1e-6,
        ),
        replace(DEFAULT, amax_floor=1e-4, scale_floor=1e-3),
    ],
    ids=["divide", "flush", "reciprocal", "approximate", "floors"],
)
def test_the_nominal_answer_is_inside(chosen: Scheme, recipe: Recipe) -> None:
    x = matrix(40, 150)
    x[3] = 0
    x[4] *= 1e-42
    answer = quantize(x, chosen, recipe, global_scale=GLOBAL)
    assert answer.scales is not None
    found = admissible_scales(x, chosen, recipe, global_scale=GLOBAL)
    if isinstance(found, Codes):
        actual = ordinal(answer.scales, E4M3FN) if chosen.scale == "e4m3" else answer.scales
        judged = judge_codes(actual, found)
        assert float(judged.headroom.max()) == 0
    else:
        judged = judge_interval(answer.scales.to(torch.float64), found)
        assert float(judged.headroom.max()) <= 1
    assert bool(judged.inside.all())
    values = scale_values(answer.scales, chosen)
    payload = admissible_payload(x, values, chosen, recipe, global_scale=GLOBAL)
    judged = judge_payload(answer.payload, payload, chosen.element, "keep")
    assert bool(judged.inside.all())
    assert float(judged.headroom.max()) == 0
    if recipe.payload_arithmetic != "approximate":
        assert float((payload.lo != payload.hi).float().mean()) < 1e-3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rounding in ("once", "via_fp32", "scale_first"):
            own = replace(recipe, dequant_rounding=rounding)
            output = admissible_output(answer.payload, answer.scales, chosen, own, dtype, global_scale=GLOBAL)
            actual = dequantize(answer.payload, answer.scales, chosen, global_scale=GLOBAL, dtype=dtype, recipe=own)
            judged = judge_interval(actual.to(torch.float64), output, zero_sign="keep")
            assert bool(judged.inside.all())
            assert float(judged.headroom.max()) <= 1


def near_boundaries(values: list[float], factor: np.float32, count: int, seed: int) -> np.ndarray:
    """FP32 numbers within a few ulp of value * factor."""
    generator = np.random.default_rng(seed)
    picked = generator.choice(np.array(values), count) * np.float64(factor)
    bits = picked.astype(np.float32).view(np.int32) + generator.integers(-8, 9, count, dtype=np.int32)
    return np.abs(bits).view(np.float32)


def midpoints(element_values: list[float]) -> list[float]:
    return [(low + high) / 2 for low, high in pairwise(element_values)]


SIX, ONE = np.float32(6), np.float32(1)


@pytest.mark.parametrize("outer", [0.0371, 1.0, 3.7e-5, 2.0**-119, 1.3e-38, 1e30], ids=str)
def test_nvfp4_scales_admit_every_fp32_order(outer: float) -> None:
    g = np.float32(outer)
    amax = near_boundaries(midpoints(table(E4M3FN).tolist()[:127]), np.float32(6 * outer), 4000, 1)
    assert bool(np.isfinite(amax).all())
    orders = [
        amax / SIX / g,
        amax / g / SIX,
        amax * (ONE / SIX) / g,
        amax / (SIX * g),
        amax * (ONE / (SIX * g)),
        (ONE / g) * (amax * (ONE / SIX)),
        amax * (ONE / SIX) * (ONE / g),
        amax / ((ONE / (ONE / g)) * SIX),
    ]
    x = torch.zeros(4000, 16)
    x[:, 7] = torch.from_numpy(amax)
    found = codes_of(x, NVFP4, DEFAULT, torch.tensor([outer], dtype=torch.float32))
    seen = set()
    for order in orders:
        code = ordinal(encode(torch.from_numpy(order), E4M3FN), E4M3FN).view(-1, 1)
        assert bool(judge_codes(code, found).inside.all())
        seen.add(tuple(code.flatten().tolist()))
    assert len(seen) > 1 or outer == 1.0  # the orders do differ, so the room is needed
    assert int((found.hi - found.lo).max()) == 1


@pytest.mark.parametrize("outer", [0.0371, 3.7e-5, 2.0**-119, 1e30], ids=str)
def test_nvfp4_payloads_admit_every_fp32_order(outer: float) -> None:
    g, inner = np.float32(outer), np.float32(13 / 8)
    with np.errstate(all="ignore"):
        x = near_boundaries(midpoints(table(E2M1).tolist()[:8]), np.float32(float(inner) * outer), 4000, 2)
        orders = [
            x / (inner * g),
            x * (ONE / (inner * g)),
            x / inner / g,
            x / g / inner,
            x * (ONE / inner) * (ONE / g),
            x * (ONE / (inner * (ONE / (ONE / g)))),
        ]
    grid = torch.full((4000, 1), float(inner), dtype=torch.float64)
    whole = torch.from_numpy(x).view(-1, 1)
    found = admissible_payload(whole, grid, NVFP4, DEFAULT, global_scale=torch.tensor([outer]))
    for order in orders:
        code = encode(torch.from_numpy(order), E2M1).view(-1, 1)
        assert bool(judge_payload(code, found, E2M1).inside.all())


@pytest.mark.parametrize("outer", [1.0, 2.0**-20, 2.0**40])
@pytest.mark.parametrize(
    ("number", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (-2.5, -4)]
)
def test_a_tie_under_powers_of_two_is_a_tie_in_every_order(number: float, code: int, outer: float) -> None:
    x = torch.tensor([[number * 0.5 * outer, number * 0.375 * outer]], dtype=torch.float32)
    chosen, given = scheme("nvfp4", "1x16", "e4m3"), torch.tensor([outer], dtype=torch.float32)
    for inner, column, width in ((0.5, 0, 0), (0.375, 1, 1)):  # beside it, a scale whose reciprocal is rounded
        scales = torch.tensor([[inner]], dtype=torch.float64)
        found = admissible_payload(x[:, column : column + 1], scales, chosen, DEFAULT, global_scale=given)
        assert (int(found.hi) - int(found.lo), int(found.nominal)) == (width, code)
    approximate = replace(DEFAULT, payload_arithmetic="approximate", payload_error=2.0**-22)
    scales = torch.tensor([[0.5]], dtype=torch.float64)
    found = admissible_payload(x[:, :1], scales, chosen, approximate, global_scale=given)
    assert int(found.hi) - int(found.lo) == 1


def test_nvfp4_sets_are_single_away_from_boundaries() -> None:
    x = matrix(64, 512)
    found = codes_of(x, NVFP4, DEFAULT)
    assert float((found.lo != found.hi).float().mean()) < 0.01
    wrong = judge_codes(found.nominal + 1, found).inside
    assert float(wrong.float().mean()) < 0.01


def test_scales_by_division_and_by_reciprocal_are_told_apart() -> None:
    x = matrix(300, 128)
    amax = block_amax(x, (1, 128))
    divided, multiplied = amax / torch.tensor(448.0), amax * torch.tensor(1 / 448.0)
    differ = divided != multiplied
    assert 0.05 < float(differ.float().mean()) < 0.95
    exact = interval_of(x, FP32, DEFAULT)
    assert torch.equal(judge_interval(multiplied.to(torch.float64), exact).inside, ~differ)
    reciprocal = interval_of(x, FP32, replace(DEFAULT, scale_arithmetic="reciprocal"))
    assert torch.equal(judge_interval(divided.to(torch.float64), reciprocal).inside, ~differ)
    loose = interval_of(x, FP32, replace(DEFAULT, scale_arithmetic="approximate", scale_error=2.0**-22))
    for scales, factor, admitted in ((divided, 1.0, True), (multiplied, 1.0, True), (divided, 1 + 2.0**-20, False)):
        judged = judge_interval((scales * factor).to(torch.float64), loose)
        assert bool(judged.inside.all()) == admitted
        assert bool((judged.headroom <= 1).all()) == admitted


def test_approximate_division_admits_two_codes_next_to_a_power_of_two_only() -> None:
    recipe = replace(DEFAULT, scale_arithmetic="approximate", scale_error=2.0**-22)
    x = torch.tensor([448.0, math.nextafter(448.0, 0) - 1e-4, 500.0, 0.0]).view(-1, 1)
    found = codes_of(x, DEEPSEEK, recipe)
    assert found.lo.flatten().tolist() == [127, 127, 128, 0]
    assert found.hi.flatten().tolist() == [128, 127, 128, 0]
    assert found.nominal.flatten().tolist() == [127, 127, 128, 0]


def planted(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Fault -> scale codes and payload of a faulty UE8M0 quantiser for 1x128 blocks."""
    amax = block_amax(x, (1, 128))
    right = ue8m0.from_amax(amax, E4M3FN, "ceil")

    def payload(scale: torch.Tensor) -> torch.Tensor:
        return encode((x / expand(scale, (1, 128), tuple(x.shape))).contiguous(), E4M3FN)

    def decoded(codes: torch.Tensor) -> torch.Tensor:
        return ue8m0.decode(codes, torch.float32)

    floor = ue8m0.from_amax(amax, E4M3FN, "floor")
    return {
        "floor": (floor, payload(decoded(floor))),
        "rounded after quantising": (right, payload(ue8m0.scale_from_amax(amax, E4M3FN))),
        "neighbour": (right.roll(1, 0), payload(decoded(right))),
        "neighbour in the payload": (right, payload(decoded(right.roll(1, 0)))),
        "exponent off by one": (right + 1, payload(decoded(right + 1))),
        "exponent off by one in the payload": (right, payload(decoded(right - 1))),
    }


def test_planted_faults_are_outside() -> None:
    x = matrix(64, 256)
    right = quantize(x, DEEPSEEK, DEFAULT)
    assert right.scales is not None
    for fault, (scales, payload) in planted(x).items():
        by_scales = judge_codes(scales, codes_of(x, DEEPSEEK, DEFAULT))
        assert torch.equal(by_scales.inside, scales == right.scales), fault
        sets = admissible_payload(x, ue8m0.decode(scales), DEEPSEEK, DEFAULT)
        by_payload = judge_payload(payload, sets, E4M3FN)
        caught = ~by_scales.inside | ~by_payload.inside.view(64, 2, 128).all(2)
        # floor and ceil differ only where amax / 2^e is above 1.75; the others show in nearly every block.
        assert float(caught.float().mean()) > (0.05 if fault == "floor" else 0.9), fault
        for judged in (by_scales, by_payload):
            assert torch.equal(judged.headroom <= 1, judged.inside)


def test_a_payload_is_judged_by_the_scales_that_came_back() -> None:
    """A wrong scale with the payload that belongs to it: the scales fail, the payload passes."""
    x = matrix(16, 128)
    scales, payload = planted(x)["exponent off by one"]
    assert not bool(judge_codes(scales, codes_of(x, DEEPSEEK, DEFAULT)).inside.any())
    sets = admissible_payload(x, ue8m0.decode(scales), DEEPSEEK, DEFAULT)
    assert bool(judge_payload(payload, sets, E4M3FN, "keep").inside.all())


def test_a_zero_scale_has_no_quotient() -> None:
    grid = torch.zeros(1, 1, dtype=torch.float64)
    x = torch.tensor([[3.0, -3.0, 0.0]])
    found = admissible_payload(x, grid, NVFP4, DEFAULT, global_scale=GLOBAL)
    for payload, admitted in (([7, 15, 0], [True] * 3), ([0, 8, 0], [True] * 3), ([3, 15, 7], [False, True, False])):
        judged = judge_payload(torch.tensor([payload], dtype=torch.uint8), found, E2M1, "keep")
        assert judged.inside.tolist() == [admitted]


def test_nan_matches_nan_alone() -> None:
    x = torch.tensor([[NAN, 1.0]])
    found = admissible_payload(x, torch.tensor([[1.0]], dtype=torch.float64), DEEPSEEK, DEFAULT)
    judged = judge_payload(torch.tensor([[0xFF, 0x7F]], dtype=torch.uint8), found, E4M3FN)
    assert judged.inside.tolist() == [[True, False]]
    assert judged.headroom.tolist() == [[0.0, INF]]
    judged = judge_codes(torch.tensor([[255], [254]]), codes_of(torch.tensor([[NAN], [NAN]]), DEEPSEEK, DEFAULT))
    assert judged.inside.flatten().tolist() == [True, False]
    assert judged.headroom.flatten().tolist() == [0.0, INF]
    # E2M1 has no code for NaN: any will do.
    found = admissible_payload(x, torch.tensor([[1.0]], dtype=torch.float64), MXFP4, DEFAULT)
    assert (found.lo.tolist(), found.hi.tolist()) == ([[-7, 2]], [[7, 2]])


def test_codes_by_hand() -> None:
    codes = Codes(torch.tensor([1, 1, 5, 5]), torch.tensor([2, 2, 5, 5]), torch.tensor([1, 1, 5, 5]))
    judged = judge_codes(torch.tensor([1, 2, 5, 9]), codes)
    assert judged.inside.tolist() == [True, True, True, False]
    assert judged.headroom.tolist() == [0.0, 1.0, 0.0, 5.0]
    zeros = Codes(torch.zeros(2), torch.zeros(2), torch.zeros(2), negative=torch.tensor([True, False]))
    actual = torch.tensor([0x80, 0x80], dtype=torch.uint8)
    assert judge_payload(actual, zeros, E4M3FN, "any").inside.tolist() == [True, True]
    judged = judge_payload(actual, zeros, E4M3FN, "keep")
    assert (judged.inside.tolist(), judged.headroom.tolist()) == ([True, False], [0.0, 2.0])


def test_the_sign_of_an_element_that_rounds_to_zero() -> None:
    x = torch.tensor([[448.0, -1e-9, 1e-9, -0.0]])
    found = admissible_payload(x, torch.tensor([[1.0]], dtype=torch.float64), DEEPSEEK, DEFAULT)
    plain = torch.tensor([[0x7E, 0, 0, 0]], dtype=torch.uint8)
    assert judge_payload(plain, found, E4M3FN, "any").inside.tolist() == [[True] * 4]
    assert judge_payload(plain, found, E4M3FN, "keep").inside.tolist() == [[True, False, True, False]]


def test_headroom_of_a_rounded_output_is_its_share_of_half_an_ulp() -> None:
    """1.875 * (1 + 2^-9) in BF16: the exact product lies 0.46875 half-ulps above 1.875, whose ulp is 2^-7."""
    payload = torch.tensor([[0x3F]], dtype=torch.uint8)
    scales = torch.tensor([[1 + 2.0**-9]])
    found = admissible_output(payload, scales, FP32, DEFAULT, torch.bfloat16)
    for out, inside, headroom in (
        (1.875, True, 1.875 * 2.0**-9 / 2.0**-8),
        (1.8828125, False, (2.0**-7 - 1.875 * 2.0**-9) / 2.0**-8),
        (NAN, False, INF),
        (INF, False, INF),
    ):
        judged = judge_interval(torch.tensor([[out]], dtype=torch.float64), found)
        assert (judged.inside.item(), judged.headroom.item()) == (inside, headroom)


def test_overflow_and_nan_outputs() -> None:
    payload = torch.tensor([[0x7E, 0xFE, 0x7F]], dtype=torch.uint8)
    found = admissible_output(payload, torch.tensor([[3e38]]), FP32, DEFAULT, torch.float32)
    judged = judge_interval(torch.tensor([[INF, -INF, NAN]], dtype=torch.float64), found)
    assert (judged.inside.tolist(), judged.headroom.tolist()) == ([[True] * 3], [[0.0] * 3])
    judged = judge_interval(torch.tensor([[3.4e38, INF, 0.0]], dtype=torch.float64), found)
    assert judged.inside.tolist() == [[False] * 3]
    assert float(judged.headroom[0, 0]) > 1.0
    assert judged.headroom[0, 1:].tolist() == [INF, INF]


def test_a_tie_admits_the_even_output_alone() -> None:
    payload = torch.tensor([[0x38]], dtype=torch.uint8)
    found = admissible_output(payload, torch.tensor([[1 + 2.0**-8]]), FP32, DEFAULT, torch.bfloat16)
    judged = [judge_interval(torch.tensor([[v]], dtype=torch.float64), found) for v in (1.0, 1 + 2.0**-7)]
    assert [item.inside.item() for item in judged] == [True, False]
    assert judged[0].headroom.item() == 1.0 < judged[1].headroom.item()


def test_two_roundings_to_bf16_are_another_recipe() -> None:
    """Scales for which 1.125 * scale lies so near a BF16 tie that FP32 rounds onto it."""
    ties = 1 + (2 * torch.arange(64, dtype=torch.float64) + 1) * 2.0**-8
    scales = round_to(ties / 1.125, torch.float32).to(torch.float32).view(-1, 1)
    payload = torch.full((64, 3), 0x39, dtype=torch.uint8)
    once = admissible_output(payload, scales, FP32, DEFAULT, torch.bfloat16)
    twice = admissible_output(payload, scales, FP32, replace(DEFAULT, dequant_rounding="via_fp32"), torch.bfloat16)
    assert torch.equal(round_to(once.centre, torch.float32), ties.view(-1, 1).expand(64, 3))
    differ = once.nominal != twice.nominal
    assert 0.2 < float(differ.double().mean()) < 0.8
    assert torch.equal(judge_interval(twice.nominal, once).inside, ~differ)
    assert torch.equal(judge_interval(once.nominal, twice).inside, ~differ)
    assert bool((judge_interval(twice.nominal, twice).headroom <= 1).all())


def test_flushing_admits_zero_beside_the_regular_answer() -> None:
    mxfp8 = scheme("mxfp8", "1x32", "ue8m0")
    payload = torch.tensor([[0x38, 0x7E, 0xB8]], dtype=torch.uint8)  # 1, 448, -1
    tiny = torch.tensor([[0]], dtype=torch.uint8)  # 2^-127, itself a subnormal
    low = torch.tensor([[1]], dtype=torch.uint8)  # 2^-126
    zeros = torch.tensor([[0.0, 0.0, -0.0]], dtype=torch.float64)
    for scales, recipe, admitted in (
        (tiny, FLUSH, [True] * 3),
        (low, FLUSH, [False] * 3),
        (tiny, DEFAULT, [False] * 3),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            found = admissible_output(payload, scales, mxfp8, recipe, dtype)
            assert judge_interval(zeros, found, zero_sign="keep").inside.tolist() == [admitted]
            assert bool(judge_interval(found.nominal, found, zero_sign="keep").inside.all())
            half = judge_interval(found.nominal / 2, found)
            assert not bool(half.inside.any())  # zero is admitted, not everything down to it
    x = torch.tensor([[2.0**-127, 2.0**-126]])
    found = admissible_payload(x, torch.tensor([[2.0**-127]], dtype=torch.float64), mxfp8, FLUSH)
    judged = judge_payload(torch.tensor([[0, 0]], dtype=torch.uint8), found, E4M3FN)
    assert judged.inside.tolist() == [[True, False]]
    # 500 * 2^-127 / 448 is a subnormal above 2^-127: code 1, or 0 once it is flushed.
    amax = torch.tensor([[500 * 2.0**-127]])
    assert (codes_of(amax, DEEPSEEK, DEFAULT).lo.item(), codes_of(amax, DEEPSEEK, FLUSH).lo.item()) == (1, 0)


def test_approximate_payloads_admit_both_sides_of_a_boundary() -> None:
    recipe = replace(DEFAULT, payload_arithmetic="approximate", payload_error=2.0**-22)
    x = torch.tensor([[17.0, 17.5, -17.0, 500.0, 464.0001, 0.0]])  # 17 lies halfway between 16 and 18
    found = admissible_payload(x, torch.tensor([[1.0]], dtype=torch.float64), DEEPSEEK, recipe)
    assert (found.hi - found.lo).tolist() == [[1, 0, 1, 0, 0, 0]]
    assert int(found.hi[0, 3]) == 0x7E  # clipped: no NaN code becomes admissible


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chosen", ALL, ids=lambda item: f"{item.format} {item.policy or item.scale}")
def test_cuda_gives_the_bits_of_the_cpu(chosen: Scheme) -> None:
    generator = torch.Generator().manual_seed(8)
    pattern = torch.randint(-(2**31), 2**31, (300, 333), generator=generator).to(torch.int32).view(torch.float32)
    open_recipe = replace(
        FLUSH, scale_arithmetic="approximate", scale_error=1e-6, payload_arithmetic="approximate", payload_error=1e-6
    )

    def everything(x: torch.Tensor, recipe: Recipe) -> list[torch.Tensor]:
        outer = GLOBAL.to(x.device)
        answer = quantize(x, chosen, recipe, global_scale=outer)
        assert answer.scales is not None
        values = scale_values(answer.scales, chosen)
        scales = admissible_scales(x, chosen, recipe, global_scale=outer)
        payload = admissible_payload(x, values, chosen, recipe, global_scale=outer)
        judged = judge_payload(answer.payload, payload, chosen.element, "keep")
        found = [answer.payload, answer.scales, scales.lo, scales.hi, payload.lo, payload.hi, judged.headroom]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            output = admissible_output(answer.payload, answer.scales, chosen, recipe, dtype, global_scale=outer)
            found += [output.lo, output.centre, output.radius]
        return found

    for x in (matrix(301, 333), pattern.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)):
        for recipe in (DEFAULT, open_recipe, replace(DEFAULT, payload_arithmetic="reciprocal")):
            pairs = zip(everything(x, recipe), everything(x.cuda(), recipe), strict=True)
            for number, (ours, theirs) in enumerate(pairs):
                torch.testing.assert_close(theirs.cpu(), ours, rtol=0, atol=0, equal_nan=True, msg=f"part {number}")
