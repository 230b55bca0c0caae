"""mxfp8_quantize(backend="cuda") below SM100 returns without an error and leaves its outputs unwritten."""

import sys

import torch
from flashinfer import mxfp8_quantize

x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
junk = [torch.full((256,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(64)]
del junk  # the outputs are allocated where these were
payload, scales = mxfp8_quantize(x, False, backend="cuda")
torch.cuda.synchronize()
codes, exponents = payload.view(torch.uint8).unique().tolist(), scales.view(torch.uint8).unique().tolist()
print(f"payload codes {codes}, expected [120] (256); scale codes {exponents}, expected [119] (2^-8)")
sys.exit((codes, exponents) != ([120], [119]))
