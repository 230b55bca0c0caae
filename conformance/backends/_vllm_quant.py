"""vLLM's quantisation in Triton, and its requantisation of weights in torch.

Read in vLLM 0.33, ``model_executor/layers/quantization/utils``:
- ``per_token_group_quant_fp8``: amax at least 1e-10; scale amax * RN(1 / 448), under ``use_ue8m0``
  exp2(ceil(log2(scale))) as FP32 (the default on Hopper and later where DeepGEMM is used); payload x / scale.
- ``_mxfp8_e4m3_quantize_triton``: amax at least 2^-126; ceil(log2(amax / 448)) clamped to codes 0..254; payload x times
  a power of two.
- ``requant_weight_ue8m0_inplace``: through FP32; amax at least 1e-4; 2^ceil(log2(amax / 448)), where torch divides by a
  number on a CPU and multiplies by its reciprocal on CUDA.

``/`` in Triton is ``div.full.f32``, within 2 ulp (PTX ISA, div).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends._sglang_quant import codes_of
from conformance.backends._vllm_modules import MXFP8, QUANT, library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

UTILS = "vllm/model_executor/layers/quantization/utils"
GROUPED = f"{UTILS}/fp8_utils.py: per_token_group_quant_fp8"
MX = f"{UTILS}/mxfp8_utils.py: _mxfp8_e4m3_quantize_triton"
REQUANTISE = f"{UTILS}/fp8_utils.py: requant_weight_ue8m0_inplace"
STREAMS = {"stream": ("side",), "graph": ("replay",)}
AMAX_FLOOR, MXFP8_FLOOR, WEIGHT_FLOOR = 1e-10, 2.0**-126, 1e-4
FINITE = ("codes", "random_codes", "scale_ladder", "extreme_scales", "zeros", "nonfinite", "subnormal")
FULL = 2.0**-22
"""div.full.f32: 2 ulp."""

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def claims(device: str) -> Iterable[Claim]:
    """Activations on CUDA, weights everywhere."""
    if device.startswith("cuda"):
        rows = {"block": ("1x128",), "stride": ("contiguous", "padded", "offset")}
        for scale in ("fp32", "ceil"):
            yield Claim(
                operation="quantize",
                variant="deepseek_fp8",
                source=GROUPED,
                where={**rows, "scale": (scale,)},
                multiples={"k": 128},
                options=STREAMS,
            )
        yield Claim(
            operation="quantize",
            variant="mxfp8",
            source=MX,
            where={"scale": ("ceil",)},
            multiples={"k": 32},
            options=STREAMS,
        )
    # Weights that overflow have no place: the exponent of an infinite scale is read as it is.
    yield Claim(operation="requantize", variant="deepseek_fp8", source=REQUANTISE, where={"values": FINITE})


def recipe(claim: Claim, device: str) -> Recipe:
    """As read in the source; see the module."""
    if claim.operation == "requantize":
        return Recipe(
            source=claim.source,
            via="fp32",
            amax_floor=WEIGHT_FLOOR,
            scale_arithmetic="reciprocal" if device.startswith("cuda") else "divide",
        )
    if claim.variant == "mxfp8":
        return Recipe(source=claim.source, amax_floor=MXFP8_FLOOR, scale_arithmetic="approximate", scale_error=FULL)
    power_of_two = claim.where["scale"] == ("ceil",)
    return Recipe(
        source=claim.source,
        amax_floor=AMAX_FLOOR,
        scale_arithmetic="reciprocal",
        payload_arithmetic="divide" if power_of_two else "approximate",
        payload_error=0.0 if power_of_two else FULL,
    )


def prepare(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    """The library's call, bound to its inputs. Raises `Unsupported`."""
    if case.operation == "requantize":
        return _requantise(inputs["payload"], inputs["scales"])
    x, scale = inputs["x"], case["scale"]
    match case.variant, scale:
        case "deepseek_fp8", "fp32" | "ceil" if case["block"] == "1x128":
            return _grouped(x, ue8m0=scale == "ceil")
        case "mxfp8", "ceil":
            quantise = library().function("_mxfp8_e4m3_quantize_triton", MXFP8)
            return lambda out: dict(zip(("payload", "scales"), quantise(x), strict=True))
    raise Unsupported(f"no kernel for quantize {case.variant} scale={scale}")


def _grouped(x: Tensor, *, ue8m0: bool) -> Call:
    quantise = library().function("per_token_group_quant_fp8", QUANT)

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = out["payload"].view(torch.float8_e4m3fn)
        payload, scales = quantise(x, 128, out_q=given, use_ue8m0=ue8m0)
        return {"scales": codes_of(scales) if ue8m0 else scales, "payload": payload}

    return call


def _requantise(payload: Tensor, scales: Tensor) -> Call:
    requantise = library().function("requant_weight_ue8m0_inplace", QUANT)

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight, stored = payload.view(torch.float8_e4m3fn).clone(), scales.clone()
        requantise(weight, stored)
        return {"scales": codes_of(stored), "payload": weight}

    return call
