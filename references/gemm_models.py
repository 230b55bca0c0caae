"""GEMMs whose every bit is known: a tensor core's dot products, combined with scales in FP32 in a declared order.

Source of the combinations: measured on an H200 against SGLang's Triton kernel (``fma_dot_sa_sb``), and DeepGEMM,
cuBLASLt and FlashInfer (``fma_dot_sasb``); see docs/gemm.md.
"""

from __future__ import annotations

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
        return names == {"bf16"} and a.side.scale is None and b.side.scale is None and recipe.promotion == "none"
    scaled = {a.side.scale, b.side.scale} <= {"fp32", "ue8m0"} and recipe.scale_combination != "any"
    return recipe.accumulator in ("hopper_fp8", "f16_upcast") and names == {"e4m3"} and scaled


def exact_rows(a: Operand, b: Operand, recipe: Recipe) -> Tensor:
    """The FP32 accumulator after all of K, FP64 ``[m, n]``, before it is rounded to the output dtype.

    Raises ValueError where `has_model` does not hold.
    """
    if not has_model(a, b, recipe):
        raise ValueError(f"gemm: no exact model of accumulator {recipe.accumulator} here")
    core = CORES[recipe.accumulator]
    if a.side.scale is None:
        return tensor_core_dot(a.values, b.values, "bf16", core)
    name = "f16" if recipe.accumulator == "f16_upcast" else "e4m3"
    k, block = a.codes.shape[1], min(a.width, b.width)
    step = min(block, 128) if recipe.promotion == "every_128" else block
    total = a.codes.new_zeros(a.codes.shape[0], b.codes.shape[0])
    if a.width >= k and b.width >= k:
        # One scale each: promoted sums are added first and scaled at the end.
        for start in range(0, k, step):
            dot = tensor_core_dot(a.codes[:, start : start + step], b.codes[:, start : start + step], name, core)
            total = fma_fp32(dot, torch.ones_like(dot), total)
        return _combine(total, a.scales[:, :1], b.scales[:, 0], torch.zeros_like(total), recipe)
    for start in range(0, k, step):
        dot = tensor_core_dot(a.codes[:, start : start + step], b.codes[:, start : start + step], name, core)
        scale_a, scale_b = a.scales[:, start // a.width, None], b.scales[:, start // b.width]
        total = _combine(dot, scale_a, scale_b, total, recipe)
    return total


def _combine(dot: Tensor, scale_a: Tensor, scale_b: Tensor, total: Tensor, recipe: Recipe) -> Tensor:
    left, right = scale_a.expand_as(dot), scale_b[None, :].expand_as(dot)
    if recipe.scale_combination == "fma_dot_sa_sb":
        return fma_fp32(multiply_fp32(dot, left), right, total)
    return fma_fp32(dot, multiply_fp32(left, right), total)
