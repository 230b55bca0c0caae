"""Block quantisation: a matrix to payload and scales. Contract: docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import (
    block_text,
    classify,
    codes_verdict,
    distance,
    part_verdict,
    payload_verdict,
    show_code,
    show_float,
    show_ordinal,
    show_ue8m0,
)
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references.admissible import Codes, Interval, admissible_payload, admissible_scales, judge_codes, judge_interval
from references.blocks import block_amax, block_size, scale_grid, scale_values
from references.elements import E4M3FN, ordinal
from references.packing import unpack_fp4
from references.recipes import Recipe
from references.schemes import Scheme, scheme

Source = Callable[[tuple[int, ...]], str]

NAME = "quantize"
_ALWAYS = frozenset({"payload_arithmetic", "payload_error", "zero_sign", "subnormals"})
_SCALES = frozenset({"scale_arithmetic", "scale_error", "amax_floor", "scale_floor"})


def open_choices(variant: str) -> frozenset[str]:
    """Arithmetic, floors, the sign of a zero and FP32 subnormals."""
    return _ALWAYS | _SCALES


def inputs(case: Case) -> dict[str, Tensor]:
    """``x`` `[m, k]`; ``global_scale`` `[1]` (nvfp4); ``scale`` `[1]` (static)."""
    return fuzz_inputs.build(case)


def scheme_of(case: Case) -> Scheme:
    """The block scheme that the case asks for."""
    return scheme(case.variant, case["block"], case["scale"])


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``scales`` (none for static), then ``payload``."""
    m, k, kind = case.integer("m"), case.integer("k"), scheme_of(case)
    grid = scale_grid((m, k), kind.block)
    payload = (
        OutputSpec((m, k // 2), torch.uint8, (torch.float4_e2m1fn_x2,))
        if kind.element.bits == 4
        else OutputSpec((m, k), torch.uint8, (torch.float8_e4m3fn,))
    )
    scales = {
        "fp32": OutputSpec(grid, torch.float32),
        "ue8m0": OutputSpec(grid, torch.uint8, (torch.float8_e8m0fnu,)),
        "e4m3": OutputSpec(grid, torch.uint8, (torch.float8_e4m3fn,)),
    }
    return ({"scales": scales[kind.scale]} if kind.scale in scales else {}) | {"payload": payload}


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Scales against their set, then the payload given the scales that were returned."""
    recipe, kind, x = recipe.only(open_choices(case.variant)), scheme_of(case), inputs["x"]
    outer = inputs.get("global_scale")
    verdicts = []
    if kind.scale == "static":
        scales = inputs["scale"].to(torch.float64).view(1, 1)
    else:
        admissible = admissible_scales(x, kind, recipe, global_scale=outer)
        verdicts.append(scales_verdict(outputs["scales"], admissible, kind, x))
        scales = scale_values(outputs["scales"], kind)
    payload = outputs["payload"]
    if kind.element.bits == 4:
        payload = unpack_fp4(payload)
    codes = admissible_payload(x, scales, kind, recipe, global_scale=outer)
    verdicts.append(
        payload_verdict(payload, codes, kind.element, recipe.zero_sign, x, payload_source(x, scales, kind, outer))
    )
    return verdicts


def payload_source(x: Tensor, scales: Tensor, kind: Scheme, outer: Tensor | None = None) -> Source:
    """Describes the element behind a payload code and the scale that it was given."""

    def source(index: tuple[int, ...]) -> str:
        height, width = block_size(tuple(x.shape), kind.block)
        scale = f"scale {float(scales[index[0] // height, index[1] // width]):.9g}"
        if outer is not None:
            scale += f" * {float(outer):.9g}"
        return f"{show_float(float(x[index]), x.dtype)}, {scale}"

    return source


def scales_verdict(actual: Tensor, admissible: Codes | Interval, kind: Scheme, x: Tensor) -> PartVerdict:
    """The verdict on stored scales, grid-shaped, of the matrix ``x``."""
    kinds = classify(block_amax(x, kind.block))

    def source(index: tuple[int, ...]) -> str:
        return block_text(x, index, kind.block, x.dtype)

    if isinstance(admissible, Interval):
        judgement = judge_interval(actual.to(torch.float64), admissible)
        lo, hi = admissible.lo, admissible.hi
        return part_verdict(
            "scales",
            inside=judgement.inside,
            headroom=judgement.headroom,
            equal=actual.to(torch.float64) == admissible.nominal,
            kinds=kinds,
            error=distance(actual, admissible.centre),
            example=lambda index: {
                "actual": show_float(float(actual[index])),
                "admissible": show_float(float(lo[index]))
                if bool(lo[index] == hi[index])
                else f"{show_float(float(lo[index]))} .. {show_float(float(hi[index]))}",
                "input": source(index),
            },
        )
    e4m3 = kind.scale == "e4m3"
    ordinals = ordinal(actual, E4M3FN) if e4m3 else actual.to(torch.int16)
    return codes_verdict(
        "scales",
        ordinals,
        admissible,
        judge_codes(ordinals, admissible),
        kinds=kinds,
        show_actual=lambda index: show_code(int(actual[index]), E4M3FN) if e4m3 else show_ue8m0(int(actual[index])),
        show=lambda position: show_ordinal(position, E4M3FN) if e4m3 else show_ue8m0(position),
        source=source,
    )
