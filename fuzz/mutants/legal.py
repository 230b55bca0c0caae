"""Correct implementations that make the choices which a recipe may declare: none of them may raise an alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.grammar import GRAMMAR
from fuzz.mutants import correct, gemm, moe
from fuzz.mutants.base import Inputs, Mutant
from fuzz.mutants.correct import F32, Parts
from references import layouts
from references.backend import CaseLike
from references.blocks import dequantize, quantize
from references.gemm_formats import Operand
from references.recipes import Recipe
from references.requantize import requantize_deepseek
from references.rounding import round_to

Choices = dict[str, Any]
SOURCE = "docs/operations.md"


def _legal(
    name: str,
    operation: str,
    answer: Callable[[Recipe], Callable[[CaseLike, Inputs], Parts]],
    choices: Choices,
    variants: tuple[str, ...] = (),
    **where: tuple[str, ...],
) -> Mutant:
    recipe = Recipe(source=SOURCE, **choices)
    return Mutant(
        family=f"legal-{operation}-{name}",
        area="none",
        source=SOURCE,
        description=recipe.text(),
        operation=operation,
        variants=variants or tuple(GRAMMAR[operation]),
        answer=answer(recipe),
        where=where,
        choices=choices,
    )


def _quantised(recipe: Recipe) -> Callable[[CaseLike, Inputs], Parts]:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        kind = correct.scheme_of(case)
        found = quantize(inputs["x"], kind, recipe, global_scale=inputs.get("global_scale"), scale=inputs.get("scale"))
        payload = correct.packed(found.payload, kind)
        return {"payload": payload} if found.scales is None else {"scales": found.scales, "payload": payload}

    return answer


def _unsigned_zeros(recipe: Recipe) -> Callable[[CaseLike, Inputs], Parts]:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        def to_codes(scaled: Tensor, kind: Any) -> Tensor:
            found = correct.codes(scaled, kind)
            return torch.where(found == kind.element.sign, 0, found).to(torch.uint8)

        return correct.quantize(case, inputs, to_codes=to_codes)

    return answer


def _dequantised(recipe: Recipe) -> Callable[[CaseLike, Inputs], Parts]:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        kind, dtype = correct.scheme_of(case), correct.DTYPES[case["out"]]
        given = correct.plain_codes(case, inputs), inputs["scales"], kind
        outer = inputs.get("global_scale")
        exact = dequantize(*given, global_scale=outer)
        return {"output": round_to(round_to(exact, F32), dtype).to(dtype)}

    return answer


def _padded(recipe: Recipe) -> Callable[[CaseLike, Inputs], Parts]:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        packed = correct.move_scales(case, inputs)["scales"].clone()
        mask = layouts.padding_mask(case.variant, case.integer("rows"), case.integer("cols"))
        slots = packed.view(torch.uint8 if packed.dtype != torch.float32 else torch.int32).view(mask.shape)
        slots[mask] = 0x55
        return {"scales": packed}

    return answer


def _requantised(recipe: Recipe) -> Callable[[CaseLike, Inputs], Parts]:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        found = requantize_deepseek(inputs["payload"], inputs["scales"], recipe)
        assert found.scales is not None
        return {"scales": found.scales, "payload": found.payload}

    return answer


def _fp32_product(a: Operand, b: Operand) -> Tensor:
    return (a.values.to(F32) @ b.values.to(F32).t()).to(torch.float64)


def _backwards(a: Operand, b: Operand) -> Tensor:
    """Blocks of K in FP32, the last one first, scales applied to each block's sum."""
    width, k = min(a.width, b.width), a.codes.shape[1]
    total = torch.zeros(len(a.codes), len(b.codes), dtype=F32)
    for start in reversed(range(0, k, width)):
        part = slice(start, min(start + width, k))
        dot = a.codes[:, part].to(F32) @ b.codes[:, part].to(F32).t()
        scaled = dot * a.scales[:, start // a.width, None].to(F32)
        total = total + scaled * b.scales[None, :, start // b.width].to(F32)
    return total.to(torch.float64)


def _split(parts: int) -> Callable[[Operand, Operand], Tensor]:
    def multiply(a: Operand, b: Operand) -> Tensor:
        size = -(-a.values.shape[1] // parts)
        total = torch.zeros(len(a.codes), len(b.codes), dtype=torch.float64)
        for start in range(0, a.values.shape[1], size):
            part = a.values[:, start : start + size] @ b.values[:, start : start + size].t()
            total = round_to(total + round_to(round_to(part, F32), torch.bfloat16), F32)
        return total

    return multiply


def _multiplied(multiply: Callable[[Operand, Operand], Tensor]) -> Callable[[Recipe], Any]:
    return lambda recipe: lambda case, inputs: gemm.gemm(case, inputs, multiply)


def _layer(steps: moe.Steps) -> Callable[[Recipe], Any]:
    return lambda recipe: lambda case, inputs: moe.layer(case, inputs, steps)


def _stored_bf16(terms: Tensor) -> Tensor:
    return round_to(round_to(terms, F32), torch.bfloat16).sum(dim=1)


def _added_in_bf16(terms: Tensor) -> Tensor:
    total = torch.zeros_like(terms[:, 0])
    for place in reversed(range(terms.shape[1])):
        total = round_to(total + round_to(terms[:, place], torch.bfloat16), torch.bfloat16)
    return total


def _swiglu_of_bf16(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    return moe.swiglu(round_to(sums, torch.bfloat16), gate_first, limit)


def _swiglu_to_bf16(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    return round_to(moe.swiglu(sums, gate_first, limit), torch.bfloat16)


def _swiglu_in_fp32(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    first, second = sums.to(F32).chunk(2, dim=1)
    gate, up = (first, second) if gate_first else (second, first)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (1 + torch.exp(-gate)) * up).to(torch.float64)


RECIPROCAL: Choices = {"scale_arithmetic": "reciprocal", "payload_arithmetic": "reciprocal"}
CEIL = ("ceil", "fp32", "static")

LEGAL: tuple[Mutant, ...] = (
    _legal("reciprocal", "quantize", _quantised, RECIPROCAL, ("deepseek_fp8", "fp8_per_tensor")),
    _legal("reciprocal-mx", "quantize", _quantised, RECIPROCAL, ("mxfp8", "mxfp4"), scale=CEIL),
    _legal(
        "amax-reciprocal",
        "quantize",
        _quantised,
        {"payload_arithmetic": "amax_reciprocal", "amax_floor": 1e-10},
        ("deepseek_fp8", "fp8_per_tensor"),
        scale=("fp32",),
    ),
    _legal("floors", "quantize", _quantised, {"amax_floor": 1e-4}, ("deepseek_fp8", "fp8_per_tensor")),
    _legal("zeros", "quantize", _unsigned_zeros, {"zero_sign": "any"}),
    _legal("via-fp32", "dequantize", _dequantised, {"dequant_rounding": "via_fp32"}),
    _legal("padding", "scale_layout", _padded, {"padding": "any"}, direction=("pack",)),
    _legal("bf16", "requantize", _requantised, {"via": "bf16"}, ("deepseek_fp8",)),
    _legal("reciprocal", "requantize", _requantised, RECIPROCAL, ("deepseek_fp8",)),
    _legal("fp32", "gemm", _multiplied(_fp32_product), {}),
    _legal("fp32-rn", "gemm", _multiplied(_fp32_product), {"accumulator": "fp32_rn"}),
    _legal("blocks-backwards", "gemm", _multiplied(_backwards), {"accumulator": "fp32_rn"}),
    _legal("split-k", "gemm", _multiplied(_split(3)), {"accumulator": "bf16_split_k", "split_k": 3}),
    _legal("silu-in-fp32", "moe", _layer(moe.Steps(activate=_swiglu_in_fp32)), {"accumulator": "fp32_rn"}),
    _legal("fc1-in-bf16", "moe", _layer(moe.Steps(activate=_swiglu_of_bf16)), {"fc1_dtype": "bf16"}),
    _legal("activation-in-bf16", "moe", _layer(moe.Steps(activate=_swiglu_to_bf16)), {"activation_dtype": "bf16"}),
    _legal("weighted-in-bf16", "moe", _layer(moe.Steps(combine=_stored_bf16)), {"weighted_dtype": "bf16"}),
    _legal(
        "added-in-bf16",
        "moe",
        _layer(moe.Steps(combine=_added_in_bf16)),
        {"weighted_dtype": "bf16", "combine_dtype": "bf16"},
    ),
)
"""Each as a `Mutant` with nothing wrong."""
