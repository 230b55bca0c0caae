"""Faults in routing: scores, biases, groups, factors, shared experts and padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzz.mutants.base import Inputs, Mutant, Part, Partial, Racing
from fuzz.mutants.correct import F32, F64, Parts
from references.backend import CaseLike
from references.routing.cases import config_of, weight_name
from references.routing.forms import pack, to_local
from references.routing.methods import METHODS, RoutingConfig
from references.routing.rounding import DTYPES
from references.routing.rows import shared_ids

Score = Callable[[Tensor], Tensor]


def softmax(x: Tensor) -> Tensor:
    """Along the experts. In FP64: vectorised FP32 functions give equal logits unequal scores at the end of a row."""
    return x.to(F64).softmax(dim=1).to(F32)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), in FP64 likewise."""
    return torch.sigmoid(x.to(F64)).to(F32)


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) without overflow or underflow, in FP64 likewise."""
    wide = x.to(F64)
    return (F.relu(wide) + torch.log1p(torch.exp(-wide.abs()))).sqrt().to(F32)


SCORES: dict[str, Score] = {
    "logit": lambda x: x,
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": sqrt_softplus,
}


def added(score: Tensor, bias: Tensor) -> Tensor:
    """The choice score."""
    return score + bias


def two_best(members: Tensor) -> Tensor:
    """A group's score from its members ``[tokens, groups, n]``."""
    return members.topk(2, dim=2).values.sum(dim=2)


def best(members: Tensor) -> Tensor:
    """The largest member."""
    return members.amax(dim=2)


def descending(choice: Tensor) -> Tensor:
    """Experts by descending choice score, the lowest index first; NaN last."""
    return choice.masked_fill(choice.isnan(), -torch.inf).argsort(dim=1, descending=True, stable=True)


@dataclass(frozen=True)
class Steps:
    """The steps of a router that a mutant may replace; None stands for what the method says.

    read: logits to FP32. rank, weigh: the scores that choose and that weigh. bias: joins bias and score. group: a
    group's score. fill: choice score of dropped groups. order: experts by choice score. unbias: weights of all experts
    from (score, choice score, bias). normalise, factor: whether to divide by the sum, and what to multiply by.
    """

    read: Callable[[Tensor], Tensor] = Tensor.float
    rank: Score | None = None
    weigh: Score | None = None
    bias: Callable[[Tensor, Tensor], Tensor] = added
    group: Callable[[Tensor], Tensor] | None = None
    fill: float = -torch.inf
    order: Callable[[Tensor], Tensor] = descending
    unbias: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    factor: Callable[[RoutingConfig], float] = lambda config: config.scaling_factor
    selected_softmax: Score = softmax
    rotated: bool = False
    to_here: Callable[[Tensor, Tensor], Tensor] = to_local


PLAIN = Steps()


def route(case: CaseLike, inputs: Inputs, steps: Steps = PLAIN) -> Parts:
    """The parts of a ``routing`` case."""
    ids, weights = selected(case, inputs, steps)
    return finished(case, ids, weights, inputs.get("expert_map"), to_here=steps.to_here)


def selected(case: CaseLike, inputs: Inputs, steps: Steps = PLAIN) -> tuple[Tensor, Tensor]:
    """Ids int64 and weights FP32 ``[tokens, topk + shared]``, padding not masked yet."""
    config, rule = config_of(case), METHODS[case.variant]
    x = steps.read(inputs["logits"])
    score = (steps.rank or SCORES[rule.choice])(x)
    choice, bias = score, inputs.get("bias")
    if bias is not None:
        bias = bias.to(F32)
        choice = steps.bias(score, bias)
    ranked = choice
    if config.grouped:
        group = steps.group or (two_best if rule.group_score == "sum2" else best)
        ranked = kept_groups(choice, config, group, steps.fill)
    ids = steps.order(ranked)[:, : config.top_k]
    weighing = (steps.weigh or SCORES[rule.score if rule.weight != "logit" else "logit"])(x)
    if steps.unbias is not None and bias is not None:
        weighing = steps.unbias(weighing, choice, bias)
    if rule.weight == "softmax_selected":
        weights = steps.selected_softmax(x.gather(1, ids))
    else:
        weights = weighing.gather(1, ids)
        if config.normalized:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    weights = weights * steps.factor(config)
    shared = shared_ids(config, ids.device).expand(len(ids), -1).to(torch.int64)
    return torch.cat([ids, shared], dim=1), torch.cat([weights, torch.ones(shared.shape)], dim=1)


def kept_groups(
    choice: Tensor, config: RoutingConfig, group: Callable[[Tensor], Tensor], fill: float = -torch.inf
) -> Tensor:
    """Choice scores with all but the best groups at ``fill``."""
    members = choice.view(len(choice), config.n_group, -1)
    order = descending(group(members))[:, : config.topk_group]
    dropped = torch.ones(members.shape[:2], dtype=torch.bool).scatter(1, order, False)
    # An expert of a kept group precedes every dropped one, even at -inf.
    lowest = members.masked_fill(members.isnan() | (members == -torch.inf), torch.finfo(F32).min)
    return lowest.masked_fill(dropped[:, :, None], fill).view_as(choice)


def finished(
    case: CaseLike,
    ids: Tensor,
    weights: Tensor,
    mapping: Tensor | None = None,
    *,
    masked: bool = True,
    to_here: Callable[[Tensor, Tensor], Tensor] = to_local,
) -> Parts:
    """Padding, dtype and form. mapping: from all experts to those here, which ``to_here`` reads."""
    if masked and case["padding"] == "some":
        real = case.integer("tokens") * 3 // 4
        ids, weights = ids.clone(), weights.clone()
        ids[real:], weights[real:] = -1, 0.0
    if case["out"] == "packed":
        return {"packed": pack(ids, weights)}
    found = {"selection": ids.to(torch.int32), "weights": weights.to(DTYPES[weight_name(case)])}
    if mapping is not None:
        found["local"] = to_here(found["selection"], mapping)
    return found


def _with(steps: Steps) -> Callable[[CaseLike, Inputs], Parts]:
    return lambda case, inputs: route(case, inputs, steps)


def _bf16_bias(score: Tensor, bias: Tensor) -> Tensor:
    return score + bias.bfloat16().float()


def _factor_without_renormalising(config: RoutingConfig) -> float:
    return 1.0 if config.normalized else config.scaling_factor


def _no_factor(config: RoutingConfig) -> float:
    return 1.0


def _bias_before_score(case: CaseLike, inputs: Inputs) -> Parts:
    bias, rule = inputs["bias"].to(F32), METHODS[case.variant]
    score = SCORES[rule.choice]
    return route(case, inputs, Steps(rank=lambda x: score(x + bias), weigh=lambda x: score(x + bias)))


def _by_subtraction(score: Tensor, choice: Tensor, bias: Tensor) -> Tensor:
    return choice - bias


def _maximum_from_zero(x: Tensor) -> Tensor:
    powers = torch.exp((x - x.amax(dim=1, keepdim=True).clamp(min=0.0)).to(F64)).to(F32)  # 0 below -104
    return powers / powers.sum(dim=1, keepdim=True)


def _bits_as_fp32(logits: Tensor) -> Tensor:
    flat = logits.contiguous().view(-1)
    flat = F.pad(flat.view(torch.int16), (0, len(flat) % 2)).view(F32)
    return flat.repeat(2)[: logits.numel()].view(logits.shape)  # the second half lies behind the buffer


def _softplus_by_exp(x: Tensor) -> Tensor:
    total = (1 + torch.exp(x.to(F64))).to(F32)  # 1 from -16.6 down
    return torch.where(x > 20, x, total.to(F64).log().to(F32)).sqrt()


def _shared_over_a_random_slot(case: CaseLike, inputs: Inputs) -> Parts:
    config = config_of(case)
    shared, more = config.shared_experts, config.top_k + config.shared_experts
    if not shared or config.grouped or more > config.experts:
        return route(case, inputs)
    # Top-k of k + shared, in no order, whose last slots are overwritten.
    x, rule = inputs["logits"].float(), METHODS[case.variant]
    choice = SCORES[rule.choice](x) + (inputs["bias"].to(F32) if rule.biased else 0.0)
    found = descending(choice)[:, :more].roll(1, dims=1)[:, : config.top_k]
    return route(case, inputs, Steps(order=lambda _: found))


def _first_expert_for_nan(choice: Tensor) -> Tensor:
    order = descending(choice)
    return torch.where(choice.isnan().all(dim=1, keepdim=True), 0, order)


def _padding_routed(case: CaseLike, inputs: Inputs) -> Parts:
    ids, weights = selected(case, inputs)
    return finished(case, ids, weights, inputs.get("expert_map"), masked=False)


def _fp32_read_as_bf16(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        return logits.float()
    flat = logits.contiguous().view(-1)
    return flat.view(torch.bfloat16)[: len(flat)].float().view(logits.shape)


def _rows_beyond_limit(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    right = route(case, inputs)
    weights = right["weights"]
    written = (torch.arange(len(weights)) < 1408)[:, None].expand(weights.shape)
    return {**right, "weights": Partial(weights, written)}


def _order_by_chance(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    # The columns of equal weights change places from call to call.
    ids, weights = selected(case, inputs)
    k = case.integer("topk")
    mapping = inputs.get("expert_map")
    first = finished(case, ids, weights, mapping)
    back = torch.cat([torch.arange(k).flip(0), torch.arange(k, ids.shape[1])])
    second = finished(case, ids[:, back], weights[:, back], mapping)
    return {name: Racing((first[name], second[name])) for name in first}


BIASED = ("DeepSeekV3", "MiniMax2", "SqrtSoftplus")

MUTANTS = (
    Mutant(
        family="moe-rsf-only-without-renorm",
        area="routing",
        source="sgl-project/sglang#31449",
        description="routed scaling factor applied only where weights are not renormalised",
        operation="routing",
        variants=("DeepSeekV3", "SqrtSoftplus", "GroupedTopK"),
        answer=_with(Steps(factor=_factor_without_renormalising)),
    ),
    Mutant(
        family="moe-shared-replaces-random-slot",
        area="routing",
        source="sgl-project/sglang#8125",
        description="shared expert overwrites the last slot of an unsorted top-k instead of the smallest",
        operation="routing",
        variants=("Renormalize", "MiniMax2"),
        answer=_shared_over_a_random_slot,
    ),
    Mutant(
        family="router-bf16",
        area="routing",
        source="sgl-project/sglang#31213",
        description="FP32 correction bias held in BF16",
        operation="routing",
        variants=BIASED,
        where={"bias_dtype": ("fp32",)},
        answer=_with(Steps(bias=_bf16_bias)),
    ),
    Mutant(
        family="route-bias-added-before-softmax",
        area="routing",
        source="ROCm/aiter#4247",
        description="bias added to the logits while they are loaded, and again to the scores",
        operation="routing",
        variants=BIASED,
        answer=_bias_before_score,
    ),
    Mutant(
        family="route-unbias-by-subtraction",
        area="routing",
        source="flashinfer-ai/flashinfer#3875",
        description="weight recovered as (score + bias) - bias",
        operation="routing",
        variants=BIASED,
        answer=_with(Steps(unbias=_by_subtraction)),
    ),
    Mutant(
        family="route-all-negative-logits",
        area="routing",
        source="flashinfer-ai/flashinfer#2822",
        description="running maximum of the softmax starts at 0",
        operation="routing",
        variants=("Renormalize",),
        answer=_with(Steps(selected_softmax=_maximum_from_zero)),
    ),
    Mutant(
        family="route-bf16-logits-read-as-fp32",
        area="routing",
        source="flashinfer-ai/flashinfer#2889",
        description="buffer of BF16 logits read as FP32",
        operation="routing",
        variants=("DeepSeekV3",),
        where={"dtype": ("bf16",)},
        answer=_with(Steps(read=_bits_as_fp32)),
    ),
    Mutant(
        family="route-raw-logits-as-weights",
        area="routing",
        source="sgl-project/sglang#35160",
        description="raw logits as weights where nothing is renormalised",
        operation="routing",
        variants=("Default",),
        answer=_with(Steps(weigh=SCORES["logit"])),
    ),
    Mutant(
        family="route-softplus-underflow",
        area="routing",
        source="sgl-project/sglang#34459",
        description="softplus as log(1 + exp(x)), 0 below -16.6",
        operation="routing",
        variants=("SqrtSoftplus",),
        answer=_with(Steps(rank=_softplus_by_exp, weigh=_softplus_by_exp)),
    ),
    Mutant(
        family="route-sqrtsoftplus-as-sigmoid",
        area="routing",
        source="flashinfer-ai/flashinfer#5211",
        description="sigmoid scores for a model with sqrt(softplus)",
        operation="routing",
        variants=("SqrtSoftplus",),
        answer=_with(Steps(rank=sigmoid, weigh=sigmoid)),
    ),
    Mutant(
        family="route-masked-group-zero",
        area="routing",
        source="sgl-project/sglang#3705",
        description="experts of dropped groups at 0 instead of -inf, above negative scores",
        operation="routing",
        variants=("DeepSeekV3",),
        answer=_with(Steps(fill=0.0)),
    ),
    Mutant(
        family="route-group-score-max",
        area="routing",
        source="vllm-project/vllm#46869",
        description="a group's score is its largest member instead of the sum of its two largest",
        operation="routing",
        variants=("DeepSeekV3",),
        answer=_with(Steps(group=best)),
    ),
    Mutant(
        family="route-nan-duplicates-expert0",
        area="routing",
        source="vllm-project/vllm#39391",
        description="a token of NaN logits selects expert 0 for every slot",
        operation="routing",
        variants=("Default", "Renormalize", "Sigmoid"),
        answer=_with(Steps(order=_first_expert_for_nan)),
    ),
    Mutant(
        family="moe-rsf-missing",
        area="moe",
        source="vllm-project/vllm#43769",
        description="routed scaling factor hard-coded to 1",
        operation="routing",
        variants=("DeepSeekV3", "MiniMax2"),
        answer=_with(Steps(factor=_no_factor)),
    ),
    Mutant(
        family="grouped-unwritten-output",
        area="memory",
        source="kvcache-ai/sglang#68",
        description="weights of tokens from number 1408 on are never written",
        operation="routing",
        variants=("Default", "Renormalize"),
        where={"out": ("fp32", "bf16", "fp16")},
        answer=_rows_beyond_limit,
    ),
    Mutant(
        family="gate-routing-method-unsupported",
        area="gating",
        source="vllm-project/vllm#33620",
        description="FP32 logits admitted by a router that reads BF16",
        operation="routing",
        variants=("Renormalize", "DeepSeekV3"),
        where={"dtype": ("bf16", "fp16")},
        enforced=("dtype",),
        answer=_with(Steps(read=_fp32_read_as_bf16)),
    ),
    Mutant(
        family="route-topk-order-undefined",
        area="determinism",
        source="vllm-project/vllm#55514",
        description="top-k returns its experts in another order every other call",
        operation="routing",
        variants=("Renormalize", "DeepSeekV3"),
        answer=_order_by_chance,
    ),
    Mutant(
        family="cuda-graph-padding-not-masked-from-router",
        area="robustness",
        source="sgl-project/sglang#30895",
        description="padded tokens are routed like real ones",
        operation="routing",
        variants=("Default", "DeepSeekV3"),
        where={"padding": ("some",)},
        answer=_padding_routed,
    ),
)
