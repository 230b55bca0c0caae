"""Launches of the Triton GEMM kernels, and what they claim.

The interpreter multiplies with numpy in FP32, in whatever order its BLAS has. On SM90 the kernels run on Hopper's FP8
and BF16 tensor cores, whose arithmetic is known bit for bit; other architectures are claimed where FP32 is known to be
the accumulator. The 64-row tiles make Triton choose ``wgmma`` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from conformance.backends import _triton_gemm as kernels
from references.backend import Claim
from references.recipes import Recipe

OPERATIONS = ("gemm",)
SOURCE = "conformance/backends/_triton_gemm.py"
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TILE_M = 64
TILE_N = 64
KNOWN = {9: "hopper", 10: "blackwell"}
"""Major compute capabilities whose FP8 accumulator is known."""


def claims(max_size: int | None, capability: tuple[int, int] | None) -> Iterable[Claim]:
    """``deepseek_fp8`` and ``bf16``. capability: of the GPU, None for the interpreter."""
    if capability is not None and capability[0] not in KNOWN:
        return []
    maxima = {} if max_size is None else dict.fromkeys(("m", "n", "k"), max_size)
    return [
        Claim(operation=operation, variant=variant, source=f"{SOURCE}: {kernel}", maxima=maxima)
        for operation in OPERATIONS
        for variant, kernel in (("deepseek_fp8", "fp8_gemm_kernel"), ("bf16", "bf16_gemm_kernel"))
    ]


def recipe(claim: Claim, capability: tuple[int, int] | None) -> Recipe:
    """FP32 in any order; on Hopper the exact models."""
    if capability is None or capability[0] != 9:
        return Recipe(source=SOURCE)
    if claim.variant == "bf16":
        return Recipe(source=SOURCE, accumulator="hopper_f16", promotion="none")
    return Recipe(source=SOURCE, accumulator="hopper_fp8", scale_combination="fma_dot_sa_sb")


def gemm(case: Any, inputs: Mapping[str, Tensor], output: Tensor) -> Tensor:
    """Launch one GEMM into ``output`` ``[m, n]``."""
    a = inputs["a"]
    m = torch.tensor([case.integer("m")], dtype=torch.int32, device=a.device)
    start = torch.zeros(1, dtype=torch.int32, device=a.device)
    launch(case, inputs, output, start, start, m, case.integer("m"), 0)
    return output


def launch(
    case: Any,
    inputs: Mapping[str, Tensor],
    output: Tensor,
    starts: Tensor,
    scale_starts: Tensor,
    counts: Tensor,
    most: int,
    scale_group: int,
) -> None:
    """One kernel over all groups.

    starts, scale_starts, counts: int32 ``[groups]``: first row in A and the output, in a group's scales, and rows.
    most: the largest count there may be. scale_group: distance between the scales of two groups, in elements.
    """
    n, k = case.integer("n"), case.integer("k")
    grid = (triton.cdiv(most, TILE_M), triton.cdiv(n, TILE_N), counts.numel())
    a, b = inputs["a"].contiguous(), inputs["b"].contiguous()
    if case.variant == "bf16":
        kernels.bf16_gemm_kernel[grid](a, b, output, starts, counts, n, k, TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=64)
        return
    scales = inputs["a_scales"]
    row, block = scales.stride()[-2:]
    if case["layout"] == "mn_major":
        row, block = block, row
    kernels.fp8_gemm_kernel[grid](
        a, b, scales, inputs["b_scales"], output, starts, scale_starts, counts, n, k,
        scale_group, row, block, triton.cdiv(n, 128),
        SCALE=case["scale"], PACKED=scales.dtype == torch.int32, TILE_M=TILE_M, TILE_N=TILE_N, GROUP=128,
    )  # fmt: skip
