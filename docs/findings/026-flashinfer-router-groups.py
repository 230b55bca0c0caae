"""fused_topk_deepseek with more than 8 groups, more than 4 kept, or groups of one: none is refused, all are wrong.

Needs a GPU, torch and flashinfer.
"""

import sys

import torch
from flashinfer.fused_moe.fused_routing_dsv3 import fused_topk_deepseek


def exact(logits, groups, kept, topk):
    """DeepSeek-V3 selection of sigmoid scores: the best groups by their two best experts, then the best experts."""
    members = logits.double().sigmoid().view(len(logits), groups, -1)
    best = members.topk(min(2, members.shape[2]), dim=2).values.sum(2).topk(kept, dim=1).indices
    inside = torch.zeros(len(logits), groups, dtype=torch.bool, device=logits.device).scatter(1, best, True)
    return members.masked_fill(~inside[:, :, None], -1).flatten(1).topk(topk, dim=1).indices


torch.manual_seed(0)
wrong = 0
for experts, groups, kept, topk in (
    (64, 8, 4, 8),
    (64, 8, 5, 8),
    (64, 8, 8, 8),
    (128, 16, 4, 8),
    (128, 32, 4, 8),
    (2, 2, 2, 1),
):
    logits = torch.randn(64, experts, device="cuda")
    weights = torch.zeros(64, topk, device="cuda")
    ids = torch.zeros(64, topk, dtype=torch.int32, device="cuda")
    fused_topk_deepseek(logits, torch.zeros(experts, device="cuda"), groups, kept, topk, 1.0, weights, ids)
    same = (ids.long().sort(1).values == exact(logits, groups, kept, topk).sort(1).values).all(1)
    print(f"{experts} experts, {groups} groups, {kept} kept, top-{topk}: {int(same.sum())} of 64 right, expected 64")
    wrong += int((~same).sum())
sys.exit(wrong > 0)
