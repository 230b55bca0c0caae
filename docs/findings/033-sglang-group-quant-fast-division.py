import sys

import torch
from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant

failed = False
for amax in (2.0**100, 2.0**126, 1.25 * 2.0**126, 1.5 * 2.0**127):
    x = torch.zeros(1, 128, device="cuda")
    x[0, 0], x[0, 1] = amax, -amax / 2
    payload, scales = per_token_group_quant(x, group_size=128, scale_ue8m0=False)
    print(
        f"amax {amax:.4g}: scale {scales.item():.4g}, payload {payload.float()[0, :2].tolist()}, expected [448, -224]"
    )
    failed |= payload.float()[0, :2].tolist() != [448.0, -224.0]
sys.exit(failed)
