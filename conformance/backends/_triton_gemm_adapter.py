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
from references.backend import NORMAL_VALUES, Claim
from references.recipes import Recipe

OPERATIONS = ("gemm", "grouped_gemm")
SOURCE = "conformance/backends/_triton_gemm.py"
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TILE_M = 64
TILE_N = 64
KNOWN = {9: "hopper", 10: "blackwell"}
"""Major compute capabilities whose FP8 accumulator is known."""
SUBNORMAL_VALUES = ("subnormal",)
LARGEST_INTERPRETED = 256
"""Most rows and columns in the interpreter, where a block of a product takes some milliseconds."""

MOST_INTERPRETED_GROUPS = 64
"""Most groups there: the grid has a row of blocks for each of them, however few rows they hold."""


def claims(max_size: int | None, capability: tuple[int, int] | None) -> Iterable[Claim]:
    """``deepseek_fp8``, ``bf16`` and ``fp16``. capability: of the GPU, None for the interpreter."""
    if capability is not None and capability[0] not in KNOWN:
        return []
    side = LARGEST_INTERPRETED
    maxima = {} if max_size is None else {"m": side, "n": side, "k": max_size}
    limits = {
        "gemm": maxima,
        "grouped_gemm": {} if max_size is None else {**maxima, "groups": MOST_INTERPRETED_GROUPS},
    }
    kernels: list[tuple[str, str, Mapping[str, tuple[str, ...]]]] = [
        ("deepseek_fp8", "fp8_gemm_kernel", {}),
        ("bf16", "bf16_gemm_kernel", {"values": NORMAL_VALUES}),
        ("bf16", "bf16_gemm_kernel", {"values": SUBNORMAL_VALUES}),
        ("fp16", "bf16_gemm_kernel", {}),
    ]
    return [
        Claim(operation=operation, variant=variant, source=f"{SOURCE}: {kernel}", where=where, maxima=limits[operation])
        for operation in OPERATIONS
        for variant, kernel, where in kernels
    ]


def recipe(claim: Claim, capability: tuple[int, int] | None) -> Recipe:
    """FP32 in any order; on Hopper the exact models, but for BF16 sums below 2^-126, which the model misses by a few
    steps of 2^-149 (seen on an H200)."""
    if capability is None or capability[0] != 9:
        return Recipe(source=SOURCE)
    if claim.where.get("values") == SUBNORMAL_VALUES:
        return Recipe(source=SOURCE)
    if claim.variant in ("bf16", "fp16"):
        return Recipe(source=SOURCE, accumulator="hopper_f16", promotion="none")
    return Recipe(source=SOURCE, accumulator="hopper_fp8", scale_combination="fma_dot_sa_sb")


def gemm(case: Any, inputs: Mapping[str, Tensor], output: Tensor) -> Tensor:
    """Launch one GEMM into ``output`` ``[m, n]``."""
    a = inputs["a"]
    m = torch.full((1,), case.integer("m"), dtype=torch.int32, device=a.device)
    start = torch.zeros(1, dtype=torch.int32, device=a.device)
    launch(case, inputs, output, start, start, m, case.integer("m"), 0)
    return output


def grouped_gemm(case: Any, inputs: Mapping[str, Tensor], output: Tensor) -> Tensor:
    """Launch one grouped GEMM into ``output``; rows of no group are left alone."""
    groups, m = case.integer("groups"), case.integer("m")
    if case["grouping"] == "masked":
        starts = torch.arange(groups, dtype=torch.int32, device=output.device) * m
        scales = inputs.get("a_scales")
        distance = 0 if scales is None else scales.stride(0)
        launch(case, inputs, output, starts, torch.zeros_like(starts), inputs["masked_m"], m, distance)
        return output
    rows = inputs["m_indices"].to(torch.int64)
    owners = torch.where(rows >= 0, rows, groups)  # a group of its own for rows of none, so that no size is asked for
    numbers = torch.arange(m, dtype=torch.int32, device=output.device)
    counts = torch.zeros(groups + 1, dtype=torch.int32, device=output.device)
    counts = counts.scatter_add(0, owners, torch.ones_like(numbers))[:groups]
    first = torch.full((groups + 1,), m, dtype=torch.int32, device=output.device)
    starts = first.scatter_reduce(0, owners, numbers, "amin")[:groups]
    launch(case, inputs, output, starts, starts, counts, m, 0)
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
    if case.variant in ("bf16", "fp16"):
        kernels.bf16_gemm_kernel[grid](a, b, output, starts, counts, n, k, TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=64)
        return
    scales = inputs["a_scales"]
    row, block = scales.stride()[-2:]
    if case["layout"] == "mn_major":
        row, block = block, row
    kernels.fp8_gemm_kernel[grid](
        a, b, scales, inputs["b_scales"].contiguous(), output, starts, scale_starts, counts, n, k,
        scale_group, row, block, triton.cdiv(n, 128),
        SCALE=case["scale"], PACKED=scales.dtype == torch.int32, TILE_M=TILE_M, TILE_N=TILE_N, GROUP=128,
    )  # fmt: skip
