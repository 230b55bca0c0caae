"""Operands of a block-scaled GEMM: formats, scale grids and stored orders, and their exact FP64 values.

``out[m, n] = sum over k of a[m, k] * b[n, k]``, where each operand is a payload times its block's scale. Both operands
have K last. FP64 holds every ``a[m, k]`` exactly: a payload has at most 8 significant bits, a scale 24 (28 where there
are two levels), and all exponents are far inside FP64's range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from references import layouts
from references.blocks import block_size, scale_grid, scale_values
from references.elements import E2M1, E4M3FN, Element, decode, e4m3_as_float16
from references.least_bits import NOTHING, ZERO_CODE, code_least_bits, least_bit
from references.packing import unpack_fp4
from references.rounding import round_to
from references.schemes import Block, ScaleKind, Scheme

F64 = torch.float64


@dataclass(frozen=True)
class Side:
    """How one operand is stored.

    element: of the payload, None for numbers of the format ``plain``. block: rows and columns that share a scale, None
    for the whole matrix. scale: how scales are stored; None where there are none.
    """

    element: Element | None
    block: Block
    scale: ScaleKind | None
    plain: Literal["bf16", "f16"] = "bf16"

    @property
    def name(self) -> str:
        """The payload's format as ``references.tensor_cores`` names it: ``e4m3``, ``e2m1``, ``bf16`` or ``f16``."""
        return self.plain if self.element is None else self.element.name

    @property
    def scheme(self) -> Scheme:
        """The block scheme behind the scales; ValueError where there are none."""
        if self.element is None or self.scale is None:
            raise ValueError(f"gemm: a {self.name} operand has no scheme")
        return Scheme("nvfp4" if self.scale == "e4m3" else "block", self.element, self.block, self.scale)


_BF16 = Side(None, None, None)
_F16 = Side(None, None, None, "f16")
LEAST_NORMAL_F16 = 2.0**-14


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
        case "fp16":
            return _F16, _F16
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
    side: how it is stored. raw: the codes as stored, uint8 ``[rows, k]``, where there are any: the quick way to facts
    about them.

    What is derived from these is computed once, when it is first asked for.
    """

    codes: Tensor
    scales: Tensor
    width: int
    values: Tensor
    side: Side
    raw: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> Operand:
        """Some of the rows."""
        raw = None if self.raw is None else self.raw[rows]
        return Operand(self.codes[rows], self.scales[rows], self.width, self.values[rows], self.side, raw)

    @cached_property
    def size(self) -> Tensor:
        """Magnitudes of the values."""
        return self.values.abs()

    @cached_property
    def raised(self) -> Tensor | None:
        """Magnitudes with subnormal FP8 and F16 numbers raised to the smallest normal one, exact; None without any."""
        element = self.side.element
        if self.side.name == "f16":
            small = (self.size < LEAST_NORMAL_F16) & (self.size > 0)
            return torch.where(small, LEAST_NORMAL_F16, self.size) if bool(small.any()) else None
        if element is None or element.bits != 8:
            return None
        if self.raw is not None:
            magnitude = self.raw & (element.sign - 1)
            small = (magnitude < 1 << element.mantissa_bits) & (magnitude != 0)
        else:
            magnitude = self.codes.abs()
            small = (magnitude < 2.0**element.emin) & (magnitude > 0)
        rows, columns = small.nonzero(as_tuple=True)
        if not len(rows):
            return None
        found = self.size.clone()
        found[rows, columns] = self.scales[rows, columns // self.width].abs() * 2.0**element.emin
        return found

    @cached_property
    def _code_bits(self) -> Tensor | None:
        """`code_least_bits`; None without stored codes."""
        if self.raw is None or self.side.element is None:
            return None
        return code_least_bits(self.raw, self.side.element)

    @cached_property
    def least_bits(self) -> Tensor:
        """`least_bit` of every value, int16."""
        codes = self._code_bits
        if codes is None:
            return least_bit(self.values).to(torch.int16)
        return torch.where(codes == ZERO_CODE, NOTHING, codes + self.spread(least_bit(self.scales).to(torch.int16)))

    @cached_property
    def row_least_bits(self) -> tuple[Tensor, Tensor, Tensor]:
        """The smallest of a row's values, codes and scales, int32 ``[rows]``."""
        scales = least_bit(self.scales)
        codes = self._code_bits
        if codes is None:
            return least_bit(self.values).amin(1), least_bit(self.codes).amin(1), scales.amin(1)
        missing = self.scales.shape[1] * self.width - codes.shape[1]
        codes = torch.nn.functional.pad(codes, (0, missing), value=ZERO_CODE) if missing else codes
        blocks = codes.view(*self.scales.shape, self.width)
        by_block = blocks.amin(2).to(torch.int32)
        values = torch.where(by_block == ZERO_CODE, NOTHING, by_block + scales)
        return values.amin(1), torch.where(by_block == ZERO_CODE, NOTHING, by_block).amin(1), scales.amin(1)

    @cached_property
    def row_sizes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The largest code of a row and the sums of its codes, values and scales, in magnitude, FP64 ``[rows]``."""
        codes = self.codes.abs()
        return codes.amax(1), codes.sum(1), self.row_sums, self.scales.abs().sum(1)

    @cached_property
    def row_sums(self) -> Tensor:
        """The sums of a row's magnitudes, FP64 ``[rows]``."""
        return self.size.sum(1)

    def spread(self, grid: Tensor) -> Tensor:
        """One number a block, shaped like `scales`, as one an element."""
        return grid.repeat_interleave(self.width, dim=1)[:, : self.values.shape[1]]


def operand(numbers: Tensor, scales: Tensor | None, side: Side, global_scale: Tensor | None = None) -> Operand:
    """Decode an operand.

    numbers: uint8 codes ``[rows, k]`` (packed ``[rows, k/2]`` for E2M1), BF16 or F16 ``[rows, k]``. scales: the plain
    grid in its stored dtype. global_scale: float32 ``[1]``, for two-level scales.
    """
    if side.element is None:
        values = numbers.to(F64)
        return Operand(values, values.new_ones(values.shape[0], 1), values.shape[1], values, side)
    if scales is None:
        raise ValueError("gemm: the operand needs scales")
    raw = unpack_fp4(numbers) if side.element.bits == 4 else numbers
    codes = decode(raw, side.element)
    shape = (codes.shape[0], codes.shape[1])
    factors = scale_values(scales, side.scheme)
    if global_scale is not None:
        factors = factors * global_scale.to(F64).reshape(())
    by_row = _by_row(factors, side.block, shape)
    width = block_size(shape, side.block)[1]
    values = _scaled(codes, by_row, width)
    return Operand(codes, by_row, width, values, side, raw)


def _by_row(factors: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """One row of scales for each row of the matrix, in a single step: a GPU waits for every one of them."""
    height = block_size(shape, block)[0]
    return factors if height == 1 else factors.repeat_interleave(height, dim=0)[: shape[0]]


def _scaled(codes: Tensor, scales: Tensor, width: int) -> Tensor:
    """Codes times the scale of their row's block, each product rounded once, in the dtype of the scales."""
    rows, blocks = codes.shape[0], codes.shape[1] // width
    whole = blocks * width
    values = torch.empty(codes.shape, dtype=scales.dtype, device=codes.device)
    by_block = (rows, blocks, width)
    torch.mul(codes[:, :whole].view(by_block), scales[:, :blocks, None], out=values[:, :whole].view(by_block))
    if whole < codes.shape[1]:
        torch.mul(codes[:, whole:], scales[:, -1:], out=values[:, whole:])
    return values


PIECE = {"cpu": 2**21, "cuda": 2**28}
"""Elements of a `Stored` matrix that are decoded together, by device type; a CPU reuses buffers below 32 MiB."""


@dataclass(frozen=True)
class Stored:
    """A matrix as it is stored, to be decoded in pieces: the arguments of `operand`.

    The rows of a scale grid follow those of the matrix, so that some rows are a matrix of their own.
    """

    numbers: Tensor
    scales: Tensor | None
    side: Side
    global_scale: Tensor | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.numbers.shape[0])

    def decoded(self) -> Operand:
        """All of it."""
        return operand(self.numbers, self.scales, self.side, self.global_scale)

    def values(self, dtype: torch.dtype = F64) -> Tensor:
        """The values alone ``[rows, k]``: FP64, exact; or FP32, as FP32 arithmetic dequantises."""
        if self.side.element is None or self.scales is None:
            return self.numbers.to(dtype)
        codes, unit = unpack_fp4(self.numbers) if self.side.element.bits == 4 else self.numbers, 1.0
        if self.side.element is E4M3FN:
            codes, unit = e4m3_as_float16(codes), 2.0**8
        else:
            codes = decode(codes, self.side.element, dtype)
        shape = (codes.shape[0], codes.shape[1])
        factors = scale_values(self.scales, self.side.scheme)
        if self.global_scale is not None:
            factors = factors * self.global_scale.to(F64).reshape(())
            factors = round_to(factors, dtype) if dtype == torch.float32 else factors
        factors = factors.to(dtype)
        by_row = _by_row(factors, self.side.block, shape)
        return _scaled(codes, by_row * unit, block_size(shape, self.side.block)[1])

    def pieces(self) -> Iterator[Stored]:
        """Consecutive rows, whole blocks of scales each, that make up the matrix."""
        height = self.side.block[0] if self.side.block else 1
        limit = PIECE.get(self.numbers.device.type, PIECE["cpu"])
        step = max(1, limit // (max(1, self.numbers.shape[1]) * height)) * height
        if step >= self.rows:
            yield self
            return
        for start in range(0, self.rows, step):
            scales = self.scales
            if scales is not None and self.side.block is not None:
                scales = scales[start // height : -(-(start + step) // height)]
            yield Stored(self.numbers[start : start + step], scales, self.side, self.global_scale)
