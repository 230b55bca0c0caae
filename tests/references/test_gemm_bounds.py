"""GEMM intervals hold the exact sum and every legal evaluation, are no wider than need be, and exclude faults."""

import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from conformance.operations.gemm import inputs as inputs_of
from conformance.operations.gemm import operands
from fuzz.case import Case
from fuzz.grammar import GEMM_FORMATS, GEMM_SCALES, GEMM_VALUES
from references import accumulators, hopper
from references import gemm as gemm_module
from references.accumulators import gamma, on_lattice, radius, sums
from references.gemm import admissible_gemm, sample_rows
from references.gemm_formats import Operand, Side, operand
from references.gemm_models import exact_rows, has_model
from references.judging import judge_interval
from references.least_bits import least_bit
from references.recipes import Recipe
from references.rounding import next_down, next_up, round_to
from references.schemes import E4M3FN
from references.tensor_cores import HOPPER_F16, HOPPER_FP8_MMA, tensor_core_dot

sys.path.insert(0, str(Path(__file__).parent))
from gemm_variants import nearest, products, sequential, split, variants

F32, BF16 = torch.float32, torch.bfloat16


def make(variant, values, *, k=130, m=4, n=24, seed=1, scale=None, out="fp32"):
    words = {"layout": "plain", "out": out, "scale": scale or GEMM_SCALES[variant][0]}
    case = Case.make("gemm", variant, seed=seed, k=k, m=m, n=n, values=values, **words)
    return operands(case, inputs_of(case))


def recipe(**choices):
    return Recipe(source="a test", **choices)


def point(value, scale=1.0):
    """A 1 x k operand of E4M3 values under one scale."""
    codes = torch.tensor([value], dtype=torch.float64)
    scales = torch.tensor([[scale]], dtype=torch.float64)
    return Operand(codes, scales, codes.shape[1], codes * scales, Side(E4M3FN, None, "fp32"))


def outside(accumulator, interval, dtype=F32):
    return int((~judge_interval(round_to(accumulator, dtype), interval).inside).sum())


# The exact sum


@pytest.mark.parametrize("variant", GEMM_FORMATS)
@pytest.mark.parametrize("values", GEMM_VALUES)
def test_the_exact_sum_is_within_the_evaluation_error(variant, values):
    a, b = make(variant, values, k=38, m=2, n=3, seed=5)
    facts = sums(a, b)
    for row in range(2):
        for column in range(3):
            pairs = list(zip(a.values[row].tolist(), b.values[column].tolist(), strict=True))
            terms = [Fraction(x) * Fraction(y) for x, y in pairs]
            found, error = float(facts.exact[row, column]), float(facts.error[row, column])
            assert abs(Fraction(found) - sum(terms)) <= Fraction(error)
            assert sum(map(abs, terms)) <= Fraction(float(facts.size[row, column]))
            unit = Fraction(2) ** max(int(facts.unit[row, column]), -2000)
            assert all((term / unit).denominator == 1 for term in terms) or not any(terms)


@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_operands_are_exact(variant):
    """Codes times scales, by rational numbers."""
    a, b = make(variant, "scale_ladder", k=70, m=3, n=130)
    for side in (a, b):
        for row in (0, len(side.codes) - 1):
            for k in range(70):
                product = Fraction(float(side.codes[row, k])) * Fraction(float(side.scales[row, k // side.width]))
                assert Fraction(float(side.values[row, k])) == product


def test_least_bits_by_hand():
    values = torch.tensor([1.0, 3.0, 6.0, -0.75, 2.0**-149, 448.0, 0.0, 1 + 2.0**-52], dtype=torch.float64)
    assert least_bit(values).tolist() == [0, 0, 1, -2, -149, 6, 4096, -52]


def test_a_lattice_ends_at_its_last_bit():
    size = torch.tensor([2.0**24, 2.0**24 + 1, 2.0**23], dtype=torch.float64)
    assert on_lattice(size, torch.tensor([0, 0, -2]), 24).tolist() == [True, False, False]


# Radii by hand


def test_one_product_with_uneven_scales_errs_by_three_roundings():
    facts = sums(point([1.0], 1.1), point([1.0], 1.3))
    found = radius(facts, point([1.0], 1.1), point([1.0], 1.3), recipe(accumulator="fp32_rn"))
    assert float(found.accumulation) == 0.0
    assert float(found.scaling) == pytest.approx(1.43 * 3 * 2.0**-24, rel=1e-6)


def test_n_additions_of_a_one_signed_sum():
    ones, uneven = [1.0] * 100, point([1.0] * 100, 1 / 3)
    facts = sums(point(ones), uneven)
    rn = radius(facts, point(ones), uneven, recipe(accumulator="fp32_rn"))
    truncating = radius(facts, point(ones), uneven, recipe(accumulator="fp32_any"))
    assert float(rn.accumulation) == pytest.approx(100 / 3 * gamma(99, 2.0**-24), rel=1e-6)
    assert float(truncating.accumulation) == pytest.approx(100 / 3 * gamma(125, 2.0**-23), rel=1e-6)


def test_cancelling_sums_count_one_sign_only():
    a, b = point([1.0, -1.0] * 50), point([1.0] * 100, 1 / 3)
    found = radius(sums(a, b), a, b, recipe(accumulator="fp32_rn"))
    assert float(found.accumulation) == pytest.approx(50 / 3 * gamma(99, 2.0**-24), rel=1e-6)


def test_hopper_loses_nothing_on_13_bits_and_something_on_14():
    """2^13 + 1: with E = 13 the unit is 1. 2^14 + 1: the unit is 2, and the 1 is lost."""
    one = point([1.0, 1.0])
    for top, expected in ((128.0 * 64, 0.0), (128.0 * 128, 1.0)):
        a, b = point([128.0, 1.0]), point([top / 128.0, 1.0])
        shift = hopper.deviation(sums(a, b), a, b, recipe(accumulator="hopper_fp8"))
        model = exact_rows(a, b, recipe(accumulator="hopper_fp8", scale_combination="fma_dot_sasb"))
        assert float(model) == top + 1 - expected
        assert float(shift.low) <= -expected
        assert (float(shift.low) == 0.0) == (expected == 0.0)
    assert float(hopper.deviation(sums(one, one), one, one, recipe(accumulator="hopper_fp8")).high) == 0.0


# Legal evaluations


@pytest.mark.parametrize("variant", GEMM_FORMATS)
@pytest.mark.parametrize("values", GEMM_VALUES)
def test_legal_evaluations_are_never_outside(variant, values):
    index = GEMM_FORMATS.index(variant) + GEMM_VALUES.index(values)
    for scale in GEMM_SCALES[variant]:
        a, b = make(variant, values, k=(20, 130, 162)[index % 3], n=60, seed=index, scale=scale)
        any_order, to_nearest = (
            admissible_gemm(a, b, recipe(accumulator=name), F32).interval for name in ("fp32_any", "fp32_rn")
        )
        for name, accumulator in variants(a, b).items():
            assert outside(accumulator, any_order) == 0, name
            assert not name.startswith("rn") or outside(accumulator, to_nearest) == 0, name


@pytest.mark.parametrize("promotion", ["every_128", "none"])
@pytest.mark.parametrize("variant", ["deepseek_fp8", "fp8_per_tensor"])
@pytest.mark.parametrize("values", GEMM_VALUES)
def test_hopper_is_never_outside_its_enclosure(variant, values, promotion):
    for seed, k in ((1, 31), (2, 130), (3, 515)):
        for combination in ("fma_dot_sa_sb", "fma_dot_sasb"):
            a, b = make(variant, values, k=k, m=7, n=40, seed=seed)
            choices = {"accumulator": "hopper_fp8", "promotion": promotion}
            model = exact_rows(a, b, recipe(**choices, scale_combination=combination))
            assert outside(model, admissible_gemm(a, b, recipe(**choices), F32).interval) == 0


@pytest.mark.parametrize("values", GEMM_VALUES)
def test_large_products_are_bounded_by_groups(values, monkeypatch):
    a, b = make("deepseek_fp8", values, k=300, m=7, n=40)
    fine = admissible_gemm(a, b, recipe(accumulator="hopper_fp8"), F32).interval
    monkeypatch.setitem(hopper.COUNTED, "cpu", 1000)
    coarse = admissible_gemm(a, b, recipe(accumulator="hopper_fp8"), F32).interval
    model = exact_rows(a, b, recipe(accumulator="hopper_fp8", scale_combination="fma_dot_sasb"))
    assert outside(model, coarse) == 0
    assert (coarse.lo <= fine.lo).all()
    assert (coarse.hi >= fine.hi).all()


def test_hopper_groups_of_32_scaled_apart_are_inside_too():
    a, b = make("mxfp8", "wide", k=200, m=7, n=40)
    choices = recipe(accumulator="hopper_fp8", scale_combination="fma_dot_sasb")
    assert (
        outside(exact_rows(a, b, choices), admissible_gemm(a, b, recipe(accumulator="hopper_fp8"), F32).interval) == 0
    )


@pytest.mark.parametrize("values", ["normal", "wide", "cancellation", "outliers", "codes"])
def test_f16_cores_are_never_outside(values):
    for seed, k in ((1, 20), (2, 130), (3, 515)):
        a, b = make("bf16", values, k=k, seed=seed)
        interval = admissible_gemm(a, b, recipe(accumulator="hopper_f16", promotion="none"), F32).interval
        everywhere = torch.ones(4, 24, dtype=torch.bool)
        assert torch.equal(interval.lo == interval.hi, everywhere)  # the model is exact
        open_ = admissible_gemm(a, b, recipe(accumulator="hopper_f16"), F32).interval
        assert outside(tensor_core_dot(a.values, b.values, "bf16", HOPPER_F16), open_) == 0
        a, b = make("deepseek_fp8", values, k=k, seed=seed)
        found = exact_rows(a, b, recipe(accumulator="f16_upcast", scale_combination="fma_dot_sa_sb"))
        assert outside(found, admissible_gemm(a, b, recipe(accumulator="f16_upcast"), F32).interval) == 0


@pytest.mark.parametrize("values", ["normal", "integer", "cancellation"])
@pytest.mark.parametrize("parts", [2, 5])
def test_bf16_partial_sums_are_inside_their_own_recipe_only(values, parts):
    a, b = make("deepseek_fp8", values, k=300)
    terms = products(a, b)
    partial = torch.stack([round_to(sequential(part), BF16) for part in terms.tensor_split(parts)])
    own = admissible_gemm(a, b, recipe(accumulator="bf16_split_k", split_k=parts), F32).interval
    assert outside(sequential(partial), own) == 0
    assert outside(sequential(partial, lambda x: round_to(x, BF16)), own) == 0
    if values == "normal":
        fp32 = admissible_gemm(a, b, recipe(), F32).interval
        assert outside(sequential(partial), fp32) > 0.5 * partial[0].numel()


def test_flushed_subnormals_need_their_recipe():
    a, b = make("deepseek_fp8", "subnormal", k=130)
    exact = nearest(a.values @ b.values.T)
    flushed = torch.where(exact.abs() < 2.0**-126, 0.0, exact)
    assert (flushed != exact).any()
    assert outside(flushed, admissible_gemm(a, b, recipe(subnormals="flush"), F32).interval) == 0
    assert outside(flushed, admissible_gemm(a, b, recipe(), F32).interval) > 0


# How wide


@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_integers_admit_one_value_in_any_order(variant):
    a, b = make(variant, "integer", k=512)
    for name in ("fp32_any", "fp32_rn", "fp64", *(("hopper_fp8",) if variant in ("deepseek_fp8", "mxfp8") else ())):
        interval = admissible_gemm(a, b, recipe(accumulator=name), F32).interval
        assert torch.equal(interval.lo, interval.hi)
        assert torch.equal(interval.lo, a.values @ b.values.T)
    split_k = admissible_gemm(a, b, recipe(accumulator="bf16_split_k", split_k=2), F32).interval
    assert (split_k.lo < split_k.hi).any()


def test_only_fine_terms_can_err(monkeypatch):
    """2^16 and 127 times 2^4: FP32's unit at the sum is 2^-7, so nothing is fine; one product of 2^-18 is."""
    ones = [16.0] * 127
    plain, fine = point([256.0, *ones]), point([256.0, *ones, 2.0**-9])
    for choice, factor in (("fp32_rn", 1.0), ("fp32_any", 2.0)):
        for a, count in ((plain, 0), (fine, 1)):
            b = Operand(a.codes, a.scales, a.width, a.values, Side(E4M3FN, (1, 32), "ue8m0"))
            found = radius(sums(b, b), b, b, recipe(accumulator=choice)).accumulation
            assert float(found) == pytest.approx(factor * count * 2.0**-7, rel=1e-6)
    monkeypatch.setitem(accumulators.COUNTED, "cpu", 100)
    assert float(radius(sums(b, b), b, b, recipe()).accumulation) > 1.0


def test_outputs_of_fp4_weights_are_mostly_one_value():
    a, b = make("w4a8", "normal", k=512, m=8, n=64)
    interval = admissible_gemm(a, b, recipe(), F32).interval
    assert (interval.lo == interval.hi).to(F32).mean() > 0.5


@pytest.mark.parametrize("variant", ["deepseek_fp8", "mxfp8", "w4a8", "w4a16"])
def test_one_product_with_power_of_two_scales_admits_one_value(variant):
    a, b = make(variant, "single", scale="ue8m0")
    interval = admissible_gemm(a, b, recipe(), F32).interval
    assert torch.equal(interval.lo, interval.hi)


@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_median_headroom_of_bf16_outputs(variant):
    a, b = make(variant, "normal", k=512, m=8, n=64)
    interval = admissible_gemm(a, b, recipe(), BF16).interval
    headroom = judge_interval(round_to(nearest(a.values @ b.values.T), BF16), interval).headroom
    assert 0.3 < float(headroom.median()) < 0.7


@pytest.mark.parametrize("variant", ["deepseek_fp8", "fp8_per_tensor"])
def test_median_headroom_of_fp32_outputs_under_uneven_scales(variant):
    """Of the accumulators that a recipe stands for; where scales are powers of two FP32 hardly ever rounds."""
    a, b = make(variant, "normal", k=512, m=8, n=64, seed=512)
    found = variants(a, b)
    interval = admissible_gemm(a, b, recipe(), F32).interval
    assert 0.01 < float(judge_interval(found["truncating"], interval).headroom.median()) < 0.7
    short = make(variant, "normal", k=32, m=8, n=64, seed=32)
    to_nearest = admissible_gemm(*short, recipe(accumulator="fp32_rn"), F32).interval
    assert 0.01 < float(judge_interval(variants(*short)["rn sequential"], to_nearest).headroom.median()) < 0.7


@pytest.mark.parametrize("promotion", ["every_128", "none"])
@pytest.mark.parametrize("k", [128, 384, 1024, 4096])
def test_median_headroom_of_hopper(promotion, k):
    a, b = make("fp8_per_tensor", "normal", k=k, m=6, n=64)
    choices = {"accumulator": "hopper_fp8", "promotion": promotion}
    model = exact_rows(a, b, recipe(**choices, scale_combination="fma_dot_sasb"))
    headroom = judge_interval(model, admissible_gemm(a, b, recipe(**choices), F32).interval).headroom
    assert 0.01 < float(headroom.median()) < 0.7


# The exact model


def test_rows_of_a_model_admit_its_answer_alone(monkeypatch):
    monkeypatch.setitem(gemm_module.SAMPLE, "cpu", 3 * 24 * 300)
    a, b = make("deepseek_fp8", "normal", k=300, m=9)
    choices = recipe(accumulator="hopper_fp8", scale_combination="fma_dot_sa_sb")
    found = admissible_gemm(a, b, choices, F32)
    assert found.modelled.nonzero().flatten().tolist() == [0, 4, 8]
    model = exact_rows(a, b, choices)
    assert torch.equal(found.interval.lo[found.modelled], model[found.modelled])
    assert torch.equal(found.interval.hi[found.modelled], model[found.modelled])
    assert (found.interval.lo < found.interval.hi)[~found.modelled].all()
    other = exact_rows(a, b, recipe(accumulator="hopper_fp8", scale_combination="fma_dot_sasb"))
    assert 0 < outside(other, found.interval) <= 3 * 24


def test_samples_are_spread_and_never_empty():
    device = torch.device("cpu")
    assert sample_rows(1, 10, device).tolist() == [0]
    assert sample_rows(5, 1, device).tolist() == [0, 1, 2, 3, 4]
    assert sample_rows(7, 2**40, device).tolist() == [0]
    assert sample_rows(1000, 2**21, device).tolist() == [0, 999]


def rounded(value):
    return Fraction(float(nearest(torch.tensor(float(value), dtype=torch.float64))))


@pytest.mark.parametrize("combination", ["fma_dot_sa_sb", "fma_dot_sasb"])
def test_combinations_by_rational_numbers(combination):
    """Dots of multiples of 1/8 below 2^12 are exact in the core and in FP64, as are products with FP32 scales."""
    a, b = make("deepseek_fp8", "normal", k=384, m=2, n=3, seed=9)
    core = recipe(accumulator="f16_upcast", scale_combination=combination)
    found = exact_rows(a, b, core)
    for row in range(2):
        for column in range(3):
            total = Fraction(0)
            for block in range(3):
                part = slice(128 * block, 128 * block + 128)
                left, right = a.codes[row : row + 1, part], b.codes[column : column + 1, part]
                dot = Fraction(float(tensor_core_dot(left, right, "f16", HOPPER_FP8_MMA)))
                scale_a, scale_b = (Fraction(float(x.scales[i, block])) for x, i in ((a, row), (b, column)))
                if combination == "fma_dot_sa_sb":
                    total = exactly_rounded(exactly_rounded(dot * scale_a) * scale_b + total)
                else:
                    total = exactly_rounded(dot * exactly_rounded(scale_a * scale_b) + total)
            assert Fraction(float(found[row, column])) == total


def exactly_rounded(value):
    """RN32 of a rational number with a normal result."""
    if value == 0:
        return value
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def test_models_are_offered_only_where_every_bit_is_fixed():
    fp8, half, mixed = make("deepseek_fp8", "normal"), make("bf16", "normal"), make("w4a8", "normal")
    named = {"accumulator": "hopper_fp8", "scale_combination": "fma_dot_sasb"}
    assert has_model(*fp8, recipe(**named))
    assert not has_model(*fp8, recipe(accumulator="hopper_fp8"))
    assert not has_model(*fp8, recipe(**named, subnormals="flush"))
    assert not has_model(*mixed, recipe(**named))
    assert not has_model(*half, recipe(**named))
    assert has_model(*half, recipe(accumulator="hopper_f16", promotion="none"))
    assert not has_model(*half, recipe(accumulator="hopper_f16"))
    with pytest.raises(ValueError, match="no exact model"):
        exact_rows(*fp8, recipe())


@pytest.mark.parametrize("variant", ["w4a8", "bf16", "nvfp4"])
def test_hopper_fp8_multiplies_e4m3_only(variant):
    with pytest.raises(ValueError, match="E4M3"):
        admissible_gemm(*make(variant, "normal"), recipe(accumulator="hopper_fp8"), F32)


# Output rounding


def test_faithful_rounding_admits_both_neighbours():
    a, b = point([1.0, 1.0]), point([1.0, 2.0**-6 + 2.0**-9])
    nearest_, faithful = (
        admissible_gemm(a, b, recipe(out_rounding=word), BF16).interval for word in ("nearest", "faithful")
    )
    exact = torch.tensor([[1.0 + 2.0**-6 + 2.0**-9]], dtype=torch.float64)
    assert float(nearest_.lo) == float(nearest_.hi) == float(round_to(exact, BF16))
    assert (float(faithful.lo), float(faithful.hi)) == (float(next_down(exact, BF16)), float(next_up(exact, BF16)))


def test_stage_radii_add_up_to_the_reach():
    a, b = make("deepseek_fp8", "normal")
    found = admissible_gemm(a, b, recipe(), BF16)
    total = sum(found.radii.values())
    assert set(found.radii) == {"accumulation", "scaling", "output_rounding", "evaluation"}
    # An end may lie beyond a binade, whose half ulp is twice as large.
    assert (found.interval.radius <= 2 * total).all()
    assert (found.interval.radius >= found.radii["output_rounding"]).all()


def test_operands_without_scales_are_refused():
    with pytest.raises(ValueError, match="needs scales"):
        operand(torch.zeros(1, 4, dtype=torch.uint8), None, Side(E4M3FN, (1, 128), "fp32"))


# Faults


def faults(a, b):
    """Name -> FP32 accumulator of a faulty GEMM, every one a known bug of some kernel."""
    exact = a.values @ b.values.T
    shifted = exact.clone()
    shifted[:, 8:16] = exact[:, 7:15]
    zeroed = exact.clone()
    zeroed[1] = 0.0
    width = max(1, a.width)
    spread = a.scales.repeat_interleave(width, 1)[:, : a.codes.shape[1]]
    one_off = a.scales.clone()
    one_off[2, 0] *= 2.0
    neighbour = a.scales.roll(1, 0).repeat_interleave(width, 1)[:, : a.codes.shape[1]]
    return {
        "half": exact / 2,
        "twice": exact * 2,
        "all zero": exact * 0.0,
        "zeroed row": zeroed,
        "tile one column off": shifted,
        "K tail lost": a.values[:, :-2] @ b.values[:, :-2].T,
        "neighbour's scale": (a.codes * neighbour) @ b.values.T,
        "one scale twice": exact
        + (a.codes * (one_off.repeat_interleave(width, 1)[:, : spread.shape[1]] - spread)) @ b.values.T,
    }


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_planted_faults_are_outside(variant, dtype):
    a, b = make(variant, "normal", k=258, m=6)
    interval = admissible_gemm(a, b, recipe(), dtype).interval
    assert outside(a.values @ b.values.T, interval, dtype) == 0
    for name, accumulator in faults(a, b).items():
        unscaled = a.side.scale is None or a.side.block is None
        if name == "neighbour's scale" and unscaled:
            continue
        assert outside(accumulator, interval, dtype) > 0, name


def test_split_partials_of_fp32_are_inside():
    a, b = make("deepseek_fp8", "normal", k=300)
    assert outside(split(products(a, b), 4), admissible_gemm(a, b, recipe(), F32).interval) == 0
