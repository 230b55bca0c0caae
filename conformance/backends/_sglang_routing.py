"""SGLang's fused router in Triton, ``moe_fused_gate``: scores, bias, groups, top-k, weights in one kernel.

Read in SGLang 0.5.23, ``kernels/ops/moe/moe_fused_gate.py``: everything in FP32; ``tl.exp`` is ex2.approx(t * log2 e),
``/`` is div.full.f32 (2 ulp); the lowest index wins among experts and among groups; a sum of 0 is replaced by 1, to
others nothing is added; a weight of a shared expert is 1. Ids become those of a rank in the dispatcher, behind it
(``token_dispatcher/standard.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _sglang_dispatcher as dispatcher
from conformance.backends._sglang_modules import GATE, library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

SOURCE = "sglang/kernels/ops/moe/moe_fused_gate.py: moe_fused_gate"
SCORES = {
    "Default": "softmax",
    "RenormalizeNaive": "softmax",
    "MiniMax2": "sigmoid",
    "DeepSeekV3": "sigmoid",
    "SqrtSoftplus": "sqrtsoftplus",
}
EXP_SLOPE = 1.25 * 2.0**-23
"""exp(t) as ex2(RN(t * RN(log2 e))): RN of the product errs by 2^-24 |t|, RN of log2 e by 2^-26 |t|, both relative."""
DIVISION_ERROR = 2.0**-22
LOG_ERROR = 2.0**-21
"""z * log(u) / (u - 1): log and the quotient, 2 ulp each."""

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def claims(*, mapped: bool = False) -> Iterable[Claim]:
    """Five methods, packed or with FP32 weights, and a rank's ids beside these.

    mapped: whether the dispatcher's function is at hand.
    """
    return [
        Claim(
            operation="routing",
            variant=method,
            source=f"{SOURCE}; {dispatcher.SOURCE}" if mapped else SOURCE,
            where={"out": ("fp32", "packed", "local") if mapped else ("fp32", "packed")},
            options={"stream": ("side",), "graph": ("replay",)},
        )
        for method in SCORES
    ]


def recipe(claim: Claim) -> Recipe:
    """As read in the source; see the module."""
    return Recipe(
        source=claim.source,
        exp_slope=EXP_SLOPE,
        division_error=DIVISION_ERROR,
        log_error=LOG_ERROR,
        denominator="none",
        group_tie_rule="lowest_index",
    )


def prepare(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    """The library's call, bound to its inputs. Raises `Unsupported`."""
    method, logits, bias = case.variant, inputs["logits"], inputs.get("bias")
    if method not in SCORES:
        raise Unsupported(f"no routing {method}")
    route = library().function("moe_fused_gate", GATE)
    shared, tokens = case.integer("shared"), len(logits)
    topk = case.integer("topk") + shared
    arguments: dict[str, Any] = {
        "scoring_func": SCORES[method],
        "num_fused_shared_experts": shared,
        "renormalize": _renormalized(case),
        "apply_routed_scaling_factor_on_output": True,
    }
    if bias is not None:
        arguments["routed_scaling_factor"] = float(case["scaling"])
    if method == "DeepSeekV3" and case["groups"] != case["topk_group"]:
        arguments |= {"num_expert_group": case.integer("groups"), "topk_group": case.integer("topk_group")}
    if case["padding"] == "some":
        real = torch.full((), tokens * 3 // 4, dtype=torch.int32, device=logits.device)
        arguments["num_token_non_padded"] = real
    packed, mapping = case["out"] == "packed", inputs.get("expert_map")
    to_local = None if mapping is None else dispatcher.to_local(library().folder)

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if packed:
            arguments["packed_out"] = out["packed"]
        weights, ids = route(logits, bias, topk, **arguments)
        if packed:
            return {"packed": out["packed"]}
        found = {"selection": ids, "weights": weights}
        return found if to_local is None or mapping is None else {**found, "local": to_local(ids, mapping)}

    return call


def _renormalized(case: Any) -> bool:
    if case.variant in ("Default", "RenormalizeNaive"):
        return bool(case.variant == "RenormalizeNaive")
    return bool(case.variant == "MiniMax2" or case["renormalize"] == "on")
