"""An expert layer in plain torch operators, FP32 throughout: quantise, dequantise, matmul, SwiGLU, and so on again.

The composite that a reader of a format's specification would write. E4M3 payloads come from torch's cast, after a
clamp; E2M1 has no cast and is looked up among the midpoints of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends._torch_gemm import E2M1_VALUES, matmul
from references.backend import Claim
from references.recipes import Recipe

E4M3_MAX, E4M3_EMAX, E4M3_MANTISSA_BITS = 448.0, 8, 3
E2M1_MAX = 6.0
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
AMAX_FLOOR = 1e-10
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ACTIVATION_BLOCK = {"deepseek_fp8": 128, "mxfp8": 32, "w4a8": 32, "nvfp4": 16}
WEIGHT_BLOCK = {"deepseek_fp8": (128, 128), "mxfp8": (1, 32), "w4a8": (1, 32), "w4a16": (1, 32), "nvfp4": (1, 16)}
E2M1_WEIGHTS = ("w4a8", "w4a16", "nvfp4")
VARIANTS = ("deepseek_fp8", "mxfp8", "w4a8", "w4a16", "nvfp4", "fp8_per_tensor", "bf16")


def claims() -> Iterable[Claim]:
    """Every format; FP32 scales apart, which have a floor under amax."""
    source = "torch.matmul on operands quantised and dequantised to float32 by torch operators"
    return [
        Claim(operation="moe", variant=variant, source=source, where={} if scale is None else {"scale": (scale,)})
        for variant in VARIANTS
        for scale in (("fp32", "ceil") if variant == "deepseek_fp8" else (None,))
    ]


def recipe(claim: Claim, source: str) -> Recipe:
    """FMAs in an order of MKL's or cuBLAS's own; silu from exp and an IEEE division."""
    floor = AMAX_FLOOR if claim.where.get("scale") == ("fp32",) else 0.0
    # Vectorised float exp: SLEEF within 1 ulp on a CPU, CUDA's expf within 2.
    return Recipe(source=f"{source}; exp within 2 ulp", accumulator="fp32_rn", amax_floor=floor)


def moe(case: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """``[tokens, hidden]`` of the case's output dtype, one expert after another."""
    x, ids, weights = inputs["x"].float(), inputs["ids"], inputs["weights"]
    if "expert_map" in inputs:
        ids = torch.where(ids < 0, ids, inputs["expert_map"][ids.clamp(min=0).to(torch.int64)])
    on_input, factor = case["weight"] == "input", float(case["scaling"])
    x = quantised(case, x, inputs, "x")
    output = torch.zeros_like(x)
    for expert in range(case.integer("experts")):
        rows, places = torch.where(ids == expert)
        if not len(rows):
            continue
        weight = weights[rows, places][:, None]
        sums = matmul(x[rows], dequantised(case, inputs, "w1", expert))
        h = swiglu(case, sums * weight if on_input else sums)
        y = matmul(quantised(case, h, inputs, "h"), dequantised(case, inputs, "w2", expert))
        output.index_add_(0, rows, y if on_input else y * weight)
    return (output * factor).to(OUTPUTS[case["out"]])


def swiglu(case: Any, sums: Tensor) -> Tensor:
    """silu(gate) * up."""
    first, second = sums.chunk(2, dim=1)
    gate, up = (first, second) if case["gate"] == "first" else (second, first)
    if case["limit"] != "none":
        limit = float(case["limit"])
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up


def quantised(case: Any, x: Tensor, inputs: Mapping[str, Tensor], name: str) -> Tensor:
    """An activation after quantisation, in FP32 again."""
    if case.variant in ("bf16", "w4a16"):
        return x.to(torch.bfloat16).float()
    if case.variant == "fp8_per_tensor":
        scale = inputs[f"{name}_scale"]
        return to_e4m3(x / scale) * scale
    block = ACTIVATION_BLOCK[case.variant]
    rows, k = x.shape
    blocks = torch.nn.functional.pad(x, (0, -k % block)).view(rows, -1, block)
    amax = blocks.abs().amax(2, keepdim=True)
    if case.variant == "nvfp4":
        outer = inputs[f"{name}_global_scale"]
        scale = to_e4m3(amax / torch.full_like(amax, E2M1_MAX) / outer) * outer
        codes = to_e2m1(torch.where(blocks == 0, blocks, blocks / scale))
    else:
        scale = activation_scale(amax, case["scale"])
        codes = to_e4m3(torch.where(blocks == 0, blocks, blocks / scale))
    return (codes * scale).view(rows, -1)[:, :k]


def activation_scale(amax: Tensor, policy: str) -> Tensor:
    """FP32 scales of E4M3 blocks: amax / 448, or a power of two, never below 2^-126."""
    if policy == "fp32":
        amax = amax.clamp(min=AMAX_FLOOR)
        return amax / torch.full_like(amax, E4M3_MAX)
    if policy == "ceil":
        amax = amax / torch.full_like(amax, E4M3_MAX)
    mantissa, exponent = torch.frexp(amax)
    match policy:
        case "ceil":
            exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
        case "ceil_amax":
            exponent = torch.where(mantissa > 0.5, exponent, exponent - 1) - E4M3_EMAX
        case "floor":
            exponent = exponent - 1 - E4M3_EMAX
        case "even":
            up = mantissa + 2.0 ** -(E4M3_MANTISSA_BITS + 2) >= 1
            exponent = torch.where(up, exponent, exponent - 1) - E4M3_EMAX
    return torch.ldexp(torch.ones_like(amax), exponent.clamp(min=-126))


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 numbers, saturating."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def to_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 numbers, ties to the even code, saturating."""
    middles = torch.tensor(E2M1_MIDPOINTS, device=x.device)
    code = torch.bucketize(x.abs(), middles)
    # A midpoint counts to the code below it, which is odd at every second one.
    odd = (code % 2 == 1) & (x.abs() == middles[code.clamp(max=6)])
    values = torch.tensor(E2M1_VALUES[:8], device=x.device)[code + odd]
    return torch.copysign(values, x)


def dequantised(case: Any, inputs: Mapping[str, Tensor], name: str, expert: int) -> Tensor:
    """One expert's W1 or W2 in FP32."""
    codes = inputs[name][expert]
    if codes.dtype == torch.bfloat16:
        return codes.float()
    if case.variant in E2M1_WEIGHTS:
        table = torch.tensor(E2M1_VALUES, device=codes.device)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        values = table[nibbles.to(torch.int64)]
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    scales = inputs[f"{name}_scales"][expert]
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e4m3fn if case.variant == "nvfp4" else torch.float8_e8m0fnu).float()
    if case.variant == "nvfp4":
        scales = scales * inputs[f"{name}_global_scale"][expert]
    height, width = WEIGHT_BLOCK.get(case.variant, (values.shape[0], values.shape[1]))
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return values * spread[: values.shape[0], : values.shape[1]]
