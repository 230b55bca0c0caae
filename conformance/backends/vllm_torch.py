"""vLLM's routers in plain torch (``vllm/.../fused_moe/router/cpu_router.py``), called as written.

`_grouped_topk` scores in FP32; `_softmax_topk` stays in the logits' dtype. Sums have no 1e-20, ties are left to
``torch.topk``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _lone_module as lone
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("vllm_torch",)

DISTRIBUTION = "vllm"
FILE = "vllm/model_executor/layers/fused_moe/router/cpu_router.py"

GROUPED = {"DeepSeekV3": "sigmoid", "GroupedTopK": "softmax"}
PLAIN = {"Default": False, "Renormalize": True}
"""`_softmax_topk` by method: whether it renormalises."""

Call = Callable[[], dict[str, Tensor]]


class VLLMBackend:
    """The functions of the installed vLLM, looked up by name."""

    name = "vllm_torch"

    def __init__(self) -> None:
        module = lone.load(DISTRIBUTION, FILE)
        self._grouped = lone.function(module, "_grouped_topk")
        self._plain = lone.function(module, "_softmax_topk")

    def version(self) -> str:
        """vLLM's version."""
        return lone.version(DISTRIBUTION)

    def claims(self, device: str) -> Iterable[Claim]:
        """Four methods on the CPU, whose router this is; an even number of experts, since groups rank by two."""
        if device != "cpu":
            return []
        where = {"out": ("fp32",), "shared": ("0",), "padding": ("none",)}
        return [
            *(
                Claim(
                    operation="routing",
                    variant=method,
                    source=f"{FILE}: _grouped_topk",
                    where=where,
                    multiples={"experts": 2},
                )
                for method in GROUPED
            ),
            *(
                Claim(
                    operation="routing",
                    variant=method,
                    source=f"{FILE}: _softmax_topk",
                    where=where,
                )
                for method in PLAIN
            ),
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """Nothing is added to a sum."""
        return Recipe(source=claim.source, tie_rule="any", denominator="none")

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The call, bound to its inputs."""
        method, topk, logits = case.variant, case.integer("topk"), inputs["logits"]
        if case.operation != "routing" or method not in (*GROUPED, *PLAIN):
            raise Unsupported(f"no {case.operation} {method}")
        if method in PLAIN:
            return lambda: _parts(*self._plain(logits, topk, PLAIN[method]))
        groups, kept = case.integer("groups"), case.integer("topk_group")
        if groups == kept:
            groups = kept = 1  # nothing is dropped, and groups of one have no two largest
        return lambda: _parts(
            *self._grouped(
                logits,
                topk,
                case["renormalize"] == "on",
                groups,
                kept,
                GROUPED[method],
                float(case["scaling"]),
                inputs.get("bias"),
            )
        )

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it."""
        return prepared()


def _parts(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"selection": ids.to(torch.int32), "weights": weights}


def backends() -> Iterable[VLLMBackend]:
    """``vllm_torch``."""
    return [VLLMBackend()]
