"""The tensor level keeps its false-alarm rate, passes legal accumulators and finds faults that hide in elements."""

import math
import sys
from pathlib import Path

import pytest
import torch

from conformance.operations.gemm import inputs as inputs_of
from conformance.operations.gemm import operands
from fuzz.case import Case
from fuzz.grammar import GEMM_FORMATS, GEMM_SCALES, GEMM_VALUES
from references import tensor_level
from references.gemm import admissible_gemm
from references.gemm_models import exact_rows
from references.judging import judge_interval
from references.recipes import Recipe
from references.rounding import round_to
from references.tensor_level import Expectation, _solve, examine

sys.path.insert(0, str(Path(__file__).parent))
from gemm_variants import variants

F32, BF16 = torch.float32, torch.bfloat16
PROMOTED = {"accumulator": "hopper_fp8", "scale_combination": "fma_dot_sasb"}


def make(variant, values, *, k=130, m=4, n=60, seed=1, scale=None):
    words = {"layout": "plain", "out": "fp32", "scale": scale or GEMM_SCALES[variant][0]}
    case = Case.make("gemm", variant, seed=seed, k=k, m=m, n=n, values=values, **words)
    return operands(case, inputs_of(case))


def recipe(**choices):
    return Recipe(source="a test", **choices)


def headroom(accumulator, expectation, dtype):
    found = examine(round_to(accumulator, dtype), expectation, dtype)
    return 0.0 if found is None else found.headroom


def test_solutions_by_hand():
    assert _solve(lambda x: x * x, 9.0) == pytest.approx(3.0)
    assert _solve(lambda x: x, 1000.0) == pytest.approx(1000.0)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("count", [16, 400])
def test_the_false_alarm_rate_is_kept(monkeypatch, kind, dtype, count):
    """Errors with exactly the model's spread, 2000 tensors, at a rate that can be counted: 2 %."""
    monkeypatch.setattr(tensor_level, "FALSE_ALARM", 0.02)
    generator = torch.Generator().manual_seed(count)
    alarms = 0
    spread = torch.full((count,), 2.0**-12, dtype=torch.float64)
    for _ in range(2000):
        sums = 1 + torch.rand(count, generator=generator, dtype=torch.float64)
        noise = (
            (torch.rand(count, generator=generator, dtype=torch.float64) - 0.5) * math.sqrt(12)
            if kind == "uniform"
            else torch.randn(count, generator=generator, dtype=torch.float64)
        )
        expectation = Expectation(sums, spread, torch.zeros_like(spread))
        alarms += headroom(sums + spread * noise, expectation, dtype) > 1
    assert alarms <= 0.02 * 2000 + 3 * math.sqrt(0.02 * 2000)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_bias_of_half_the_spread_is_found_where_there_are_many(dtype):
    generator = torch.Generator().manual_seed(1)
    sums = 1 + torch.rand(20000, generator=generator, dtype=torch.float64)
    spread = torch.full_like(sums, 2.0**-12)
    expectation = Expectation(sums, spread, torch.zeros_like(spread))
    assert headroom(sums + spread * (1.0 if dtype == F32 else 8.0), expectation, dtype) > 1
    assert headroom(sums + spread * 0.03, expectation, dtype) < 1


def test_equal_sums_count_once_and_certain_ones_not_at_all():
    sums = torch.tensor([1.0, 1.0, -1.0, 2.0, 3.0], dtype=torch.float64)
    spread = torch.tensor([1e-6, 1e-6, 1e-6, 1e-6, 0.0], dtype=torch.float64)
    found = examine(sums + 1.0, Expectation(sums, spread, torch.zeros_like(sums)), BF16)
    assert found.message.startswith("2 of 2 outputs")
    assert examine(sums, Expectation(sums, torch.zeros_like(sums), sums * 0), BF16) is None


def test_a_nan_is_infinitely_far():
    sums = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = examine(sums * math.nan, Expectation(sums, sums * 1e-6, sums * 0), F32)
    assert found.headroom == math.inf


@pytest.mark.parametrize("variant", GEMM_FORMATS)
@pytest.mark.parametrize("values", [word for word in GEMM_VALUES if word != "codes"])
def test_legal_accumulators_pass(variant, values):
    index = GEMM_FORMATS.index(variant) + GEMM_VALUES.index(values)
    a, b = make(variant, values, k=(20, 130, 70)[index % 3], seed=index)
    for dtype in (F32, BF16):
        found = admissible_gemm(a, b, recipe(accumulator="fp32_rn"), dtype)
        for name, accumulator in variants(a, b).items():
            if name.startswith("rn"):
                assert headroom(accumulator, found.expectation, dtype) < 0.9, name


@pytest.mark.parametrize("values", ["normal", "wide", "scale_ladder", "outliers"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_hopper_in_any_combination_passes_and_other_cores_do_not(values, dtype):
    a, b = make("deepseek_fp8", values, k=512, m=8, n=128)
    found = admissible_gemm(a, b, recipe(accumulator="hopper_fp8"), dtype)
    for combination in ("fma_dot_sa_sb", "fma_dot_sasb"):
        model = exact_rows(a, b, recipe(accumulator="hopper_fp8", scale_combination=combination))
        assert headroom(model, found.expectation, dtype) < 0.5
    assert headroom(a.values @ b.values.T, found.expectation, dtype) > 1


def inside(accumulator, interval, dtype):
    return bool(judge_interval(round_to(accumulator, dtype), interval).inside.all())


def test_a_missing_promotion_is_found_although_every_element_is_inside():
    a, b = make("fp8_per_tensor", "normal", k=4096, m=8, n=128)
    fast = exact_rows(a, b, recipe(**PROMOTED, promotion="none"))
    for choices in ({"accumulator": "fp32_rn"}, {"accumulator": "hopper_fp8"}):
        found = admissible_gemm(a, b, recipe(**choices), BF16)
        if choices["accumulator"] == "fp32_rn":
            assert inside(fast, found.interval, BF16)
        assert headroom(fast, found.expectation, BF16) > 1


def test_bf16_partial_sums_are_found_although_elements_are_inside_the_default():
    a, b = make("deepseek_fp8", "normal", k=7168, m=8, n=64)
    half = 3584
    parts = [a.values[:, part] @ b.values[:, part].T for part in (slice(0, half), slice(half, None))]
    split = sum(round_to(part, BF16) for part in parts)
    found = admissible_gemm(a, b, recipe(accumulator="fp32_rn"), BF16)
    share = judge_interval(round_to(split, BF16), admissible_gemm(a, b, recipe(), BF16).interval).inside
    assert share.to(F32).mean() > 0.95
    assert headroom(split, found.expectation, BF16) > 1


def test_scales_a_thousandth_off_are_found_although_every_element_is_inside():
    a, b = make("deepseek_fp8", "normal", k=4096, m=8, n=256)
    off = (a.values @ b.values.T) * 1.001
    assert inside(off, admissible_gemm(a, b, recipe(), BF16).interval, BF16)
    assert headroom(off, admissible_gemm(a, b, recipe(accumulator="fp32_rn"), BF16).expectation, BF16) > 1


def test_recipes_without_a_model_have_no_expectation():
    a, b = make("deepseek_fp8", "normal")
    for choices in (
        {},
        {"accumulator": "bf16_split_k", "split_k": 2},
        {"accumulator": "fp32_rn", "subnormals": "flush"},
        {"accumulator": "fp32_rn", "out_rounding": "faithful"},
        PROMOTED,
    ):
        assert admissible_gemm(a, b, recipe(**choices), F32).expectation is None


@pytest.mark.parametrize("variant", ["deepseek_fp8", "fp16", "w4a8", "nvfp4"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sums_in_fp64_are_judged_as_rounded_once(variant, dtype):
    """Their spread is far below a unit of FP32, so that an FP32 sum of the same terms stands out."""
    a, b = make(variant, "wide", k=308, m=40)
    expectation = admissible_gemm(a, b, recipe(accumulator="fp64"), dtype).expectation
    assert headroom(a.values @ b.values.T, expectation, dtype) <= 1
    if dtype == F32:
        single = (a.values.float() @ b.values.float().T).double()
        assert headroom(single, expectation, dtype) > 1
