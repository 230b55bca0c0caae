"""Score intervals and roundings against mpmath and Fraction: contained, and not wider than the error model says."""

import math
import random
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from references.routing import RoutingRecipe
from references.routing.rounding import TINY, U32, add_fp32, to_dtype
from references.routing.scores import biased, effective_bias, score, sigmoid, softmax_choice

EXP = RoutingRecipe(source="test", exp_slope=2.0**-23, division_error=2.0**-22)
TANH = RoutingRecipe(source="test", sigmoid="tanh")


def plain_round(value, precision, emin):
    """Round a Fraction to nearest even with ``precision`` significand bits and gradual underflow below 2^emin."""
    if value == 0:
        return Fraction(0)
    magnitude, sign = abs(value), 1 if value > 0 else -1
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, emin) - precision + 1)
    return sign * round(magnitude / step) * step


@pytest.mark.parametrize(("name", "precision", "emin"), [("fp32", 24, -126), ("bf16", 8, -126), ("fp16", 11, -14)])
def test_to_dtype_rounds_the_fp32_value(name, precision, emin):
    source = random.Random(1)
    values = [math.ldexp(source.uniform(-1, 1), source.randint(-20, 12)) for _ in range(500)]
    values += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-24, 2.0**-25, -(1 + 2.0**-8 + 2.0**-40)]
    expected = [float(plain_round(plain_round(Fraction(v), 24, -126), precision, emin)) for v in values]
    assert expected == to_dtype(torch.tensor(values, dtype=torch.float64), name).tolist()


def test_add_fp32_rounds_once_where_two_roundings_differ():
    half = 2.0**-24
    # 1 + 2^-24 is a tie in FP32; the tail decides, but FP64 cannot hold it.
    a, b = torch.tensor([1.0 + half, 1.0 + half, 1.0 + half], dtype=torch.float64), [2.0**-80, -(2.0**-80), 0.0]
    assert add_fp32(a, torch.tensor(b, dtype=torch.float64)).tolist() == [1.0 + 2 * half, 1.0, 1.0]


def test_add_fp32_equals_fractions():
    source = random.Random(2)
    a = [math.ldexp(source.uniform(-1, 1), source.randint(-60, 14)) for _ in range(3000)]
    b = [math.ldexp(source.uniform(-1, 1), source.randint(-20, 14)) for _ in range(3000)]
    expected = [float(plain_round(Fraction(x) + Fraction(y), 24, -126)) for x, y in zip(a, b, strict=True)]
    actual = add_fp32(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    assert expected == actual.tolist()
    assert math.isinf(add_fp32(*torch.tensor([[math.inf], [1.0]], dtype=torch.float64)).item())


LOGITS = sorted(
    {
        float(np.float32(x))
        for x in [
            *np.linspace(-110, 110, 221),
            *np.random.default_rng(0).normal(0, 3, 200),
            *(sign * 2.0**e for sign in (-1, 1) for e in range(-60, 8, 4)),
            0.0, 16.6, 17.4, -16.6, -17.5, -18.1, -87.4, -88.8, 88.8, 500.0, -500.0,
        ]
    }
)  # fmt: skip


def mp_sigmoid_ends(x):
    """Extremes of 1 / ((1 + exp(-x)(1 +- eps))(1 +- u)) (1 +- delta), and 2^-126, in 40 digits."""
    eps = EXP.exp_error + EXP.exp_slope * abs(x)
    e = mpmath.exp(-mpmath.mpf(x))
    lo = 1 / ((1 + e * (1 + eps)) * (1 + U32)) * (1 - EXP.division_error)
    hi = 1 / ((1 + e * (1 - eps)) * (1 - mpmath.mpf(U32))) * (1 + EXP.division_error)
    return max(lo - TINY, 0), hi + TINY


def mp_tanh_ends(x):
    t = mpmath.tanh(mpmath.mpf(x) / 2)
    ends = [(t * (1 + side * TANH.tanh_error) / 2 + mpmath.mpf(1) / 2) for side in (-1, 1)]
    lo, hi = min(ends), max(ends)
    return max(lo * (1 - U32) if lo > 0 else lo, 0), hi * (1 + U32)


def mp_root_ends(x):
    eps = EXP.exp_error + EXP.exp_slope * abs(x)
    e = mpmath.exp(mpmath.mpf(x))
    log = EXP.log_error + U32
    lo = max(mpmath.log1p(e * (1 - eps)) * (1 - log) - TINY, 0)
    hi = mpmath.log1p(e * (1 + eps)) * (1 + log) + TINY
    return mpmath.sqrt(lo) * (1 - EXP.division_error), mpmath.sqrt(hi) * (1 + EXP.division_error)


@pytest.mark.parametrize(
    ("kind", "recipe", "ends", "width"),
    [
        ("sigmoid", EXP, mp_sigmoid_ends, 1.01),
        ("sigmoid", TANH, mp_tanh_ends, 1.01),
        ("sqrt_softplus", EXP, mp_root_ends, 1.01),
    ],
)
def test_interval_holds_the_model_and_little_more(kind, recipe, ends, width):
    with mpmath.workdps(40):
        interval = score(kind, torch.tensor([LOGITS], dtype=torch.float64), recipe)
        for x, lo, hi in zip(LOGITS, interval.lo[0].tolist(), interval.hi[0].tolist(), strict=True):
            model_lo, model_hi = ends(x)
            assert lo <= model_lo, x
            assert model_hi <= hi, x
            if abs(x) < 80:
                assert hi - lo <= width * (model_hi - model_lo) + 2 * TINY, x


def test_softmax_choice_holds_the_model():
    with mpmath.workdps(40):
        interval = softmax_choice(torch.tensor([LOGITS], dtype=torch.float64), EXP)
        top = max(LOGITS)
        for x, lo, hi in zip(LOGITS, interval.lo[0].tolist(), interval.hi[0].tolist(), strict=True):
            t = mpmath.mpf(x) - top
            e, eps = mpmath.exp(t), EXP.exp_error + EXP.exp_slope * min(abs(t), 200)
            shift = mpmath.exp(-U32 * abs(t)), mpmath.exp(U32 * abs(t))
            assert lo <= e * shift[0] * (1 - eps) * (1 - EXP.division_error)
            assert e * shift[1] * (1 + eps) * (1 + EXP.division_error) <= hi


def test_tanh_form_may_lose_small_scores_and_exp_form_not():
    x = torch.tensor([[-18.2]], dtype=torch.float64)
    assert sigmoid(x, TANH).lo.item() == 0.0
    assert sigmoid(x, EXP).lo.item() > 1.2e-8


def test_saturated_sigmoids_overlap():
    """Both logits give 1.0 in FP32, so either may rank first."""
    interval = sigmoid(torch.tensor([[17.5, 30.0]], dtype=torch.float64), RoutingRecipe(source="test"))
    assert interval.hi[0, 0] >= interval.lo[0, 1]
    assert interval.lo[0, 0] <= 1.0 <= interval.hi[0, 0]


def test_large_bias_rounds_scores_onto_its_grid():
    """Next to 1e4 FP32 is spaced 2^-10, so sigmoid(0) = 0.5 lands exactly and 0.50001 with it."""
    recipe = RoutingRecipe(source="test")
    s = sigmoid(torch.tensor([[0.0, 0.00004]], dtype=torch.float64), recipe)
    c = biased(s, torch.full((2,), 1e4, dtype=torch.float64))
    assert c.lo.tolist() == c.hi.tolist() == [[10000.5, 10000.5]]


def test_bf16_bias_is_rounded_where_declared():
    bias = torch.tensor([6.95, 6.957, 6.964])
    declared = RoutingRecipe(source="test", bias_dtype="bf16")
    assert effective_bias(bias, declared).tolist() == [6.9375, 6.96875, 6.96875]
    assert effective_bias(bias, RoutingRecipe(source="test")).tolist() == bias.to(torch.float64).tolist()
    with pytest.raises(ValueError, match="not finite"):
        effective_bias(torch.tensor([math.nan]), declared)
