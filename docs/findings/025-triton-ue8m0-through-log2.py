import sys

import torch


def vllm_scale(x):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    # Rows lie apart: contiguous ones take vLLM's compiled operator.
    rows = torch.zeros(len(x), 136, device="cuda")[:, :128]
    rows.copy_(x)
    return per_token_group_quant_fp8(rows, 128, use_ue8m0=True)[1][:, 0]


def sglang_scale(x):
    from sglang.kernels.ops.quantization.mxfp8_quant import to_mxfp8

    return 2.0 ** (to_mxfp8(x).scale[:, 0].float() - 127)


EXPONENTS = torch.arange(-20, 21)
failed, called = False, 0
# SGLang divides by 448 within 2 ulp, so that it gets an amax 8 ulp above.
for name, scales_of, steps, k in (("vllm", vllm_scale, 1, 4), ("sglang", sglang_scale, 8, 16)):
    # Blocks whose amax lies some ulp above 448 * 2^k: the smallest power of two >= amax / 448 is 2^(k+1).
    amax = ((448.0 * 2.0**EXPONENTS).view(torch.int32) + steps).view(torch.float32)
    x = torch.zeros(len(amax), 128, device="cuda")
    x[:, 0] = amax
    try:
        scales = scales_of(x).cpu()
    except ImportError as error:
        print(f"{name}: {error}")
        continue
    called += 1
    wrong = scales * 448 < amax
    shown, scale = amax[20 + k].item(), scales[20 + k].item()
    print(f"{name}: amax = {shown} (448 * 2^{k} + {steps} ulp): scale {scale}, expected {2.0 ** (k + 1)}")
    print(f"{name}: scale half as large as it must be at k = {EXPONENTS[wrong].tolist()}")
    failed |= bool(wrong.any())
sys.exit(bool(failed or not called))
