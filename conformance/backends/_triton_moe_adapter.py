"""Launches of the fused expert layer in Triton, and what they claim.

On SM90 the products run on Hopper's FP8 and BF16 tensor cores: FP8 sums of 128 products with 13 fractional bits that
join an FP32 accumulator, BF16 sums over all of K. The interpreter multiplies with numpy in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from conformance.backends import _triton_kernels as kernels
from conformance.backends import _triton_moe as moe_kernels
from conformance.backends._triton_gemm_adapter import KNOWN
from conformance.backends._triton_routing import EXP_SLOPE
from references.backend import Claim
from references.recipes import Recipe

SOURCE = "conformance/backends/_triton_moe.py"
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
AMAX_FLOOR = 2.0**-40
"""Lower bound of amax under FP32 scales, so that a zero block has a quotient."""
TILE_M = 64
STAGES = {True: 3, False: 2}
"""Of FP8 and BF16 loops: three of BF16's gate, up and x tiles are more than Hopper's shared memory."""
INTERPRETED = {"experts": 4, "hidden": 160, "intermediate": 160, "tokens": 70, "topk": 4}
"""Sizes in the interpreter, where a program takes some milliseconds and every expert needs its own."""

SWEPT = {"stream": ("side",), "graph": ("replay",)}


def claims(interpreted: bool, capability: tuple[int, int] | None) -> Iterable[Claim]:
    """``deepseek_fp8``, with continuous and with power-of-two scales, and ``bf16``. capability: of the GPU."""
    if capability is not None and capability[0] not in KNOWN:
        return []
    source = f"{SOURCE}: fc1_kernel, fc2_kernel, combine_kernel"
    maxima, options = (INTERPRETED, {}) if interpreted else ({}, SWEPT)
    return [
        Claim(
            operation="moe", variant=variant, source=source, where={"scale": (scale,)}, maxima=maxima, options=options
        )
        for variant, scale in (("deepseek_fp8", "fp32"), ("deepseek_fp8", "ceil"), ("bf16", "none"))
    ]


def recipe(claim: Claim, capability: tuple[int, int] | None) -> Recipe:
    """FP32 on the way, BF16 or FP8 where the format says so; ``tl.exp`` is ``ex2.approx`` of a product on a GPU."""
    floor = AMAX_FLOOR if claim.where.get("scale") == ("fp32",) else 0.0
    if capability is not None and capability[0] == 9 and claim.variant == "deepseek_fp8":
        return Recipe(source=SOURCE, exp_slope=EXP_SLOPE, amax_floor=floor, accumulator="hopper_fp8")
    return Recipe(source=SOURCE, exp_slope=EXP_SLOPE, amax_floor=floor)


def moe(case: Any, inputs: Mapping[str, Tensor], output: Tensor, *, use_ue8m0: tuple[bool, bool] | None = None) -> None:
    """Launch a layer into ``output`` ``[tokens, hidden]``.

    use_ue8m0: whether activations get power-of-two scales at FC1 and at FC2; as the case says where None.
    """
    asked = case["scale"] == "ceil"
    at_fc1, at_fc2 = (asked, asked) if use_ue8m0 is None else use_ue8m0
    fp8, on_input = case.variant == "deepseek_fp8", case["weight"] == "input"
    tokens, topk, hidden, inner = (case.integer(key) for key in ("tokens", "topk", "hidden", "intermediate"))
    ids, weights = inputs["ids"].contiguous(), inputs["weights"].contiguous()
    if "expert_map" in inputs:
        ids = torch.where(ids < 0, ids, inputs["expert_map"][ids.clamp(min=0).to(torch.int64)])
    w1, w2 = inputs["w1"].contiguous(), inputs["w2"].contiguous()
    x, x_scales = inputs["x"].contiguous(), inputs["x"]
    h = x.new_empty(tokens * topk, inner)
    h_scales, w1_scales, w2_scales = x_scales, x_scales, x_scales
    if fp8:
        x, x_scales = _quantised(x, at_fc1)
        h = h.to(torch.uint8)
        h_scales = h.new_empty(len(h), triton.cdiv(inner, 128), dtype=torch.uint8 if at_fc2 else torch.float32)
        w1_scales, w2_scales = (inputs[name].contiguous() for name in ("w1_scales", "w2_scales"))
    pairs, expert, start, end = tiles(ids, len(w1))
    gate_at, up_at = (0, inner) if case["gate"] == "first" else (inner, 0)
    limit = float("inf") if case["limit"] == "none" else float(case["limit"])
    terms = h.new_empty(tokens * topk, hidden, dtype=torch.float32)
    blocks = triton.cdiv(hidden, 128), triton.cdiv(inner, 128)
    words = {"FP8": fp8, "W_UE8M0": asked, "WEIGHT_ON_INPUT": on_input, "TILE_M": TILE_M, "num_stages": STAGES[fp8]}
    moe_kernels.fc1_kernel[(len(expert), blocks[1])](
        x, x_scales, w1, w1_scales, h, h_scales, pairs, weights, expert, start, end,
        topk, hidden, inner, *blocks, triton.cdiv(2 * inner, 128), gate_at, up_at, limit, AMAX_FLOOR,
        X_UE8M0=at_fc1, H_UE8M0=at_fc2, **words,
    )  # fmt: skip
    moe_kernels.fc2_kernel[(len(expert), blocks[0])](
        h, h_scales, w2, w2_scales, terms, pairs, weights, expert, start, end, hidden, inner, *blocks,
        H_UE8M0=at_fc2, **words,
    )  # fmt: skip
    moe_kernels.combine_kernel[(triton.cdiv(tokens, TILE_M), blocks[0])](
        terms, ids, output, tokens, topk, hidden, float(case["scaling"]), TILE_M=TILE_M
    )


def _quantised(x: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    rows, k = x.shape
    columns = triton.cdiv(k, 128)
    payload = x.new_empty(rows, k, dtype=torch.uint8)
    scales = x.new_empty(rows, columns, dtype=torch.uint8 if use_ue8m0 else torch.float32)
    kernels.quantize_e4m3_kernel[(triton.cdiv(rows, TILE_M), columns)](
        x, payload, scales, rows, k, *x.stride(), columns, AMAX_FLOOR,
        POLICY="ceil" if use_ue8m0 else "fp32", TILE_M=TILE_M, GROUP=128,
    )  # fmt: skip
    return payload, scales


def tiles(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of a token and an expert by expert, cut into tiles of `TILE_M` pairs of one expert each.

    ids: int32 ``[tokens, topk]``, negative for none. Returns, all int32: the pairs' numbers in the order of their
    experts; each tile's expert and its first place in that order; and where each expert's pairs end. There are as many
    tiles as there may have to be, so that nothing waits for the device; those too many begin where their expert ends.
    """
    flat = ids.reshape(-1)
    ordered, pairs = torch.sort(flat, stable=True)
    numbers = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    starts = torch.searchsorted(ordered, numbers, out_int32=True)
    last = ((ends - starts + TILE_M - 1) // TILE_M).cumsum(0)
    most = flat.numel() // TILE_M + min(experts, flat.numel())
    tile = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(last, tile, right=True).clamp(max=experts - 1)
    before = last[expert] - (ends[expert] - starts[expert] + TILE_M - 1) // TILE_M
    start = torch.minimum(starts[expert] + (tile - before) * TILE_M, ends[expert])
    return pairs.to(torch.int32), expert.to(torch.int32), start.to(torch.int32), ends
