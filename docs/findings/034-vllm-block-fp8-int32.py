import sys

import torch
from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

N, K = 32784, 128


def right(m: int) -> bool:
    """Whether a product of ones, with scales of one, is K everywhere."""
    a = torch.ones(m, K, device="cuda").to(torch.float8_e4m3fn)
    b = torch.ones(N, K, device="cuda").to(torch.float8_e4m3fn)
    a_scales, b_scales = torch.ones(m, 1, device="cuda"), torch.ones(-(-N // 128), 1, device="cuda")
    out = w8a8_triton_block_scaled_mm(a, b, a_scales, b_scales, [128, 128], torch.bfloat16)
    torch.cuda.synchronize()
    return bool((out == K).all())


failed = False
for m in (65504, 65552):  # 65504 x 32784 = 2^31 - 512 outputs, 65552 x 32784 = 2^31 + 1,573,120
    try:
        found = "right" if right(m) else "wrong"
    except Exception as error:  # the context is lost: nothing else can be called
        found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"[{m}, {K}] x [{N}, {K}], {m * N} outputs: {found}; expected: right")
    failed |= found != "right"
sys.exit(failed)
