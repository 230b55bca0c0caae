"""Stored weights brought to other scales."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch

from references import ue8m0
from references.admissible import judge_codes, judge_payload
from references.blocks import block_amax, dequantize, expand
from references.elements import E4M3FN, decode, encode
from references.packing import pack_fp4, unpack_fp4
from references.recipes import Recipe
from references.requantize import (
    MXFP4,
    STORED,
    TARGET,
    admissible_deepseek_payload,
    admissible_deepseek_scales,
    admissible_mxfp4_payload,
    admissible_mxfp4_scales,
    mxfp4_to_deepseek_fp8,
    requantize_deepseek,
)
from references.rounding import round_to

DEFAULT = Recipe(source="test")


def stored(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    payload = encode((torch.randn(n, k, generator=generator) * 100).clamp(-448, 448), E4M3FN)
    scales = torch.exp2(torch.rand(-(-n // 128), -(-k // 128), generator=generator) * 20 - 15)
    return payload, scales


def test_a_block_by_hand() -> None:
    """448 * 0.75 = 336 needs scale 1 (0.75 goes up); 336 is a tie of 320 and 352: 320, the even code."""
    payload = torch.tensor([[0x7E, 0x38, 0x80]], dtype=torch.uint8)  # 448, 1, -0
    found = requantize_deepseek(payload, torch.tensor([[0.75]]), DEFAULT)
    assert found.scales is not None
    assert found.scales.tolist() == [[127]]
    assert decode(found.payload, E4M3FN).tolist() == [[320.0, 0.75, -0.0]]


@pytest.mark.parametrize("via", ["fp32", "bf16"])
def test_each_step_alone(via: str) -> None:
    payload, scales = stored(200, 300)
    recipe = replace(DEFAULT, via=via)
    found = requantize_deepseek(payload, scales, recipe)
    weight = decode(payload, E4M3FN, torch.float32) * expand(scales, (128, 128), (200, 300))
    if via == "bf16":
        weight = weight.to(torch.bfloat16).to(torch.float32)
    new = ue8m0.from_amax(block_amax(weight, (128, 128)), E4M3FN, "ceil")
    inverse = expand(ue8m0.decode(254 - new, torch.float32), (128, 128), (200, 300))
    assert found.scales is not None
    assert torch.equal(found.scales, new)
    assert torch.equal(found.payload, encode(weight * inverse, E4M3FN))
    sets = admissible_deepseek_scales(payload, scales, recipe)
    assert float(judge_codes(found.scales, sets).headroom.max()) == 0
    codes = admissible_deepseek_payload(payload, scales, found.scales, recipe)
    assert bool(judge_payload(found.payload, codes, E4M3FN, "keep").inside.all())


def test_the_two_routes_differ_and_are_told_apart() -> None:
    payload, scales = stored(1024, 768)
    answers = {via: requantize_deepseek(payload, scales, replace(DEFAULT, via=via)) for via in ("fp32", "bf16")}
    differ = answers["fp32"].payload != answers["bf16"].payload
    assert 0.001 < float(differ.float().mean()) < 0.1
    new = answers["bf16"].scales
    assert new is not None
    codes = admissible_deepseek_payload(payload, scales, new, replace(DEFAULT, via="fp32"))
    assert torch.equal(judge_payload(answers["bf16"].payload, codes, E4M3FN).inside, ~differ)


def test_keeping_the_payload_under_rounded_scales_is_outside() -> None:
    payload, scales = stored(256, 256)
    new = ue8m0.encode(scales, "ceil")
    codes = admissible_deepseek_payload(payload, scales, new, DEFAULT)
    assert float(judge_payload(payload, codes, E4M3FN).inside.float().mean()) < 0.2


def test_powers_of_two_pass_through() -> None:
    """Scales that are powers of two already, under a full-range payload: nothing changes."""
    payload = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    payload[(payload & 0x7F) == 0x7F] = 0x7E
    found = requantize_deepseek(payload, torch.tensor([[0.25, 2.0]]), DEFAULT)
    assert found.scales is not None
    assert found.scales.tolist() == [[125, 128]]
    assert torch.equal(found.payload, payload)


def test_mxfp4_by_rational_arithmetic() -> None:
    generator = torch.Generator().manual_seed(7)
    packed = torch.randint(0, 256, (256, 128), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 128, (256, 8), dtype=torch.uint8, generator=generator)
    found = mxfp4_to_deepseek_fp8(packed, scales)
    assert found.scales is not None
    assert tuple(found.scales.shape) == (2, 2)
    exact = dequantize(unpack_fp4(packed), scales, MXFP4)
    for row, column in product(range(2), range(2)):
        part = (slice(128 * row, 128 * row + 128), slice(4 * column, 4 * column + 4))
        assert int(found.scales[row, column]) == int(scales[part].max()) - 6
    back = dequantize(found.payload, found.scales, TARGET)
    # Scales within 2^9 of the largest: the smallest code, 0.5 * 2^(6 - 9), is still an E4M3 number.
    assert torch.equal(back, exact)
    assert Fraction(float(back[0, 0])) == Fraction(float(exact[0, 0]))
    assert bool(judge_codes(found.scales, admissible_mxfp4_scales(packed, scales)).inside.all())
    sets = admissible_mxfp4_payload(packed, scales, found.scales)
    assert bool(judge_payload(found.payload, sets, E4M3FN, "keep").inside.all())
    assert not bool(judge_codes(found.scales + 1, admissible_mxfp4_scales(packed, scales)).inside.any())


def test_mxfp4_rounds_what_lies_far_below_the_largest() -> None:
    """E4M3's smallest is 2^-9: 0.5 * 2^-10 is below half, 1 * 2^-10 a tie that goes to 0, 1.5 * 2^-10 above half."""
    codes = torch.zeros(128, 128, dtype=torch.uint8)
    codes[0, 0], codes[1, :4] = 7, torch.tensor([1, 2, 3, 9], dtype=torch.uint8)
    scales = torch.full((128, 4), 100, dtype=torch.uint8)
    scales[0, 0], scales[1, 0] = 120, 104
    found = mxfp4_to_deepseek_fp8(pack_fp4(codes), scales)
    assert found.scales is not None
    assert found.scales.tolist() == [[114]]
    values = decode(found.payload, E4M3FN)
    assert values[0, 0].item() == 384.0
    assert values[1, :4].tolist() == [0.0, 0.0, 2.0**-9, -0.0]
    assert bool(values[1, 3].signbit())


def test_mxfp4_at_the_ends_of_the_scale() -> None:
    codes = torch.full((128, 128), 7, dtype=torch.uint8)
    scales = torch.full((128, 4), 2, dtype=torch.uint8)
    found = mxfp4_to_deepseek_fp8(pack_fp4(codes), scales)
    assert found.scales is not None
    assert found.scales.tolist() == [[0]]
    assert bool((decode(found.payload, E4M3FN) == 24).all())
    scales[5, 1] = 255
    found = mxfp4_to_deepseek_fp8(pack_fp4(codes), scales)
    assert found.scales is not None
    assert found.scales.tolist() == [[255]]
    assert bool((found.payload == 0x7F).all())


def test_nan_weights_make_a_nan_block() -> None:
    payload, scales = stored(128, 256)
    payload[3, 4] = 0x7F
    found = requantize_deepseek(payload, scales, DEFAULT)
    assert found.scales is not None
    assert int(found.scales[0, 0]) == 255
    assert int(found.scales[0, 1]) != 255
    assert bool((found.payload[:, :128] & 0x7F == 0x7F).all())
    assert round_to(dequantize(payload, scales, STORED), torch.float32).isnan().sum() == 1
