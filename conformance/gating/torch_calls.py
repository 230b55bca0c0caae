"""torch's scaled matrix products on a real device, on both sides of their gates: one call each, with an exact answer.

Operands are 0, +-1 and +-2 under scales that are powers of two and differ from block to block, so that every partial
sum in any order fits every accumulator and the answer is exact: FP32, then one rounding to BF16. The recipes' layouts
are those of https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_mm.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from references import layouts

M, N, K = 128, 128, 512
GROUPS = 2
INTEGERS = torch.tensor([0, 1, -1, 2, -2], dtype=torch.float64)
E4M3 = torch.tensor([0x00, 0x38, 0xB8, 0x40, 0xC0], dtype=torch.uint8)
E2M1 = torch.tensor([0x0, 0x2, 0xA, 0x4, 0xC], dtype=torch.uint8)
"""The codes of `INTEGERS`."""
UNIT_E4M3 = 0x38
"""The code of 1; each 8 more doubles."""

Call = Callable[[str], tuple[Tensor, Tensor]]
"""Given a device: the answer, and the exact one on the CPU in FP64."""


def _integers(rows: int, k: int, salt: int) -> Tensor:
    """Indices into `INTEGERS`, one in four of them not zero."""
    at = (torch.arange(rows)[:, None] * 7919 + torch.arange(k)[None, :] * 104729 + salt * 15485863) % 1000003
    return torch.where(at % 4 == 0, 1 + at // 4 % 4, torch.zeros_like(at))


def _exponents(rows: int, columns: int, salt: int) -> Tensor:
    """-2, -1, 0 or 1 for each block, neighbours different."""
    return (torch.arange(rows)[:, None] * 3 + torch.arange(columns)[None, :] + salt) % 4 - 2


def _operand(rows: int, block: tuple[int, int], salt: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, the exponents of the blocks' scales, and the values in FP64."""
    indices = _integers(rows, K, salt)
    exponents = _exponents(rows // block[0], K // block[1], salt)
    scales = torch.pow(torch.tensor(2.0, dtype=torch.float64), exponents)
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return indices, exponents, INTEGERS[indices] * wide


def _e4m3(indices: Tensor, device: str) -> Tensor:
    return E4M3[indices].to(device).view(torch.float8_e4m3fn)


def _e2m1(indices: Tensor, device: str) -> Tensor:
    codes = E2M1[indices]
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(device).view(torch.float4_e2m1fn_x2)


def _scales(exponents: Tensor, device: str) -> Tensor:
    return torch.pow(torch.tensor(2.0), exponents).float().to(device)


def _exact(a: Tensor, b: Tensor) -> Tensor:
    """The product, rounded to BF16 by way of FP32, which holds it exactly."""
    return (a @ b.t()).float().bfloat16().double()


def fp8(recipe_a: str, recipe_b: str, device: str) -> tuple[Tensor, Tensor]:
    """FP8 operands under FP32 scales: a tensor, a row, 1x128 or 128x128."""
    functional = torch.nn.functional
    blocks = {"TensorWise": (M, K), "RowWise": (1, K), "BlockWise1x128": (1, 128), "BlockWise128x128": (128, 128)}
    (a, a_exponents, a_values), (b, b_exponents, b_values) = (
        _operand(rows, blocks[recipe], salt) for rows, recipe, salt in ((M, recipe_a, 1), (N, recipe_b, 2))
    )
    a_scales, b_scales = _scales(a_exponents, device), _scales(b_exponents, device)
    if recipe_a == "RowWise":
        b_scales = b_scales.t()
    if recipe_a == "BlockWise1x128":
        a_scales = a_scales.t().contiguous().t()
    if recipe_b == "BlockWise1x128":
        b_scales = b_scales.t().contiguous().t()
    if recipe_b == "BlockWise128x128":
        b_scales = b_scales.t()
    out = functional.scaled_mm(
        _e4m3(a, device),
        _e4m3(b, device).t(),
        a_scales,
        getattr(functional.ScalingType, recipe_a),
        b_scales,
        getattr(functional.ScalingType, recipe_b),
        output_dtype=torch.bfloat16,
    )
    return out, _exact(a_values, b_values)


def mxfp8(device: str) -> tuple[Tensor, Tensor]:
    """E4M3 operands under UE8M0 scales, 1x32, interleaved."""
    functional = torch.nn.functional
    (a, a_exponents, a_values), (b, b_exponents, b_values) = (
        _operand(rows, (1, 32), salt) for rows, salt in ((M, 1), (N, 2))
    )
    a_scales, b_scales = (
        layouts.pack((exponents + 127).to(torch.uint8), "interleave_128x4").to(device).view(torch.float8_e8m0fnu)
        for exponents in (a_exponents, b_exponents)
    )
    out = functional.scaled_mm(
        _e4m3(a, device),
        _e4m3(b, device).t(),
        a_scales,
        functional.ScalingType.BlockWise1x32,
        b_scales,
        functional.ScalingType.BlockWise1x32,
        swizzle_a=functional.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=functional.SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16,
    )
    return out, _exact(a_values, b_values)


def nvfp4(device: str) -> tuple[Tensor, Tensor]:
    """E2M1 operands under E4M3 scales, 1x16, interleaved, and two global scales, 1/2 and 4."""
    functional = torch.nn.functional
    (a, a_exponents, a_values), (b, b_exponents, b_values) = (
        _operand(rows, (1, 16), salt) for rows, salt in ((M, 1), (N, 2))
    )
    a_scales, b_scales = (
        layouts.pack((UNIT_E4M3 + 8 * exponents).to(torch.uint8), "interleave_128x4")
        .to(device)
        .view(torch.float8_e4m3fn)
        for exponents in (a_exponents, b_exponents)
    )
    globals_ = [torch.tensor([value], device=device) for value in (0.5, 4.0)]
    recipes = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    swizzles = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    out = functional.scaled_mm(
        _e2m1(a, device),
        _e2m1(b, device).t(),
        [a_scales, globals_[0]],
        recipes,
        [b_scales, globals_[1]],
        recipes,
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        output_dtype=torch.bfloat16,
    )
    return out, _exact(a_values * 0.5, b_values * 4.0)


def grouped(recipe: str, device: str) -> tuple[Tensor, Tensor]:
    """A grouped product: the rows of A in two groups of unequal size, each with a B of its own."""
    functional: Any = torch.nn.functional
    block = (1, K) if recipe == "RowWise" else (1, 32)
    a, a_exponents, a_values = _operand(M, block, 1)
    b, b_exponents, b_values = _operand(GROUPS * N, block, 2)
    ends = torch.tensor([M // 4, M], dtype=torch.int32)
    b_codes = _e4m3(b, device).view(GROUPS, N, K).transpose(-2, -1)
    if recipe == "RowWise":
        a_scales, b_scales = _scales(a_exponents, device).view(M), _scales(b_exponents, device).view(GROUPS, N)
        swizzle = functional.SwizzleType.NO_SWIZZLE
    else:
        # Each group's rows are padded to whole tiles of 128 of their own.
        starts = [0, *ends.tolist()]
        packed = [
            layouts.pack((a_exponents[start:end] + 127).to(torch.uint8), "interleave_128x4")
            for start, end in pairwise(starts)
        ]
        a_scales = torch.cat(packed).view(-1, K // 32).to(device).view(torch.float8_e8m0fnu)
        packed = [
            layouts.pack((b_exponents[group * N : (group + 1) * N] + 127).to(torch.uint8), "interleave_128x4")
            for group in range(GROUPS)
        ]
        b_scales = torch.stack(packed).to(device).view(torch.float8_e8m0fnu)
        swizzle = functional.SwizzleType.SWIZZLE_32_4_4
    out = functional.scaled_grouped_mm(
        _e4m3(a, device),
        b_codes,
        a_scales,
        getattr(functional.ScalingType, recipe),
        b_scales,
        getattr(functional.ScalingType, recipe),
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        offs=ends.to(device),
        output_dtype=torch.bfloat16,
    )
    cut = int(ends[0])
    exact = torch.cat([_exact(a_values[:cut], b_values[:N]), _exact(a_values[cut:], b_values[N:])])
    return out, exact


CALLS: Mapping[tuple[str, str], Call] = {
    ("scaled_mm", "TensorWise"): partial(fp8, "TensorWise", "TensorWise"),
    ("scaled_mm", "RowWise"): partial(fp8, "RowWise", "RowWise"),
    ("scaled_mm", "BlockWise1x128"): partial(fp8, "BlockWise1x128", "BlockWise1x128"),
    ("scaled_mm", "BlockWise1x128 x BlockWise128x128"): partial(fp8, "BlockWise1x128", "BlockWise128x128"),
    ("scaled_mm", "BlockWise1x32"): mxfp8,
    ("scaled_mm", "BlockWise1x16"): nvfp4,
    ("scaled_grouped_mm", "RowWise"): partial(grouped, "RowWise"),
    ("scaled_grouped_mm", "BlockWise1x32"): partial(grouped, "BlockWise1x32"),
}
"""By function of torch.nn.functional and scaling recipe, as in ``torch_gates.py``."""
