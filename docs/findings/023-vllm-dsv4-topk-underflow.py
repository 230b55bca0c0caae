import sys

import torch
from vllm.model_executor.layers.fused_moe.router.dsv4_topk import dsv4_topk

failed = False
for level in (-4.0, -8.0, -12.0, -16.0, -17.0, -20.0):
    logits = torch.full((1, 256), level, device="cuda")
    logits[0, :6] += torch.arange(6, device="cuda") / 4
    weights, ids = dsv4_topk(logits, torch.zeros(256, device="cuda"), torch.int32, 1.0)
    scores = torch.log1p(logits.double().exp()).sqrt()
    best = scores.topk(6)
    expected = dict(zip(best.indices[0].tolist(), (best.values / best.values.sum())[0].tolist(), strict=True))
    actual = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    print(f"logits from {level}: " + ", ".join(f"{e}: {actual.get(e)} ({w:.7f})" for e, w in expected.items()))
    failed |= any(abs(actual.get(e, 0.0) - w) > 1e-5 * w for e, w in expected.items())
sys.exit(failed)
