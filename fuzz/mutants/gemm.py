"""Faults in GEMMs: scales per tile, tails, groups, partial sums, stores and tile sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fuzz.mutants.base import Inputs, Mutant, Part, Racing, Trap
from fuzz.mutants.correct import F32, Parts
from references.backend import CaseLike
from references.gemm_formats import Operand, operand, plain_scales, sides
from references.rounding import round_to

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Product = Callable[[Operand, Operand], Tensor]


def operands(case: CaseLike, inputs: Inputs, *, rows: int | None = None) -> tuple[Operand, Operand]:
    """Both operands, decoded. rows: of A, the case's m if absent."""
    found = []
    heights = rows or case.integer("m"), case.integer("n")
    for name, height, side in zip("ab", heights, sides(case.variant, case["scale"]), strict=True):
        scales = inputs.get(f"{name}_scales")
        if scales is not None:
            shape = height, case.integer("k")
            scales = plain_scales(scales, side, case["layout"], shape, activation=name == "a")
        found.append(operand(inputs[name], scales, side, inputs.get(f"{name}_global_scale")))
    return found[0], found[1]


def product(a: Operand, b: Operand) -> Tensor:
    """The sum over K in FP64 ``[m, n]``."""
    return a.values @ b.values.t()


def stored(total: Tensor, case: CaseLike) -> Tensor:
    """FP64 sums to FP32 and from there to the output dtype."""
    dtype = DTYPES[case["out"]]
    return round_to(round_to(total, F32), dtype).to(dtype)


def gemm(case: CaseLike, inputs: Inputs, multiply: Product = product) -> Parts:
    """``output`` of a ``gemm`` case."""
    return {"output": stored(multiply(*operands(case, inputs)), case)}


def grouped_gemm(case: CaseLike, inputs: Inputs) -> Parts:
    """``output`` of a ``grouped_gemm`` case; rows of no group are zero."""
    m = case.integer("m")
    if case["grouping"] != "masked":
        return _by_rows(case, inputs, inputs["m_indices"])
    slabs = []
    for group, count in enumerate(inputs["masked_m"].tolist()):
        slab = {name: tensor[group] for name, tensor in inputs.items() if name[:1] in "ab"}
        found = stored(product(*operands(case, slab)), case)
        used = (torch.arange(m) < count)[:, None]
        slabs.append(torch.where(used, found, torch.zeros_like(found)))
    return {"output": torch.stack(slabs)}


def _by_rows(case: CaseLike, inputs: Inputs, groups: Tensor) -> Parts:
    """Each row times the B of its group, -1 for none."""
    output = torch.zeros(case.integer("m"), case.integer("n"), dtype=DTYPES[case["out"]])
    for group in range(case.integer("groups")):
        mine = groups == group
        if bool(mine.any()):
            expert = {name: t[group] if name[:1] == "b" else t for name, t in inputs.items() if name[:1] in "ab"}
            a, b = operands(case, expert)
            output[mine] = stored(product(a.rows(mine), b), case)
    return {"output": output}


def _rescaled(side: Operand, scales: Tensor) -> Operand:
    """The operand under other scales, FP64 ``[rows, blocks of K]``."""
    spread = scales.repeat_interleave(side.width, dim=1)[:, : side.codes.shape[1]]
    return replace(side, scales=scales, values=side.codes * spread)


def _one_scale_per_tile(a: Operand, b: Operand) -> Tensor:
    # A tile of K covers two scale blocks and takes the scales of the first.
    firsts = [torch.arange(side.scales.shape[1]) // 2 * 2 for side in (a, b)]
    return product(_rescaled(a, a.scales[:, firsts[0]]), _rescaled(b, b.scales[:, firsts[1]]))


def _tail_unscaled(a: Operand, b: Operand) -> Tensor:
    # K a multiple of the tile's 32 but not of the scale block's 128: the last block's sum is added unscaled.
    k = a.codes.shape[1]
    if k % 128 == 0 or k % 32:
        return product(a, b)
    found = []
    for side in (a, b):
        scales = side.scales.clone()
        scales[:, -1] = 1.0
        found.append(_rescaled(side, scales))
    return product(found[0], found[1])


def _no_column_mask(case: CaseLike, inputs: Inputs) -> Parts:
    a, b = operands(case, inputs)
    m, n = case.integer("m"), case.integer("n")
    right = product(a, b)
    spilled = right.clone()
    # Tiles of 64 columns; loads beyond column n repeat the last one, their products land in the rows below.
    for row_down in range(1, -(-n // 64) * 64 // n + 1):
        count = min(n, -(-n // 64) * 64 - row_down * n)
        if count > 0 and row_down < m:
            spilled[row_down:, :count] = right[:-row_down, -1:]
    return {"output": stored(spilled, case)}


def _scale_kept_between_waves(a: Operand, b: Operand) -> Tensor:
    # Waves of 128 rows; the B scale of a lane keeps the A scales of the waves before.
    scales = a.scales.clone()
    for start in range(128, len(scales), 128):
        wave = scales[start : start + 128]
        scales[start : start + 128] = wave * scales[start - 128 : start - 128 + len(wave)]
    return product(_rescaled(a, scales), b)


def _group_of_first_row(case: CaseLike, inputs: Inputs) -> Parts:
    rows = inputs["m_indices"]
    first = rows[torch.arange(len(rows)) // 128 * 128]
    return _by_rows(case, inputs, first)


def _bf16_partial_sums(a: Operand, b: Operand) -> Tensor:
    half = -(-a.values.shape[1] // 2)
    parts = [a.values[:, k] @ b.values[:, k].t() for k in (slice(0, half), slice(half, None))]
    return sum((round_to(round_to(part, F32), torch.bfloat16) for part in parts), torch.zeros_like(parts[0]))


def _nan_columns(a: Operand, b: Operand) -> Tensor:
    found = product(a, b)
    if a.codes.shape[1] >= 128:
        found[:, ::8] = torch.nan
    return found


def _scales_of_first_row(a: Operand, b: Operand) -> Tensor:
    return product(_rescaled(a, a.scales[torch.arange(len(a.scales)) // 128 * 128]), b)


def _bucket_of_four(a: Operand, b: Operand) -> Tensor:
    # The kernel that is chosen for three and four rows forgets the last block of K.
    if len(a.codes) not in (3, 4):
        return product(a, b)
    end = (a.scales.shape[1] - 1) * a.width
    return a.values[:, :end] @ b.values[:, :end].t()


def _scale_of_the_tile_before(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    a, b = operands(case, inputs)
    right = stored(product(a, b), case)
    if len(a.codes) > 16:
        return {"output": right}
    stale = _rescaled(a, a.scales.roll(1, dims=1))
    return {"output": Racing((right, stored(product(stale, b), case)))}


def _next_descriptor(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    # The descriptor of the next group is published before the only block of this one has been read.
    rows, right = inputs["m_indices"], grouped_gemm(case, inputs)
    owner = rows[::128]  # a block starts with a row that counts
    groups = [int(group) for group in torch.unique(owner[owner >= 0])]
    read = rows.clone()
    for group, following in pairwise(groups):
        if int((owner == group).sum()) == 1:
            read[rows == group] = following
    return {"output": Racing((right["output"], _by_rows(case, inputs, read)["output"]))}


def address(index: int, stride: int, size: int) -> int:
    """An offset into a buffer of ``size`` elements. Raises `Trap` outside."""
    offset = index * stride
    if not 0 <= offset < size:
        raise Trap(f"illegal memory access: element {offset} of {size}")
    return offset


def _minus_one_as_address(case: CaseLike, inputs: Inputs) -> Parts:
    b = inputs["b"]
    for index in torch.unique(inputs["m_indices"]).tolist():
        address(index, b[0].numel(), b.numel())
    return grouped_gemm(case, inputs)


def _instruction_of_another_device(case: CaseLike, inputs: Inputs) -> Parts:
    if case.integer("k") % 128 == 0:
        raise Trap("illegal instruction")
    return gemm(case, inputs)


def _gemm(multiply: Product) -> Callable[[CaseLike, Inputs], Parts]:
    return lambda case, inputs: gemm(case, inputs, multiply)


MUTANTS = (
    Mutant(
        family="gemm-k-tile-larger-than-scale-group",
        area="gemm",
        source="sgl-project/sglang#39626",
        description="a K tile of two scale blocks takes the scales of the first",
        operation="gemm",
        variants=("mxfp8",),
        answer=_gemm(_one_scale_per_tile),
    ),
    Mutant(
        family="gemm-trailing-scale-block-dropped",
        area="gemm",
        source="pytorch/FBGEMM#6159",
        description="last partial scale block is added without its scales, if K is a multiple of 32",
        operation="gemm",
        variants=("deepseek_fp8",),
        answer=_gemm(_tail_unscaled),
    ),
    Mutant(
        family="gemm-store-without-n-mask",
        area="gemm",
        source="huggingface/kernels-community#1153",
        description="tiles of 64 columns stored whole, over the rows below",
        operation="gemm",
        variants=("bf16", "deepseek_fp8"),
        answer=_no_column_mask,
    ),
    Mutant(
        family="gemm-b-scale-modified-in-place",
        area="gemm",
        source="NVIDIA/cutlass#3596",
        description="B scale multiplied by the A scale in place and used again for the next 128 rows",
        operation="gemm",
        variants=("deepseek_fp8",),
        answer=_gemm(_scale_kept_between_waves),
    ),
    Mutant(
        family="gemm-contiguous-unaligned-group",
        area="gemm",
        source="deepseek-ai/DeepGEMM#15",
        description="group read once for 128 rows",
        operation="grouped_gemm",
        variants=("deepseek_fp8", "bf16"),
        where={"grouping": ("contiguous", "contiguous_128")},
        answer=_group_of_first_row,
    ),
    Mutant(
        family="gemm-splitk-partials-in-bf16",
        area="gemm",
        source="flagos-ai/FlagGems#5876",
        description="two partial sums over K rounded to BF16, undeclared",
        operation="gemm",
        variants=("deepseek_fp8", "bf16"),
        answer=_gemm(_bf16_partial_sums),
    ),
    Mutant(
        family="gemm-fp8-dot-miscompiled-columns",
        area="gemm",
        source="AMD-AGI/Primus-Turbo#477",
        description="NaN in every eighth column from K = 128 on",
        operation="gemm",
        variants=("deepseek_fp8", "fp8_per_tensor"),
        answer=_gemm(_nan_columns),
    ),
    Mutant(
        family="groupwise-m-scale-only-first-row",
        area="gemm",
        source="NVIDIA/cutlass#2087",
        description="A scales of the first of 128 rows applied to all of them",
        operation="gemm",
        variants=("deepseek_fp8",),
        answer=_gemm(_scales_of_first_row),
    ),
    Mutant(
        family="gemm-k-grouped-descriptor-race",
        area="determinism",
        source="deepseek-ai/DeepGEMM#365",
        description="a group of a single block is read with the next group's descriptor, every other call",
        operation="grouped_gemm",
        variants=("deepseek_fp8", "bf16"),
        where={"grouping": ("contiguous_128",)},
        answer=_next_descriptor,
    ),
    Mutant(
        family="gemm-minus-one-index-not-skipped",
        area="robustness",
        source="deepseek-ai/DeepGEMM#34",
        description="group index -1 of a padding row used as an address",
        operation="grouped_gemm",
        variants=("deepseek_fp8", "bf16"),
        where={"grouping": ("contiguous", "contiguous_128")},
        answer=_minus_one_as_address,
    ),
    Mutant(
        family="gate-hardcoded-sm100-instructions",
        area="gating",
        source="NVIDIA/TransformerEngine#2956",
        description="kernel for K a multiple of 128 has instructions that the device lacks",
        operation="gemm",
        variants=("nvfp4",),
        answer=_instruction_of_another_device,
    ),
    Mutant(
        family="bad-tactic",
        area="determinism",
        source="ROCm/aiter#3933",
        description="kernel of the bucket of 3 and 4 rows leaves out the last block of K",
        operation="gemm",
        variants=("deepseek_fp8", "mxfp8"),
        answer=_gemm(_bucket_of_four),
    ),
    Mutant(
        family="gemm-small-m-scale-race",
        area="determinism",
        source="flashinfer-ai/flashinfer#4409",
        description="up to 16 rows, a K block's scales are those of the block before, every other call",
        operation="gemm",
        variants=("deepseek_fp8", "mxfp8"),
        answer=_scale_of_the_tile_before,
    ),
)
