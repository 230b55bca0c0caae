"""Requantisation of stored weights to other scales. Contract: docs/operations.md."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import payload_verdict
from conformance.operations.quantize import payload_source, scales_verdict
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references import ue8m0
from references.blocks import dequantize, scale_grid
from references.elements import E4M3FN
from references.packing import unpack_fp4
from references.recipes import Recipe
from references.requantize import (
    MXFP4,
    TARGET,
    admissible_deepseek_payload,
    admissible_deepseek_scales,
    admissible_mxfp4_payload,
    admissible_mxfp4_scales,
    intermediate,
)

NAME = "requantize"
_DEEPSEEK = frozenset(
    {
        "via",
        "amax_floor",
        "scale_floor",
        "scale_arithmetic",
        "scale_error",
        "payload_arithmetic",
        "payload_error",
        "zero_sign",
        "subnormals",
    }
)


def open_choices(variant: str) -> frozenset[str]:
    """The dtype in between and the quantiser's choices; only the sign of a zero for the exact MXFP4 conversion."""
    return _DEEPSEEK if variant == "deepseek_fp8" else frozenset({"zero_sign"})


def inputs(case: Case) -> dict[str, Tensor]:
    """``payload`` and ``scales`` as stored."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``scales``, then ``payload``."""
    shape = case.integer("n"), case.integer("k")
    return {
        "scales": OutputSpec(scale_grid(shape, TARGET.block), torch.uint8, (torch.float8_e8m0fnu,)),
        "payload": OutputSpec(shape, torch.uint8, (torch.float8_e4m3fn,)),
    }


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """New scales against their set, then the new payload given the new scales that were returned."""
    recipe = recipe.only(open_choices(case.variant))
    stored, scales, new_scales = inputs["payload"], inputs["scales"], outputs["scales"]
    if case.variant == "deepseek_fp8":
        x = intermediate(stored, scales, recipe)
        scale_codes = admissible_deepseek_scales(stored, scales, recipe)
        payload_codes = admissible_deepseek_payload(stored, scales, new_scales, recipe)
    else:
        # An MXFP4 product has two significant bits and an exponent of at least -128: FP32 holds it.
        x = dequantize(unpack_fp4(stored), scales, MXFP4, dtype=torch.float32)
        scale_codes = admissible_mxfp4_scales(stored, scales)
        payload_codes = admissible_mxfp4_payload(stored, scales, new_scales)
    source = payload_source(x, ue8m0.decode(new_scales), TARGET)
    return [
        scales_verdict(new_scales, scale_codes, TARGET, x),
        payload_verdict(outputs["payload"], payload_codes, E4M3FN, recipe.zero_sign, x, source),
    ]
