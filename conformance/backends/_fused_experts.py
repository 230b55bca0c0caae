"""What the Triton expert layers of SGLang and vLLM, which are of one origin, have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends._sglang_gemm import fp32_scales
from references.backend import Claim, Unsupported
from references.recipes import Recipe

BLOCK = 128
SILU_DIVISION = 2.0**-22
EXP_SLOPE = 1.25 * 2.0**-23
"""silu(gate) by ex2.approx(x * log2 e) and a quotient within 2 ulp."""
STORED: Mapping[str, Any] = {
    "fc1_dtype": "bf16",
    "activation_dtype": "bf16",
    "weighted_dtype": "bf16",
    "exp_slope": EXP_SLOPE,
    "division_error": SILU_DIVISION,
}
"""FC1, silu(gate) * up and the weighted FC2 are stored as BF16."""


def recipe(claim: Claim, *, static: Mapping[str, Any], amax_floor: float, payload_error: float) -> Recipe:
    """Of a layer. static: how given scales are used. amax_floor, payload_error: of its quantiser of blocks."""
    match claim.variant:
        case "bf16":
            return Recipe(source=claim.source, **STORED)
        case "fp8_per_tensor":
            return Recipe(source=claim.source, accumulator="hopper_fp8", promotion="none", **static, **STORED)
    return Recipe(
        source=claim.source,
        accumulator="hopper_fp8",
        amax_floor=amax_floor,
        scale_arithmetic="reciprocal",
        payload_arithmetic="approximate",
        payload_error=payload_error,
        **STORED,
    )


def weights(case: Any, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Both weights as the kernels take them, and the arguments of their format. Raises `Unsupported`."""
    both = [inputs["w1"], inputs["w2"]]
    if case.variant == "bf16":
        return both, {}
    if case.variant not in ("deepseek_fp8", "fp8_per_tensor"):
        raise Unsupported(f"no moe {case.variant}")
    scales = {f"{name}_scale": fp32_scales(inputs[f"{name}_scales"]) for name in ("w1", "w2")}
    both = [weight.view(torch.float8_e4m3fn) for weight in both]
    if case.variant == "deepseek_fp8":
        return both, {"use_fp8_w8a8": True, "block_shape": [BLOCK, BLOCK], **scales}
    given = {"a1_scale": inputs["x_scale"], "a2_scale": inputs["h_scale"]}
    return both, {"use_fp8_w8a8": True, **given, **{name: scale.reshape(-1) for name, scale in scales.items()}}
