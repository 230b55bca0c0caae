"""Operands of a block-scaled GEMM: formats, scale grids and stored orders, and their exact FP64 values.

``out[m, n] = sum over k of a[m, k] * b[n, k]``, where each operand is a payload times its block's scale. Both operands
have K last. FP64 holds every ``a[m, k]`` exactly: a payload has at most 8 significant bits, a scale 24 (28 where there
are two levels), and all exponents are far inside FP64's range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references import layouts
from references.blocks import block_size, grid_rows, scale_grid, scale_values
from references.elements import E2M1, E4M3FN, Element, decode
from references.packing import unpack_fp4
from references.schemes import Block, ScaleKind, Scheme

F64 = torch.float64


@dataclass(frozen=True)
class Side:
    """How one operand is stored.

    element: of the payload, None for BF16 numbers. block: rows and columns that share a scale, None for the whole
    matrix. scale: how scales are stored; None where there are none.
    """

    element: Element | None
    block: Block
    scale: ScaleKind | None

    @property
    def name(self) -> str:
        """The payload's format as ``references.tensor_cores`` names it: ``e4m3``, ``e2m1`` or ``bf16``."""
        return "bf16" if self.element is None else self.element.name

    @property
    def scheme(self) -> Scheme:
        """The block scheme behind the scales; ValueError where there are none."""
        if self.element is None or self.scale is None:
            raise ValueError("gemm: a BF16 operand has no scheme")
        return Scheme("nvfp4" if self.scale == "e4m3" else "block", self.element, self.block, self.scale)


_BF16 = Side(None, None, None)


def sides(format: str, scale: str) -> tuple[Side, Side]:  # noqa: A002 - the word of the grammar
    """The operands (A, B) of a GEMM format under a case's scale word. Raises ValueError for unknown words."""
    kind: ScaleKind = "ue8m0" if scale == "ue8m0" else "fp32"
    match format:
        case "deepseek_fp8":
            return Side(E4M3FN, (1, 128), kind), Side(E4M3FN, (128, 128), kind)
        case "mxfp8":
            return Side(E4M3FN, (1, 32), "ue8m0"), Side(E4M3FN, (1, 32), "ue8m0")
        case "w4a8":
            return Side(E4M3FN, (1, 32), "ue8m0"), Side(E2M1, (1, 32), "ue8m0")
        case "w4a16":
            return _BF16, Side(E2M1, (1, 32), "ue8m0")
        case "nvfp4":
            return Side(E2M1, (1, 16), "e4m3"), Side(E2M1, (1, 16), "e4m3")
        case "fp8_per_tensor":
            return Side(E4M3FN, None, "fp32"), Side(E4M3FN, None, "fp32")
        case "bf16":
            return _BF16, _BF16
    raise ValueError(f"gemm: unknown format {format!r}")


def scale_order(side: Side, layout: str, *, activation: bool) -> str | None:
    """The stored order of an operand's scales (`references.layouts`) under a case's layout word; None for plain."""
    if layout == "plain" or side.scale is None:
        return None
    if layout == "mn_major":
        packed = "mn_major_packed" if side.scale == "ue8m0" else "mn_major"
        return packed if activation else None
    return layout


def plain_scales(scales: Tensor, side: Side, layout: str, shape: tuple[int, int], *, activation: bool) -> Tensor:
    """Stored scales of a matrix of this shape as a plain grid."""
    order = scale_order(side, layout, activation=activation)
    return scales if order is None else layouts.unpack(scales, order, *scale_grid(shape, side.block))


@dataclass(frozen=True)
class Operand:
    """One operand, decoded.

    codes: FP64 payload values ``[rows, k]``. scales: FP64 ``[rows, blocks of K]`` with any global scale multiplied in;
    ones where there are none. width: K elements in a full block. values: FP64 ``codes * scales``, exact.
    side: how it is stored.
    """

    codes: Tensor
    scales: Tensor
    width: int
    values: Tensor
    side: Side

    def rows(self, rows: slice | Tensor) -> Operand:
        """Some of the rows."""
        return Operand(self.codes[rows], self.scales[rows], self.width, self.values[rows], self.side)


def operand(numbers: Tensor, scales: Tensor | None, side: Side, global_scale: Tensor | None = None) -> Operand:
    """Decode an operand.

    numbers: uint8 codes ``[rows, k]`` (packed ``[rows, k/2]`` for E2M1) or BF16 ``[rows, k]``. scales: the plain grid
    in its stored dtype. global_scale: float32 ``[1]``, for two-level scales.
    """
    if side.element is None:
        values = numbers.to(F64)
        return Operand(values, values.new_ones(values.shape[0], 1), values.shape[1], values, side)
    if scales is None:
        raise ValueError("gemm: the operand needs scales")
    codes = decode(unpack_fp4(numbers) if side.element.bits == 4 else numbers, side.element)
    shape = (codes.shape[0], codes.shape[1])
    factors = scale_values(scales, side.scheme)
    if global_scale is not None:
        factors = factors * global_scale.to(F64).reshape(())
    by_row = grid_rows(factors, side.block, shape, slice(0, shape[0]))
    width = block_size(shape, side.block)[1]
    spread = by_row.repeat_interleave(width, dim=1)[:, : shape[1]]
    return Operand(codes, by_row, width, codes * spread, side)
