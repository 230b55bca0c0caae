"""The nominal answer: correctly rounded scores, the lowest index first."""

from __future__ import annotations

import torch
from torch import Tensor

from references.routing.methods import RoutingConfig
from references.routing.recipe import RoutingRecipe
from references.routing.rounding import DTYPES
from references.routing.rows import check, choice_intervals, chunks, padding_rows, shared_ids, shared_weight
from references.routing.selection import group_scores
from references.routing.weights import enclose


def nominal(logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe) -> tuple[Tensor, Tensor]:
    """The answer of a correctly rounded implementation in which the lowest index wins ties.

    logits: [tokens, experts] fp32, bf16 or fp16. bias: [experts] where the method is biased, else None.
    Returns ids int32 and weights (the recipe's dtype), both [tokens, top_k + shared_experts]. A NaN logit counts as
    -inf in the selection, and undefined weights are 0.
    """
    check(logits, bias, config, recipe)
    parts = [_nominal(logits[rows], bias, config, recipe, rows.start) for rows in chunks(logits)]
    ids, weights = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return ids.to(torch.int32), weights.to(DTYPES[recipe.weight_dtype])


def _nominal(
    logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe, start: int
) -> tuple[Tensor, Tensor]:
    tokens = logits.shape[0]
    _, c = choice_intervals(logits, bias, config, recipe)
    ranked = torch.where(torch.isnan(logits), -torch.inf, c.mid)
    if config.grouped:
        group = group_scores(ranked, config)
        best = group.argsort(dim=1, descending=True, stable=True)[:, : config.topk_group]
        kept = torch.zeros_like(group, dtype=torch.bool).scatter(1, best, True)
        outside = ~kept.repeat_interleave(config.group_size, dim=1)
    else:
        outside = torch.zeros_like(ranked, dtype=torch.bool)
    # Two stable sorts, so that an expert of a kept group at -inf still precedes every dropped one.
    order = ranked.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, outside.gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
    ids = order[:, : config.top_k]
    values = enclose(ids, logits.to(torch.float64), config, recipe)
    weights = torch.where(values.free, 0.0, values.nominal)
    shared = shared_ids(config, logits.device).expand(tokens, -1)
    filled = torch.full(shared.shape, shared_weight(config, recipe), dtype=torch.float64, device=logits.device)
    ids, weights = torch.cat([ids, shared], 1), torch.cat([weights, filled], 1)
    padding = padding_rows(tokens, start, config, logits.device)[:, None]
    return torch.where(padding, -1, ids), torch.where(padding, 0.0, weights)
