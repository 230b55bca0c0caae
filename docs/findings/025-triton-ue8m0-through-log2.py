import sys

import torch
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

# A block whose amax is one step above 448 * 2^k. Rows lie apart: contiguous ones take vLLM's compiled operator.
wrong = []
for k in range(-20, 21):
    x = torch.zeros(2, 136, device="cuda")[:, :128]
    x[:, 0] = torch.nextafter(torch.tensor(448.0 * 2.0**k), torch.tensor(torch.inf)).item()
    payload, scales = per_token_group_quant_fp8(x, 128, use_ue8m0=True)
    scale = float(scales[0, 0])
    if scale * 448 < float(x[0, 0]):
        wrong.append(k)
print(f"scale too small for amax = 448 * 2^k + 1 ulp at k = {wrong}")
sys.exit(bool(wrong))
