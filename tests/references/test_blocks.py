"""Block quantisation and dequantisation: hand-worked blocks, and every block against exact rational arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch

from references import chunks, ue8m0
from references.blocks import block_amax, dequantize, expand, nominal_payload, quantize, scale_grid, scale_values
from references.elements import decode, table
from references.recipes import Recipe
from references.rounding import round_to
from references.schemes import Scheme, scheme

DEFAULT = Recipe(source="test")
GLOBAL = torch.tensor([0.0371], dtype=torch.float32)
SCHEMES = {
    "deepseek_fp8 1x128 ceil": scheme("deepseek_fp8", "1x128", "ceil"),
    "deepseek_fp8 1x128 fp32": scheme("deepseek_fp8", "1x128", "fp32"),
    "deepseek_fp8 128x128 fp32": scheme("deepseek_fp8", "128x128", "fp32"),
    "mxfp8 ceil": scheme("mxfp8", "1x32", "ceil"),
    "mxfp8 floor": scheme("mxfp8", "1x32", "floor"),
    "mxfp8 even": scheme("mxfp8", "1x32", "even"),
    "mxfp4 ceil_amax": scheme("mxfp4", "1x32", "ceil_amax"),
    "nvfp4": scheme("nvfp4", "1x16", "e4m3"),
    "fp8_per_tensor": scheme("fp8_per_tensor", "tensor", "fp32"),
}
EACH = pytest.mark.parametrize("name", SCHEMES)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Normal values under a different power of two for every 16 columns and every row."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    exponents = (torch.arange(rows).view(-1, 1) * 3 + torch.arange(columns) // 16 * 5) % 23 - 11
    return values * torch.exp2(exponents.to(torch.float32))


def f32(exact: Fraction) -> Fraction:
    """Round to FP32, ties to even (values here are far from its limits)."""
    if exact == 0:
        return exact
    exponent = math.frexp(float(abs(exact)))[1] - 1
    while Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(exact / step) * step


def nearest_code(exact: Fraction, values: list[Fraction]) -> int:
    return min(range(len(values)), key=lambda code: (abs(values[code] - exact), code & 1))


def scalar_block(
    block: list[float], chosen: Scheme, recipe: Recipe, outer: Fraction
) -> tuple[Fraction, list[Fraction]]:
    """The scale and the payload's values of one block, by rational arithmetic."""
    limit = Fraction(chosen.element.max)
    finite = [Fraction(v) for v in table(chosen.element).tolist() if v >= 0]
    exact = [Fraction(v) for v in block]
    amax = max(max(abs(v) for v in exact), Fraction(recipe.amax_floor))
    scale = f32(amax * f32(1 / limit)) if recipe.scale_arithmetic == "reciprocal" else f32(amax / limit)
    if chosen.scale == "e4m3":
        codes = [Fraction(v) for v in decode(torch.arange(127, dtype=torch.uint8), E4M3).tolist()]
        scale = codes[nearest_code(f32(scale / outer), codes)]
    elif chosen.scale == "ue8m0":
        exponent = -160
        if chosen.policy == "ceil":
            while Fraction(2) ** exponent < scale:
                exponent += 1
        else:
            if chosen.policy == "even":
                rough = math.frexp(float(amax))[1] - 1
                amax += Fraction(2) ** (rough - chosen.element.mantissa_bits - 1)
            while Fraction(2) ** (exponent + 1) <= amax:
                exponent += 1
            if chosen.policy == "ceil_amax" and Fraction(2) ** exponent < amax:
                exponent += 1
            exponent -= chosen.element.emax
        scale = Fraction(2) ** exponent
    whole = f32(scale * outer)
    payload = []
    for value in exact:
        if recipe.payload_arithmetic == "reciprocal":
            scaled = f32(value * f32(1 / whole))
        elif recipe.payload_arithmetic == "amax_reciprocal":
            scaled = f32(value * f32(limit / amax))
        else:
            scaled = f32(value / whole)
        code = nearest_code(min(abs(scaled), limit), finite)
        payload.append(finite[code] if value >= 0 else -finite[code])
    return scale, payload


E4M3 = SCHEMES["mxfp8 ceil"].element


@EACH
@pytest.mark.parametrize(
    "recipe",
    [
        DEFAULT,
        replace(DEFAULT, scale_arithmetic="reciprocal", payload_arithmetic="reciprocal"),
        replace(DEFAULT, payload_arithmetic="amax_reciprocal"),
        replace(DEFAULT, amax_floor=0.5),
    ],
    ids=["divide", "reciprocal", "amax_reciprocal", "amax_floor"],
)
def test_every_block_agrees_with_rational_arithmetic(name: str, recipe: Recipe) -> None:
    chosen = SCHEMES[name]
    if recipe.payload_arithmetic == "amax_reciprocal" and chosen.scale != "fp32":
        with pytest.raises(ValueError, match="amax_reciprocal"):
            quantize(matrix(2, 16), chosen, recipe, global_scale=GLOBAL)
        return
    outer = Fraction(float(GLOBAL)) if chosen.two_level else Fraction(1)
    x = matrix(3, 71)  # ragged under every block
    found = quantize(x, chosen, recipe, global_scale=GLOBAL)
    assert found.scales is not None
    values, payload = scale_values(found.scales, chosen), decode(found.payload, chosen.element)
    height, width = chosen.block or (3, 71)
    rows, columns = range(-(-3 // height)), range(-(-71 // width))
    assert tuple(values.shape) == (len(rows), len(columns))
    for row, column in product(rows, columns):
        part = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
        scale, numbers = scalar_block(x[part].flatten().tolist(), chosen, recipe, outer)
        assert Fraction(float(values[row, column])) == scale
        assert [Fraction(v) for v in payload[part].flatten().tolist()] == numbers


def test_a_block_by_hand() -> None:
    """500 / 448 = 1.116 goes up to 2; 250 to 256, 50 (a tie) to 48, -3.5 stays."""
    x = torch.tensor([[500.0, 100.0, -7.0]])
    found = quantize(x, SCHEMES["deepseek_fp8 1x128 ceil"], DEFAULT)
    assert found.scales is not None
    assert found.scales.tolist() == [[128]]
    assert found.payload.tolist() == [[0x78, 0x64, 0xC6]]
    assert dequantize(found.payload, found.scales, SCHEMES["deepseek_fp8 1x128 ceil"]).tolist() == [[512, 96, -7]]


def test_policies_by_hand() -> None:
    """amax 7 in E2M1: 7/6 goes up to 2; floor(log2 7) - 2 = 0 gives 1, and 7 saturates at 6."""
    x = torch.tensor([[7.0, -1.0, 0.25, 0.0]])
    up = quantize(x, scheme("mxfp4", "1x32", "ceil"), DEFAULT)
    down = quantize(x, scheme("mxfp4", "1x32", "floor"), DEFAULT)
    assert up.scales is not None
    assert down.scales is not None
    assert (up.scales.tolist(), up.payload.tolist()) == (
        [[128]],
        [[6, 9, 0, 0]],
    )  # 3.5 is a tie: 4; 0.125 is below half
    assert (down.scales.tolist(), down.payload.tolist()) == ([[127]], [[7, 10, 0, 0]])


def test_nvfp4_by_hand() -> None:
    """amax 12, global 1/64: 12 / 6 * 64 = 128 is an E4M3 number; the block's unit is 2."""
    chosen, outer = SCHEMES["nvfp4"], torch.tensor([1 / 64])
    found = quantize(torch.tensor([[12.0, -3.0, 0.4, 0.0]]), chosen, DEFAULT, global_scale=outer)
    assert found.scales is not None
    assert decode(found.scales, E4M3).tolist() == [[128.0]]
    assert found.payload.tolist() == [[7, 8 + 3, 0, 0]]
    assert dequantize(found.payload, found.scales, chosen, global_scale=outer).tolist() == [[12.0, -3.0, 0.0, 0.0]]


def test_static_scales_saturate_and_keep_nan() -> None:
    x = torch.tensor([[1e30, -1e30, math.inf, math.nan, 3.0, -0.0]])
    found = quantize(x, scheme("fp8_per_tensor", "tensor", "static"), DEFAULT, scale=torch.tensor([2.0]))
    assert found.scales is None
    assert found.payload.tolist() == [[0x7E, 0xFE, 0x7E, 0x7F, 0x3C, 0x80]]


@EACH
def test_zero_blocks_have_a_zero_payload(name: str) -> None:
    x = torch.zeros(2, 300)
    x[1, 5] = -0.0
    for recipe in (DEFAULT, replace(DEFAULT, payload_arithmetic="reciprocal")):
        found = quantize(x, SCHEMES[name], recipe, global_scale=GLOBAL)
        assert found.scales is not None
        assert int(found.scales.to(torch.float64).abs().max()) == 0
        sign = SCHEMES[name].element.sign
        assert int(found.payload[1, 5]) == sign
        assert int(found.payload.to(torch.int64).sum()) == sign


def test_floors_apply_to_amax_and_to_the_scale() -> None:
    x, chosen = torch.zeros(1, 8), SCHEMES["deepseek_fp8 1x128 fp32"]
    floor = round_to(torch.tensor(1e-4, dtype=torch.float64), torch.float32)
    found = quantize(x, chosen, replace(DEFAULT, amax_floor=1e-4)).scales
    assert found is not None
    assert float(found) == float(round_to(floor / 448, torch.float32))
    found = quantize(x, chosen, replace(DEFAULT, scale_floor=0.5)).scales
    assert found is not None
    assert float(found) == 0.5
    found = quantize(x, SCHEMES["mxfp8 ceil"], replace(DEFAULT, scale_floor=0.5)).scales
    assert found is not None
    assert int(found) == 126


@pytest.mark.parametrize("block", [None, (1, 32), (1, 128), (128, 128), (2, 3)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 70), (130, 129), (128, 256), (257, 1), (1, 400)])
def test_amax_and_expand_against_slices(block: tuple[int, int] | None, shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    height, width = block or shape
    rows, columns = -(-shape[0] // height), -(-shape[1] // width)
    assert scale_grid(shape, block) == (rows, columns)
    grid = block_amax(x, block)
    spread = expand(grid, block, shape)
    assert (tuple(grid.shape), tuple(spread.shape)) == ((rows, columns), shape)
    for row, column in product(range(rows), range(columns)):
        part = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
        assert float(grid[row, column]) == float(x[part].abs().max())
        assert bool((spread[part] == grid[row, column]).all())


@EACH
def test_strides_and_input_dtypes_change_nothing(name: str) -> None:
    chosen, x = SCHEMES[name], matrix(131, 77).to(torch.bfloat16)
    expected = quantize(x.to(torch.float32), chosen, DEFAULT, global_scale=GLOBAL)
    padded = torch.full((131, 80), 1e9, dtype=torch.bfloat16)[:, 2:79]
    padded.copy_(x)
    for view in (x, x.t().contiguous().t(), padded):
        found = quantize(view, chosen, DEFAULT, global_scale=GLOBAL)
        assert torch.equal(found.payload, expected.payload)
        assert found.scales is not None
        assert expected.scales is not None
        assert torch.equal(found.scales, expected.scales)


def test_pieces_join_without_a_seam() -> None:
    """A matrix of several pieces equals its rows taken alone."""
    x, chosen = matrix(2500, 257), SCHEMES["deepseek_fp8 1x128 fp32"]
    found = quantize(x, chosen, DEFAULT)
    assert found.scales is not None
    back = dequantize(found.payload, found.scales, chosen)
    for rows in (slice(0, 1), slice(1016, 1024), slice(2499, 2500)):
        part = quantize(x[rows], chosen, DEFAULT)
        assert torch.equal(part.payload, found.payload[rows])
        assert torch.equal(back[rows], dequantize(found.payload[rows], found.scales[rows], chosen))


@EACH
def test_dequantize_is_the_exact_product(name: str) -> None:
    chosen = SCHEMES[name]
    generator = torch.Generator().manual_seed(4)
    payload = torch.randint(0, chosen.element.count, (5, 67), dtype=torch.uint8, generator=generator)
    grid = scale_grid((5, 67), chosen.block)
    if chosen.scale == "fp32":
        scales = torch.rand(grid, generator=generator) * 1e-3
    else:
        scales = torch.randint(0, 120, grid, dtype=torch.uint8, generator=generator)
    found = dequantize(payload, scales, chosen, global_scale=GLOBAL)
    outer = Fraction(float(GLOBAL)) if chosen.two_level else Fraction(1)
    values, numbers = scale_values(scales, chosen), decode(payload, chosen.element)
    height, width = chosen.block or (5, 67)
    for row, column in product(range(5), range(67)):
        if not math.isnan(float(numbers[row, column])):
            scale = Fraction(float(values[row // height, column // width])) * outer
            assert Fraction(float(found[row, column])) == Fraction(float(numbers[row, column])) * scale
    assert torch.equal(found.isnan(), numbers.isnan())


@pytest.mark.parametrize("name", ["deepseek_fp8 1x128 fp32", "mxfp8 ceil", "nvfp4"])
@pytest.mark.parametrize("rounding", ["once", "scale_first"])
def test_fp32_output_is_the_exact_product_rounded(name: str, rounding: str) -> None:
    """Every code under scales at the ends of their range: results from zero over subnormal numbers to infinity."""
    chosen, recipe = SCHEMES[name], replace(DEFAULT, dequant_rounding=rounding)
    width = (chosen.block or (1, 1))[1]
    codes = torch.arange(256, dtype=torch.uint8) & (chosen.element.count - 1)
    payload = codes.repeat(6, 1).repeat_interleave(width, dim=1)
    if chosen.scale == "fp32":
        ends = torch.tensor([0x00000001, 0x00400001, 0x007FFFFF, 0x3DCCCCCD, 0x7F000001, 0x7F7FFFFF])
        scales = ends.to(torch.int32).view(torch.float32).view(6, 1).repeat(1, 256)
    else:
        scales = torch.tensor([0, 1, 7, 126, 250, 254], dtype=torch.uint8).view(6, 1).repeat(1, 256)
    outer = torch.tensor([1.7e-38 if chosen.two_level else 1.0])
    found = dequantize(payload, scales, chosen, global_scale=outer, dtype=torch.float32, recipe=recipe)
    factors = scale_values(scales, chosen) * (float(outer) if chosen.two_level else 1.0)
    if rounding == "scale_first":
        factors = round_to(factors, torch.float32)
    exact = decode(payload, chosen.element) * factors.repeat_interleave(width, dim=1)
    assert torch.equal(found.to(torch.float64).nan_to_num(7.0), round_to(exact, torch.float32).nan_to_num(7.0))


def test_a_given_output_is_filled() -> None:
    chosen = SCHEMES["mxfp8 ceil"]
    found = quantize(matrix(6, 70), chosen, DEFAULT)
    assert found.scales is not None
    for dtype in (torch.float64, torch.bfloat16):
        out = torch.full((6, 70), math.nan, dtype=dtype)
        same = dequantize(found.payload, found.scales, chosen, dtype=dtype, out=out)
        assert same.data_ptr() == out.data_ptr()
        assert torch.equal(out, dequantize(found.payload, found.scales, chosen, dtype=dtype))
    with pytest.raises(ValueError, match="out is"):
        dequantize(found.payload, found.scales, chosen, out=torch.empty(70, 6, dtype=torch.float64).t())


def test_nan_scales_and_payloads() -> None:
    chosen = scheme("mxfp8", "1x32", "ue8m0")
    payload = torch.full((1, 64), 0x38, dtype=torch.uint8)
    payload[0, 3] = 0xFF
    found = dequantize(payload, torch.tensor([[0, 255]], dtype=torch.uint8), chosen)
    assert bool(found[0, 32:].isnan().all())
    assert bool(found[0, 3].isnan())
    assert float(found[0, 0]) == 2.0**-127
    assert (
        nominal_payload(torch.ones(1, 32), ue8m0.decode(torch.tensor([[255]], dtype=torch.uint8)), chosen, DEFAULT)[
            0, 0
        ].item()
        == 0x7F
    )


def test_roundings_of_a_dequantised_matrix_differ_where_they_should() -> None:
    """0.5 * scale * global with a 24-bit global: one rounding against two."""
    chosen = SCHEMES["nvfp4"]
    generator = torch.Generator().manual_seed(5)
    payload = torch.randint(0, 16, (64, 512), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 120, (64, 32), dtype=torch.uint8, generator=generator)
    exact = dequantize(payload, scales, chosen, global_scale=GLOBAL)
    once, first = (
        dequantize(
            payload,
            scales,
            chosen,
            global_scale=GLOBAL,
            dtype=torch.float32,
            recipe=replace(DEFAULT, dequant_rounding=rounding),
        )
        for rounding in ("once", "scale_first")
    )
    assert torch.equal(once.to(torch.float64), round_to(exact, torch.float32))
    assert not torch.equal(once, first)
    ratio = (first.to(torch.float64) / exact)[exact != 0]
    assert float((ratio - 1).abs().max()) < 2 * 2.0**-24 + 2.0**-47


def test_a_grid_of_the_wrong_shape_is_refused() -> None:
    chosen = SCHEMES["mxfp8 ceil"]
    with pytest.raises(ValueError, match=r"needs \(2, 3\)"):
        dequantize(torch.zeros(2, 70, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), chosen)
    with pytest.raises(ValueError, match="global_scale"):
        quantize(torch.zeros(2, 16), SCHEMES["nvfp4"], DEFAULT)
    with pytest.raises(ValueError, match="no way to choose"):
        quantize(torch.zeros(2, 16), scheme("mxfp8", "1x32", "ue8m0"), DEFAULT)


def test_a_zero_block_of_a_transposed_matrix_has_a_zero_payload() -> None:
    # The strides of x must not reach the payload, whichever operand of the division is zero.
    x = torch.zeros(256, 3).t()
    x[:, 0] = 448.0
    found = quantize(x, SCHEMES["deepseek_fp8 1x128 fp32"], DEFAULT)
    assert found.scales is not None
    assert found.scales.tolist() == [[1.0, 0.0]] * 3
    assert found.payload[:, :2].tolist() == [[0x7E, 0]] * 3
    assert found.payload.is_contiguous()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 130, 257])
def test_threads_that_share_the_rows_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(rows, 132, generator=torch.Generator().manual_seed(rows))
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for least in (1 << 62, 1):
            monkeypatch.setattr(chunks, "STRIPES_FROM", least)
            monkeypatch.setattr(chunks, "STRIPE_ELEMENTS", 4 * 132)
            for words in (("mxfp8", "1x32", "ceil"), ("deepseek_fp8", "128x128", "fp32")):
                chosen = scheme(*words)
                answer = quantize(x, chosen, Recipe(source="t"))
                assert answer.scales is not None
                found.append((answer.payload, answer.scales, dequantize(answer.payload, answer.scales, chosen)))
    finally:
        torch.set_num_threads(threads)
    for alone, shared in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, alone, shared))


def test_what_a_thread_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pieces: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(chunks, "STRIPES_FROM", 1)
    with pytest.raises(MemoryError, match="full"):
        chunks.in_stripes(fail, 8, 8, torch.device("cpu"))
