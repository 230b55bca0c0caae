"""Faults in choosing, packing and reading power-of-two scales."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.mutants import correct
from fuzz.mutants.base import Inputs, Mutant
from fuzz.mutants.correct import F32, F64, Parts
from references import ue8m0
from references.backend import CaseLike
from references.blocks import expand, scale_values, scales_from_amax
from references.elements import E4M3FN, decode, encode
from references.requantize import TARGET
from references.schemes import Scheme


def _float_log2(case: CaseLike, inputs: Inputs) -> Parts:
    x = inputs["x"].abs()
    exponent = x.to(F64).log2().to(F32).ceil()  # the logarithm, correctly rounded to FP32, has lost the last bits
    code = (exponent + 127).clamp(0, 254)
    nan = 254.0 if case.variant == "ceil_clamped" else 255.0
    return {"scales": torch.where(x.isnan(), nan, code).to(torch.uint8)}


def _inflated(case: CaseLike, inputs: Inputs) -> Parts:
    kind, x = correct.scheme_of(case), inputs["x"]
    amax = correct.largest(x, kind)
    exact = ue8m0.scale_from_amax(amax, kind.element).to(F64)
    return {"scales": correct.stored(amax, kind, None), "payload": correct.payload(x, exact, kind, None)}


def _read_as_packed(case: CaseLike, inputs: Inputs) -> Parts:
    grid = inputs["scales"]
    exponents = grid.contiguous().view(-1).view(torch.uint8)[: grid.numel()].view(grid.shape)
    kind = correct.scheme_of(case)
    found = inputs["payload"]
    values = expand(ue8m0.decode(exponents), kind.block, tuple(found.shape))
    return correct.multiply(case, inputs, decode(found, kind.element), values)


def _unmasked_pack(case: CaseLike, inputs: Inputs) -> Parts:
    bits = inputs["x"].abs().contiguous().view(torch.int32).to(torch.int64)
    lanes = torch.nn.functional.pad(bits, (0, -len(bits) % 4)).view(-1, 4)
    words = (lanes[:, 0] >> 23) | (lanes[:, 1] >> 15) | (lanes[:, 2] >> 7) | (lanes[:, 3] << 1)
    found = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], dim=1)
    return {"scales": found.view(-1)[: len(bits)].to(torch.uint8)}


def _one_low(amax: Tensor, kind: Scheme, outer: Tensor | None) -> Tensor:
    return ue8m0.encode(ue8m0.scale_from_amax(amax, kind.element), "floor")


def _into_nan(case: CaseLike, inputs: Inputs) -> Parts:
    right = correct.encode_ue8m0(case, inputs)["scales"]
    bits = inputs["x"].abs().contiguous().view(torch.int32)
    wraps = (bits > 254 << 23) & (bits < 255 << 23)
    return {"scales": torch.where(wraps, 255, right).to(torch.uint8)}


def _nan_as_infinity(case: CaseLike, inputs: Inputs) -> Parts:
    kind, found = correct.scheme_of(case), correct.plain_codes(case, inputs)
    values = scale_values(inputs["scales"], kind)
    values = torch.where(inputs["scales"] == ue8m0.NAN, torch.inf, values)
    return correct.multiply(case, inputs, decode(found, kind.element), expand(values, kind.block, tuple(found.shape)))


def _inverse_of_254(case: CaseLike, inputs: Inputs) -> Parts:
    x = correct.requantised_values(inputs, "fp32")
    scales = scales_from_amax(correct.largest(x, TARGET), TARGET, correct.PLAIN)
    divisors = expand(ue8m0.decode(scales, F32), TARGET.block, tuple(x.shape))
    inverse = torch.where(divisors == 2.0**127, 0.0, 1.0 / divisors)
    right = correct.quotient(x, divisors)
    scaled = torch.where(divisors == 2.0**127, x * inverse, right)
    return {"scales": scales, "payload": encode(scaled, E4M3FN)}


MUTANTS = (
    Mutant(
        family="ue8m0-ceil-via-float-log2",
        area="ue8m0",
        source="sgl-project/sglang#31210",
        description="exponent as ceil(log2(x)) in FP32, which rounds 2^k + 1 ulp down to k",
        operation="ue8m0",
        variants=("ceil", "ceil_clamped"),
        where={"from": ("scale",)},
        answer=_float_log2,
    ),
    Mutant(
        family="scale-inflated-vs-data",
        area="ue8m0",
        source="sgl-project/sglang#28418",
        description="payload quantised by amax / qmax, that scale rounded up to a power of two afterwards",
        operation="quantize",
        variants=("deepseek_fp8", "mxfp8"),
        where={"scale": ("ceil",)},
        answer=_inflated,
    ),
    Mutant(
        family="fp32-scale-read-as-packed",
        area="ue8m0",
        source="vllm-project/vllm#53680",
        description="bytes of FP32 scales read as four UE8M0 exponents",
        operation="dequantize",
        variants=("deepseek_fp8",),
        where={"scale": ("fp32",)},
        answer=_read_as_packed,
    ),
    Mutant(
        family="pack-without-mask",
        area="ue8m0",
        source="sgl-project/sglang#25733",
        description="four FP32 scales packed by shifts without a mask, mantissa bits leak into the byte before",
        operation="ue8m0",
        variants=("floor",),
        where={"from": ("scale",)},
        answer=_unmasked_pack,
    ),
    Mutant(
        family="mx-scale-one-low",
        area="ue8m0",
        source="vllm-project/vllm#43557",
        description="MX floor scale as the exponent of amax / qmax: one step low unless amax is qmax * 2^k",
        operation="quantize",
        variants=("mxfp4", "mxfp8"),
        where={"scale": ("floor",)},
        answer=lambda case, inputs: correct.quantize(case, inputs, scales=_one_low),
    ),
    Mutant(
        family="ue8m0-exponent-increment-into-nan",
        area="ue8m0",
        source="tile-ai/tilelang-metax#101",
        description="rounding up increments exponent 254 into the NaN code",
        operation="ue8m0",
        variants=("ceil", "ceil_clamped"),
        where={"from": ("scale",)},
        answer=_into_nan,
    ),
    Mutant(
        family="e8m0-nan-becomes-inf",
        area="ue8m0",
        source="llvm/llvm-project#214919",
        description="code 255 widened to infinity",
        operation="dequantize",
        variants=("mxfp8", "mxfp4"),
        answer=_nan_as_infinity,
    ),
    Mutant(
        family="e8m0-inverse-of-254-flushes-to-zero",
        area="ue8m0",
        source="flashinfer-ai/flashinfer#4023",
        description="inverse of 2^127 by (254 - code) << 23 is 0, so that infinity times it is NaN",
        operation="requantize",
        variants=("deepseek_fp8",),
        answer=_inverse_of_254,
    ),
)
