import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

GROUPS, ROWS, N, K = 2, 128, 128, 128


def call() -> torch.Tensor:
    """MXFP8 operands of ones with scales of one in the documented 32-4-4 order, two groups of 128 rows."""
    a = torch.ones(GROUPS * ROWS, K, device="cuda").to(torch.float8_e4m3fn)
    b = torch.ones(GROUPS, N, K, device="cuda").to(torch.float8_e4m3fn)
    one = torch.full((GROUPS * ROWS, K // 32), 127, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
    ones = torch.full((GROUPS, N * K // 32), 127, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
    ends = torch.tensor([ROWS, 2 * ROWS], dtype=torch.int32, device="cuda")
    kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return F.scaled_grouped_mm(
        a, b.transpose(1, 2), one, kind, ones, kind, order, order, offs=ends, output_dtype=torch.bfloat16
    )


def say(text: str) -> None:
    """On stderr: the kernel prints thousands of words to stdout."""
    print(" ".join(text.split())[:160], file=sys.stderr, flush=True)


if len(sys.argv) > 1:
    try:
        out = call()
        say("the call returned without an error")
        say(f"out[0, 0] = {out[0, 0].item()}, expected {K}.0")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        say(f"{type(error).__name__}: {error}")
    try:
        say(f"the device afterwards: 1 + 1 = {(torch.ones(1, device='cuda') + 1).item()}")
    except RuntimeError as error:
        say(f"the device afterwards: {type(error).__name__}: {error}")
        sys.exit(1)
    sys.exit(0)

major, minor = torch.cuda.get_device_capability()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, SM{major}{minor}")
print("expected: a refusal, after which the device works", flush=True)
sys.exit(subprocess.run([sys.executable, __file__, "call"], stdout=subprocess.DEVNULL, check=False).returncode)
