import os
import sys

os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # the host functions need no GPU

import torch
from flashinfer import mxfp8_dequantize_host, mxfp8_quantize

payload, scale = mxfp8_quantize(torch.full((1, 32), 2.0**-127), False, enable_pdl=False, backend="cuda")
one = torch.full((1, 32), 0x38, dtype=torch.uint8)
tiny, nan = (mxfp8_dequantize_host(one, torch.tensor([code], dtype=torch.uint8), False)[0, 0] for code in (0, 255))
actual = (scale.item(), payload[0, 0].item(), tiny.item(), nan.item())
print("expected", (0, 0x38, 2.0**-127, float("nan")))
print("actual  ", actual)
sys.exit(actual[:3] != (0, 0x38, 2.0**-127) or nan == nan)
