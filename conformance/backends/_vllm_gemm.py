"""vLLM's block-scaled GEMM and its expert kernel in Triton.

A block of K joins the accumulator as ``accumulator += tl.dot(a, b) * a_s[:, None] * b_s[None, :]``, a product and one
FMA. The tiles are 64 rows high, which Triton compiles to ``wgmma`` on SM90.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from conformance.backends._sglang_gemm import SWEPT, activation_scales, fp32_scales, grouped_scales, tiles
from conformance.backends._vllm_modules import FUSED_MOE, QUANT, library
from conformance.backends._vllm_ops import moe_align_block_size
from references.backend import Claim, Unsupported
from references.recipes import Recipe

DENSE = "vllm/model_executor/layers/quantization/utils/fp8_utils.py: w8a8_triton_block_scaled_mm"
EXPERTS = "vllm/model_executor/layers/fused_moe/fused_moe.py: invoke_fused_moe_triton_kernel"
BLOCK = [128, 128]
STREAMS = {"stream": ("side",), "graph": ("replay",)}
LARGE_BATCH = 128
"""Tokens for which vLLM's default tile has 64 rows."""
OUTPUTS = {"fp32": (torch.float32, tl.float32), "bf16": (torch.bfloat16, tl.bfloat16)}

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def claims(major: int) -> Iterable[Claim]:
    """``deepseek_fp8`` where the accumulator is known. major: of the compute capability."""
    if major not in (9, 10):
        return []
    return [
        Claim(operation="gemm", variant="deepseek_fp8", source=DENSE, options=SWEPT),
        Claim(operation="grouped_gemm", variant="deepseek_fp8", source=EXPERTS, options=STREAMS),
    ]


def recipe(claim: Claim, major: int) -> Recipe:
    """13 bits on SM90, bit for bit; FP32 in any order above."""
    if major != 9:
        return Recipe(source=claim.source)
    return Recipe(source=claim.source, accumulator="hopper_fp8", scale_combination="fma_dot_sa_sb")


def prepare(case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
    """The library's call. Raises `Unsupported`."""
    if case.variant != "deepseek_fp8":
        raise Unsupported(f"no {case.operation} {case.variant}")
    return _grouped(case, inputs) if case.operation == "grouped_gemm" else _dense(case, inputs, options)


def _dense(case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
    multiply = library().function("w8a8_triton_block_scaled_mm", QUANT)
    a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
    a_scales, b_scales = activation_scales(case, inputs["a_scales"]), inputs["b_scales"]
    if b_scales.dtype == torch.uint8:
        b_scales = b_scales.view(torch.float8_e8m0fnu)  # vLLM decodes UE8M0 itself
    dtype = OUTPUTS[case["out"]][0]

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with tiles(library().load(QUANT), options.get("tactic")):
            return {"output": multiply(a, b, a_scales, b_scales, BLOCK, output_dtype=dtype)}

    return call


def _grouped(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    launch = library().function("invoke_fused_moe_triton_kernel", FUSED_MOE)
    default = library().function("get_default_config", FUSED_MOE)
    groups, n, k = (case.integer(key) for key in ("groups", "n", "k"))
    config = dict(default(LARGE_BATCH, groups, n, k, 1, "fp8_w8a8", BLOCK))
    a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
    a_scales, b_scales = grouped_scales(case, inputs["a_scales"]), fp32_scales(inputs["b_scales"])
    a = a.reshape(-1, k)
    ids = group_of_rows(case, inputs)
    rows, experts, padded = aligned(ids, config["BLOCK_SIZE_M"], groups)
    compute = OUTPUTS[case["out"]][1]

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        output = out["output"]
        launch(
            a, b, output.view(-1, 1, n), a_scales, b_scales, None, rows, experts, padded, False, 1, config,
            compute_type=compute, use_fp8_w8a8=True, use_int8_w8a8=False, use_int8_w8a16=False,
            use_int4_w4a16=False, per_channel_quant=False, block_shape=BLOCK,
        )  # fmt: skip
        return {"output": output}

    return call


def group_of_rows(case: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """int32 `[rows]`: the group of each row, -1 for padding."""
    if case["grouping"] != "masked":
        return inputs["m_indices"]
    counts, m = inputs["masked_m"], case.integer("m")
    group = torch.arange(len(counts), dtype=torch.int32, device=counts.device)[:, None]
    used = torch.arange(m, device=counts.device)[None, :] < counts[:, None]
    return torch.where(used, group, -1).to(torch.int32).reshape(-1)


def aligned(ids: Tensor, block: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_align_block_size` of rows by group: int32 rows, groups of blocks, and ``[1]`` how many of the rows count."""
    most = -(-(len(ids) + groups * (block - 1)) // block)
    rows, owners, padded = (ids.new_empty(size, dtype=torch.int32) for size in (most * block, most, 1))
    moe_align_block_size(ids, groups, block, rows, owners, padded)
    return rows, owners, padded
