"""Exact ties: experts whose (logit, bias) pairs are equal bit for bit, and groups whose contents are.

Whatever an elementwise score computes, it computes the same for equal bits, so these ties are certain; ties that only
rounding makes are inside the score intervals already.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bit_keys(logits: Tensor, bias: Tensor | None) -> Tensor:
    """One int64 for each (logit, bias) pair: FP32 bits of both. logits [tokens, experts], bias [experts] or None."""
    high = logits.to(torch.float32).view(torch.int32).to(torch.int64) << 32
    if bias is None:
        return high
    low = bias.to(torch.float32).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return high | low


def overtaken(mask: Tensor, keys: Tensor) -> Tensor:
    """Experts left out although a selected one with a higher index in the row has the same key.

    mask: bool [rows, n], the selected. keys: int64 [rows, n]. Returns bool [rows, n].
    """
    ordered, order = torch.sort(keys, dim=1, stable=True)
    fresh = torch.ones_like(mask)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    run = fresh.to(torch.int64).cumsum(1) - 1
    chosen = mask.gather(1, order)
    last = torch.full_like(keys, -1).scatter_reduce(1, run, torch.where(chosen, order, -1), "amax")
    behind = ~chosen & (order < last.gather(1, run))
    return torch.zeros_like(mask).scatter(1, order, behind)


def equal_groups(keys: Tensor) -> Tensor:
    """Pairs of groups with the same keys in any order. keys: int64 [tokens, groups, n].

    Returns bool [tokens, groups, groups]; entry (h, g) is set only for h < g.
    """
    content = keys.sort(-1).values
    groups = keys.shape[1]
    same = torch.zeros(keys.shape[0], groups, groups, dtype=torch.bool, device=keys.device)
    for distance in range(1, groups):
        equal = (content[:, distance:] == content[:, :-distance]).all(-1)
        index = torch.arange(groups - distance, device=keys.device)
        same[:, index, index + distance] = equal
    return same
