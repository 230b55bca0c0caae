"""SGLang's routers in plain torch (``sglang/srt/layers/moe/topk.py``), called as written, without ``torch.compile``.

All of them return FP32 weights and leave ties to ``torch.topk``. Those that score in the logits' own dtype round BF16
scores to BF16, which their recipes declare; FP16 scores underflow below 2^-25, for which no choice exists, so those
claims leave FP16 out. Ids are mapped to those of a rank as its dispatcher does it, after the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _lone_module as lone
from conformance.backends import _sglang_dispatcher as dispatcher
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("sglang_torch",)

DISTRIBUTION = "sglang"
FILE = "sglang/srt/layers/moe/topk.py"

PLAIN: Mapping[str, dict[str, Any]] = {
    "Default": {"scoring_func": "softmax", "renormalize": False},
    "RenormalizeNaive": {"scoring_func": "softmax", "renormalize": True},
    "Sigmoid": {"scoring_func": "sigmoid", "renormalize": False},
    "SigmoidRenorm": {"scoring_func": "sigmoid", "renormalize": True},
}
"""`fused_topk_torch_native` by method."""
RAW = {"Renormalize": True, "TopK": False}
"""`fused_topk_softmax_torch_raw_logits` by method: whether it renormalises."""
BIASED = {"MiniMax2": "sigmoid", "SqrtSoftplus": "sqrtsoftplus"}
"""`biased_topk_impl` by method."""
BF16_ERROR = 2.0**-8 + 2.0**-23
"""A score in FP32, then rounded to BF16: half an ulp of eight bits, and the FP32 rounding before it."""
FUNCTIONS = {
    **dict.fromkeys(BIASED, "biased_topk_impl"),
    "DeepSeekV3": "biased_grouped_topk_impl, kimi_k2_biased_topk_impl",
    "GroupedTopK": "grouped_topk_gpu",
}
"""The functions that score in the logits' dtype, by method."""

Call = Callable[[], dict[str, Tensor]]


class SGLangBackend:
    """The functions of the installed SGLang, looked up by name."""

    name = "sglang_torch"

    def __init__(self) -> None:
        module = lone.load(DISTRIBUTION, FILE)
        self._native = lone.function(module, "fused_topk_torch_native")
        self._raw = lone.function(module, "fused_topk_softmax_torch_raw_logits")
        self._biased = lone.function(module, "biased_topk_impl")
        self._ungrouped = lone.function(module, "kimi_k2_biased_topk_impl")
        self._biased_grouped = lone.function(module, "biased_grouped_topk_impl")
        self._grouped = lone.function(module, "grouped_topk_gpu")
        self._mask_padding = lone.function(module, "_mask_topk_ids_padded_region")
        self._to_local = dispatcher.to_local(lone.folder(DISTRIBUTION))

    def version(self) -> str:
        """SGLang's version."""
        return lone.version(DISTRIBUTION)

    def claims(self, device: str) -> Iterable[Claim]:
        """Ten methods; padding on the CPU alone, where it takes no kernel; a fused shared expert with a bias."""
        mapped = self._to_local is not None
        where: dict[str, tuple[str, ...]] = {"out": ("fp32", "local") if mapped else ("fp32",), "shared": ("0",)}
        local = f"; {dispatcher.SOURCE}" if mapped else ""
        if device != "cpu":
            where["padding"] = ("none",)

        def claim(method: str, function: str, **more: Any) -> Claim:
            narrowed = {**where, **more.pop("where", {})}
            return Claim(
                operation="routing", variant=method, source=f"{FILE}: {function}{local}", where=narrowed, **more
            )

        found = [claim(method, "fused_topk_torch_native") for method in PLAIN]
        found += [claim(method, "fused_topk_softmax_torch_raw_logits") for method in RAW]
        for method, function in FUNCTIONS.items():
            for own in _dtypes(method):
                found.append(claim(method, function, where=own))
                if method != "GroupedTopK":
                    # The function ranks one expert more than it returns.
                    sizes = {"maxima": {"topk": 8}, "multiples": {"experts": 32}}
                    found.append(claim(method, function, where={**own, "shared": ("1",)}, **sizes))
        return found

    def recipe(self, claim: Claim) -> Recipe:
        """Sums + 1e-20; dropped groups at 0.0 in `grouped_topk_gpu`; scores in BF16 where the logits are."""
        bf16 = claim.where.get("dtype") == ("bf16",)
        return Recipe(
            source=claim.source,
            tie_rule="any",
            division_error=BF16_ERROR if bf16 else 2.0**-24,
            log_error=BF16_ERROR if bf16 and claim.variant == "SqrtSoftplus" else 2.0**-22,
            dropped_fill="zero" if claim.variant == "GroupedTopK" else "minus_inf",
        )

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The call, bound to its inputs."""
        if case.operation != "routing":
            raise Unsupported(f"no {case.operation}")
        logits = inputs["logits"]
        mapping, to_local = inputs.get("expert_map"), self._to_local
        route = self._route(case, logits.new_empty(len(logits), 1), logits, inputs.get("bias"))

        def call() -> dict[str, Tensor]:
            weights, ids = route()
            ids = ids.to(torch.int32)
            if case["padding"] == "some":
                self._mask_padding(ids, torch.tensor(len(logits) * 3 // 4, device=ids.device))
            found = {"selection": ids, "weights": weights}
            return found if mapping is None or to_local is None else {**found, "local": to_local(ids, mapping)}

        return call

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it."""
        return prepared()

    def _route(
        self, case: Any, hidden: Tensor, logits: Tensor, bias: Tensor | None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        method, topk = case.variant, case.integer("topk")
        if method in PLAIN:
            return lambda: self._native(hidden, logits, topk, **PLAIN[method])
        if method in RAW:
            return lambda: self._raw(hidden, logits, topk, RAW[method])
        scaled: dict[str, Any] = {
            "renormalize": method == "MiniMax2" or case["renormalize"] == "on",
            "routed_scaling_factor": float(case["scaling"]),
            "apply_routed_scaling_factor_on_output": True,
        }
        shared = case.integer("shared")
        if method in BIASED:
            biased = {"scoring_func": BIASED[method], "num_fused_shared_experts": shared}
            return lambda: self._biased(hidden, logits, bias, topk + shared, **biased, **scaled)
        groups = {"num_expert_group": case.integer("groups"), "topk_group": case.integer("topk_group")}
        if groups["num_expert_group"] == groups["topk_group"]:
            groups = dict.fromkeys(groups, 1)  # nothing is dropped, and groups of one have no two largest
        if method == "GroupedTopK":
            return lambda: self._grouped(hidden, logits, topk, **scaled, **groups)
        if method != "DeepSeekV3":
            raise Unsupported(f"no {method}")
        if groups["num_expert_group"] == 1 and not shared:
            return lambda: self._ungrouped(hidden, logits, bias, topk, **scaled)
        return lambda: self._biased_grouped(
            hidden, logits, bias, topk + shared, num_fused_shared_experts=shared, **scaled, **groups
        )


def _dtypes(method: str) -> Iterable[dict[str, tuple[str, ...]]]:
    """FP32 logits; BF16 logits where all after the scores is in FP32: a bias in FP32, and a sum or no factor."""
    yield {"dtype": ("fp32",)}
    bf16: dict[str, tuple[str, ...]] = {"dtype": ("bf16",)}
    if method != "GroupedTopK":
        bf16["bias_dtype"] = ("fp32",)
    if method == "MiniMax2":
        yield bf16
    else:
        yield {**bf16, "renormalize": ("on",)}
        yield {**bf16, "renormalize": ("off",), "scaling": ("1",)}


def backends() -> Iterable[SGLangBackend]:
    """``sglang_torch``."""
    return [SGLangBackend()]
