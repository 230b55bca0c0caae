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


@triton.jit
def decode(x, y, n: tl.constexpr, dtype: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y + at, tl.load(x + at).to(dtype, bitcast=True).to(tl.float32))


x = torch.tensor([7.93, 1.0625, 1.5 * 2.0**-10, 1.00390625])
codes = torch.tensor([0x7F, 0x38], dtype=torch.uint8)  # NaN and 1 in E4M3
words = torch.tensor([0x0040, 0x3F80], dtype=torch.int16)  # 2^-127 and 1 in BF16
failed = False
for name, kernel, given, dtype, wanted in (
    ("FP32 to E4M3", cast, x, tl.float8e4nv, x.to(torch.float8_e4m3fn).float()),
    ("FP32 to BF16", cast, x, tl.bfloat16, x.to(torch.bfloat16).float()),
    ("E4M3 to FP32", decode, codes, tl.float8e4nv, torch.tensor([torch.nan, 1.0])),
    ("BF16 to FP32", decode, words, tl.bfloat16, torch.tensor([2.0**-127, 1.0])),
):
    actual = torch.empty(len(given))
    kernel[(1,)](given, actual, len(given), dtype)
    print(f"{name}: actual {actual.tolist()}, expected {wanted.tolist()}")
    failed |= not bool(((actual == wanted) | (actual.isnan() & wanted.isnan())).all())
nan = torch.empty(1)
cast[(1,)](torch.full((1,), torch.nan), nan, 1, tl.float8e4nv)
print(f"FP32 NaN to E4M3 and back: actual {nan.item()}, expected nan")
sys.exit(bool(failed or not nan.isnan().all()))
