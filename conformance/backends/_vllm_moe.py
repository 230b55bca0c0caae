"""vLLM's expert layers in Triton: ``fused_experts`` without its compiled operators.

Read in vLLM 0.33, ``model_executor/layers/fused_moe``:
- ``fused_experts_impl``: FC1 is stored as BF16; so is silu(gate) * up; FC2 is multiplied by the router weight in FP32
  and stored as BF16. ``apply_router_weight_on_input`` multiplies FC1's output instead.
- ``fused_moe_kernel``: a block of K joins as ``tl.dot(a, b) * a_scale * b_scale``; with one scale a tensor the dot
  products run on over all of K. Tiles with fewer than 64 rows swap the operands on Hopper, so that all use ``wgmma``.
- activations are quantised by ``per_token_group_quant_fp8`` (see `_vllm_quant`), under powers of two where vLLM's
  configuration says so (``VLLM_USE_DEEP_GEMM_E8M0`` with DeepGEMM at hand), as a case's policy asks here.
- silu is computed by ``_swiglu_limit_pad_aware_kernel``, vLLM's Triton kernel for layers with a clamp, since its other
  one is compiled; sorting and the last sum are torch (`_vllm_ops`). ``gate / (1 + tl.exp(-gate))`` is ex2.approx(x *
  log2 e), and div.full of 2 ulp (PTX ISA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.backends import _fused_experts
from conformance.backends import _vllm_quant as quant
from conformance.backends._fused_experts import BLOCK
from conformance.backends._vllm_modules import FUSED_MOE, MOE_UTILS, QUANT, library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

LAYER = "vllm/model_executor/layers/fused_moe/fused_moe.py: fused_experts_impl"
TACTICS = {
    "16x64": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 1, "num_stages": 4},
    "64x64": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 32, "num_stages": 3},
    "128x128": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 16, "num_stages": 3},
}
"""Tiles of the tuned configurations that vLLM ships for an H200."""
SWEPT: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",), "tactic": tuple(TACTICS)}

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def claims(major: int) -> Iterable[Claim]:
    """Block-scaled, tensor-scaled and unquantised layers where the accumulator is known. major: of the capability."""
    if major != 9:
        return []
    layer = {"gate": ("first",), "out": ("bf16",), "scaling": ("1",)}
    return [
        Claim(operation="moe", variant=variant, source=LAYER, where=layer, multiples=multiples, options=SWEPT)
        for variant, multiples in (
            ("deepseek_fp8", {"hidden": BLOCK, "intermediate": BLOCK}),
            ("fp8_per_tensor", {"hidden": 16, "intermediate": 16}),
            ("bf16", {"hidden": 8, "intermediate": 8}),
        )
    ]


def recipe(claim: Claim) -> Recipe:
    """As read in the source; see the module."""
    return _fused_experts.recipe(claim, static={}, amax_floor=quant.AMAX_FLOOR, payload_error=quant.FULL)


def prepare(case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
    """The library's call, bound to its inputs. Raises `Unsupported`."""
    if case["out"] != "bf16" or case["gate"] != "first" or case["scaling"] != "1":
        raise Unsupported("BF16, gate first, no scaling factor")
    run = library().function("fused_experts_impl", FUSED_MOE)
    ids, expert_map = routed(case, inputs)
    weights, arguments = _fused_experts.weights(case, inputs)
    arguments["apply_router_weight_on_input"] = case["weight"] == "input"
    if expert_map is not None:
        arguments |= {"expert_map": expert_map, "global_num_experts": len(expert_map)}
    limit = 0.0 if case["limit"] == "none" else float(case["limit"])
    powers, tactic = case["scale"] == "ceil", options.get("tactic")

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with configured(ids, expert_map, limit=limit, powers_of_two=powers, tactic=tactic):
            return {"output": run(inputs["x"], *weights, inputs["weights"], ids, **arguments)}

    return call


def routed(case: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Ids of experts, none of them negative, and the map from all experts to those here, None where all are.

    An id of -1 becomes one more expert, which lives elsewhere: vLLM's kernels take ids of experts only.
    """
    ids, given = inputs["ids"], inputs.get("expert_map")
    if given is None and case["ids"] != "elsewhere":
        return ids, None
    count = case.integer("experts")
    here = torch.arange(count, dtype=torch.int32, device=ids.device) if given is None else given.to(torch.int32)
    return torch.where(ids < 0, len(here), ids), torch.nn.functional.pad(here, (0, 1), value=-1)


@contextmanager
def configured(
    ids: Tensor, expert_map: Tensor | None, *, limit: float, powers_of_two: bool, tactic: str | None
) -> Iterator[None]:
    """Within it vLLM is configured as a case asks; everything is undone after."""
    layer, activation = library().load(FUSED_MOE), library().function("_swiglu_limit_pad_aware", MOE_UTILS)

    def silu(kind: Any, output: Tensor, gate_up: Tensor) -> Tensor:
        activation(output, gate_up, ids.reshape(-1), limit, expert_map)
        return output

    with ExitStack() as stack:
        stack.enter_context(patch.object(layer, "apply_moe_activation", silu))
        stack.enter_context(patch.object(library().load(QUANT), "is_deep_gemm_e8m0_used", lambda: powers_of_two))
        if tactic is not None:
            config = {**TACTICS[tactic], "BLOCK_SIZE_K": BLOCK, "SPLIT_K": 1, "num_warps": 4}
            stack.enter_context(patch.object(layer, "try_get_optimal_moe_config", lambda *_, **__: dict(config)))
        yield
