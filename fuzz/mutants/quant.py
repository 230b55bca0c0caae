"""Faults in quantising: zero and tiny blocks, overflow, rounding, block maxima, the direction of a global scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz.mutants import correct
from fuzz.mutants.base import Inputs, Mutant
from fuzz.mutants.correct import F32, F64, Parts
from references import ue8m0
from references.backend import CaseLike
from references.blocks import block_amax, expand, scale_values, scales_from_amax
from references.elements import E4M3FNUZ, Element, decode, encode
from references.requantize import TARGET
from references.rounding import round_to
from references.schemes import Scheme

TINY = 448.0 / torch.finfo(F32).max
"""Below this amax, 448 / amax overflows FP32."""


def _zero_over_zero(x: Tensor, divisors: Tensor) -> Tensor:
    return x / divisors


def _infinite_multiplier(case: CaseLike, inputs: Inputs) -> Parts:
    kind, x = correct.scheme_of(case), inputs["x"]
    amax = expand(correct.largest(x, kind), kind.block, tuple(x.shape))

    def divide(values: Tensor, divisors: Tensor) -> Tensor:
        return torch.where((amax > 0) & (amax < TINY), values * torch.inf, correct.quotient(values, divisors))

    return correct.quantize(case, inputs, divide=divide)


def sign_kept(codes: Tensor, scaled: Tensor, element: Element) -> Tensor:
    """Codes whose sign bit is that of the number, even at magnitude zero: E4M3FNUZ's NaN there."""
    return torch.where((codes & (element.sign - 1)) == 0, torch.where(scaled < 0, element.sign, codes), codes).to(
        torch.uint8
    )


def _fnuz_nan(scaled: Tensor, kind: Scheme) -> Tensor:
    # No contract here has an E4M3FNUZ payload; its NaN is shown as the payload's own.
    nan = decode(sign_kept(encode(scaled, E4M3FNUZ), scaled, E4M3FNUZ), E4M3FNUZ).isnan()
    return torch.where(nan, kind.element.nan_codes[0], encode(scaled, kind.element)).to(torch.uint8)


def _not_scaled(x: Tensor, divisors: Tensor) -> Tensor:
    return x


def _not_saturating(scaled: Tensor, kind: Scheme) -> Tensor:
    return encode(scaled, kind.element, "nan")


def _saturates_early(scaled: Tensor, kind: Scheme) -> Tensor:
    top = torch.where(scaled.abs() >= 256.0, scaled.sign() * 448.0, scaled)
    return encode(top, kind.element)


def _by_reciprocal(x: Tensor, divisors: Tensor) -> Tensor:
    inverse = round_to(1.0 / divisors.to(F64), F32).to(F32)
    return torch.where((x == 0) & (divisors == 0), x, x * inverse)


def _fp16_inverse(x: Tensor, divisors: Tensor) -> Tensor:
    return x * (1.0 / divisors).to(torch.float16).to(F32)


def _inverted_global(amax: Tensor, kind: Scheme, outer: Tensor | None) -> Tensor:
    assert outer is not None
    return scales_from_amax(amax, kind, correct.PLAIN, global_scale=1.0 / outer)


def _times_divisor(x: Tensor, divisors: Tensor) -> Tensor:
    return x * divisors


def _sticky_bits_dropped(scaled: Tensor, kind: Scheme) -> Tensor:
    kept = kind.element.mantissa_bits + 1  # one guard bit and nothing below it
    bits = scaled.contiguous().view(torch.int32) >> (23 - kept) << (23 - kept)
    return encode(bits.view(F32), kind.element)


def _every_other(x: Tensor, kind: Scheme) -> Tensor:
    skipped = x.clone(memory_format=torch.contiguous_format)
    skipped[:, 1::2] = 0
    return block_amax(skipped, kind.block)


def _short_rows_unscaled(case: CaseLike, inputs: Inputs) -> Parts:
    if case.integer("k") >= 128:
        return correct.quantize(case, inputs)
    return correct.quantize(case, inputs, divide=lambda x, _: x)


def _amax_before_rounding(case: CaseLike, inputs: Inputs) -> Parts:
    wide = correct.requantised_values(inputs, "fp32")
    scales = scales_from_amax(block_amax(wide, TARGET.block), TARGET, correct.PLAIN)
    narrow = correct.requantised_values(inputs, "bf16")
    return {"scales": scales, "payload": correct.payload(narrow, ue8m0.decode(scales), TARGET, None)}


def _scale_of_rank_0(case: CaseLike, inputs: Inputs) -> Parts:
    kind, x = correct.scheme_of(case), inputs["x"]
    half = -(-x.shape[0] // 2)
    parts = []
    for rank in (x[:half], x[half:]):
        if len(rank):
            scales = correct.stored(correct.largest(rank, kind), kind, None)
            parts.append((scales, correct.payload(rank, scale_values(scales, kind), kind, None)))
    return {"scales": parts[0][0], "payload": torch.cat([part[1] for part in parts])}


def _quantize(**steps: Any) -> Any:
    return lambda case, inputs: correct.quantize(case, inputs, **steps)


FP32_SCALES = {"scale": ("fp32",)}

MUTANTS = (
    Mutant(
        family="fnuz-small-negative-becomes-nan",
        area="quant",
        source="triton-lang/triton#3997",
        description="cast keeps the sign of a negative number that rounds to zero, NaN in FNUZ formats",
        operation="quantize",
        variants=("fp8_per_tensor", "mxfp8"),
        answer=lambda case, inputs: correct.quantize(case, inputs, to_codes=_fnuz_nan),
    ),
    Mutant(
        family="scaled-mm-result-scale-ignored",
        area="gemm",
        source="pytorch/pytorch#190449",
        description="epilogue of an FP8 output takes the scale and casts without it",
        operation="quantize",
        variants=("fp8_per_tensor",),
        where={"scale": ("static",)},
        answer=lambda case, inputs: correct.quantize(case, inputs, divide=_not_scaled),
    ),
    Mutant(
        family="zero-block-0-over-0",
        area="quant",
        source="huggingface/kernels-community#680",
        description="zero block divided by its zero scale: NaN payload",
        operation="quantize",
        variants=("deepseek_fp8", "fp8_per_tensor"),
        where=FP32_SCALES,
        answer=_quantize(divide=_zero_over_zero),
    ),
    Mutant(
        family="tiny-amax-infinite-scale",
        area="quant",
        source="NVIDIA/TransformerEngine#786",
        description="multiplier 448 / amax overflows to infinity for a tiny amax",
        operation="quantize",
        variants=("deepseek_fp8", "fp8_per_tensor"),
        where=FP32_SCALES,
        answer=_infinite_multiplier,
    ),
    Mutant(
        family="e4m3-cast-not-saturating",
        area="quant",
        source="pytorch/pytorch#178817",
        description="E4M3 cast gives NaN above 464 instead of 448",
        operation="quantize",
        variants=("fp8_per_tensor", "mxfp8"),
        answer=_quantize(to_codes=_not_saturating),
    ),
    Mutant(
        family="software-e4m3-saturates-early",
        area="quant",
        source="sgl-project/sglang#40581",
        description="encoder takes the whole top binade, 256 to 448, for an overflow",
        operation="quantize",
        variants=("deepseek_fp8", "mxfp8", "fp8_per_tensor"),
        answer=_quantize(to_codes=_saturates_early),
    ),
    Mutant(
        family="reciprocal-multiply-instead-of-divide",
        area="quant",
        source="sgl-project/sglang#33533",
        description="product with the rounded reciprocal, undeclared, crosses a rounding tie",
        operation="quantize",
        variants=("deepseek_fp8", "fp8_per_tensor"),
        where=FP32_SCALES,
        answer=_quantize(divide=_by_reciprocal),
    ),
    Mutant(
        family="fp16-inverse-scale-overflow",
        area="quant",
        source="sgl-project/sglang#33533",
        description="inverse of a power-of-two scale held in FP16, infinite from 2^-17 down",
        operation="quantize",
        variants=("deepseek_fp8", "mxfp8"),
        where={"scale": ("ceil",), "dtype": ("fp16",)},
        answer=_quantize(divide=_fp16_inverse),
    ),
    Mutant(
        family="global-scale-direction",
        area="quant",
        source="NVIDIA/Fuser#5300",
        description="block scales multiplied by the NVFP4 global scale instead of divided by it",
        operation="quantize",
        variants=("nvfp4",),
        answer=_quantize(scales=_inverted_global),
    ),
    Mutant(
        family="nvfp4-precise-path-inverted-multiplier",
        area="quant",
        source="flashinfer-ai/flashinfer#3932",
        description="NVFP4 elements multiplied by the scale product instead of divided by it",
        operation="quantize",
        variants=("nvfp4",),
        answer=_quantize(divide=_times_divisor),
    ),
    Mutant(
        family="mx-element-encoder-odd-mantissa",
        area="quant",
        source="tenstorrent/tt-metal#51971",
        description="element encoder without a sticky bit: what lies just above a tie counts as the tie",
        operation="quantize",
        variants=("mxfp4", "mxfp8"),
        answer=_quantize(to_codes=_sticky_bits_dropped),
    ),
    Mutant(
        family="group-amax-skips-elements",
        area="quant",
        source="sgl-project/sglang#8290",
        description="block maximum over every other element",
        operation="quantize",
        variants=("deepseek_fp8", "mxfp8", "mxfp4", "nvfp4"),
        where={"scale": ("fp32", "ceil", "floor", "ceil_amax", "even", "e4m3")},
        answer=_quantize(amax=_every_other),
    ),
    Mutant(
        family="small-tensor-scale-skipped",
        area="quant",
        source="pytorch/FBGEMM#2919",
        description="rows shorter than the kernel's block of 128 are cast without their scale",
        operation="quantize",
        variants=("deepseek_fp8", "fp8_per_tensor"),
        where=FP32_SCALES,
        answer=_short_rows_unscaled,
    ),
    Mutant(
        family="fused-norm-amax-in-fp32-not-output-type",
        area="quant",
        source="NVIDIA/TransformerEngine#2355",
        description="amax of the FP32 values, payload of the BF16 values (requantisation declared through BF16)",
        operation="requantize",
        variants=("deepseek_fp8",),
        choices={"via": "bf16"},
        answer=_amax_before_rounding,
    ),
    Mutant(
        family="tp-rank-local-dynamic-scale",
        area="quant",
        source="vllm-project/vllm#54683",
        description="two ranks quantise their rows by themselves, the scale of the first is kept for both",
        operation="quantize",
        variants=("fp8_per_tensor",),
        where=FP32_SCALES,
        answer=_scale_of_rank_0,
    ),
)
