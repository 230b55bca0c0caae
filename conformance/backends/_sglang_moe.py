"""SGLang's expert layers in Triton: ``fused_experts`` as `moe`, the kernel alone as a grouped GEMM.

Read in SGLang 0.5.23 (``moe_runner/triton_utils/fused_moe.py``, ``kernels/ops/moe/fused_moe_triton_kernels.py``): FC1
and silu(gate) * up are stored as BF16; activations are quantised by the JIT kernels; FC2 is multiplied by the router
weight in FP32 and stored as BF16; experts are added in FP32, but two of them in BF16. Silu is x / (1 + expf(-x)) under
``--use_fast_math``: ex2.approx(x * log2 e) and div.approx. A block of K joins as
``accumulator += tl.dot(a, b) * (a_scale[:, None] * b_scale)``. Activation scales are continuous, whatever scales the
weights have: there is no argument that asks for powers of two. Ids of all ranks become those of one in the dispatcher
before it (``token_dispatcher/standard.py``), where -1 stays -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor

from conformance.backends import _fused_experts
from conformance.backends import _sglang_dispatcher as dispatcher
from conformance.backends import _sglang_quant as quant
from conformance.backends._fused_experts import BLOCK
from conformance.backends._sglang_gemm import fp32_scales, grouped_scales
from conformance.backends._sglang_modules import MOE, RUNNER, library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

LAYER = "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe.py: fused_experts"
KERNEL = "sglang/kernels/ops/moe/fused_moe_triton_kernels.py: fused_moe_kernel"
TILES = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": BLOCK,
    "BLOCK_SIZE_K": BLOCK,
    "GROUP_SIZE_M": 32,
    "num_warps": 4,
    "num_stages": 3,
}
"""SGLang's default for block-scaled FP8 (``fused_moe_triton_config.py: get_default_config``)."""
TACTICS = {
    "16x64": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 1, "num_stages": 4},
    "64x64": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 32, "num_stages": 3},
    "128x128": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": BLOCK, "GROUP_SIZE_M": 16, "num_stages": 3},
}
"""Tiles of the tuned configurations that SGLang ships for an H200."""
CONFIGURATIONS = "try_get_optimal_moe_config"
STREAMS: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",)}
SWEPT: Mapping[str, tuple[str, ...]] = {**STREAMS, "tactic": tuple(TACTICS)}
OUTPUTS = {"fp32": tl.float32, "bf16": tl.bfloat16}

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def claims(*, mapped: bool = False) -> Iterable[Claim]:
    """Expert layers with continuous activation scales, unquantised ones, and grouped GEMMs; SM90.

    mapped: whether the dispatcher's function is at hand.
    """
    layer: dict[str, tuple[str, ...]] = {"gate": ("first",), "limit": ("none",), "out": ("bf16",)}
    source = f"{LAYER}; {dispatcher.SOURCE}"
    if not mapped:
        layer["ids"], source = ("spread", "skewed", "elsewhere"), LAYER
    # A row of one block goes another way, to the kernel that quantises whole rows.
    whole = {"hidden": 2 * BLOCK, "intermediate": 2 * BLOCK}
    return [
        *(
            Claim(operation="moe", variant=variant, source=source, where=where, multiples=multiples, options=SWEPT)
            for variant, where, multiples in (
                ("deepseek_fp8", {**layer, "scale": ("fp32",)}, whole),
                ("bf16", layer, dict.fromkeys(whole, 8)),
                ("fp8_per_tensor", layer, dict.fromkeys(whole, 16)),
            )
        ),
        Claim(operation="grouped_gemm", variant="deepseek_fp8", source=KERNEL, options=STREAMS),
    ]


def recipe(claim: Claim) -> Recipe:
    """As read in the source; see the module."""
    if claim.operation == "grouped_gemm":
        return Recipe(source=claim.source, accumulator="hopper_fp8", scale_combination="fma_dot_sasb")
    return _fused_experts.recipe(
        claim,
        static={"payload_arithmetic": "reciprocal"},
        amax_floor=quant.AMAX_FLOOR,
        payload_error=quant.AMAX_ERROR,
    )


def prepare(case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
    """The library's call, bound to its inputs. Raises `Unsupported`."""
    if case.operation == "grouped_gemm":
        return _grouped(case, inputs)
    call = _layer(case, inputs)

    def tiled(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with tiles(library().load(f"{RUNNER}.fused_moe"), options.get("tactic")):
            return call(out)

    return tiled


def tiles(module: ModuleType, tactic: str | None) -> AbstractContextManager[Any]:
    """Within it the library finds the tactic as its tuned configuration, for both products; None leaves it alone."""
    if tactic is None:
        return nullcontext()
    config = {**TACTICS[tactic], "BLOCK_SIZE_K": BLOCK, "num_warps": 4}
    return patch.object(module, CONFIGURATIONS, lambda *_, **__: (dict(config), (None, None)))


def _layer(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    if case["out"] != "bf16" or case["gate"] != "first" or case["limit"] != "none":
        raise Unsupported("BF16, gate first, no limit")
    run = library().function("fused_experts", f"{RUNNER}.fused_moe")
    experts, ids, mapping = case.integer("experts"), inputs["ids"], inputs.get("expert_map")
    to_local = None if mapping is None else dispatcher.to_local(library().folder)
    config = SimpleNamespace(
        activation="silu",
        is_gated=True,
        inplace=False,
        no_combine=False,
        no_combine_keep_router_weight=False,
        apply_router_weight_on_input=case["weight"] == "input",
        routed_scaling_factor=float(case["scaling"]),
        gemm1_alpha=None,
        gemm1_clamp_limit=None,
        swiglu_limit=None,
        gate_up_interleaved=False,
        # Experts that live elsewhere have the id -1, which the kernels skip where there are more than are local.
        num_experts=experts + (case["ids"] == "elsewhere") if mapping is None else len(mapping),
        num_local_experts=experts,
    )
    weights, arguments = _fused_experts.weights(case, inputs)
    arguments["moe_runner_config"] = config

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        local = ids if to_local is None or mapping is None else to_local(ids, mapping)
        return {"output": run(inputs["x"], *weights, topk_output=(inputs["weights"], local, None), **arguments)}

    return call


def _grouped(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    if case.variant != "deepseek_fp8":
        raise Unsupported(f"no grouped_gemm {case.variant}")
    align = library().function("moe_align_block_size", f"{RUNNER}.moe_align_block_size")
    launch = library().function("invoke_fused_moe_kernel", f"{MOE}.fused_moe_triton_kernels")
    groups, n = case.integer("groups"), case.integer("n")
    a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
    ids = group_of_rows(case, inputs)
    compute = OUTPUTS[case["out"]]
    a_scales, b_scales = grouped_scales(case, inputs["a_scales"]), fp32_scales(inputs["b_scales"])
    a = a.reshape(-1, a.shape[-1])

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        output = out["output"]
        rows, experts, padded = align(ids, TILES["BLOCK_SIZE_M"], groups)
        launch(
            a, b, None, output.view(-1, n), a_scales, b_scales, None, torch.ones_like(ids, dtype=torch.float32), ids,
            rows, experts, padded, False, 1, TILES, compute_type=compute, use_fp8_w8a8=True, use_int8_w8a8=False,
            use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False, block_shape=[BLOCK, BLOCK],
        )  # fmt: skip
        return {"output": output}

    return call


def group_of_rows(case: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """int32 `[rows, 1]`: the group of each row, -1 for padding."""
    if case["grouping"] != "masked":
        return inputs["m_indices"].view(-1, 1)
    counts, m = inputs["masked_m"], case.integer("m")
    group = torch.arange(len(counts), dtype=torch.int32, device=counts.device)[:, None]
    used = torch.arange(m, device=counts.device)[None, :] < counts[:, None]
    return torch.where(used, group, -1).to(torch.int32).reshape(-1, 1)
