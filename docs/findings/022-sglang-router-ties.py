import sys

import torch
from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate


def exact(logits, topk, groups, kept):
    """DeepSeek-V3 selection of sigmoid scores: the best groups by their two best experts, then the best experts."""
    scores = logits.double().sigmoid()
    members = scores.view(len(scores), groups, -1)
    best = members.topk(2, dim=2).values.sum(2).topk(kept, dim=1).indices
    inside = torch.zeros(len(scores), groups, dtype=torch.bool, device=scores.device).scatter(1, best, True)
    return members.masked_fill(~inside[:, :, None], -1).flatten(1).topk(topk, dim=1).values.sum(1)


def total(logits, ids):
    return logits.double().sigmoid().gather(1, ids.long()).sum(1)


# Two groups of three: the first holds two experts at 2.0, the second 1.5 and 1.0.
logits = torch.tensor([[2.0, 2.0, -4.0, 1.0, 1.5, -4.0]], device="cuda")
weights, ids = moe_fused_gate(logits, torch.zeros(6, device="cuda"), 2, num_expert_group=2, topk_group=1)
print(f"experts {sorted(ids[0].tolist())}, expected [0, 1]")
failed = sorted(ids[0].tolist()) != [0, 1]

torch.manual_seed(0)
logits = torch.randn(100_000, 256, device="cuda").bfloat16()
weights, ids = moe_fused_gate(logits, torch.zeros(256, device="cuda"), 8, num_expert_group=8, topk_group=4)
worse = int((total(logits, ids) < exact(logits, 8, 8, 4) - 1e-6).sum())
print(
    f"BF16 logits of N(0, 1), 256 experts in 8 groups, 4 kept, top-8: {worse} of 100000 tokens get worse experts,"
    " expected 0"
)
sys.exit(failed or worse > 0)
