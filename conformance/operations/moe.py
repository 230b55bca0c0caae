"""An expert layer: activations, ids and router weights to the weighted sum of the experts. Contract: docs/moe.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import classify, distance, part_verdict, root_mean_square, show_float
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references.judging import judge_interval
from references.moe import AdmissibleMoe, admissible_moe, config_of, expectation, expert_operands, nominal_moe
from references.moe.config import OUTPUTS, activation_scales, local_ids
from references.recipes import Recipe
from references.rounding import round_to
from references.tensor_level import examine

NAME = "moe"
GEMMS = frozenset({"accumulator", "promotion", "split_k", "subnormals"})
STORED = frozenset({"fc1_dtype", "activation_dtype", "fc2_dtype", "weighted_dtype", "combine_dtype"})
SWIGLU = frozenset({"sigmoid", "exp_error", "exp_slope", "tanh_error", "division_error"})
PAYLOAD = frozenset({"payload_arithmetic", "payload_error"})
SCALE = frozenset({"scale_arithmetic", "scale_error", "scale_floor", "amax_floor"})


def open_choices(variant: str) -> frozenset[str]:
    """Accumulators, what is stored in BF16 on the way, the error of silu, and how activations are quantised."""
    choices = GEMMS | STORED | SWIGLU
    if variant not in ("bf16", "w4a16"):
        choices |= PAYLOAD
    if variant not in ("bf16", "w4a16", "fp8_per_tensor"):
        choices |= SCALE
    return choices


def inputs(case: Case) -> dict[str, Tensor]:
    """``x``, ``ids``, ``weights``, ``w1``, ``w2``, their scales, the given scales of activations; ``expert_map``."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``output`` `[tokens, hidden]`."""
    return {"output": OutputSpec((case.integer("tokens"), case.integer("hidden")), OUTPUTS[case["out"]])}


def layer(case: Case, inputs: Mapping[str, Tensor], recipe: Recipe) -> tuple[Any, ...]:
    """The arguments of `admissible_moe` and its like, the recipe cut to the open choices."""
    config = config_of(case)
    return (
        inputs["x"],
        local_ids(inputs),
        inputs["weights"],
        expert_operands(config, inputs),
        config,
        recipe.only(open_choices(case.variant)),
        activation_scales(inputs),
    )


def admissible(case: Case, inputs: Mapping[str, Tensor], recipe: Recipe) -> AdmissibleMoe:
    """The admissible outputs under a recipe."""
    return admissible_moe(*layer(case, inputs, recipe))


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Membership of every output, with the radius of the worst by stage."""
    whole = layer(case, inputs, recipe)
    found, actual, dtype = admissible_moe(*whole), outputs["output"], OUTPUTS[case["out"]]
    interval = found.interval
    wide = actual.to(torch.float64)
    judgement = judge_interval(wide, interval)

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        low, high = (float(end[index]) for end in (interval.lo, interval.hi))
        ends = show_float(low, dtype) if low == high else f"{show_float(low, dtype)} .. {show_float(high, dtype)}"
        experts = ", ".join(str(item) for item in local_ids(inputs)[index[0]].tolist())
        return {
            "actual": show_float(float(actual[index]), dtype),
            "admissible": ends,
            "input": f"experts {experts}; the nominal layer gives {float(interval.centre[index]):.9g}",
        }

    verdict = part_verdict(
        "output",
        inside=judgement.inside,
        headroom=judgement.headroom,
        equal=wide == interval.nominal,
        kinds=classify(interval.centre),
        error=distance(wide, interval.centre),
        example=example,
    )
    worst = tuple(verdict.worst_index or (0, 0))
    radii = {name: float(radius[worst]) for name, radius in found.radii.items()}
    rival = round_to(nominal_moe(*whole, precision=torch.float32), dtype)
    note = f"the radius at {list(worst)} comes from {shares(radii)}"
    output = replace(
        verdict,
        stage_radii=radii,
        fp32_error=root_mean_square(distance(rival, interval.centre)),
        message=f"{verdict.message}; {note}" if verdict.message else note,
    )
    return [output, *tensor_verdict(case, whole, actual, found)]


def tensor_verdict(case: Case, whole: tuple[Any, ...], actual: Tensor, found: AdmissibleMoe) -> list[PartVerdict]:
    """``property:tensor`` where the recipe has a model of its errors: those of the whole output have its size."""
    expected = expectation(*whole)
    if expected is None:
        return []
    doubt = torch.stack([radius for name, radius in found.radii.items() if name != "output_rounding"]).sum(0)
    expected = replace(expected, spread=torch.where(doubt > 0, expected.spread, 0.0))
    finding = examine(actual.to(torch.float64), expected, OUTPUTS[case["out"]])
    if finding is None:
        return []
    verdict = "pass" if finding.headroom <= 1 else "wrong"
    return [PartVerdict(part="property:tensor", verdict=verdict, headroom=finding.headroom, message=finding.message)]


def shares(radii: Mapping[str, float]) -> str:
    """The dominant stage of a radius and the next, with shares: ``requantisation (71%), output_rounding (20%)``."""
    whole = sum(radii.values())
    if whole == 0:
        return "no stage: it is zero"
    ranked = sorted(radii.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} ({radius / whole:.0%})" for name, radius in ranked if radius > 0)
