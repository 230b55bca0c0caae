import sys

import torch
from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant

failed = False
for dtype in (torch.bfloat16, torch.float16):
    for amax in (1.0, 2.0**-6, 2.0**-8, 2.0**-14):
        x = torch.zeros(1, 128, device="cuda", dtype=dtype)
        x[0, 0], x[0, 1] = amax, -amax / 2
        payload, scales = per_token_group_quant(x, group_size=128, scale_ue8m0=True)
        code = int(scales.view(torch.uint8)[0, 0])
        expected = [256.0, -128.0, 0.0, 0.0]
        back = payload.double()[0, :4] * 2.0 ** (code - 127)
        actual = payload.float()[0, :4].tolist()
        print(f"{dtype}, amax {amax}: scale 2^{code - 127}, payload {actual}, expected {expected}")
        failed |= not torch.equal(back, x.double()[0, :4])
sys.exit(failed)
