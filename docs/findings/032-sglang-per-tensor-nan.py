import sys

import torch
from sglang.kernels.ops.quantization.fp8_kernel import static_quant_fp8
from sglang.kernels.ops.quantization.per_tensor_quant_fp8 import per_tensor_quant_fp8
from sglang.srt.layers.quantization.fp8_utils import quant_weight_ue8m0

nan, one = float("nan"), torch.ones(1, device="cuda")


def jit(x, scale):
    payload = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    found = torch.zeros(1, device="cuda") if scale is None else scale
    per_tensor_quant_fp8(x, payload, found, is_static=scale is not None)
    return payload, found


failed = False
x = torch.tensor([[1.0, nan] + [0.0] * 126], device="cuda", dtype=torch.bfloat16)
for name, payload in (("static_quant_fp8", static_quant_fp8(x, one)[0]), ("per_tensor_quant_fp8", jit(x, one)[0])):
    print(f"{name}: 1.0, NaN become {payload.float()[0, :2].tolist()}, expected [1.0, nan]")
    failed |= not payload.float()[0, 1].isnan()
payload, scale = jit(torch.zeros(1, 128, device="cuda", dtype=torch.bfloat16), None)
back = payload.float() * scale
print(f"per_tensor_quant_fp8 of zeros: scale {scale.item()}, payload {payload.float()[0, 0].item()}, expected 0.0")
weight = torch.ones(128, 128, device="cuda", dtype=torch.bfloat16)
weight[0, 0] = nan
codes, scales = quant_weight_ue8m0(weight, [128, 128])
other = (codes.float()[1, 1] * scales[0, 0]).item()
print(f"quant_weight_ue8m0 of ones and a NaN: scale {scales.item()}, other elements {other}, expected 1.0 or nan")
failed |= other == 0.0
sys.exit(bool(failed or payload.float().any() or back.any()))
