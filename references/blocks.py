"""Block-scaled quantisation and dequantisation: the nominal answer of a scheme under a recipe.

Blocks tile a ``[m, k]`` matrix from its first element; those at the right and bottom edges are smaller where the sizes
do not divide. A scale grid has one entry a block, row-major. Payload codes are unpacked (see `references.packing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references import compiled, ue8m0
from references.chunks import empty, in_stripes, row_pieces
from references.elements import E4M3FN, decode, decode_into, decode_table, encode, encode_into, encode_table
from references.recipes import Recipe
from references.rounding import round_to
from references.schemes import Block, Scheme

F32 = torch.float32
F64 = torch.float64


@dataclass(frozen=True)
class Quantized:
    """A quantised matrix.

    payload: uint8 codes ``[m, k]``, one a byte. scales: float32, uint8 UE8M0 or uint8 E4M3 codes, one a block; None
    where the scheme's scale is given (``static``).
    """

    payload: Tensor
    scales: Tensor | None


def block_size(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Rows and columns of a full block within a matrix of this shape: no larger than the matrix itself."""
    rows, columns = shape
    if block is None:
        return rows, columns
    return min(block[0], rows), min(block[1], columns)


def scale_grid(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """The shape of the scale grid."""
    rows, columns = block_size(shape, block)
    return -(-shape[0] // rows), -(-shape[1] // columns)


def expand(grid: Tensor, block: Block, shape: tuple[int, ...]) -> Tensor:
    """A grid repeated over its blocks, ``[m, k]`` of the grid's dtype."""
    return expand_rows(grid, block, shape, slice(0, shape[0]))


def expand_rows(grid: Tensor, block: Block, shape: tuple[int, ...], rows: slice) -> Tensor:
    """The given rows of `expand`."""
    columns = block_size(shape, block)[1]
    some = grid_rows(grid, block, shape, rows)
    return some.unsqueeze(2).expand(-1, -1, columns).reshape(some.shape[0], -1)[:, : shape[1]]


def grid_rows(grid: Tensor, block: Block, shape: tuple[int, ...], rows: slice) -> Tensor:
    """The grid's row of each of the given matrix rows, ``[rows, gk]``."""
    height = block_size(shape, block)[0]
    if height == 1:
        return grid[rows]
    return grid[torch.arange(rows.start, rows.stop, device=grid.device) // height]


def _check_grid(grid: Tensor, block: Block, shape: tuple[int, ...]) -> None:
    if tuple(grid.shape) != scale_grid(shape, block):
        raise ValueError(
            f"blocks: scales are {tuple(grid.shape)}, a {tuple(shape)} matrix needs {scale_grid(shape, block)}"
        )


def _by_block(rows: Tensor, width: int) -> Tensor:
    """``[r, k]`` viewed as ``[r, gk, width]``, padded with zeros at a ragged edge."""
    missing = -rows.shape[1] % width
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    return padded.reshape(padded.shape[0], -1, width)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude in each block of an fp32, bf16 or fp16 matrix, FP32 ``[gm, gk]``; NaN if one is within."""
    height, width = block_size(tuple(x.shape), block)
    grid = scale_grid(tuple(x.shape), block)
    by_row = torch.empty(x.shape[0], grid[1], dtype=torch.int32, device=x.device)
    if compiled.pays(compiled.row_maxima, x):
        compiled.block_maxima(x, width, by_row)
    else:
        for rows in row_pieces(x.shape[0], x.shape[1], x.device):
            # Magnitudes are in the order of their bits, NaN above infinity, and the largest integer is found sooner.
            by_row[rows] = _by_block(x[rows].to(F32).view(torch.int32) & 0x7FFFFFFF, width).amax(2)
    if height == 1:
        return by_row.view(F32)
    missing = -x.shape[0] % height
    padded = torch.nn.functional.pad(by_row, (0, 0, 0, missing)) if missing else by_row
    return padded.view(-1, height, padded.shape[1]).amax(1).view(F32)


def floored(values: Tensor, floor: float) -> Tensor:
    """FP32 or FP64 values, at least the FP32 number nearest to ``floor``; NaN stays NaN."""
    if floor == 0:
        return values
    least = round_to(torch.tensor(floor, dtype=F64), F32).to(values)
    return torch.maximum(values, least)


def nominal_scales(x: Tensor, scheme: Scheme, recipe: Recipe, *, global_scale: Tensor | None = None) -> Tensor:
    """The scales of a matrix in their stored form, one a block; ``approximate`` arithmetic counts as ``divide``."""
    return scales_from_amax(block_amax(x, scheme.block), scheme, recipe, global_scale=global_scale)


def scales_from_amax(amax: Tensor, scheme: Scheme, recipe: Recipe, *, global_scale: Tensor | None = None) -> Tensor:
    """`nominal_scales` from the FP32 block maxima ``[gm, gk]``."""
    amax = floored(amax, recipe.amax_floor)
    arithmetic = "reciprocal" if recipe.scale_arithmetic == "reciprocal" else "divide"
    if scheme.scale == "e4m3":
        first = ue8m0.scale_from_amax(amax, scheme.element, arithmetic)
        value = first / global_value(global_scale, amax.device).to(F32)
        return encode(floored(value, recipe.scale_floor), E4M3FN)
    if scheme.scale == "fp32":
        return floored(ue8m0.scale_from_amax(amax, scheme.element, arithmetic), recipe.scale_floor)
    if scheme.scale != "ue8m0" or scheme.policy is None:
        raise ValueError(f"blocks: {scheme.format} with scale {scheme.scale} has no way to choose scales")
    if scheme.policy in ("ceil", "ceil_clamped"):
        scale = floored(ue8m0.scale_from_amax(amax, scheme.element, arithmetic), recipe.scale_floor)
        return ue8m0.encode(scale, scheme.policy)
    return ue8m0.from_amax(amax, scheme.element, scheme.policy)


def global_value(global_scale: Tensor | None, device: torch.device) -> Tensor:
    """The global scale ``[1]`` as an FP64 scalar tensor."""
    if global_scale is None:
        raise ValueError("blocks: a two-level scheme needs global_scale")
    return global_scale.to(device=device, dtype=F64).reshape(())


def scale_values(scales: Tensor, scheme: Scheme) -> Tensor:
    """Stored scales of any shape to their values, FP64, without the global scale."""
    if scheme.scale == "ue8m0":
        return ue8m0.decode(scales)
    if scheme.scale == "e4m3":
        return decode(scales, E4M3FN)
    return scales.to(F64)


def divisor(scales: Tensor, scheme: Scheme, global_scale: Tensor | None = None) -> Tensor:
    """The FP32 number that an element is divided by, from the values of stored scales, which are FP32 numbers too.

    RN32(scale * global) under two levels.
    """
    single = scales.to(F32)
    return single * global_value(global_scale, scales.device).to(F32) if scheme.two_level else single


def payload_factors(divisors: Tensor, amax: Tensor | None, scheme: Scheme, recipe: Recipe) -> tuple[Tensor, bool]:
    """The FP32 grid that brings elements to the payload's range as the recipe says, and whether as a factor.

    divisors: FP32 grid. amax: FP32 grid, for ``amax_reciprocal`` only. ``approximate`` counts as ``divide``.
    """
    if recipe.payload_arithmetic == "amax_reciprocal":
        if amax is None:
            raise ValueError("blocks: payload_arithmetic=amax_reciprocal needs FP32 scales, one level")
        # Both operands tensors: torch turns number / tensor into a product with the reciprocal.
        factor = torch.full_like(amax, scheme.element.max, dtype=F64) / amax.to(F64)
        return round_to(factor, F32).to(F32), True
    if recipe.payload_arithmetic == "reciprocal":
        return round_to(1.0 / divisors.to(F64), F32).to(F32), True
    return divisors, False


def quotient_rows(x: Tensor, factors: Tensor, multiply: bool, block: Block, rows: slice) -> Tensor:
    """The given rows of x, scaled to the payload's range in FP32, ``[rows, k]`` contiguous.

    factors, multiply: of `payload_factors`. FP32 division and multiplication by tensors are correctly rounded on CPU
    and CUDA.
    """
    shape = tuple(x.shape)
    values = _by_block(x[rows].to(F32), block_size(shape, block)[1])
    by_row = grid_rows(factors, block, shape, rows).unsqueeze(2)
    scaled = values * by_row if multiply else values / by_row
    return scaled.flatten(1)[:, : shape[1]].contiguous()


def quantize(
    x: Tensor,
    scheme: Scheme,
    recipe: Recipe,
    *,
    global_scale: Tensor | None = None,
    scale: Tensor | None = None,
) -> Quantized:
    """The nominal answer for an fp32, bf16 or fp16 matrix ``[m, k]`` of any strides.

    global_scale: float32 ``[1]``, for two levels. scale: float32 ``[1]``, for ``static``. Overflow saturates.
    """
    if scheme.scale == "static":
        if scale is None:
            raise ValueError("blocks: a static scheme needs scale")
        return Quantized(nominal_payload(x, scale.to(F64).reshape(1, 1), scheme, recipe), None)
    scales = nominal_scales(x, scheme, recipe, global_scale=global_scale)
    return Quantized(
        nominal_payload(x, scale_values(scales, scheme), scheme, recipe, global_scale=global_scale), scales
    )


def nominal_payload(
    x: Tensor, scales: Tensor, scheme: Scheme, recipe: Recipe, *, global_scale: Tensor | None = None
) -> Tensor:
    """The payload codes uint8 ``[m, k]`` of a matrix under given scale values, FP64 grid.

    Zero elements stay zero where scales are zero, since a zero block has a zero payload.
    """
    shape, block = (x.shape[0], x.shape[1]), scheme.block
    _check_grid(scales, block, shape)
    divisors = divisor(scales, scheme, global_scale)
    amax = payload_amax(x, scheme, recipe)
    factors, multiply = payload_factors(divisors, amax, scheme, recipe)
    keep_zeros = bool((divisors == 0).any()) or amax is not None
    out = empty(shape, torch.uint8, x.device)
    if compiled.pays(compiled.encode_quotients, x):
        table, shift = encode_table(scheme.element, x.device)
        by_row, width = grid_rows(factors, block, shape, slice(0, shape[0])), block_size(shape, block)[1]
        compiled.payload(x, by_row, width, table, shift, out, multiply=multiply, keep_zeros=keep_zeros)
        return out
    for rows in row_pieces(*shape, x.device):
        scaled = quotient_rows(x, factors, multiply, block, rows)
        if keep_zeros:
            values = x[rows].to(F32)
            scaled = torch.where(values == 0, values, scaled).contiguous()  # the strides of x may win
        encode_into(scaled.view(-1), scheme.element, out[rows].view(-1))
    return out


def payload_amax(x: Tensor, scheme: Scheme, recipe: Recipe) -> Tensor | None:
    """The block maxima where the payload depends on them (``amax_reciprocal``), else None."""
    if recipe.payload_arithmetic != "amax_reciprocal":
        return None
    if scheme.scale != "fp32":
        raise ValueError(f"blocks: payload_arithmetic=amax_reciprocal is no quotient by a {scheme.scale} scale")
    return floored(block_amax(x, scheme.block), recipe.amax_floor)


def dequantize(
    payload: Tensor,
    scales: Tensor,
    scheme: Scheme,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = F64,
    recipe: Recipe | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Payload codes uint8 ``[m, k]`` times their scales, ``[m, k]`` of ``dtype``.

    scales: as stored, one a block. FP64 is exact (at most 3 + 4 + 24 significant bits, exponents far inside its
    range); other dtypes are rounded as ``recipe.dequant_rounding`` says, once without a recipe.
    out: a contiguous ``[m, k]`` tensor of ``dtype`` to fill (a fresh one costs a CPU more than the arithmetic).
    """
    shape = tuple(payload.shape)
    _check_grid(scales, scheme.block, shape)
    rounding = "once" if recipe is None or dtype == F64 else recipe.dequant_rounding
    values = scale_values(scales, scheme)
    if scheme.two_level:
        values = values * global_value(global_scale, values.device)
    if rounding == "scale_first":
        values = round_to(values, F32)
    # A product of two FP32 numbers is rounded once, and as it should be, in FP32.
    direct = dtype == F64 or (dtype == F32 and (rounding == "scale_first" or not scheme.two_level))
    if direct:
        values = values.to(dtype)
    if out is None:
        out = empty(shape, dtype, payload.device)
    elif out.shape != payload.shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"blocks: out is {out.dtype} {tuple(out.shape)}, expected contiguous {dtype} {shape}")
    if direct and compiled.pays(compiled.decode_products, payload):
        table, width = decode_table(scheme.element, dtype, payload.device), block_size(shape, scheme.block)[1]
        compiled.products(payload, table, grid_rows(values, scheme.block, shape, slice(0, shape[0])), width, out)
        return out
    target = out

    def fill(pieces: Iterator[slice]) -> None:
        for rows in pieces:
            exact = target[rows] if direct else torch.empty(target[rows].shape, dtype=F64, device=target.device)
            decode_into(payload[rows], scheme.element, exact)
            _scale_rows(exact, values, scheme.block, shape, rows)
            if not direct:
                between = exact if rounding == "once" else round_to(exact, F32)
                target[rows] = round_to(between, dtype).to(dtype)

    in_stripes(fill, shape[0], shape[1], payload.device)
    return target


def _scale_rows(matrix: Tensor, values: Tensor, block: Block, shape: tuple[int, ...], rows: slice) -> None:
    width = block_size(shape, block)[1]
    factors = grid_rows(values, block, shape, rows)
    full = shape[1] // width
    matrix[:, : full * width].view(-1, full, width).mul_(factors[:, :full].unsqueeze(2))
    if full * width < shape[1]:
        matrix[:, full * width :].mul_(factors[:, full:])
