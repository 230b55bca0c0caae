"""GEMMs by torch's own operators: dequantise to FP32 and multiply, or a BF16 matmul for BF16 operands.

Dequantised operands are FP32, the product is FP32 (TF32 and reduced-precision reductions off), the output is rounded
once. Every operand holds its scales in the order that the case names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _torch_layouts as layouts
from references.backend import Claim
from references.recipes import Recipe

OPERATIONS = ("gemm", "grouped_gemm")
FORMATS = ("deepseek_fp8", "mxfp8", "w4a8", "w4a16", "nvfp4", "fp8_per_tensor", "bf16", "fp16")
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = {"mxfp8": (1, 32), "w4a8": (1, 32), "w4a16": (1, 32), "nvfp4": (1, 16)}
E2M1 = {"w4a8": "b", "w4a16": "b", "nvfp4": "ab"}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def claims() -> Iterable[Claim]:
    """Every format; BF16 matmuls apart, because they may flush subnormal numbers."""
    source = "torch.matmul on operands dequantised to float32 by torch operators"
    return [
        Claim(
            operation=operation,
            variant=variant,
            source="torch.matmul of bfloat16" if out == ("bf16",) else source,
            where={} if out is None else {"out": out},
        )
        for operation in OPERATIONS
        for variant in FORMATS
        for out in ((("bf16",), ("fp32",)) if variant == "bf16" else (None,))
    ]


def recipe(claim: Claim, source: str) -> Recipe:
    """FP32 matmuls add by FMA, rounded to nearest, in an order of their own; BF16 ones may use other units."""
    if claim.where.get("out") == ("bf16",):
        # x86: VDPBF16PS and TDPBF16PS treat subnormal inputs and results as zero (Intel SDM).
        return Recipe(source=f"{source}; Intel SDM, VDPBF16PS", subnormals="flush")
    return Recipe(source=f"{source}; FP32 matmuls without TF32 round to nearest", accumulator="fp32_rn")


def gemm(case: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """``[m, n]`` of the case's output dtype."""
    out = OUTPUTS[case["out"]]
    if case.variant == "bf16" and out == torch.bfloat16:
        return matmul(inputs["a"], inputs["b"])
    sizes = {"a": case.integer("m"), "b": case.integer("n")}
    a, b = (dequantized(case, inputs, name, rows) for name, rows in sizes.items())
    return matmul(a, b).to(out)


def grouped_gemm(case: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Each group's rows times its own B, one matmul after another; rows of no group are zero."""
    groups, m, n = (case.integer(key) for key in ("groups", "m", "n"))
    masked, out = case["grouping"] == "masked", OUTPUTS[case["out"]]
    output = inputs["a"].new_zeros((groups, m, n) if masked else (m, n), dtype=out)
    for group in range(groups):
        if masked:
            where = torch.arange(m, device=output.device) < inputs["masked_m"][group]
            slab = {name: tensor[group] for name, tensor in inputs.items() if name.startswith("a")}
        else:
            where = inputs["m_indices"] == group
            slab = {name: tensor for name, tensor in inputs.items() if name.startswith("a")}
        expert = {name: tensor[group] for name, tensor in inputs.items() if name.startswith("b")}
        if case.variant == "bf16" and out == torch.bfloat16:
            product = matmul(slab["a"][where], expert["b"])
        else:
            a, b = dequantized(case, slab, "a", m), dequantized(case, expert, "b", n)
            product = matmul(a[where], b).to(out)
        (output[group] if masked else output)[where] = product
    return output


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` in the operands' dtype with FP32 accumulation throughout."""
    with full_precision():
        return a @ b.transpose(-1, -2)


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32, no BF16 partial sums."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction
    flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction = False, False
    try:
        yield
    finally:
        flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction = before


def dequantized(case: Any, inputs: Mapping[str, Tensor], name: str, rows: int) -> Tensor:
    """One operand in FP32 ``[rows, k]``."""
    codes, k = inputs[name], case.integer("k")
    if codes.dtype.is_floating_point:
        return codes.float()
    if name in E2M1.get(case.variant, ""):
        table = torch.tensor(E2M1_VALUES, device=codes.device)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(rows, k)
        values = table[nibbles.to(torch.int64)]
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    scales = _scales(case, inputs[f"{name}_scales"], name, (rows, k))
    if case.variant == "nvfp4":
        scales = scales * inputs[f"{name}_global_scale"]
    height, width = _block(case, name, (rows, k))
    return values * scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :k]


def _block(case: Any, name: str, shape: tuple[int, int]) -> tuple[int, int]:
    if case.variant == "deepseek_fp8":
        return (1, 128) if name == "a" else (128, 128)
    return BLOCKS.get(case.variant, shape)


def _scales(case: Any, stored: Tensor, name: str, shape: tuple[int, int]) -> Tensor:
    """The plain grid in FP32."""
    height, width = _block(case, name, shape)
    grid = -(-shape[0] // height), -(-shape[1] // width)
    if case["layout"] == "interleave_128x4":
        stored = layouts.deinterleave(stored, *grid)
    elif case["layout"] == "mn_major" and name == "a":
        unpack = layouts.from_mn_major if case["scale"] == "fp32" else layouts.from_mn_major_packed
        stored = unpack(stored, *grid)
    if case["scale"] == "fp32":
        return stored
    return stored.view(torch.float8_e8m0fnu if case["scale"] == "ue8m0" else torch.float8_e4m3fn).float()
