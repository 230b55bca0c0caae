import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, y, n: tl.constexpr, dtype: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y + at, tl.load(x + at).to(dtype).to(tl.float32))


x = torch.tensor([7.93, 1.0625, 1.5 * 2.0**-10, 1.00390625])
e4m3, bf16 = torch.empty(4), torch.empty(4)
cast[(1,)](x, e4m3, 4, tl.float8e4nv)
cast[(1,)](x, bf16, 4, tl.bfloat16)
wanted = x.to(torch.float8_e4m3fn).float(), x.to(torch.bfloat16).float()
print("e4m3", e4m3.tolist(), "expected", wanted[0].tolist())
print("bf16", bf16.tolist(), "expected", wanted[1].tolist())
sys.exit(not (torch.equal(e4m3, wanted[0]) and torch.equal(bf16, wanted[1])))
