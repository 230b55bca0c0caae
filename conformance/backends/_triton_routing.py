"""A Triton kernel of this project: grouped top-k, of biased sigmoids (DeepSeek-V3) or of a softmax.

A program takes TILE tokens (one on a GPU; many in the interpreter, where a program is slow). Maxima are taken one after
another, the lowest index winning, with experts that are out of the game at -inf and everything else finite, so that a
NaN logit still ends in distinct ids. BF16 is read and rounded by its bits; quotients are IEEE; ``tl.exp`` is fast.
"""

# ruff: noqa: N803 - constexpr parameters in capitals, as Triton kernels have them
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from references.backend import Claim
from references.recipes import Recipe

SOURCE = "conformance/backends/_triton_routing.py"
EXP_SLOPE = 1.25 * 2.0**-23
"""exp(t) as ex2(RN(t * RN(log2 e))): RN of the product errs by 2^-24 |t|, RN of log2 e by 2^-26 |t|, both relative."""
OUTPUTS = {"fp32": torch.float32, "local": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@triton.jit
def load_fp32(pointer, at, inside, BF16: tl.constexpr):
    """FP32 values; BF16 comes as int16 words."""
    value = tl.load(pointer + at, mask=inside, other=0)
    if BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def bf16_word(x):
    """The BF16 bits of FP32 values as int32 0..65535, rounded to nearest even; NaN is 0x7fc0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    map_ptr,
    local_ptr,
    tokens,
    real_tokens,
    experts,
    groups,
    group_size,
    kept_groups,
    topk,
    shared,
    stride_token,
    stride_expert,
    scaling,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BF16_LOGITS: tl.constexpr,
    BF16_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """ids and weights [tokens, topk + shared] of logits [tokens, experts] and bias [experts], and ids of this rank.

    SOFTMAX: scores are a softmax, without a bias, and a group's is its largest; else they are sigmoids, with a bias,
    and a group's is the sum of its two largest. OUT: ``fp32`` and ``fp16`` weights, ``bf16`` words (int16), or
    ``packed`` ids (weights_ptr is unused), or ``local``: FP32 weights, and the ids that map_ptr [experts + shared] has
    for these, -1 for -1. Rows from real_tokens on are padding: id -1, weight 0.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (row < tokens)[:, None] & (expert < experts)
    at = row.to(tl.int64)[:, None] * stride_token + expert.to(tl.int64) * stride_expert
    x = load_fp32(logits_ptr, at, inside, BF16_LOGITS)
    if SOFTMAX:
        x = tl.where(expert < experts, x, -float("inf"))
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        score = tl.div_rn(numerator, tl.broadcast_to(tl.sum(numerator, axis=1)[:, None], x.shape))
        choice = score
    else:
        denominator = 1.0 + tl.exp(-x)
        score = tl.div_rn(tl.full(denominator.shape, 1.0, tl.float32), denominator)
        choice = score + load_fp32(bias_ptr, expert, expert < experts, BF16_BIAS)
    choice = tl.where(choice == choice, choice, -3.0e38)
    choice = tl.where(expert < experts, choice, -float("inf"))

    if groups > kept_groups:
        group = expert // group_size
        number = tl.arange(0, GROUPS)[None, :]
        best = tl.full([TILE, GROUPS], -float("inf"), tl.float32)
        for g in range(groups):
            members = tl.where(group == g, choice, -float("inf"))
            total = tl.max(members, axis=1)
            if not SOFTMAX:
                first = tl.argmax(members, axis=1, tie_break_left=True)
                total += tl.max(tl.where(expert == first[:, None], -float("inf"), members), axis=1)
            total = tl.maximum(total, -3.0e38)
            best = tl.where(number == g, total[:, None], best)
        kept = tl.full([TILE, EXPERTS], 0, tl.int32)
        for _ in range(kept_groups):
            winner = tl.argmax(best, axis=1, tie_break_left=True)[:, None]
            kept = tl.where(group == winner, 1, kept)
            best = tl.where(number == winner, -float("inf"), best)
        choice = tl.where(kept == 1, choice, -float("inf"))

    column = tl.arange(0, COLUMNS)[None, :]
    ids = tl.full([TILE, COLUMNS], 0, tl.int32) + experts + column - topk
    weights = tl.full([TILE, COLUMNS], 0.0, tl.float32)
    for place in range(topk):
        chosen = tl.argmax(choice, axis=1, tie_break_left=True).to(tl.int32)[:, None]
        weight = tl.sum(tl.where(expert == chosen, score, 0.0), axis=1)[:, None]
        choice = tl.where(expert == chosen, -float("inf"), choice)
        ids = tl.where(column == place, chosen, ids)
        weights = tl.where(column == place, weight, weights)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1)[:, None] + 1e-20
        weights = tl.div_rn(weights, tl.broadcast_to(total, weights.shape))
    weights = weights * scaling
    weights = tl.where(column >= topk, 1.0, weights)

    padding = (row >= real_tokens)[:, None]
    ids = tl.where(padding, -1, ids)
    weights = tl.where(padding, 0.0, weights)
    stored = (row < tokens)[:, None] & (column < topk + shared)
    to = row.to(tl.int64)[:, None] * (topk + shared) + column
    if OUT == "packed":
        tl.store(ids_ptr + to, (ids << 16) | bf16_word(weights), mask=stored)
    else:
        tl.store(ids_ptr + to, ids, mask=stored)
        if OUT == "local":
            here = tl.load(map_ptr + ids, mask=stored & (ids >= 0), other=-1)
            tl.store(local_ptr + to, here, mask=stored)
        if OUT == "bf16":
            tl.store(weights_ptr + to, bf16_word(weights).to(tl.int16), mask=stored)
        elif OUT == "fp16":
            tl.store(weights_ptr + to, weights.to(tl.float16), mask=stored)
        else:
            tl.store(weights_ptr + to, weights, mask=stored)


def claims(max_tokens: int | None) -> list[Claim]:
    """DeepSeek-V3, and grouped top-k of a softmax."""
    maxima = {} if max_tokens is None else {"tokens": max_tokens}
    return [
        Claim(operation="routing", variant=method, source=f"{SOURCE}: route_kernel", maxima=maxima)
        for method in ("DeepSeekV3", "GroupedTopK")
    ]


def recipe() -> Recipe:
    """The lowest index wins everywhere; ``tl.exp`` is ``ex2.approx`` of a product on a GPU."""
    return Recipe(source=SOURCE, exp_slope=EXP_SLOPE, tie_rule="lowest_index", group_tie_rule="lowest_index")


def route(
    case: Any, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor], *, interpreted: bool
) -> dict[str, Tensor]:
    """The parts of a case, written into ``out`` where its buffers are.

    interpreted: many tokens a program, since a program of the interpreter is slow.
    """
    logits = inputs["logits"]
    bias = inputs.get("bias", logits)
    tokens, experts = logits.shape
    topk, shared, form = case.integer("topk"), case.integer("shared"), case["out"]
    shape = tokens, topk + shared
    if form == "packed":
        parts = {"packed": out.get("packed", logits.new_empty(shape, dtype=torch.int32))}
        ids = weights = parts["packed"]
    else:
        ids = out.get("selection", logits.new_empty(shape, dtype=torch.int32))
        weights = out.get("weights", logits.new_empty(shape, dtype=OUTPUTS[form]))
        parts = {"selection": ids, "weights": weights}
    mapping = inputs.get("expert_map", ids)
    local = out.get("local", torch.empty_like(ids)) if form == "local" else ids
    if form == "local":
        parts["local"] = local
    groups = case.integer("groups")
    tile = min(512, triton.next_power_of_2(tokens)) if interpreted else 1
    route_kernel[(triton.cdiv(tokens, tile),)](
        _words(logits), _words(bias), ids, _words(weights), mapping, local, tokens,
        tokens * 3 // 4 if case["padding"] == "some" else tokens,
        experts, groups, experts // groups, case.integer("topk_group"), topk, shared, *logits.stride(),
        float(case["scaling"]), SOFTMAX=case.variant == "GroupedTopK", RENORMALIZE=case["renormalize"] == "on",
        BF16_LOGITS=logits.dtype == torch.bfloat16, BF16_BIAS=bias.dtype == torch.bfloat16, OUT=form,
        EXPERTS=triton.next_power_of_2(experts), GROUPS=triton.next_power_of_2(groups),
        COLUMNS=triton.next_power_of_2(topk + shared), TILE=tile,
    )  # fmt: skip
    return parts


def _words(tensor: Tensor) -> Tensor:
    """BF16 as int16 words, anything else as it is."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
