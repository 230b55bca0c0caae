"""vLLM's routers: ``dsv4_topk`` in Triton, ``grouped_topk`` in torch, as they run on a GPU.

Read in vLLM 0.33, ``model_executor/layers/fused_moe/router``: ``dsv4_topk`` scores by sqrt(log(1 + exp(x))), or sqrt(x)
above 20, with Triton's fast ``exp`` and ``log``; its weights are multiplied by factor / sum. ``grouped_topk`` (with
``VLLM_USE_FUSED_MOE_GROUPED_TOPK`` off) scores in the logits' own dtype and leaves ties to ``torch.topk``. Nothing is
added to a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends._vllm_modules import DSV4, GROUPED, library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

ROUTER = "vllm/model_executor/layers/fused_moe/router"
TRITON = f"{ROUTER}/dsv4_topk.py: dsv4_topk"
TORCH = f"{ROUTER}/grouped_topk_router.py: grouped_topk"
STREAMS = {"stream": ("side",), "graph": ("replay",)}
SCORES = {"DeepSeekV3": "sigmoid", "GroupedTopK": "softmax"}
EXP_SLOPE = 1.25 * 2.0**-23
DIVISION_ERROR = 2.0**-22

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def claims() -> Iterable[Claim]:
    """SqrtSoftplus with six of 256 or 384 experts; the grouped methods of FP32 logits."""
    plain: dict[str, tuple[str, ...]] = {"out": ("fp32",), "shared": ("0",), "dtype": ("fp32",)}
    dsv4 = {
        **plain,
        "experts": ("256", "384"),
        "topk": ("6",),
        "renormalize": ("on",),
        "bias_dtype": ("fp32",),
        "stride": ("contiguous", "offset"),
    }
    yield Claim(operation="routing", variant="SqrtSoftplus", source=TRITON, where=dsv4, options=STREAMS)
    for method in SCORES:
        # Groups rank by two experts where there is a bias.
        yield Claim(
            operation="routing",
            variant=method,
            source=TORCH,
            where={**plain, "padding": ("none",)},
            multiples={"experts": 2},
            options=STREAMS,
        )


def recipe(claim: Claim) -> Recipe:
    """As read in the source; see the module."""
    if claim.variant == "SqrtSoftplus":
        return Recipe(source=claim.source, exp_slope=EXP_SLOPE, division_error=DIVISION_ERROR, denominator="none")
    return Recipe(source=claim.source, tie_rule="any", denominator="none")


def prepare(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    """The library's call, bound to its inputs. Raises `Unsupported`."""
    logits, bias, topk = inputs["logits"], inputs.get("bias"), case.integer("topk")
    if case.variant == "SqrtSoftplus":
        return _dsv4(case, logits, bias)
    if case.variant not in SCORES:
        raise Unsupported(f"no routing {case.variant}")
    route = library().function("grouped_topk", GROUPED)
    groups, kept = case.integer("groups"), case.integer("topk_group")
    if groups == kept:
        groups = kept = 1  # nothing is dropped, and groups of one have no two largest
    arguments = {
        "renormalize": case["renormalize"] == "on",
        "num_expert_group": groups,
        "topk_group": kept,
        "scoring_func": SCORES[case.variant],
        "routed_scaling_factor": float(case["scaling"]),
        "e_score_correction_bias": bias,
    }

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights, ids = route(logits, logits, topk, **arguments)
        return {"selection": ids, "weights": weights}

    return call


def _dsv4(case: Any, logits: Tensor, bias: Tensor | None) -> Call:
    usable = library().function("can_use_dsv4_topk", DSV4)
    if not usable(logits, bias, case.integer("topk"), case["renormalize"] == "on", torch.int32):
        raise Unsupported("can_use_dsv4_topk says no")
    route = library().function("dsv4_topk", DSV4)
    tokens = len(logits)
    padding = None
    if case["padding"] == "some":
        padding = torch.arange(tokens, device=logits.device) >= tokens * 3 // 4

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights, ids = route(logits, bias, torch.int32, float(case["scaling"]), is_padding=padding)
        return {"selection": ids, "weights": weights}

    return call
