"""Block dequantisation: payload and scales to a matrix. Contract: docs/operations.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import classify, distance, part_verdict, show_code, show_float
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references.admissible import admissible_output, judge_interval
from references.blocks import block_size, scale_values
from references.packing import unpack_fp4
from references.recipes import Recipe
from references.schemes import scheme

NAME = "dequantize"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_choices(variant: str) -> frozenset[str]:
    """Where the product is rounded, FP32 subnormals and the sign of a zero."""
    return frozenset({"dequant_rounding", "subnormals", "zero_sign"})


def inputs(case: Case) -> dict[str, Tensor]:
    """``payload``, ``scales``, and ``global_scale`` (nvfp4)."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``output`` `[m, k]`."""
    return {"output": OutputSpec((case.integer("m"), case.integer("k")), DTYPES[case["out"]])}


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Membership of every element, and its distance from the exact product."""
    recipe = recipe.only(open_choices(case.variant))
    kind, dtype = scheme(case.variant, case["block"], case["scale"]), DTYPES[case["out"]]
    payload, scales, outer = inputs["payload"], inputs["scales"], inputs.get("global_scale")
    if kind.element.bits == 4:
        payload = unpack_fp4(payload)
    interval = admissible_output(payload, scales, kind, recipe, dtype, global_scale=outer)
    actual = outputs["output"]
    wide = actual.to(torch.float64)
    judgement = judge_interval(wide, interval, zero_sign=recipe.zero_sign)

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        height, width = block_size(tuple(payload.shape), kind.block)
        scale = scale_values(scales, kind)[index[0] // height, index[1] // width]
        product = f"{show_code(int(payload[index]), kind.element)} * {float(scale):.9g}"
        return {
            "actual": show_float(float(actual[index]), dtype),
            "admissible": show_float(float(interval.nominal[index]), dtype),
            "input": product if outer is None else f"{product} * {float(outer):.9g}",
        }

    return [
        part_verdict(
            "output",
            inside=judgement.inside,
            headroom=judgement.headroom,
            equal=(wide == interval.nominal) | (wide.isnan() & interval.nominal.isnan()),
            kinds=classify(interval.centre),
            error=distance(wide, interval.centre),
            example=example,
        )
    ]
