"""`fuzz.mutants.edges` for products and expert layers: edges of tiles, lone groups, counters, other tokens' weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fuzz.mutants import gemm, moe
from fuzz.mutants.base import Answer, Inputs, Mutant
from fuzz.mutants.correct import F32, F64, Parts
from fuzz.mutants.edges import changed, neighbours
from fuzz.mutants.probes import probe
from references.backend import CaseLike
from references.gemm_formats import Operand
from references.moe.config import config_of, local_ids
from references.rounding import round_to

BF16, FP16 = torch.bfloat16, torch.float16


def _gemm(multiply: Callable[[Operand, Operand], Tensor]) -> Answer:
    return lambda case, inputs: gemm.gemm(case, inputs, multiply)


def _moe(**steps: object) -> Answer:
    return lambda case, inputs: moe.layer(case, inputs, replace(moe.CORRECT, **steps))  # type: ignore[arg-type]


# Products.


def _late_scale(a: Operand, b: Operand) -> Tensor:
    scales = a.scales.clone()
    scales[:, 2:] = a.scales[:, 1:-1][:, : scales[:, 2:].shape[1]]
    return gemm.product(gemm._rescaled(a, scales), b)


def _scales_of_neighbours(period: int, place: int, step: int, *, second: bool = False) -> Callable[..., Tensor]:
    change = neighbours(period, place, step)

    def multiply(a: Operand, b: Operand) -> Tensor:
        if second:
            return gemm.product(a, gemm._rescaled(b, change(b.scales)))
        return gemm.product(gemm._rescaled(a, change(a.scales)), b)

    return multiply


def _tile_lost(a: Operand, b: Operand) -> Tensor:
    found = gemm.product(a, b)
    found[64:128, 64:128] = 0
    return found


def _last_column_lost(a: Operand, b: Operand) -> Tensor:
    found = gemm.product(a, b)
    if found.shape[1] % 8 and found.shape[1] > 8:
        found[:, -1] = 0
    return found


def _block_twice(a: Operand, b: Operand) -> Tensor:
    again = slice(128, 256)
    more = a.values[:, again] @ b.values[:, again].t() if a.values.shape[1] >= 256 else 0.0
    return gemm.product(a, b) + more


def _beyond(count: int) -> Callable[[Operand, Operand], Tensor]:
    return lambda a, b: a.values[:, :count] @ b.values[:, :count].t()


def _thirteen_bits(a: Operand, b: Operand) -> Tensor:
    # The accumulator keeps 13 bits behind the leading one after every 32 products.
    total = torch.zeros(len(a.values), len(b.values), dtype=F64)
    for k in range(0, a.values.shape[1], 32):
        total = total + a.values[:, k : k + 32] @ b.values[:, k : k + 32].t()
        total = (total.to(F32).view(torch.int32) & -1024).view(F32).to(F64)
    return total


def _square_grid_transposed(a: Operand, b: Operand) -> Tensor:
    blocks = b.scales[::128]
    if len(blocks) != blocks.shape[1]:
        return gemm.product(a, b)
    return gemm.product(a, gemm._rescaled(b, blocks.t()[torch.arange(len(b.scales)) // 128]))


def _last_row_of_next_group(case: CaseLike, inputs: Inputs) -> Parts:
    rows = inputs["m_indices"]
    following = torch.cat([rows[1:], rows[-1:]])
    changes = (following != rows) & (following >= 0) & (rows >= 0)
    return gemm._by_rows(case, inputs, torch.where(changes, following, rows))


def _lone_rows_skipped(case: CaseLike, inputs: Inputs) -> Parts:
    rows = inputs["m_indices"]
    counts = torch.tensor([int((rows == row).sum()) for row in rows])
    return gemm._by_rows(case, inputs, torch.where(counts == 1, -1, rows))


def _wrapped_groups(count: int) -> Answer:
    return lambda case, inputs: gemm._by_rows(case, inputs, inputs["m_indices"] % count)


# Expert layers.


def _at_most(count: int) -> Callable[[moe.Places], moe.Places]:
    return lambda places: (places[0][:count], places[1][:count])


def _lone_tokens_skipped(places: moe.Places) -> moe.Places:
    return places if len(places[0]) != 1 else (places[0][:0], places[1][:0])


def _ids_in_7_bits(ids: Tensor) -> Tensor:
    return torch.where(ids > 127, ids - 256, ids)


def _square_scales_transposed(scales: Tensor) -> Tensor:
    return scales.transpose(1, 2) if scales.shape[1] == scales.shape[2] else scales


def _after_an_empty_expert(case: CaseLike, inputs: Inputs) -> Parts:
    ids, w2 = local_ids(inputs), inputs["w2"]
    empty = torch.tensor([not bool((ids == expert).any()) for expert in range(len(w2))])
    places = torch.arange(len(w2))
    moved = torch.cat([torch.zeros(1, dtype=torch.bool), empty[:-1]])
    return moe.layer(case, {**inputs, "w2": w2[torch.where(moved, places - 1, places)]})


def _next_token_s_weights(weights: Tensor) -> Tensor:
    if weights.shape[1] < 2:
        return weights
    found = weights.clone()
    found[:-1, 1] = weights[1:, 1]
    return found


def _factor_after_rounding(case: CaseLike, inputs: Inputs) -> Parts:
    found = moe.layer(case, inputs, moe.Steps(factor=lambda factor: 1.0))["output"]
    return {"output": (found.to(BF16).to(F32) * config_of(case).scaling).to(found.dtype)}


def _fp16_sums(terms: Tensor) -> Tensor:
    total = torch.zeros_like(terms[:, 0])
    for place in range(terms.shape[1]):
        total = round_to(total + terms[:, place], FP16)
    return total


E4M3 = ("mxfp8", "deepseek_fp8")
EDGES: tuple[Mutant, ...] = (
    probe("late-scale", "scales of the K block before, from the third on", "gemm", E4M3, _gemm(_late_scale)),
    probe("row-63", "each 64th row under the next one's scales", "gemm", E4M3, _gemm(_scales_of_neighbours(64, 63, 1))),
    probe(
        "column-128",
        "each 129th column under the scales of the one before",
        "gemm",
        E4M3,
        _gemm(_scales_of_neighbours(128, 0, -1, second=True)),
    ),
    probe("tile-64-64", "the tile at row and column 64 is lost", "gemm", ("bf16", "mxfp8"), _gemm(_tile_lost)),
    probe("last-column", "last column of a ragged eight is lost", "gemm", ("bf16",), _gemm(_last_column_lost)),
    probe("block-twice", "second block of K added twice", "gemm", ("deepseek_fp8",), _gemm(_block_twice)),
    probe("k-2048", "K from 2048 on is left out", "gemm", ("bf16",), _gemm(_beyond(2048))),
    probe("13-bits", "accumulator of 13 bits", "gemm", ("mxfp8",), _gemm(_thirteen_bits)),
    probe(
        "square-grid", "square grid of B scales transposed", "gemm", ("deepseek_fp8",), _gemm(_square_grid_transposed)
    ),
    probe(
        "next-group",
        "last row of a group times the next group's B",
        "grouped_gemm",
        ("bf16",),
        _last_row_of_next_group,
        grouping=("contiguous", "contiguous_128"),
    ),
    probe(
        "lone-rows",
        "groups of one row skipped",
        "grouped_gemm",
        ("bf16",),
        _lone_rows_skipped,
        grouping=("contiguous",),
    ),
    probe("groups-64", "groups wrap at 64", "grouped_gemm", ("bf16",), _wrapped_groups(64), grouping=("contiguous",)),
    probe("lone-tokens", "experts of one token skipped", "moe", ("bf16",), _moe(dispatched=_lone_tokens_skipped)),
    probe("tokens-63", "an expert's tokens from 63 on are lost", "moe", ("mxfp8",), _moe(dispatched=_at_most(63))),
    probe("moe-ids", "expert ids in 7 bits", "moe", ("bf16",), changed("ids", _ids_in_7_bits, moe.layer)),
    probe(
        "square-w2",
        "a square grid of W2 scales transposed",
        "moe",
        ("deepseek_fp8",),
        changed("w2_scales", _square_scales_transposed, moe.layer),
    ),
    probe("empty-expert", "W2 of an empty expert for the next one", "moe", ("bf16",), _after_an_empty_expert),
    probe(
        "next-token-weight",
        "second weight is the next token's",
        "moe",
        ("w4a8",),
        changed("weights", _next_token_s_weights, moe.layer),
    ),
    probe("late-factor", "factor after the rounding", "moe", ("bf16",), _factor_after_rounding, scaling=("2.5",)),
    probe("fp16-combine", "experts added in FP16", "moe", ("mxfp8",), _moe(combine=_fp16_sums)),
)
"""Those of products and of expert layers."""
