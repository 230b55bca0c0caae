import inspect
import sys

import torch
from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

asked = [name for name in inspect.signature(fused_experts).parameters if "ue8m0" in name]
print(f"fused_experts: arguments that ask for UE8M0 activation scales: {asked or 'none'}")

# What the layer calls on the activations of FC1 and FC2 (fused_moe_triton_kernels.py: invoke_fused_moe_kernel).
torch.manual_seed(0)
x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
payload, scales = sglang_per_token_group_quant_fp8(x, 128)
powers = int(((scales.view(torch.int32) & 0x7FFFFF) == 0).sum())
print(f"{powers} of {scales.numel()} activation scales are powers of two, expected all")
sys.exit(not asked and powers < scales.numel())
