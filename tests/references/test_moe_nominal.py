"""The layer without bounds: in FP64 the centre of the bounds, in FP32 a member of them."""

import pytest
import torch

from conformance.operations import moe
from fuzz.case import Case
from fuzz.grammar import MOE_SCALES
from references.moe import config_of, expert_operands, nominal_moe
from references.moe.config import activation_scales
from references.moe.nominal import ROWS
from references.recipes import Recipe
from references.rounding import round_to

RECIPE = Recipe(source="a test", accumulator="fp32_rn")
FORMATS = [(variant, scale) for variant, scales in MOE_SCALES.items() for scale in scales]


def make(variant, scale, **words):
    given = {
        "experts": 5,
        "gate": "first",
        "hidden": 160,
        "ids": "elsewhere",
        "intermediate": 66,
        "limit": "none",
        "out": "fp32",
        "scaling": "2.5",
        "tokens": 9,
        "topk": 3,
        "values": "normal",
        "weight": "output",
    }
    case = Case.make("moe", variant, seed=4, scale=scale, **(given | words))
    return case, moe.inputs(case)


def nominal(case, inputs, precision):
    config = config_of(case)
    stored, given = expert_operands(config, inputs), activation_scales(inputs)
    return nominal_moe(
        inputs["x"], inputs["ids"], inputs["weights"], stored, config, RECIPE, given, precision=precision
    )


@pytest.mark.parametrize(("variant", "scale"), FORMATS)
@pytest.mark.parametrize("words", [{}, {"gate": "second", "limit": "7", "weight": "input"}])
def test_fp64_is_the_centre_of_the_bounds(variant, scale, words):
    case, inputs = make(variant, scale, **words)
    centre = moe.admissible(case, inputs, RECIPE).interval.centre
    found = nominal(case, inputs, torch.float64)
    assert bool(((found - centre).abs() <= 1e-13 * centre.abs().amax(1, keepdim=True)).all())


@pytest.mark.parametrize(("variant", "scale"), FORMATS)
def test_fp32_is_admissible_and_not_exact(variant, scale):
    case, inputs = make(variant, scale)
    interval = moe.admissible(case, inputs, RECIPE).interval
    found = round_to(nominal(case, inputs, torch.float32), torch.float32)
    assert bool(((found >= interval.lo) & (found <= interval.hi)).all())
    assert bool((found != interval.nominal).any())


def test_experts_in_groups_give_the_same(monkeypatch):
    case, inputs = make("mxfp8", "ceil", tokens=33)
    whole = nominal(case, inputs, torch.float64)
    monkeypatch.setitem(ROWS, "cpu", 7)
    assert torch.allclose(nominal(case, inputs, torch.float64), whole, rtol=0, atol=1e-12)


def test_a_token_whose_experts_are_elsewhere_gives_zero():
    case, inputs = make("bf16", "none")
    assert bool((nominal(case, inputs, torch.float64)[4] == 0).all())
