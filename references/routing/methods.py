"""The routing methods as rows of a table, and the parameters of one router.

x = logit, b = correction bias, s = score, c = RN32(s + b) (``c = s`` without a bias).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Score = Literal["logit", "softmax", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["none", "sum2", "max"]
Weight = Literal["logit", "score", "softmax_selected"]

MAX_EXPERTS = 512
MAX_TOP_K = 32


@dataclass(frozen=True, kw_only=True)
class Method:
    """What one routing method fixes.

    choice: what top-k ranks (plus the bias where ``biased``). weight: what a selected expert's weight is made of.
    score: the score behind ``weight="score"``. group_score: how a group is ranked; ``none`` for no groups.
    renormalize: divide by the sum over the selected; None where the router's configuration decides.
    scaled: whether a routed scaling factor other than 1 is part of the method. max_top_k: largest top-k.
    """

    choice: Score
    weight: Weight
    score: Score
    biased: bool = False
    group_score: GroupScore = "none"
    renormalize: bool | None = False
    scaled: bool = False
    max_top_k: int = MAX_TOP_K


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "Default": Method(choice="softmax", weight="score", score="softmax"),
        "Renormalize": Method(choice="logit", weight="softmax_selected", score="softmax"),
        "RenormalizeNaive": Method(choice="softmax", weight="score", score="softmax", renormalize=True),
        "DeepSeekV3": Method(
            choice="sigmoid",
            weight="score",
            score="sigmoid",
            biased=True,
            group_score="sum2",
            renormalize=None,
            scaled=True,
        ),
        "Llama4": Method(choice="logit", weight="score", score="sigmoid", max_top_k=1),
        "TopK": Method(choice="logit", weight="logit", score="logit"),
        "SigmoidRenorm": Method(choice="sigmoid", weight="score", score="sigmoid", renormalize=True),
        "MiniMax2": Method(
            choice="sigmoid", weight="score", score="sigmoid", biased=True, renormalize=True, scaled=True
        ),
        "SqrtSoftplus": Method(
            choice="sqrt_softplus", weight="score", score="sqrt_softplus", biased=True, renormalize=None, scaled=True
        ),
        "Sigmoid": Method(choice="sigmoid", weight="score", score="sigmoid"),
        "TopKSigmoid": Method(choice="logit", weight="score", score="sigmoid"),
        "GroupedTopK": Method(
            choice="softmax", weight="score", score="softmax", group_score="max", renormalize=None, scaled=True
        ),
    }
)
"""Name -> `Method`. Sources: flashinfer-ai/flashinfer (RoutingMethodType), sgl-project/sglang and vllm-project/vllm
(grouped_topk, biased_grouped_topk, sqrtsoftplus)."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """The parameters of one router; they are inputs of a case, not choices of a backend.

    experts: routed experts, 1..512. top_k: routed experts of a token, 1..32. n_group, topk_group: equal groups of
    consecutive experts, and how many are kept. renormalize: None takes the method's rule. scaling_factor: the routed
    scaling factor, > 0. shared_experts: fused shared experts, as extra columns with ids experts, experts + 1, ...
    num_token_non_padded: rows from here on are padding; None for no padding.
    """

    method: str
    experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    renormalize: bool | None = None
    scaling_factor: float = 1.0
    shared_experts: int = 0
    num_token_non_padded: int | None = None

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ValueError(f"routing: {problem}")

    @property
    def rule(self) -> Method:
        """The method's row of `METHODS`."""
        return METHODS[self.method]

    @property
    def grouped(self) -> bool:
        """Whether groups restrict the selection."""
        return self.topk_group < self.n_group

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.experts // self.n_group

    @property
    def normalized(self) -> bool:
        """Whether weights are divided by the sum over the selected experts."""
        fixed = self.rule.renormalize
        if fixed is not None:
            return fixed
        return True if self.renormalize is None else self.renormalize

    @property
    def columns(self) -> int:
        """Columns of ids and weights: top_k + shared_experts."""
        return self.top_k + self.shared_experts


def _problem(config: RoutingConfig) -> str | None:
    rule = METHODS.get(config.method)
    if rule is None:
        return f"unknown method {config.method!r}; known: {', '.join(METHODS)}"
    if not 1 <= config.experts <= MAX_EXPERTS:
        return f"experts={config.experts} is not within 1..{MAX_EXPERTS}"
    if not 1 <= config.top_k <= min(rule.max_top_k, config.experts):
        return f"top_k={config.top_k} is not within 1..{min(rule.max_top_k, config.experts)} for {config.method}"
    if config.n_group < 1 or config.experts % config.n_group or not 1 <= config.topk_group <= config.n_group:
        return f"topk_group={config.topk_group} of n_group={config.n_group} does not divide {config.experts} experts"
    if config.n_group > 1 and rule.group_score == "none":
        return f"{config.method} has no groups"
    if config.grouped and rule.group_score == "sum2" and config.group_size < 2:
        return "the sum of the two largest needs groups of at least two experts"
    if config.top_k > config.topk_group * config.group_size:
        return f"top_k={config.top_k} exceeds the {config.topk_group * config.group_size} experts of the kept groups"
    if config.renormalize is not None and rule.renormalize not in (None, config.renormalize):
        return f"{config.method} fixes renormalize={rule.renormalize}"
    if not (math.isfinite(config.scaling_factor) and config.scaling_factor > 0):
        return f"scaling_factor={config.scaling_factor} is not a finite number > 0"
    if config.scaling_factor != 1.0 and not rule.scaled:
        return f"{config.method} takes no scaling factor"
    if config.shared_experts < 0:
        return f"shared_experts={config.shared_experts} is negative"
    if config.num_token_non_padded is not None and config.num_token_non_padded < 0:
        return f"num_token_non_padded={config.num_token_non_padded} is negative"
    return None
