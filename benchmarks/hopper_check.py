"""Hopper's tensor cores against `references.tensor_cores`, bit for bit, on the GPU at hand.

    python -m benchmarks.hopper_check

One Triton program computes a 64x64 or 16x64 product with ``tl.dot`` on one accumulator, so that the instruction's own
arithmetic is all there is: ``wgmma`` for 64 rows, ``mma.sync`` for 16. Prints a Markdown table with the share of equal
elements; exits 1 unless every share is 100 %, 2 without an SM90 GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from references.elements import E4M3FN, decode
from references.tensor_cores import HOPPER_F16, HOPPER_FP8, HOPPER_FP8_MMA, TensorCore, tensor_core_dot

DEPTHS = (128, 256, 512, 1024, 7168)


@triton.jit
def dot_kernel(
    a,
    b,
    c,
    K: tl.constexpr,  # noqa: N803
    M: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IMPRECISE: tl.constexpr,  # noqa: N803
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        y = tl.load(b + n[None, :] * K + start + k[:, None])
        acc = tl.dot(x, y, acc, max_num_imprecise_acc=IMPRECISE)
    tl.store(c + m[:, None] * N + n[None, :], acc)


def e4m3(rows: int, k: int, wide: bool, generator: torch.Generator) -> Tensor:
    """Codes: of normal numbers, or every finite code alike."""
    if not wide:
        numbers = torch.randn(rows, k, generator=generator) * 2
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.randint(0, 256, (rows, k), generator=generator, dtype=torch.int32).to(torch.uint8)
    return torch.where((codes & 0x7F) == 0x7F, 0, codes)


def products(k: int, wide: bool, generator: torch.Generator) -> Iterator[tuple[str, int, float]]:
    """(instruction, rows, share of equal elements) for every operand format."""
    a, b = (e4m3(64, k, wide, generator).cuda() for _ in range(2))
    wide_a, wide_b = decode(a, E4M3FN), decode(b, E4M3FN)
    for name, rows, operand, core, imprecise in (
        ("E4M3 wgmma", 64, "e4m3", HOPPER_FP8, None),
        ("E4M3 mma.sync", 16, "f16", HOPPER_FP8_MMA, 0),
    ):
        floats = (codes.view(torch.float8_e4m3fn) for codes in (a[:rows].contiguous(), b))
        yield name, rows, share(*floats, wide_a[:rows], wide_b, operand, core, imprecise)
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        spread = 2.0 ** torch.randint(-10, 11, (64, k), generator=generator) if wide else 1.0
        x = (torch.randn(64, k, generator=generator) * spread).to(dtype).cuda()
        y = torch.randn(64, k, generator=generator).to(dtype).cuda()
        for rows, instruction in ((64, "wgmma"), (16, "mma.sync")):
            part = x[:rows].contiguous()
            equal = share(part, y, part.double(), y.double(), name, HOPPER_F16, 0)
            yield f"{name.upper()} {instruction}", rows, equal


def share(
    a: Tensor, b: Tensor, wide_a: Tensor, wide_b: Tensor, operand: str, core: TensorCore, imprecise: object
) -> float:
    """The share of elements on which the GPU and the model agree."""
    out = torch.empty(a.shape[0], 64, device="cuda")
    block = 128 if a.element_size() == 1 else 64
    dot_kernel[(1,)](a, b, out, a.shape[1], a.shape[0], 64, block, imprecise, num_warps=4)
    return float((out.double() == tensor_core_dot(wide_a, wide_b, operand, core)).double().mean())


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("hopper_check: needs an SM90 GPU", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {triton.__version__}\n")
    print("| instruction | rows | data | K | equal elements |\n|---|--:|---|--:|--:|")
    generator = torch.Generator().manual_seed(0)
    worst = 1.0
    for wide in (False, True):
        for k in DEPTHS:
            for name, rows, equal in products(k, wide, generator):
                worst = min(worst, equal)
                print(f"| {name} | {rows} | {'wide' if wide else 'normal'} | {k} | {equal:.2%} |")
    return int(worst < 1.0)


if __name__ == "__main__":
    sys.exit(main())
