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
from fuzz.philox import Words, key_of, words
from fuzz.sites import Matrix, Site
from fuzz.values import ELEMENTS, FLOATS, coin, from_bits, integer, pow2, to_bits, unit
from references import layouts
from references.gemm_formats import Side, scale_order, sides

CHUNK = 2**16
"""Elements that are made at a time."""

STALE_SCALES = {"fp32": (0x7FC00000, 0x7F7FFFFF), "ue8m0": (0xFF, 0xFE), "e4m3": (0x7F, 0x7E)}
"""Bits of a NaN and of the largest number."""

PLAIN = {"bf16": ("bf16", torch.bfloat16, 0x7FC0, 0x7F7F), "f16": ("fp16", torch.float16, 0x7E00, 0x7BFF)}
"""Formats without scales: their name in `FLOATS`, dtype, and the bits of a NaN and of the largest number."""

_SIGNED: dict[int, Any] = {8: np.uint8, 16: np.int16, 32: np.int32}
_UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def build_gemm(case: Case) -> dict[str, Tensor]:
    """``a``, ``b`` and, where the format has them, ``?_scales`` and ``?_global_scale`` of each."""
    inputs: dict[str, Tensor] = {}
    for name, side in zip("ab", sides(case.variant, case["scale"]), strict=True):
        rows = case.integer("m" if name == "a" else "n")
        inputs |= operand_inputs(case, name, side, rows)
    return inputs


def build_grouped_gemm(case: Case) -> dict[str, Tensor]:
    """``a`` with its scales, ``b`` with a leading dimension of groups, and which rows of ``a`` belong to which group.

    ``m_indices`` int32 ``[m]``, -1 for padding, where rows are contiguous; ``masked_m`` int32 ``[groups]`` and ``a``
    ``[groups, m, k]`` where they are masked. Stale rows hold garbage: NaN or, under every other seed, the largest.
    """
    first, second = sides(case.variant, case["scale"])
    groups, m = case.integer("groups"), case.integer("m")
    found: dict[str, Tensor] = {}
    if case["grouping"] == "masked":
        found["masked_m"] = valid = _valid_rows(case)
        slabs = [operand_inputs(case, "a", first, m, group, int(valid[group])) for group in range(groups)]
        found |= {name: torch.stack([slab[name] for slab in slabs]) for name in slabs[0]}
    else:
        found["m_indices"] = rows = _row_groups(case)
        found |= operand_inputs(case, "a", first, m, None, rows >= 0)
    experts = [operand_inputs(case, "b", second, case.integer("n"), group) for group in range(groups)]
    return found | {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}


def _valid_rows(case: Case) -> Tensor:
    """Rows in use of every slab: none in a quarter of them, all in an eighth."""
    groups, m = case.integer("groups"), case.integer("m")
    some, choice = integer(_row_words(case, groups), m + 1), integer(_row_words(case, groups, "choice"), 8)
    counts = np.where(choice < 2, 0, np.where(choice == 2, m, some))
    return torch.from_numpy(counts.astype(np.int32))


def _row_groups(case: Case) -> Tensor:
    """The group of every row, ascending, -1 for padding, which follows its group; some groups are empty."""
    groups, m = case.integer("groups"), case.integer("m")
    align = 128 if case["grouping"] == "contiguous_128" else 1
    slots = -(-m // align)
    alive = np.flatnonzero(integer(_row_words(case, groups, "alive"), 4))
    alive = alive if alive.size else np.array([case.seed % groups])
    owner = np.sort(alive[integer(_row_words(case, slots), alive.size)])
    if align == 1:
        padding = integer(_row_words(case, m, "padding"), 8) == 0
        order = np.lexsort((padding, owner))
        rows = np.where(padding[order], -1, owner[order])
        return torch.from_numpy(rows.astype(np.int32))
    inside = np.arange(m) % align
    last = np.append(owner[1:] != owner[:-1], True)
    kept = np.where(last, 1 + integer(_row_words(case, slots, "kept"), align), align)
    rows = np.where(inside < kept[np.arange(m) // align], owner[np.arange(m) // align], -1)
    return torch.from_numpy(rows.astype(np.int32))


def _row_words(case: Case, count: int, salt: str = "groups") -> Words:
    return words(key_of(case.text, f"rows.{salt}"), 0, count)


def operand_inputs(
    case: Case, name: str, side: Side, rows: int, group: int | None = None, valid: int | Tensor | None = None
) -> dict[str, Tensor]:
    """One operand ``[rows, k]`` with its scales in the stored order and its global scale.

    group: the number of its slab, if there are several. valid: how many rows, or which ones, are no garbage.
    """
    values, k = case["values"], case.integer("k")
    profile = GEMM_PROFILES[values]
    element = ELEMENTS[side.name] if side.element else ELEMENTS["e4m3"]
    matrix = Matrix(
        text=case.text if group is None else f"{case.text} {group}",
        name=name,
        seed=case.seed,
        rows=rows,
        cols=k,
        float_=FLOATS["fp32" if side.element else PLAIN[side.name][0]],
        element=element,
    )
    if side.element is None:
        _, dtype, nan, largest = PLAIN[side.name]
        numbers = fill(matrix, lambda site: to_bits(profile(site), matrix.float_), 16)
        _spoil(numbers, valid, case.seed, nan, largest)
        return {name: numbers.view(dtype)}
    codes = fill(matrix, lambda site: to_codes(profile(site), element), 8)
    _spoil(codes, valid, case.seed, 0x7F if element.nans else element.top, element.top)
    if side.element.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    height, width = side.block or (rows, k)
    width_bits = 32 if side.scale == "fp32" else 8
    grid = Matrix(
        text=matrix.text,
        name=f"{name}_scales",
        seed=case.seed,
        rows=-(-rows // height),
        cols=-(-k // width),
        scale=str(side.scale),
    )
    scales = fill(grid, lambda site: stored_scales(site, values), width_bits)
    if height == 1:
        _spoil(scales, valid, case.seed, *STALE_SCALES[str(side.scale)])
    if side.scale == "fp32":
        scales = scales.view(torch.float32)
    order = scale_order(side, case["layout"], activation=name == "a")
    found = {name: codes, f"{name}_scales": scales if order is None else stored(scales, order, grid)}
    if side.scale == "e4m3":
        found[f"{name}_global_scale"] = _global_scale(matrix.text, name, values)
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


def _spoil(matrix: Tensor, valid: int | Tensor | None, seed: int, nan: int, largest: int) -> None:
    """Fill the rows that are not valid."""
    if valid is None:
        return
    stale = ~valid if isinstance(valid, Tensor) else torch.arange(len(matrix)) >= valid
    matrix[stale] = largest if seed % 2 else nan


def _global_scale(text: str, name: str, values: str) -> Tensor:
    """One positive FP32 number: a power of two for half of the cases and for integers."""
    pick = words(key_of(text, f"{name}_global_scale"), 0, 1)
    power = pow2(np.array([global_exponent(values)]))
    if values != "integer" and bool(coin(pick)[0]):
        power = (1.0 + unit(pick)) * power
    return torch.tensor([float(from_bits(to_bits(power, FLOATS["fp32"]), FLOATS["fp32"])[0])], dtype=torch.float32)


def fill(matrix: Matrix, profile: Callable[[Site], npt.NDArray[Any]], width: int) -> Tensor:
    """A matrix of bits of 8, 16 or 32, from what the profile gives for windows of rows."""
    out = torch.empty((matrix.rows, matrix.cols), dtype={8: torch.uint8, 16: torch.int16, 32: torch.int32}[width])
    target = out.numpy().view(_UNSIGNED[width])  # torch would wake all of its threads for every copy
    step = max(1, CHUNK // matrix.cols)
    for start in range(0, matrix.rows, step):
        stop = min(start + step, matrix.rows)
        target[start:stop] = profile(Site(matrix, start, stop))
    return out


def _to_torch(bits: npt.NDArray[Any], width: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits.astype(_UNSIGNED[width])).view(_SIGNED[width]))
