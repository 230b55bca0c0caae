"""The inputs of ``gemm`` and ``grouped_gemm`` cases, on the CPU: quantised operands and their stored scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.gemm_profiles import GEMM_PROFILES, global_exponent, stored_scales, to_codes
from fuzz.philox import key_of, words
from fuzz.sites import Matrix, Site
from fuzz.values import ELEMENTS, FLOATS, coin, from_bits, pow2, to_bits, unit
from references import layouts
from references.gemm_formats import Side, scale_order, sides

CHUNK = 2**19
"""Elements that are made at a time."""

_SIGNED: dict[int, Any] = {8: np.uint8, 16: np.int16, 32: np.int32}
_UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def build_gemm(case: Case) -> dict[str, Tensor]:
    """``a``, ``b`` and, where the format has them, ``?_scales`` and ``?_global_scale`` of each."""
    inputs: dict[str, Tensor] = {}
    for name, side in zip("ab", sides(case.variant, case["scale"]), strict=True):
        rows = case.integer("m" if name == "a" else "n")
        inputs |= operand_inputs(case, name, side, rows)
    return inputs


def operand_inputs(case: Case, name: str, side: Side, rows: int) -> dict[str, Tensor]:
    """One operand ``[rows, k]`` with its scales in the stored order and its global scale."""
    values, k = case["values"], case.integer("k")
    profile = GEMM_PROFILES[values]
    element = ELEMENTS[side.name] if side.element else ELEMENTS["e4m3"]
    matrix = Matrix(
        text=case.text,
        name=name,
        seed=case.seed,
        rows=rows,
        cols=k,
        float_=FLOATS["fp32" if side.element else "bf16"],
        element=element,
    )
    if side.element is None:
        numbers = _fill(matrix, lambda site: to_bits(profile(site), FLOATS["bf16"]), 16)
        return {name: numbers.view(torch.bfloat16)}
    codes = _fill(matrix, lambda site: to_codes(profile(site), element), 8)
    if side.element.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    height, width = side.block or (rows, k)
    width_bits = 32 if side.scale == "fp32" else 8
    grid = Matrix(
        text=case.text,
        name=f"{name}_scales",
        seed=case.seed,
        rows=-(-rows // height),
        cols=-(-k // width),
        scale=str(side.scale),
    )
    scales = _fill(grid, lambda site: stored_scales(site, values), width_bits)
    if side.scale == "fp32":
        scales = scales.view(torch.float32)
    order = scale_order(side, case["layout"], activation=name == "a")
    found = {name: codes, f"{name}_scales": scales if order is None else stored(scales, order, grid)}
    if side.scale == "e4m3":
        found[f"{name}_global_scale"] = _global_scale(case, name)
    return found


def stored(plain: Tensor, order: str, grid: Matrix) -> Tensor:
    """A plain grid in its stored order, the padding filled with garbage (NaN scales among it)."""
    packed = layouts.pack(plain, order)
    padding = layouts.padding_mask(order, grid.rows, grid.cols)
    width = 8 if plain.dtype == torch.uint8 else 32
    slots = packed.view(torch.uint8 if width == 8 else torch.int32).view(padding.shape)
    count = int(padding.sum())
    garbage = (words(grid.key("padding"), 0, count) >> np.uint64(64 - width)).astype(np.uint32)
    garbage[::2] = {8: 0xFF, 32: 0x7FC00000}[width]
    slots[padding] = _to_torch(garbage, width)
    return packed


def _global_scale(case: Case, name: str) -> Tensor:
    """One positive FP32 number: a power of two for half of the cases and for integers."""
    pick = words(key_of(case.text, f"{name}_global_scale"), 0, 1)
    power = pow2(np.array([global_exponent(case["values"])]))
    if case["values"] != "integer" and bool(coin(pick)[0]):
        power = (1.0 + unit(pick)) * power
    return torch.tensor([float(from_bits(to_bits(power, FLOATS["fp32"]), FLOATS["fp32"])[0])], dtype=torch.float32)


def _fill(matrix: Matrix, profile: Callable[[Site], npt.NDArray[Any]], width: int) -> Tensor:
    out = torch.empty((matrix.rows, matrix.cols), dtype={8: torch.uint8, 16: torch.int16, 32: torch.int32}[width])
    step = max(1, CHUNK // matrix.cols)
    for start in range(0, matrix.rows, step):
        stop = min(start + step, matrix.rows)
        out[start:stop] = _to_torch(profile(Site(matrix, start, stop)), width)
    return out


def _to_torch(bits: npt.NDArray[Any], width: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits.astype(_UNSIGNED[width])).view(_SIGNED[width]))
