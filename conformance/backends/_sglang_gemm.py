"""SGLang's block-scaled GEMM in Triton, ``w8a8_block_fp8_matmul_triton``.

The default tiles are 64 x 128 x 128, which Triton compiles to ``wgmma`` on SM90; a block of K joins the accumulator as
``accumulator += tl.dot(a, b) * a_s[:, None] * b_s[None, :]``, a product and one FMA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.backends._sglang_modules import GEMM, library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

SOURCE = "sglang/kernels/ops/gemm/fp8_kernel.py: w8a8_block_fp8_matmul_triton"
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TACTICS = {
    "64x32": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_stages": 4},
    "64x64": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "num_stages": 4},
    "64x128": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 64, "num_stages": 3},
}
"""Tiles of the tuned configurations that SGLang and vLLM ship for an H200, of those that run on ``wgmma`` a block of K
at a time: the answer must be the same to the last bit. (Few have 16 rows, which run on ``mma.sync``.)"""
CONFIGURATIONS = "get_w8a8_block_fp8_configs"
SWEPT = {"stream": ("side",), "graph": ("replay",), "tactic": tuple(TACTICS)}
FP32_ACCUMULATORS = (10,)
"""Major compute capabilities on which FP8 tensor cores add in FP32."""

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def claims(major: int) -> Iterable[Claim]:
    """``deepseek_fp8`` where the accumulator is known. major: of the compute capability."""
    if major != 9 and major not in FP32_ACCUMULATORS:
        return []
    return [Claim(operation="gemm", variant="deepseek_fp8", source=SOURCE, options=SWEPT)]


def recipe(claim: Claim, major: int) -> Recipe:
    """13 bits on SM90, bit for bit; FP32 in any order above."""
    if major != 9:
        return Recipe(source=claim.source)
    return Recipe(source=claim.source, accumulator="hopper_fp8", scale_combination="fma_dot_sa_sb")


def prepare(case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
    """The library's call; UE8M0 scales become the FP32 numbers that it takes. Raises `Unsupported`."""
    if case.variant != "deepseek_fp8":
        raise Unsupported(f"no {case.operation} {case.variant}")
    multiply = library().function("w8a8_block_fp8_matmul_triton", GEMM)
    a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
    a_scales, b_scales = activation_scales(case, inputs["a_scales"]), fp32_scales(inputs["b_scales"])
    out = OUTPUTS[case["out"]]

    def call(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with tiles(library().load(GEMM), options.get("tactic")):
            return {"output": multiply(a, b, a_scales, b_scales, [128, 128], output_dtype=out)}

    return call


def tiles(module: ModuleType, tactic: str | None) -> AbstractContextManager[Any]:
    """Within it the library finds the tactic as its tuned configuration; None leaves it alone."""
    if tactic is None:
        return nullcontext()
    config = {**TACTICS[tactic], "num_warps": 4}
    return patch.object(module, CONFIGURATIONS, lambda *_: {1: config})


def activation_scales(case: Any, stored: Tensor) -> Tensor:
    """FP32 `[..., m, ceil(k / 128)]`, a view of the stored order where that is FP32."""
    if case["layout"] == "plain":
        return fp32_scales(stored)
    m, columns = case.integer("m"), -(-case.integer("k") // 128)
    rows = stored.transpose(-1, -2)[..., :m, :]
    if stored.dtype != torch.int32:
        return rows
    # A clone, because a single column counts as contiguous whatever its stride.
    return fp32_scales(rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :columns])


def grouped_scales(case: Any, stored: Tensor) -> Tensor:
    """The same for a grouped GEMM, with the slabs of ``masked`` one after another: `[rows, ceil(k / 128)]`."""
    scales = activation_scales(case, stored)
    return scales.reshape(-1, scales.shape[-1])


def fp32_scales(scales: Tensor) -> Tensor:
    """UE8M0 codes as FP32 numbers, from their bits; FP32 scales as they are."""
    if scales.dtype != torch.uint8:
        return scales
    wide = scales.to(torch.int32)
    return torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32)
