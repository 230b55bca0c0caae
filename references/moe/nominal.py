"""The expert layer without bounds: the nominal answer in FP64, or the best that FP32 arithmetic does.

FP64 shows what an implementation aims at, quickly; FP32 is a rival of the same precision to measure its errors with:
dequantised operands, one matrix product, IEEE operations, every step rounded once to FP32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from references.gemm_formats import Stored
from references.moe.activation import silu
from references.moe.config import MoeConfig
from references.moe.requantise import quantised
from references.recipes import Recipe

F64 = torch.float64
ROWS = {"cpu": 2**12, "cuda": 2**16}
"""Pairs of a token and an expert whose intermediates are held together, by device type."""


def nominal_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Callable[[int], tuple[Stored, Stored]],
    config: MoeConfig,
    recipe: Recipe,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    precision: torch.dtype = F64,
) -> Tensor:
    """The layer's output before it is rounded, FP64 ``[tokens, hidden]``; arguments as of `admissible_moe`.

    precision: of all arithmetic but quantisation, float64 or float32. Experts are asked for twice, in order.
    """
    entering = quantised(x.to(F64), config.scheme, config.sides[0], recipe, scales[0]).values(precision)
    output = entering.new_zeros(x.shape)
    chosen, order = torch.sort(ids.reshape(-1), stable=True)
    counts = torch.bincount(chosen[chosen >= 0].to(torch.int64)).tolist()
    start = int((chosen < 0).sum())
    busy = [expert for expert, count in enumerate(counts) if count]
    while busy:
        group = [busy.pop(0)]
        taken = counts[group[0]]
        while busy and taken + counts[busy[0]] <= ROWS.get(x.device.type, ROWS["cpu"]):
            taken += counts[busy[0]]
            group.append(busy.pop(0))
        places = order[start : start + taken]
        start += taken
        rows, factor = places // ids.shape[1], weights.reshape(-1)[places].to(precision)[:, None]
        part = [counts[expert] for expert in group]
        sums = _grouped(entering, rows, [experts(expert)[0] for expert in group], part, precision)
        h = _activated(sums.mul_(factor) if config.weight_on_input else sums, config)
        second = quantised(h.to(F64), config.scheme, config.sides[0], recipe, scales[1])
        inner = second.values(precision)
        found = _grouped(inner, None, [experts(expert)[1] for expert in group], part, precision)
        output.index_add_(0, rows, found if config.weight_on_input else found.mul_(factor))
    return (output * config.scaling).to(F64)


def _grouped(
    x: Tensor, rows: Tensor | None, weights: list[Stored], counts: list[int], precision: torch.dtype
) -> Tensor:
    """Each expert's rows of x, one after another, times its matrix."""
    found, start = x.new_empty(sum(counts), weights[0].rows), 0
    for stored, count in zip(weights, counts, strict=True):
        some = slice(start, start + count)
        start += count
        mine, column = x[some] if rows is None else x[rows[some]], 0
        for piece in stored.pieces():
            torch.mm(mine, piece.values(precision).T, out=found[some, column : column + piece.rows])
            column += piece.rows
    return found


def _activated(sums: Tensor, config: MoeConfig) -> Tensor:
    first, second = sums.chunk(2, dim=1)
    gate, up = (first, second) if config.gate_first else (second, first)
    if config.limit is not None:
        gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    return silu(gate) * up
