"""Each profile holds what it promises, whatever the seed: facts about bits, not about distributions."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import grammar
from fuzz.case import Case
from fuzz.code_profiles import CODE_PROFILES
from fuzz.inputs import block_of, build, element_of
from fuzz.profiles import MATRIX_PROFILES
from fuzz.scale_profiles import BOUNDARY_MANTISSAS, LAYOUT_PROFILES, SCALE_PROFILES, SPECIAL
from fuzz.sites import Matrix, Site, ladder
from fuzz.values import ELEMENTS, FLOATS, from_bits

seeds = st.integers(0, 2**32 - 1)
QUANTIZE = [
    (variant, block, dtype, scale)
    for variant in grammar.FORMATS
    for block in grammar.BLOCKS[variant]
    for dtype in grammar.FLOATS
    for scale in grammar.QUANT_SCALES[variant]
]
NUMPY = {"fp32": (np.float32, np.uint32), "fp16": (np.float16, np.uint16), "bf16": (ml_dtypes.bfloat16, np.uint16)}
BLOCKED = [row for row in QUANTIZE if row[0] != "fp8_per_tensor"]


def quantize(variant, block, dtype, scale, values, m, k, seed):
    return Case.make(
        "quantize",
        variant,
        seed=seed,
        block=block,
        dtype=dtype,
        k=k,
        m=m,
        scale=scale,
        stride="contiguous",
        values=values,
    )


def reals(x):
    return x.to(torch.float64).numpy()


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy().view(f"u{x.element_size()}")


def grid_amax(x, block):
    """Largest magnitude of every block, one block after the other."""
    height, width = block
    rows, cols = -(-x.shape[0] // height), -(-x.shape[1] // width)
    return np.array(
        [
            [np.abs(x[r * height : (r + 1) * height, c * width : (c + 1) * width]).max() for c in range(cols)]
            for r in range(rows)
        ]
    )


def spread(grid, block, shape):
    return np.repeat(np.repeat(grid, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


def neighbours_differ(grid):
    return all(
        (a != b).all()
        for a, b in (
            (grid[1:], grid[:-1]),
            (grid[:, 1:], grid[:, :-1]),
            (grid[1:, 1:], grid[:-1, :-1]),
            (grid[1:, :-1], grid[:-1, 1:]),
        )
    )


def exponents(numbers):
    return np.frexp(numbers)[1] - 1


def test_every_word_of_the_grammar_has_a_profile_and_a_purpose():
    assert tuple(SCALE_PROFILES) == grammar.SCALE_VALUES
    assert tuple(MATRIX_PROFILES) == grammar.STATIC_VALUES
    assert set(grammar.MATRIX_VALUES) < set(grammar.STATIC_VALUES)
    assert tuple(CODE_PROFILES) == grammar.OVERFLOWING
    assert tuple(LAYOUT_PROFILES) == grammar.LAYOUT_VALUES
    for profile in (*SCALE_PROFILES.values(), *MATRIX_PROFILES.values(), *LAYOUT_PROFILES.values()):
        assert ":" in profile.__doc__.splitlines()[0]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), seeds, st.sampled_from([(-12, 37), (-9, 17), (0, 255)]))
def test_a_ladder_never_repeats_beside_itself_and_at_all_only_where_it_must(rows, cols, seed, span):
    matrix = Matrix(text=f"case {seed}", name="x", seed=seed, rows=rows, cols=cols)
    steps = ladder(Site(matrix, 0, rows), *span)
    assert steps.min() >= span[0]
    assert steps.max() < span[0] + span[1]
    assert neighbours_differ(steps)
    prime = max(n for n in range(2, span[1] + 1) if all(n % small for small in range(2, n)))
    assert len(np.unique(steps)) == min(rows * cols, prime) or rows * cols > prime
    for distance in (2, 4, 8, 16, 32):
        assert (steps[distance:] != steps[:-distance]).all()
        assert (steps[:, distance:] != steps[:, :-distance]).all()


@pytest.mark.parametrize(("variant", "block", "dtype", "scale"), BLOCKED)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_scale_ladder_gives_neighbouring_blocks_other_exponents(variant, block, dtype, scale, seed):
    height, width = map(int, block.split("x"))
    m, k = (2 * height + 1, 3 * width + 2) if height > 1 else (7, 9 * width + 2)
    case = quantize(variant, block, dtype, scale, "scale_ladder", m, k, seed)
    amax = grid_amax(reals(build(case)["x"]), (height, width))
    assert neighbours_differ(exponents(amax))
    assert np.isin(amax / 2.0 ** exponents(amax), (1.125, 1.25, 1.375)).all()
    if amax.size <= 17:
        assert len(np.unique(exponents(amax))) == amax.size


@pytest.mark.parametrize(("variant", "block", "dtype", "scale"), [row for row in QUANTIZE if row[3] != "static"])
@pytest.mark.parametrize("seed", [0, 5])
def test_pow2_edges_are_exact_anchors_and_their_two_neighbours(variant, block, dtype, scale, seed):
    float_, element = FLOATS[dtype], ELEMENTS["e2m1" if variant in ("mxfp4", "nvfp4") else "e4m3"]
    anchors = {element.qmax / 2.0**element.emax, 1.0, {"e4m3": 1.9375, "e2m1": 1.75}[element.name]}
    if scale == "e4m3":  # of amax / 6 also the midpoints between neighbouring E4M3 numbers
        middle = [1.5 * odd / 16 for odd in range(17, 32, 2)]
        anchors = {1.5, 1.0, *(value if value < 2 else value / 2 for value in middle)}
    sizes = {"1x128": (66, 256), "128x128": (129, 130), "1x32": (20, 320), "1x16": (20, 320), "tensor": (3, 5)}
    case = quantize(variant, block, dtype, scale, "pow2_edges", *sizes[block], seed)
    amax = grid_amax(reals(build(case)["x"]), block_of(case)).ravel()
    pattern = amax.astype(NUMPY[dtype][0]).view(NUMPY[dtype][1]).astype(np.int64)
    seen = set()
    for value in pattern:
        found = []
        for delta in (-1, 0, 1):
            number = float(from_bits(value - delta, float_))
            if number > 0:
                found += [
                    (delta, significand) for significand in anchors if number == significand * 2.0 ** exponents(number)
                ]
        assert found, f"{value:#x} is beside no anchor"
        seen |= set(found)
    if amax.size >= 3 * len(anchors) * 4:
        assert {(delta, anchor) for delta, anchor in product((-1, 0, 1), anchors)} <= seen


def scales_of(case, inputs):
    """The block scales that a plain implementation of the policy finds, as float64."""
    element = ELEMENTS[element_of(case)]
    amax = grid_amax(reals(inputs["x"]), block_of(case))
    match case["scale"]:
        case "ceil":
            mantissa, exponent = np.frexp(amax / element.qmax)
            return np.ldexp(1.0, exponent - (mantissa == 0.5))
        case "floor":
            return np.ldexp(1.0, exponents(amax) - element.emax)
        case "ceil_amax":
            mantissa, exponent = np.frexp(amax)
            return np.ldexp(1.0, exponent - (mantissa == 0.5) - element.emax)
        case "even":
            half = 2.0 ** -(element.mantissa_bits + 1)
            return np.ldexp(1.0, exponents(amax + half * np.ldexp(1.0, exponents(amax))) - element.emax)
        case "fp32":
            return (amax / 448.0).astype(np.float32).astype(np.float64)
        case "e4m3":
            exact = amax / 6.0 / float(inputs["global_scale"])
            return exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * float(inputs["global_scale"])
        case _:
            return np.full(amax.shape, float(inputs["scale"]))


def reachable(case):
    element = ELEMENTS[element_of(case)]
    limit = 2.0**element.emax if case["scale"] == "ceil_amax" else element.qmax
    return [float(value) for value in element.magnitudes if value <= limit]


def on_exact_grid(row, values):
    """Elements and their scales, in blocks whose scale is exact: FP32 ones where they are powers of two."""
    for seed in range(20):
        case = quantize(*row, values, 130, 384, seed)
        inputs = build(case)
        x, scales = reals(inputs["x"]), scales_of(case, inputs)
        exact = np.frexp(scales)[0] == 0.5 if case["scale"] in ("fp32", "static") else np.ones(scales.shape, bool)
        if exact.any():
            where = spread(exact, block_of(case), x.shape)
            return case, x[where], spread(scales, block_of(case), x.shape)[where]
    raise AssertionError("no seed of 20 has a power of two for its scale")


@pytest.mark.parametrize("row", QUANTIZE, ids="-".join)
def test_codes_holds_every_code_exactly_and_nothing_else(row):
    case, x, scales = on_exact_grid(row, "codes")
    magnitudes = reachable(case)
    found = set(zip(np.abs(x / scales).tolist(), np.signbit(x).tolist(), strict=True))
    assert found == {(value, sign) for value in magnitudes for sign in (False, True)}


@pytest.mark.parametrize("row", QUANTIZE, ids="-".join)
def test_rounding_holds_every_midpoint_and_its_two_neighbours(row):
    case, x, scales = on_exact_grid(row, "rounding")
    magnitudes = np.array(reachable(case))
    middle = (magnitudes[:-1] + magnitudes[1:]) / 2
    dtype, pattern = NUMPY[case["dtype"]]
    integers = np.abs(x).astype(dtype).view(pattern).astype(np.int64)
    for sign, delta in product((False, True), (-1, 0, 1)):
        ours = np.signbit(x) == sign
        hit = from_bits(np.maximum(integers - delta, 0), FLOATS[case["dtype"]])[ours] / scales[ours]
        missing = set(middle.tolist()) - set(np.unique(hit).tolist())
        assert not missing, f"{len(missing)} of {len(middle)} midpoints lack {delta:+d} ulp"


@pytest.mark.parametrize("seed", range(8))
def test_rounding_under_uneven_scales_is_within_an_ulp_and_a_half_of_the_midpoint(seed):
    case = quantize("deepseek_fp8", "1x128", "fp32", "fp32", "rounding", 5, 300, seed)
    inputs = build(case)
    scales = scales_of(case, inputs)
    quotients = np.abs(reals(inputs["x"])) / spread(scales, (1, 128), (5, 300))
    magnitudes = ELEMENTS["e4m3"].magnitudes
    middle = np.concatenate([(magnitudes[:-1] + magnitudes[1:]) / 2, [448.0]])
    nearest = np.abs(quotients[..., None] - middle).min(-1)
    assert (nearest <= 1.5 * 2.0**-23 * quotients).all()
    assert 0 < (np.frexp(scales)[0] == 0.5).sum() < scales.size


@pytest.mark.parametrize(("variant", "block", "dtype", "scale"), BLOCKED)
def test_outliers_are_alone_and_also_last_in_full_and_ragged_blocks(variant, block, dtype, scale):
    height, width = map(int, block.split("x"))
    m, k = (2 * height + 3, 3 * width + 6) if height > 1 else (16, 3 * width + 6)
    case = quantize(variant, block, dtype, scale, "outliers", m, k, 1)
    x = np.abs(reals(build(case)["x"]))
    assert np.array_equal(grid_amax((x >= 64) * 1.0, (height, width)), np.ones((-(-m // height), 4)))
    assert (x >= 64).sum() == 4 * -(-m // height)
    lasts = [x[min((r + 1) * height, m) - 1, k - 1] >= 64 for r in range(-(-m // height))]
    inner = [
        x[min((r + 1) * height, m) - 1, (c + 1) * width - 1] >= 64 for r in range(-(-m // height)) for c in range(3)
    ]
    assert any(lasts) or height > 1
    assert any(inner)


@settings(deadline=None, max_examples=30)
@given(seeds, st.sampled_from(QUANTIZE), st.integers(1, 40), st.integers(1, 20))
def test_plain_facts_about_the_simple_profiles(seed, row, m, half):
    def x_of(values):
        return build(quantize(*row, values, m, 2 * half, seed))["x"]

    float_ = FLOATS[row[2]]
    magnitude = {name: bits(x_of(name)) & (float_.sign - 1) for name in grammar.MATRIX_VALUES}
    for name, pattern in magnitude.items():
        assert (pattern < float_.inf).all(), name
    assert (magnitude["zeros"] == 0).all()
    assert (magnitude["subnormal"] <= float_.mantissa).all()
    assert (reals(x_of("negative")) < 0).all()
    constant = reals(x_of("constant"))
    assert (constant == constant[0, 0]).all()
    assert constant[0, 0] != 0
    big = reals(x_of("cancellation"))
    signs = np.where((np.arange(m)[:, None] + np.arange(2 * half)) % 2 == 1, -1, 1)
    assert ((big * signs >= 1024) & (big * signs < 2048)).all()
    blocks = reals(x_of("zero_blocks"))
    block = block_of(quantize(*row, "zero_blocks", m, 2 * half, seed))
    zero = (np.arange(m)[:, None] // block[0] + np.arange(2 * half) // block[1] + seed) % 2 == 0
    assert (blocks[zero] == 0).all()


def test_zeros_have_both_signs_and_zero_blocks_have_neighbours():
    zeros = bits(build(quantize("mxfp8", "1x32", "bf16", "ceil", "zeros", 4, 64, 0))["x"])
    assert set(np.unique(zeros)) == {0, 0x8000}
    amax = grid_amax(reals(build(quantize("mxfp8", "1x32", "bf16", "ceil", "zero_blocks", 4, 128, 0))["x"]), (1, 32))
    assert np.array_equal(amax == 0, (np.arange(4)[:, None] + np.arange(4)) % 2 == 0)


@pytest.mark.parametrize("dtype", grammar.FLOATS)
def test_wide_reaches_both_ends_of_the_dtype(dtype):
    float_ = FLOATS[dtype]
    amax = grid_amax(reals(build(quantize("mxfp8", "1x32", dtype, "ceil", "wide", 64, 3200, 0))["x"]), (1, 32))
    found = set(exponents(amax[amax > 0]).tolist())
    assert set(range(float_.emin - float_.mantissa_bits, float_.emax + 1)) <= found


@pytest.mark.parametrize("dtype", grammar.FLOATS)
@pytest.mark.parametrize("seed", range(6))
def test_overflow_surrounds_464_and_480_times_the_scale(dtype, seed):
    inputs = build(quantize("fp8_per_tensor", "tensor", dtype, "static", "overflow", 9, 30, seed))
    scale, float_ = float(inputs["scale"]), FLOATS[dtype]
    pattern = bits(inputs["x"]).astype(np.int64).ravel()
    for anchor in (448.0, 464.0, 480.0, 512.0):
        cast = torch.tensor(anchor * scale, dtype=torch.float64).to(torch.float32).to(inputs["x"].dtype)
        centre = int(bits(cast.reshape(1))[0])
        if dtype != "fp32" and np.frexp(scale)[0] != 0.5:
            continue  # two roundings may differ from one
        for sign, delta in product((0, float_.sign), (-1, 0, 1)):
            assert (centre + delta | sign) in pattern
    assert {float_.inf - 1, (float_.inf - 1) | float_.sign} & set(pattern.tolist())


@pytest.mark.parametrize("dtype", grammar.FLOATS)
def test_nonfinite_has_nans_and_both_infinities_among_numbers(dtype):
    x = build(quantize("fp8_per_tensor", "tensor", dtype, "static", "nonfinite", 16, 16, 0))["x"]
    assert x[-1, -1].isnan()
    assert x[0, 0].isinf()
    assert {float("inf"), float("-inf")} <= set(x[x.isinf()].tolist())
    assert x.isfinite().sum() > 128
    assert len(np.unique(bits(x)[x.isnan().numpy()])) > 3


def ue8m0(policy, source, values, n, seed):
    x = build(Case.make("ue8m0", policy, seed=seed, **{"from": source}, n=n, values=values))["x"]
    assert x.dtype == torch.float32
    return bits(x)


@pytest.mark.parametrize("seed", [0, 1, 1535, 4294967295])
def test_boundary_numbers_hold_every_exponent_and_mantissa(seed):
    found = ue8m0("ceil", "scale", "boundary", 1536, seed)
    assert set(found.tolist()) == {field << 23 | low for field in range(256) for low in BOUNDARY_MANTISSAS}
    assert BOUNDARY_MANTISSAS == (0, 1, 2**23 - 1, 2**22, 2**22 - 1, 2**22 + 1)


def test_special_numbers_are_zeros_subnormals_infinities_and_nans_of_both_signs():
    found = ue8m0("floor", "scale", "special", len(SPECIAL), 3)
    assert sorted(found.tolist()) == sorted(SPECIAL)
    numbers = np.array(SPECIAL, dtype=np.uint32).view(np.float32)
    for kind in (numbers == 0, np.isinf(numbers), np.isnan(numbers), (np.abs(numbers) < 2.0**-126) & (numbers != 0)):
        assert set(np.signbit(numbers[kind])) == {False, True}


@pytest.mark.parametrize("source", ["scale", *grammar.AMAX_SOURCES])
def test_pow2_edges_hold_every_power_with_three_ulps_each_side(source):
    found = set(ue8m0("ceil", source, "pow2_edges", 254 * 7 * 3, 11).tolist())
    assert {(field << 23) + delta for field in range(1, 255) for delta in range(-3, 4)} <= found
    if source != "scale":
        qmax = {"amax_e4m3": 448, "amax_e5m2": 57344, "amax_e2m1": 6, "amax_e2m3": 7.5, "amax_e3m2": 28}[source]
        low = int(np.float32(qmax).view(np.uint32)) & 0x7FFFFF
        assert {(field << 23 | low) + delta for field in range(1, 255) for delta in range(-3, 4)} <= found


def test_wide_normal_and_uniform_scales():
    wide = ue8m0("ceil", "scale", "wide", 20000, 0).view(np.float32)
    assert set(exponents(wide[wide > 0].astype(np.float64)).tolist()) == set(range(-149, 128))
    assert (ue8m0("ceil", "scale", "normal", 1000, 0).view(np.float32) >= 0).all()
    uniform = ue8m0("ceil", "scale", "uniform_bits", 20000, 0)
    assert np.isfinite(uniform.view(np.float32)).all()
    assert len(np.unique(uniform >> 23)) == 510


def stored(operation, variant, values, m, k, seed, **params):
    rows = "n" if operation == "requantize" else "m"
    case = Case.make(operation, variant, seed=seed, values=values, k=k, **{rows: m}, **params)
    return build(case)


STORED = [
    (variant, block, scale)
    for variant in grammar.FORMATS
    for block in grammar.BLOCKS[variant]
    for scale in grammar.STORED_SCALES[variant]
]


def unpacked(payload, variant):
    codes = payload.numpy()
    if variant in ("mxfp4", "nvfp4", "mxfp4_to_deepseek_fp8"):
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    return codes


@pytest.mark.parametrize(("variant", "block", "scale"), STORED)
@pytest.mark.parametrize("values", grammar.CODE_VALUES)
def test_payloads_and_scales_of_stored_matrices(variant, block, scale, values):
    inputs = stored("dequantize", variant, values, 257, 386, 5, block=block, scale=scale, out="bf16")
    codes = unpacked(inputs["payload"], variant)
    four = variant in ("mxfp4", "nvfp4")
    assert codes.shape == (257, 386)
    scales = inputs["scales"].numpy()
    grid = scales.view(np.uint32) if scale == "fp32" else scales
    nan = np.isnan(scales) if scale == "fp32" else grid == {"ue8m0": 255, "e4m3": 127}[scale]
    if values == "nonfinite":
        assert nan.any()
        assert nan.size == 1 or not nan.all()
        assert four or {127, 255} <= set(codes.ravel().tolist())
    else:
        assert not nan.any()
        assert neighbours_differ(grid)
    if values == "codes":
        assert len(np.unique(codes)) == (16 if four else 256)
    elif values == "zeros":
        assert set(np.unique(codes)) == ({0, 8} if four else {0, 128})
    elif values != "nonfinite":
        assert four or not np.isin(codes, (127, 255)).any()
    if scale == "fp32" and values not in ("nonfinite", "extreme_scales"):
        assert (grid & 0x7FFFFF != 0).any()
    if values == "subnormal":
        small = codes & (7 if four else 127)
        assert ((small > 0) & (small < (2 if four else 8))).any()


@pytest.mark.parametrize(
    ("variant", "block", "scale", "ends"),
    [
        ("mxfp8", "1x32", "ue8m0", {0, 1, 253, 254}),
        ("nvfp4", "1x16", "e4m3", {0, 1, 126}),
        ("deepseek_fp8", "1x128", "fp32", {1, 0x7FFFFF, 0x800000, 0x7F7FFFFF}),
    ],
)
def test_extreme_scales_hold_the_ends_of_the_format(variant, block, scale, ends):
    scales = stored("dequantize", variant, "extreme_scales", 9, 256, 0, block=block, scale=scale, out="fp32")["scales"]
    assert ends <= set((bits(scales) if scale == "fp32" else scales.numpy()).ravel().tolist())


@pytest.mark.parametrize("values", grammar.CODE_VALUES)
def test_requantize_inputs_stay_where_the_contract_speaks(values):
    inputs = stored("requantize", "deepseek_fp8", values, 257, 386, 5, scale="ceil")
    codes, scales = inputs["payload"].numpy(), inputs["scales"].numpy().astype(np.float64)
    assert scales.shape == (3, 4)
    assert values == "nonfinite" or not np.isin(codes, (127, 255)).any()
    assert values == "nonfinite" or np.isfinite((scales * 448).astype(np.float32)).all()
    if values == "codes":
        assert len(np.unique(codes)) == 254


@pytest.mark.parametrize("values", ["codes", "random_codes", "scale_ladder", "extreme_scales", "zeros", "subnormal"])
@pytest.mark.parametrize("seed", range(4))
def test_merged_scales_are_codes_and_differ_from_block_to_block(values, seed):
    scales = stored("requantize", "mxfp4_to_deepseek_fp8", values, 256, 384, seed)["scales"].numpy()
    assert scales.shape == (256, 12)
    merged = scales.reshape(2, 128, 3, 4).max(axis=(1, 3)).astype(int) - 6
    assert merged.min() >= 0
    assert (merged[:, 1:] != merged[:, :-1]).all()
    assert (merged[1:] != merged[:-1]).all()


def test_layout_values_tell_places_apart():
    plain = build(Case.make("scale_layout", "mn_major", seed=3, cols=9, rows=50, direction="pack", values="index"))
    assert len(plain["scales"].unique()) == 450
    plain = build(
        Case.make("scale_layout", "mn_major_packed", seed=3, cols=9, rows=50, direction="pack", values="index")
    )
    assert len(plain["scales"].unique()) == 251
    odd = build(Case.make("scale_layout", "k_major", seed=3, cols=9, rows=50, direction="pack", values="nonfinite"))
    assert odd["scales"].isnan().any()
    assert odd["scales"].isinf().any()
