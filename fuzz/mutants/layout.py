"""Faults in where scales and payloads lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.mutants import correct
from fuzz.mutants.base import Inputs, Mutant, Part, Partial
from fuzz.mutants.correct import Parts
from references import layouts
from references.backend import CaseLike
from references.blocks import expand, scale_values
from references.elements import decode


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padding_unwritten(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    packed = layouts.pack(inputs["scales"], case.variant)
    padding = layouts.padding_mask(case.variant, case.integer("rows"), case.integer("cols"))
    return {"scales": Partial(packed, ~padding)}


def _tail_bytes_unwritten(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    # Bytes of a word that no column owns; the rows beyond the matrix are zeroed as they should be.
    packed = layouts.pack(inputs["scales"], case.variant)
    padding = layouts.padding_mask(case.variant, case.integer("rows"), case.integer("cols"))
    tail = padding.clone()
    tail[:, case.integer("rows") :] = False
    as_bytes = packed.view(torch.uint8).view(*packed.shape, 4)
    return {"scales": Partial(as_bytes, ~tail)}


def _by_input_strides(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    right = correct.quantize(case, inputs)
    x, payload = inputs["x"], right["payload"]
    rows, cols = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None, :]
    places = (rows * x.stride(0) + cols * x.stride(1)).reshape(-1)
    inside = places < payload.numel()  # what falls behind the buffer is left out: the real kernel corrupts memory there
    values, written = torch.zeros_like(payload).view(-1), torch.zeros(payload.numel(), dtype=torch.bool)
    values[places[inside]] = payload.reshape(-1)[inside]
    written[places[inside]] = True
    return {**right, "payload": Partial(values.view(payload.shape), written.view(payload.shape))}


def _gathered_scales(case: CaseLike, inputs: Inputs) -> Parts:
    half = case.integer("k") // 2
    if not half:
        return correct.quantize(case, inputs)
    shards = [correct.quantize(case, {"x": part}) for part in (inputs["x"][:, :half], inputs["x"][:, half:])]
    return {name: torch.cat([shard[name] for shard in shards], dim=1) for name in ("scales", "payload")}


def _not_interleaved(case: CaseLike, inputs: Inputs) -> Parts:
    plain = inputs["scales"]
    padded = plain.new_zeros(_up(plain.shape[0], 128), _up(plain.shape[1], 4))
    padded[: plain.shape[0], : plain.shape[1]] = plain
    return {"scales": padded.view(-1)}


def _interleaved(plain: Tensor, tile_row: int) -> Tensor:
    """128x4 tiles with ``tile_row`` bytes from one row of tiles to the next; later rows of tiles overwrite."""
    rows, cols = plain.shape
    found = plain.new_zeros(_up(rows, 128) * _up(cols, 4))
    for start in range(0, rows, 128):
        tile = layouts.pack(plain[start : start + 128], "interleave_128x4")
        offset = start // 128 * tile_row
        found[offset : offset + len(tile)] = tile
    return found


def _unpadded_row_stride(case: CaseLike, inputs: Inputs) -> Parts:
    return {"scales": _interleaved(inputs["scales"], 128 * case.integer("cols"))}


def _logical_stride(case: CaseLike, inputs: Inputs) -> Parts:
    plain = inputs["scales"]
    rows, cols = plain.shape
    padded = plain.new_zeros(_up(rows, 128), _up(cols, 4))
    padded.view(-1)[: rows * cols] = plain.reshape(-1)
    return {"scales": layouts.pack(padded, "interleave_128x4")}


def _square_transposed(case: CaseLike, inputs: Inputs) -> Parts:
    kind, found = correct.scheme_of(case), inputs["payload"]
    values = scale_values(inputs["scales"], kind)
    if values.shape[0] == values.shape[1]:
        values = values.t()
    return correct.multiply(case, inputs, decode(found, kind.element), expand(values, kind.block, tuple(found.shape)))


def _strides_ignored(case: CaseLike, inputs: Inputs) -> Parts:
    rows, cols = case.integer("rows"), case.integer("cols")
    if case["direction"] == "pack":
        return {"scales": inputs["scales"].contiguous().view(cols, rows)}
    return {"scales": inputs["scales"].contiguous().view(rows, cols)}


def _small_tiles(case: CaseLike, inputs: Inputs) -> Parts:
    plain = inputs["scales"]
    rows, cols = plain.shape
    if rows > 64:
        return correct.move_scales(case, inputs)
    found = plain.new_zeros(_up(rows, 128) * _up(cols, 4))
    row, col = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    found[(row // 8 * (_up(cols, 4) // 4) + col // 4) * 32 + row % 8 * 4 + col % 4] = plain
    return {"scales": found}


PACK = {"direction": ("pack",)}

MUTANTS = (
    Mutant(
        family="packed-tail-bytes-uninitialised",
        area="layout",
        source="sgl-project/sglang#21183",
        description="unused bytes of the last packed word keep what the buffer held",
        operation="scale_layout",
        variants=("mn_major_packed",),
        where=PACK,
        answer=_tail_bytes_unwritten,
    ),
    Mutant(
        family="dirty-padding-scales",
        area="layout",
        source="NVIDIA/TransformerEngine#3070",
        description="padding of the 128x4 layout is never zeroed",
        operation="scale_layout",
        variants=("interleave_128x4", "mn_major"),
        where=PACK,
        answer=_padding_unwritten,
    ),
    Mutant(
        family="noncontig-input-written-with-input-strides",
        area="layout",
        source="pytorch/FBGEMM#2919",
        description="payload stored with the strides of the input",
        operation="quantize",
        variants=("deepseek_fp8", "mxfp8", "fp8_per_tensor"),
        answer=_by_input_strides,
    ),
    Mutant(
        family="tp-gather-scale-too-many-blocks",
        area="layout",
        source="modelscope/mcore-bridge#32",
        description="scales of two shards set side by side, a block that both share twice",
        operation="quantize",
        variants=("deepseek_fp8",),
        answer=_gathered_scales,
    ),
    Mutant(
        family="weight-sf-permuted-not-interleaved",
        area="layout",
        source="flashinfer-ai/flashinfer#4093",
        description="scales padded but left in row-major order",
        operation="scale_layout",
        variants=("interleave_128x4",),
        where=PACK,
        answer=_not_interleaved,
    ),
    Mutant(
        family="scale-row-group-stride-unpadded",
        area="layout",
        source="ROCm/aiter#2900",
        description="rows of tiles laid out by the number of columns before padding",
        operation="scale_layout",
        variants=("interleave_128x4",),
        where=PACK,
        answer=_unpadded_row_stride,
    ),
    Mutant(
        family="swizzle-offset-from-logical-stride",
        area="layout",
        source="meta-pytorch/MSLK#339",
        description="linear index made with the logical row length, taken apart with the padded one",
        operation="scale_layout",
        variants=("interleave_128x4",),
        where=PACK,
        answer=_logical_stride,
    ),
    Mutant(
        family="scale-orientation-inferred-square",
        area="layout",
        source="pytorch/pytorch#195751",
        description="orientation of a scale grid guessed from its shape, wrong where it is square",
        operation="dequantize",
        variants=("deepseek_fp8",),
        answer=_square_transposed,
    ),
    Mutant(
        family="transposed-scales",
        area="layout",
        source="flashinfer-ai/flashinfer#2147",
        description="column-major scales read as row-major",
        operation="scale_layout",
        variants=("k_major",),
        answer=_strides_ignored,
    ),
    Mutant(
        family="tactic-dependent-scale-layout",
        area="layout",
        source="flashinfer-ai/flashinfer#4574",
        description="8x4 tiles instead of 128x4 up to 64 rows",
        operation="scale_layout",
        variants=("interleave_128x4",),
        where=PACK,
        answer=_small_tiles,
    ),
)
