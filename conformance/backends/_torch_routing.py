"""Routers by torch's own operators, in FP32 from the logits' own dtype.

Without groups ids come from ``torch.topk``, which breaks ties as it likes; with groups from a stable sort. There too a
tie may go either way: on a CPU, vectorised functions give equal logits unequal scores where a row does not fill the
last vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from references.backend import Claim
from references.recipes import Recipe

GROUPED = ("DeepSeekV3", "GroupedTopK")
BIASED = ("DeepSeekV3", "MiniMax2", "SqrtSoftplus")
RENORMALIZED = ("RenormalizeNaive", "SigmoidRenorm", "MiniMax2")
METHODS = (
    "Default",
    "Renormalize",
    "RenormalizeNaive",
    "DeepSeekV3",
    "Llama4",
    "TopK",
    "SigmoidRenorm",
    "MiniMax2",
    "SqrtSoftplus",
    "Sigmoid",
    "TopKSigmoid",
    "GroupedTopK",
)
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OUTPUTS |= {"packed": torch.bfloat16, "local": torch.float32}

Scores = Callable[[Tensor], Tensor]


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=1)


def _sqrt_softplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


def _itself(x: Tensor) -> Tensor:
    return x


SCORES: Mapping[str, tuple[Scores, Scores]] = {
    "Default": (_softmax, _softmax),
    "Renormalize": (_itself, _itself),
    "RenormalizeNaive": (_softmax, _softmax),
    "DeepSeekV3": (torch.sigmoid, torch.sigmoid),
    "Llama4": (_itself, torch.sigmoid),
    "TopK": (_itself, _itself),
    "SigmoidRenorm": (torch.sigmoid, torch.sigmoid),
    "MiniMax2": (torch.sigmoid, torch.sigmoid),
    "SqrtSoftplus": (_sqrt_softplus, _sqrt_softplus),
    "Sigmoid": (torch.sigmoid, torch.sigmoid),
    "TopKSigmoid": (_itself, torch.sigmoid),
    "GroupedTopK": (_softmax, _softmax),
}
"""Method -> the score that ranks (before the bias) and the score that weighs."""


def claims() -> Iterable[Claim]:
    """Every method."""
    return [
        Claim(
            operation="routing",
            variant=method,
            source="torch.sort(stable=True)" if method in GROUPED else "torch.topk, which promises no order of ties",
        )
        for method in METHODS
    ]


def recipe(claim: Claim, source: str) -> Recipe:
    """Sums + 1e-20, the factor at the end; ties as they come."""
    return Recipe(source=source, tie_rule="any")


def route(case: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a ``routing`` case."""
    method, k, experts = case.variant, case.integer("topk"), case.integer("experts")
    x = inputs["logits"].float()
    rank, weigh = SCORES[method]
    choice = rank(x)
    if method in BIASED:
        choice = choice + inputs["bias"].float()
    if method in GROUPED:
        choice = _kept(choice, case.integer("groups"), case.integer("topk_group"), pair=method == "DeepSeekV3")
        ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :k]
    else:
        ids = choice.topk(k, dim=1).indices
    weights = weigh(x).gather(1, ids)
    if method == "Renormalize":
        weights = weights.softmax(dim=1)
    elif method in RENORMALIZED or (method in (*GROUPED, "SqrtSoftplus") and case["renormalize"] == "on"):
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    if method in (*BIASED, "GroupedTopK"):
        weights = weights * float(case["scaling"])
    return _parts(case, ids, weights, experts, inputs.get("expert_map"))


def _kept(choice: Tensor, groups: int, count: int, *, pair: bool) -> Tensor:
    """Choice scores with all but the ``count`` best groups at -inf."""
    if count == groups:
        return choice
    members = choice.view(len(choice), groups, -1)
    best = members.topk(2 if pair else 1, dim=2).values.sum(dim=2)
    kept = best.sort(dim=1, descending=True, stable=True).indices[:, :count]
    dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    return members.masked_fill(dropped[:, :, None], -torch.inf).view_as(choice)


def _parts(case: Any, ids: Tensor, weights: Tensor, experts: int, mapping: Tensor | None = None) -> dict[str, Tensor]:
    """Shared experts, padding and the form of the output. mapping: from all experts to those here."""
    tokens, shared = len(ids), case.integer("shared")
    extra = torch.arange(experts, experts + shared, device=ids.device).expand(tokens, -1)
    ids = torch.cat([ids, extra], dim=1).to(torch.int32)
    weights = torch.cat([weights, torch.ones(tokens, shared, device=ids.device)], dim=1)
    if case["padding"] == "some":
        ids[tokens * 3 // 4 :] = -1
        weights[tokens * 3 // 4 :] = 0.0
    weights = weights.to(OUTPUTS[case["out"]])
    if case["out"] == "packed":
        return {"packed": (ids << 16) | (weights.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF)}
    if mapping is not None:
        local = torch.where(ids < 0, ids, mapping[ids.clamp(min=0).to(torch.int64)])
        return {"selection": ids, "weights": weights, "local": local}
    return {"selection": ids, "weights": weights}
