"""What there is to say of a token whose selection is not admissible: its class, its chosen and rejected experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.operations.judging import show_float
from references.routing import Reason, RoutingConfig, RoutingRecipe, SelectionJudgement
from references.routing.rows import choice_intervals, padding_rows
from references.routing.selection import group_scores

KINDS = ("clear", "near_tie", "tie", "inf", "nan", "padding")
"""Classes of tokens: the answer is unique; scores meet within their error; scores are equal; a logit is not finite."""
SHOWN = 12
"""Ids of a token that an example lists."""


def kinds_of(rows: Tensor, logits: Tensor, bias: Tensor | None, router: RoutingConfig, recipe: RoutingRecipe) -> Tensor:
    """The class of each token in ``rows``, as an index into `KINDS`."""
    x = logits[rows]
    _, c = choice_intervals(x, bias, router, recipe)
    k = router.top_k
    near = torch.zeros(len(rows), dtype=torch.bool, device=x.device)
    tie = near.clone()
    lo, mid, hi = c.lo, c.mid, c.hi
    if router.grouped:
        group_lo, group_mid, group_hi = (group_scores(end, router) for end in (lo, mid, hi))
        tie |= _meet(group_mid, group_mid, router.topk_group)
        near |= _meet(group_lo, group_hi, router.topk_group)
        best = group_mid.topk(router.topk_group, dim=1).indices
        kept = torch.zeros_like(group_mid, dtype=torch.bool).scatter(1, best, True)
        outside = ~kept.repeat_interleave(router.group_size, dim=1)
        lo, mid, hi = (torch.where(outside, -torch.inf, end) for end in (lo, mid, hi))
    tie |= _meet(mid, mid, k)
    near |= _meet(lo, hi, k)
    kinds = torch.zeros(len(rows), dtype=torch.uint8, device=x.device)
    kinds[near] = 1
    kinds[tie] = 2
    kinds[torch.isinf(x).any(1)] = 3
    kinds[torch.isnan(x).any(1)] = 4
    kinds[padding_rows(len(logits), 0, router, x.device)[rows]] = 5
    return kinds


def _meet(lo: Tensor, hi: Tensor, count: int) -> Tensor:
    """Rows in which more than ``count`` entries reach the ``count``-th largest lower end."""
    least = lo.topk(count, dim=1).values[:, -1:]
    return (hi >= least).sum(1) > count


def example_of(
    token: int,
    ids: Tensor,
    expected: Tensor,
    found: SelectionJudgement,
    logits: Tensor,
    bias: Tensor | None,
    router: RoutingConfig,
    recipe: RoutingRecipe,
) -> dict[str, Any]:
    """A token's ids with the reason, the nominal ids, and its weakest chosen and strongest rejected expert."""
    reason = Reason(int(found.reason[token])).name.lower()
    return {
        "actual": f"{reason} {_listed(ids[token])}",
        "admissible": f"such as {_listed(expected[token])}",
        "input": f"{_rivals(ids[token, : router.top_k], logits[token : token + 1], bias, router, recipe)}; "
        f"margin {float(found.margin[token]):.3g}",
    }


def _rivals(ids: Tensor, x: Tensor, bias: Tensor | None, router: RoutingConfig, recipe: RoutingRecipe) -> str:
    inside = ids[(ids >= 0) & (ids < router.experts)].to(torch.int64)
    mask = torch.zeros(router.experts, dtype=torch.bool, device=x.device)
    mask[inside] = True
    rivals = ~mask
    if router.grouped:
        used = mask.view(router.n_group, -1).any(1)
        rivals &= used.repeat_interleave(router.group_size)
    _, c = choice_intervals(x, bias, router, recipe)
    mid = c.mid[0]
    words = []
    for word, among, weakest in (("chosen", mask, True), ("rejected", rivals, False)):
        if bool(among.any()):
            ranked = torch.where(among, mid, torch.inf if weakest else -torch.inf)
            expert = int(ranked.argmin() if weakest else ranked.argmax())
            logit = show_float(float(x[0, expert]), x.dtype)
            ends = f"{float(c.lo[0, expert]):.9g} .. {float(c.hi[0, expert]):.9g}"
            words.append(f"{word} {expert}: logit {logit}, score {ends}")
    return "; ".join(words) or "no expert within range"


def _listed(ids: Tensor) -> str:
    shown = ", ".join(map(str, ids[:SHOWN].tolist()))
    return f"[{shown}, ...]" if len(ids) > SHOWN else f"[{shown}]"
