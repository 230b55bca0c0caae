"""The compiled passes against torch's way, bit for bit, and as plain Python against FP64 arithmetic."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from references import chunks, compiled
from references.blocks import Quantized, block_amax, dequantize, nominal_payload, quantize, scale_grid
from references.elements import E2M1, E4M3FN, E5M2, ELEMENTS, Element, encode_bits, encode_table, ordinal
from references.recipes import DequantRounding, Recipe
from references.rounding import round_to
from references.schemes import scheme

DEFAULT = Recipe(source="test")
RECIPES = {
    "divide": DEFAULT,
    "reciprocal": replace(DEFAULT, scale_arithmetic="reciprocal", payload_arithmetic="reciprocal"),
    "amax_reciprocal": replace(DEFAULT, payload_arithmetic="amax_reciprocal"),
    "floors": replace(DEFAULT, amax_floor=1e-4, scale_floor=2.0**-20),
}
SCHEMES = {
    "deepseek_fp8 1x128 ceil": scheme("deepseek_fp8", "1x128", "ceil"),
    "deepseek_fp8 1x128 fp32": scheme("deepseek_fp8", "1x128", "fp32"),
    "deepseek_fp8 128x128 fp32": scheme("deepseek_fp8", "128x128", "fp32"),
    "mxfp8 ceil": scheme("mxfp8", "1x32", "ceil"),
    "mxfp8 floor": scheme("mxfp8", "1x32", "floor"),
    "mxfp8 E5M2": replace(scheme("mxfp8", "1x32", "even"), element=E5M2),
    "mxfp4 ceil_amax": scheme("mxfp4", "1x32", "ceil_amax"),
    "nvfp4": scheme("nvfp4", "1x16", "e4m3"),
    "fp8_per_tensor fp32": scheme("fp8_per_tensor", "tensor", "fp32"),
    "fp8_per_tensor static": scheme("fp8_per_tensor", "tensor", "static"),
}
# Divisors FP32: ordinary ones, powers of two, the ends of the range, subnormal numbers, zeros, infinity, NaN.
FACTORS = [1.0, 0.0371, -3.0, 2.0**-127, 2.0**126, 2.0**-149, 1.1754942e-38, 3.4028235e38, 0.0, -0.0, np.inf, np.nan]
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="Numba is not installed: nothing to compare"
)


def every_exponent() -> torch.Tensor:
    """FP32 patterns: each sign and exponent with mantissas at the ends and around every bit that decides a rounding."""
    ends = {0, 1, 2, (1 << 23) - 1} | {(1 << bit) + near for bit in range(17, 23) for near in (-1, 0, 1)}
    mantissas = torch.tensor(sorted(ends | {end | 1 << 22 for end in ends}), dtype=torch.int64)
    patterns = (torch.arange(512, dtype=torch.int64).view(-1, 1) << 23) + mantissas
    return (patterns - (patterns >> 31 << 32)).to(torch.int32).view(torch.float32)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(128, 512)


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "fp32": every_exponent,
    "bf16": lambda: every_pattern(torch.bfloat16),
    "fp16": lambda: every_pattern(torch.float16),
}


def both_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for least in (1 << 62, 0):
        monkeypatch.setattr(compiled, "LEAST_ELEMENTS", least)
        yield


def assert_same(slow: Quantized, fast: Quantized) -> None:
    assert torch.equal(slow.payload, fast.payload)
    assert fast.payload.is_contiguous()
    assert (slow.scales is None) == (fast.scales is None)
    if slow.scales is not None and fast.scales is not None:
        assert torch.equal(slow.scales.view(torch.uint8), fast.scales.view(torch.uint8))


@needs_numba
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
@pytest.mark.parametrize("dtype", INPUTS)
def test_every_pattern_under_every_kind_of_scale(element: Element, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of BF16 and FP16, and of FP32 what decides a rounding, with and without a zero among the scales."""
    x, chosen = INPUTS[dtype](), replace(scheme("fp8_per_tensor", "tensor", "static"), element=element)
    for factor in FACTORS:
        grid = torch.tensor([[factor]], dtype=torch.float32).to(torch.float64)
        for recipe in (RECIPES["divide"], RECIPES["reciprocal"]):
            slow, fast = (nominal_payload(x, grid, chosen, recipe) for _ in both_ways(monkeypatch))
            if recipe.payload_arithmetic == "reciprocal" and np.isnan(factor):
                # The sign of NaN times NaN is that of either, with torch as with the compiler.
                slow, fast = ordinal(slow, element), ordinal(fast, element)
            assert torch.equal(slow, fast), (factor, recipe.payload_arithmetic)


@needs_numba
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("block", [None, (1, 7), (1, 16), (1, 32), (1, 128), (128, 128), (2, 600)])
def test_maxima_of_every_pattern(dtype: str, block: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = (block_amax(INPUTS[dtype](), block) for _ in both_ways(monkeypatch))
    assert torch.equal(slow.nan_to_num(-1.0, posinf=-2.0), fast.nan_to_num(-1.0, posinf=-2.0))


PAIRS = [
    (name, recipe)
    for name in SCHEMES
    for recipe in RECIPES
    if recipe != "amax_reciprocal" or SCHEMES[name].scale == "fp32"
]


@needs_numba
@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_matrices_of_any_shape_and_strides(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, given = SCHEMES[name], torch.tensor([0.0371])
    for number, (rows, columns) in enumerate([(1, 1), (3, 71), (130, 300), (2, 4100), (257, 16)]):
        generator = torch.Generator().manual_seed(number)
        exponents = torch.randint(-30, 20, (rows, columns), generator=generator).to(torch.float32)
        x = torch.randn(rows, columns, generator=generator) * torch.exp2(exponents)
        x[torch.rand(rows, columns, generator=generator) < 0.2] = 0.0
        x[-1] = -0.0  # zero blocks
        spread = torch.full((rows, columns + 3), 1e9)[:, 2:-1]
        spread.copy_(x)
        views = [x, x.t().contiguous().t(), spread, x.to(torch.bfloat16), x.to(torch.float16)]
        if rows > 2:
            special = x.clone()
            special[0, 0], special[1, -1], special[2, 0] = np.nan, np.inf, -np.nan
            views.append(special)
        for view in views:
            answers = (
                quantize(view, chosen, RECIPES[recipe], global_scale=given, scale=given) for _ in both_ways(monkeypatch)
            )
            assert_same(*answers)


@needs_numba
@pytest.mark.parametrize("name", [name for name in SCHEMES if "static" not in name])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        (torch.float64, "once"),
        (torch.float32, "once"),
        (torch.float32, "scale_first"),
        (torch.bfloat16, "via_fp32"),
    ],
)
def test_every_code_dequantised(
    name: str, rounding: DequantRounding, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under scales of every kind, in matrices of any shape and strides, into fresh and given outputs."""
    chosen, outer = SCHEMES[name], torch.tensor([1.7e-38])
    recipe = replace(DEFAULT, dequant_rounding=rounding)
    for rows, columns in ((256, 256), (3, 71), (130, 300), (2, 4100)):
        generator = torch.Generator().manual_seed(columns)
        payload = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
        payload[0, : min(columns, 256)] = torch.arange(min(columns, 256))
        grid = scale_grid((rows, columns), chosen.block)
        if chosen.scale == "fp32":
            scales = torch.tensor(FACTORS)[torch.randint(0, len(FACTORS), grid, generator=generator)]
        else:
            scales = torch.randint(0, 256, grid, dtype=torch.uint8, generator=generator)
        for codes in (payload, payload.t().contiguous().t(), payload.repeat(1, 2)[:, columns - 1 : -1]):
            out = torch.empty(codes.shape, dtype=dtype)
            slow, fast = (
                dequantize(codes, scales, chosen, global_scale=outer, dtype=dtype, recipe=recipe, out=given)
                for given, _ in zip((None, out), both_ways(monkeypatch), strict=True)
            )
            assert fast is out
            assert torch.equal(slow.isnan(), fast.isnan())
            assert torch.equal(slow.nan_to_num(1.0).signbit(), fast.nan_to_num(1.0).signbit())
            torch.testing.assert_close(fast, slow, rtol=0, atol=0, equal_nan=True)


@needs_numba
@pytest.mark.parametrize("rows", [1, 5, 257])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_and_threads_join_without_a_seam(rows: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(rows, 140, generator=torch.Generator().manual_seed(rows))
    monkeypatch.setattr(chunks, "STRIPES_FROM", 1)
    monkeypatch.setattr(chunks, "STRIPE_ELEMENTS", 4 * 140)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in ("mxfp8 ceil", "deepseek_fp8 128x128 fp32", "fp8_per_tensor fp32"):
            answers, products = [], []
            for _ in both_ways(monkeypatch):
                answers.append(quantize(x, SCHEMES[name], DEFAULT))
                scales = answers[0].scales
                assert scales is not None
                products.append(dequantize(answers[0].payload, scales, SCHEMES[name]))
            assert_same(*answers)
            assert torch.equal(*products)
    finally:
        torch.set_num_threads(before)


def test_products_by_hand() -> None:
    """A ragged block, a code that takes the table's last entry, an overflow and a half of the smallest number."""
    functions = [compiled.decode_products]
    if (kernel := compiled.kernel(compiled.decode_products)) is not None:
        functions.append(kernel)
    codes = np.array([[0, 1, 255], [2, 255, 1]], np.uint8)
    for real, largest, smallest in ((np.float64, 1.7e308, 5e-324), (np.float32, 3.4e38, 1e-45)):
        table: Any = np.zeros(256, real)
        factors: Any = np.array([[2.0, -4.0], [2.0, smallest]], real)
        table[:3], table[255] = [0.0, -1.5, largest], 0.5
        for function in functions:
            out = np.full((2, 3), 7.0, real)
            with np.errstate(over="ignore", under="ignore"):
                function(codes, table, factors, 2, out)
            assert out.tolist() == [[0.0, -3.0, -2.0], [np.inf, 1.0, -2 * float(real(smallest))]]


def expected_codes(x: torch.Tensor, factor: float, multiply: bool, element: Element) -> torch.Tensor:
    """From FP64: of 53 bits, a quotient or a product of two FP32 numbers rounds to FP32 as the exact one would."""
    other = torch.tensor(factor, dtype=torch.float32).to(torch.float64)
    wide = x.to(torch.float64)
    return encode_bits(round_to(wide * other if multiply else wide / other, torch.float32), element)


def run_plain(
    function: Callable[..., None], x: torch.Tensor, factor: float, multiply: bool, element: Element, width: int
) -> torch.Tensor:
    """The payload function, uncompiled unless it is handed compiled."""
    table, shift = encode_table(element, x.device)
    blocks = -(-x.shape[1] // width)
    padded = torch.nn.functional.pad(x, (0, blocks * width - x.shape[1])).contiguous()
    out = np.zeros(tuple(x.shape), np.uint8)
    factors = np.full((x.shape[0], blocks), factor, np.float32)
    with np.errstate(all="ignore"):
        function(padded.numpy(), factors, width, multiply, False, table.numpy(), shift, out)
    return torch.from_numpy(out)


@pytest.mark.parametrize("element", [E4M3FN, E2M1, E5M2], ids=lambda element: element.name)
@pytest.mark.parametrize("multiply", [False, True])
def test_the_payload_against_fp64(element: Element, multiply: bool) -> None:
    """As plain Python on a few numbers, compiled on all."""
    x = every_exponent()
    x = x[x.isfinite().all(1)]
    for factor in (1.0, 0.0371, 2.0**-126, 1.5 * 2.0**-140, 3.4e38):
        few = x[::31, ::5]
        assert torch.equal(
            run_plain(compiled.encode_quotients, few, factor, multiply, element, 3),
            expected_codes(few, factor, multiply, element),
        )
        if (kernel := compiled.kernel(compiled.encode_quotients)) is not None:
            found = run_plain(kernel, x, factor, multiply, element, 16)
            assert torch.equal(found, expected_codes(x, factor, multiply, element))


def test_the_maxima_by_hand() -> None:
    bits = np.array([[0x80000002, 1, 0, 0x7F800000, 0xFFC00001, 0x3F800000], [0, 0x80000000, 5, 4, 7, 0x80000009]])
    found = np.zeros((2, 3), np.uint32)
    functions = [compiled.row_maxima]
    if (kernel := compiled.kernel(compiled.row_maxima)) is not None:
        functions.append(kernel)
    for function in functions:
        found[:] = 0xAAAAAAAA
        function(bits.astype(np.uint32), 2, found)
        assert found.tolist() == [[2, 0x7F800000, 0x7FC00001], [0, 5, 9]]


MUTATIONS = [
    ("value / factor", "value * (np.float32(1.0) / factor)"),
    ("+ below) | pattern)", "+ below))"),
    ("(pattern & below) + below", "below"),
    ("((1 << shift) - 1)", "((1 << shift) - 2)"),
    (">> down", ">> (down + np.uint32(1))"),
    ("some[block]", "some[0]"),
    ("max(SEGMENT // width, 1)", "2"),  # right all the same: segments are none of the answer's business
]


@pytest.mark.parametrize(("old", "new"), MUTATIONS, ids=[new for _, new in MUTATIONS])
def test_a_changed_payload_function_is_noticed(old: str, new: str) -> None:
    source = textwrap.dedent(inspect.getsource(compiled.encode_quotients))
    assert source.count(old) == 1
    names = dict(vars(compiled))
    exec(source.replace(old, new), names)
    # The ties between 1 and 2 with their neighbours, times a factor a block that has to be divided out again.
    ties = 1 + torch.arange(1, 16, 2) / 16
    near = torch.cat((ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(2.0))))
    factors = [1.0, 41.0, 47.0, 49.0, 55.0, 0.0371]
    x = torch.cat([near * factor for factor in factors]).view(1, -1)
    width, (table, shift) = len(near), encode_table(E4M3FN, x.device)
    parts = zip(x.view(-1, width), factors, strict=True)
    expected = torch.cat([expected_codes(part, factor, False, E4M3FN) for part, factor in parts]).view(1, -1)
    out = np.zeros(tuple(x.shape), np.uint8)
    with np.errstate(all="ignore"):
        grid = np.array([factors], np.float32)
        names["encode_quotients"](x.numpy(), grid, width, False, False, table.numpy(), shift, out)
    assert torch.equal(torch.from_numpy(out), expected) == (new == "2")


@pytest.fixture
def fresh() -> Iterator[None]:
    compiled.kernel.cache_clear()
    yield
    compiled.kernel.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_numba_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compiled.kernel(compiled.row_maxima) is None
    found = quantize(torch.tensor([[500.0, 100.0, -7.0]]), SCHEMES["deepseek_fp8 1x128 ceil"], DEFAULT)
    assert found.payload.tolist() == [[0x78, 0x64, 0xC6]]
    with pytest.raises(RuntimeError, match="row_maxima needs Numba"):
        compiled.block_maxima(torch.ones(1, 1), 1, torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.usefixtures("fresh")
def test_a_numba_that_is_broken_or_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.warns(RuntimeWarning, match="Numba is installed, but"):
        assert compiled.kernel(compiled.row_maxima) is None
    compiled.kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(config=SimpleNamespace(DISABLE_JIT=1)))
    assert compiled.kernel(compiled.row_maxima) is None


@needs_numba
def test_small_matrices_take_the_other_way() -> None:
    assert not compiled.pays(compiled.row_maxima, torch.empty(compiled.LEAST_ELEMENTS - 1, 1, dtype=torch.bfloat16))
    assert compiled.pays(compiled.row_maxima, torch.empty(1, compiled.LEAST_ELEMENTS, dtype=torch.bfloat16))
    assert not compiled.pays(compiled.row_maxima, torch.empty(1, compiled.LEAST_ELEMENTS, device="meta"))
