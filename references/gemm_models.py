"""GEMMs whose every bit is known: a tensor core's dot products, combined with scales in FP32 in a declared order.

Source of the combinations: measured on an H200 against SGLang's Triton kernel (``fma_dot_sa_sb``), and DeepGEMM,
cuBLASLt and FlashInfer (``fma_dot_sasb``); see docs/gemm.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from references.gemm_formats import Operand
from references.recipes import Recipe
from references.tensor_cores import (
    HOPPER_F16,
    HOPPER_FP8,
    HOPPER_FP8_MMA,
    TensorCore,
    fma_fp32,
    multiply_fp32,
    tensor_core_dot,
)

CORES: dict[str, TensorCore] = {"hopper_fp8": HOPPER_FP8, "hopper_f16": HOPPER_F16, "f16_upcast": HOPPER_FP8_MMA}


def has_model(a: Operand, b: Operand, recipe: Recipe) -> bool:
    """Whether a recipe fixes every bit: an exact core for these payloads, and a named order of scale multiplications.

    Without scales nothing is left to name; ``promotion`` then has to be ``none``.
    """
    names = {a.side.name, b.side.name}
    if recipe.subnormals != "keep" or recipe.out_rounding != "nearest":
        return False
    if recipe.accumulator == "hopper_f16":
        return (
            names in ({"bf16"}, {"f16"})
            and a.side.scale is None
            and b.side.scale is None
            and recipe.promotion == "none"
        )
    scaled = {a.side.scale, b.side.scale} <= {"fp32", "ue8m0"} and recipe.scale_combination != "any"
    return recipe.accumulator in ("hopper_fp8", "f16_upcast") and names == {"e4m3"} and scaled


def orders(k: int, recipe: Recipe, *, blocks: bool) -> list[list[slice]]:
    """The ways of cutting K that a recipe admits, distinct, fewest parts first. blocks: whether there are block scales.

    Source: cuBLASLt's split products on an H200, where K = 4096 to 16384 is cut into 2 to 8 such parts.
    """
    unit, found = 128 if blocks else 64, []
    for parts in range(1, recipe.k_parts + 1):
        units = (k + unit - 1) // unit
        step = (units + parts - 1) // parts * unit
        spans = [slice(start, min(start + step, k)) for start in range(0, k, step)]
        if spans not in found:
            found.append(spans)
    return found


def exact_rows(a: Operand, b: Operand, recipe: Recipe, spans: Sequence[slice] | None = None) -> Tensor:
    """The FP32 accumulator after all of K, FP64 ``[m, n]``, before it is rounded to the output dtype.

    spans: one of `orders`; K in one piece if None. Raises ValueError where `has_model` does not hold.
    """
    if not has_model(a, b, recipe):
        raise ValueError(f"gemm: no exact model of accumulator {recipe.accumulator} here")
    core, k = CORES[recipe.accumulator], a.codes.shape[1]
    spans = spans or [slice(0, k)]
    if a.side.scale is None:
        return _added([tensor_core_dot(a.values[:, part], b.values[:, part], a.side.name, core) for part in spans])
    name = "f16" if recipe.accumulator == "f16_upcast" else "e4m3"
    block = min(a.width, b.width)
    step = min(block, 128) if recipe.promotion == "every_128" else block
    whole = a.width >= k and b.width >= k  # one scale each: promoted sums are added first and scaled at the end
    totals = []
    for part in spans:
        total = a.codes.new_zeros(a.codes.shape[0], b.codes.shape[0])
        for start in range(part.start, part.stop, step):
            ks = slice(start, min(start + step, part.stop))
            dot = tensor_core_dot(a.codes[:, ks], b.codes[:, ks], name, core)
            if whole:
                total = fma_fp32(dot, torch.ones_like(dot), total)
            else:
                scale_a, scale_b = a.scales[:, start // a.width, None], b.scales[:, start // b.width]
                total = _combine(dot, scale_a, scale_b, total, recipe)
        totals.append(total)
    total = _added(totals)
    return _combine(total, a.scales[:, :1], b.scales[:, 0], torch.zeros_like(total), recipe) if whole else total


def _added(parts: Sequence[Tensor]) -> Tensor:
    """Sums of parts of K, added in order in FP32."""
    total = parts[0]
    for part in parts[1:]:
        total = fma_fp32(part, torch.ones_like(part), total)
    return total


def _combine(dot: Tensor, scale_a: Tensor, scale_b: Tensor, total: Tensor, recipe: Recipe) -> Tensor:
    left, right = scale_a.expand_as(dot), scale_b[None, :].expand_as(dot)
    if recipe.scale_combination == "fma_dot_sa_sb":
        return fma_fp32(multiply_fp32(dot, left), right, total)
    return fma_fp32(dot, multiply_fp32(left, right), total)
