"""Faults that no report describes: neighbours of the reported ones, planted to see what the search lets through.

They do not count towards the score. A kind of fault that only one place of a kernel may have is planted in others here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fuzz.mutants import correct, gemm, moe, routing
from fuzz.mutants.base import Answer, Inputs, Mutant, Part, Partial, Racing
from fuzz.mutants.correct import F32, Parts
from references import layouts
from references.backend import CaseLike
from references.blocks import block_amax, scale_values
from references.gemm_formats import Operand
from references.moe.config import config_of
from references.packing import pack_fp4, unpack_fp4
from references.rounding import round_to
from references.schemes import Scheme

SOURCE = "docs/power.md#probes"


def probe(
    family: str,
    description: str,
    operation: str,
    variants: tuple[str, ...],
    answer: Answer,
    frozen: tuple[str, ...] = (),
    **where: tuple[str, ...],
) -> Mutant:
    """A mutant of the area ``probe``."""
    return Mutant(
        family=f"probe-{family}",
        area="probe",
        source=SOURCE,
        description=description,
        operation=operation,
        variants=variants,
        answer=answer,
        where=where,
        frozen=frozen,
    )


def _gemm(multiply: Callable[[Operand, Operand], Tensor]) -> Answer:
    return lambda case, inputs: gemm.gemm(case, inputs, multiply)


def _moe(steps: moe.Steps) -> Answer:
    return lambda case, inputs: moe.layer(case, inputs, steps)


def _without_last_block(least: int, most: int) -> Answer:
    def multiply(a: Operand, b: Operand) -> Tensor:
        if not least <= len(a.codes) <= most:
            return gemm.product(a, b)
        end = (a.values.shape[1] - 1) // 32 * 32
        return a.values[:, :end] @ b.values[:, :end].t()

    return _gemm(multiply)


def _tail_of_k(tile: int) -> Answer:
    """The part of K behind the last whole tile is left out, where there is a whole one."""

    def multiply(a: Operand, b: Operand) -> Tensor:
        end = a.values.shape[1] // tile * tile or a.values.shape[1]
        return a.values[:, :end] @ b.values[:, :end].t()

    return _gemm(multiply)


def _b_scales_of_first_rows(a: Operand, b: Operand) -> Tensor:
    return gemm.product(a, gemm._rescaled(b, b.scales[:1].expand_as(b.scales)))


def _codes_lost(lost: float) -> Callable[[Operand, Operand], Tensor]:
    def multiply(a: Operand, b: Operand) -> Tensor:
        sides = [gemm._rescaled(side, torch.where(side.scales == lost, 0.0, side.scales)) for side in (a, b)]
        return gemm.product(sides[0], sides[1])

    return multiply


def _truncated(case: CaseLike, inputs: Inputs) -> Parts:
    total = round_to(gemm.product(*gemm.operands(case, inputs)), F32).to(F32)
    bits = total.view(torch.int32) & -65536
    return {"output": bits.view(F32).to(torch.bfloat16)}


def _last_rows_unwritten(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    right = gemm.gemm(case, inputs)["output"]
    written = torch.ones(right.shape, dtype=torch.bool)
    written[len(right) // 64 * 64 or len(right) :] = False
    return {"output": Partial(right, written)}


def _masked_count_one_less(case: CaseLike, inputs: Inputs) -> Parts:
    counts = (inputs["masked_m"] - 1).clamp(min=0)
    return gemm.grouped_gemm(case, {**inputs, "masked_m": counts})


def _group_below(case: CaseLike, inputs: Inputs) -> Parts:
    # The first group's number is found by a search that skips empty groups.
    rows = inputs["m_indices"]
    present = torch.unique(rows[rows >= 0])
    read = rows.clone()
    for place, group in enumerate(present.tolist()):
        read[rows == group] = place
    return gemm._by_rows(case, inputs, read)


def _silu_clamped(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    first, second = sums.chunk(2, dim=1)
    gate, up = (first, second) if gate_first else (second, first)
    h = gate * torch.sigmoid(gate)
    if limit is not None:
        h, up = h.clamp(max=limit), up.clamp(-limit, limit)
    return round_to(h * up, F32)


def _up_clamped_above(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    first, second = sums.chunk(2, dim=1)
    gate, up = (first, second) if gate_first else (second, first)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(max=limit)
    return round_to(gate * torch.sigmoid(gate) * up, F32)


def _gate_clamped_below(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    first, second = sums.chunk(2, dim=1)
    gate, up = (first, second) if gate_first else (second, first)
    if limit is not None:
        gate, up = gate.clamp(-limit, limit), up.clamp(-limit, limit)
    return round_to(gate * torch.sigmoid(gate) * up, F32)


def _bf16_weights(case: CaseLike, inputs: Inputs) -> Parts:
    return moe.layer(case, {**inputs, "weights": inputs["weights"].to(torch.bfloat16).to(F32)})


def _tokens_swapped(case: CaseLike, inputs: Inputs) -> Parts:
    # The activation's scales are those of the first token: as if it had been quantised under them.
    config = config_of(case)
    x = inputs["x"]
    kind = config.scheme
    assert kind is not None
    amax = block_amax(x, kind.block)
    factor = correct.stored(amax[:1].expand_as(amax).contiguous(), kind, None)
    own = correct.stored(amax, kind, None)
    found = _scale_ratio(factor, own, kind)
    wide = found.repeat_interleave(kind.block[1] if kind.block else 1, dim=1)[:, : x.shape[1]]
    quantised = moe.quantised(x.to(F32), config, None) * wide
    return moe.layer(case, inputs, replace(moe.CORRECT, x=quantised))


def _scale_ratio(one: Tensor, other: Tensor, kind: Scheme) -> Tensor:
    first, second = scale_values(one, kind), scale_values(other, kind)
    return torch.where(second == 0, 1.0, first / second)


def _rows_from(count: int) -> Answer:
    def answer(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
        right = moe.layer(case, inputs)["output"]
        written = (torch.arange(len(right)) < count)[:, None].expand(right.shape)
        return {"output": Partial(right, written)}

    return answer


def _ids_in_a_byte(case: CaseLike, inputs: Inputs) -> Parts:
    right = routing.route(case, inputs)
    if "selection" in right:
        right["selection"] = torch.where(right["selection"] > 255, right["selection"] - 256, right["selection"])
    return right


def _tokens_beyond(count: int) -> Answer:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        right = routing.route(case, inputs)
        return {name: torch.where(_late(part, count), torch.zeros_like(part), part) for name, part in right.items()}

    return answer


def _late(part: Tensor, count: int) -> Tensor:
    return (torch.arange(len(part)) >= count).view(-1, *[1] * (part.dim() - 1)).expand(part.shape)


def _order_of_two(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    right = correct.quantize(case, inputs)
    flipped = right["payload"].clone()
    flipped[-1] = 0
    return {**right, "payload": Racing((right["payload"], flipped))}


def _last_column(x: Tensor, kind: Scheme) -> Tensor:
    # The last block of a row is taken to be whole; what is missing comes from the row below.
    width = kind.block[1] if kind.block else 1
    missing = -x.shape[1] % width
    if not missing:
        return correct.largest(x, kind)
    below = torch.cat([x[1:, :missing], torch.zeros_like(x[:1, :missing])])[:, : min(missing, x.shape[1])]
    found = correct.largest(x, kind).clone()
    found[:, -1] = torch.maximum(found[:, -1], below.abs().amax(1).to(found.dtype))
    return found


def _nibbles_swapped(case: CaseLike, inputs: Inputs) -> Parts:
    found = correct.quantize(case, inputs)
    plain = unpack_fp4(found["payload"])
    return {**found, "payload": pack_fp4(plain.view(len(plain), -1, 2).flip(2).reshape(plain.shape))}


def _inputs_strided(case: CaseLike, inputs: Inputs) -> Parts:
    x = inputs["x"]
    flat = torch.as_strided(x, tuple(x.shape), (x.shape[1], 1), x.storage_offset())
    return correct.quantize(case, {**inputs, "x": flat})


def _fc1_bf16(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    return moe.swiglu(round_to(sums, torch.bfloat16), gate_first, limit)


def _even_pack(case: CaseLike, inputs: Inputs) -> Parts:
    packed = correct.move_scales(case, inputs)["scales"].clone()
    padding = layouts.padding_mask(case.variant, case.integer("rows"), case.integer("cols"))
    slots = packed.view(torch.uint8 if packed.dtype == torch.uint8 else torch.int32).view(padding.shape)
    slots[padding] = 1
    return {"scales": packed}


PROBES: tuple[Mutant, ...] = (
    *(
        probe(
            f"bucket-{least}-{most}",
            f"kernel for {least} to {most} rows leaves out the last of K",
            "gemm",
            ("deepseek_fp8", "nvfp4", "bf16"),
            _without_last_block(least, most),
        )
        for least, most in ((1, 1), (2, 2), (5, 8), (9, 16), (17, 32), (65, 128), (129, 256), (1025, 2**31))
    ),
    *(
        probe(f"k-tail-{tile}", f"K behind the last tile of {tile} is left out", "gemm", (variant,), _tail_of_k(tile))
        for tile, variant in ((16, "bf16"), (64, "deepseek_fp8"), (128, "w4a8"), (256, "nvfp4"), (512, "mxfp8"))
    ),
    probe(
        "b-scale-rows", "B scales of the first rows for all", "gemm", ("deepseek_fp8",), _gemm(_b_scales_of_first_rows)
    ),
    probe("code-0-in-gemm", "scale 2^-127 decoded as 0", "gemm", ("mxfp8", "w4a8"), _gemm(_codes_lost(2.0**-127))),
    probe("truncating-store", "BF16 outputs cut off", "gemm", ("bf16", "mxfp8"), _truncated, out=("bf16",)),
    probe("rows-unwritten", "rows behind the last tile of 64 unwritten", "gemm", ("bf16",), _last_rows_unwritten),
    probe(
        "masked-count",
        "one row of a masked group too few",
        "grouped_gemm",
        ("bf16", "deepseek_fp8"),
        _masked_count_one_less,
        grouping=("masked",),
    ),
    probe(
        "empty-groups-skipped",
        "groups counted without the empty ones",
        "grouped_gemm",
        ("bf16",),
        _group_below,
        grouping=("contiguous", "contiguous_128"),
    ),
    probe(
        "weights-frozen", "a converted B kept by address", "gemm", ("deepseek_fp8", "bf16"), gemm.gemm, frozen=("b",)
    ),
    probe(
        "bias-frozen", "a converted bias kept by address", "routing", ("DeepSeekV3",), routing.route, frozen=("bias",)
    ),
    probe("silu-clamped", "limit on silu(gate)", "moe", ("bf16", "mxfp8"), _moe(moe.Steps(activate=_silu_clamped))),
    probe("up-clamped-above", "up clamped from above", "moe", ("bf16",), _moe(moe.Steps(activate=_up_clamped_above))),
    probe(
        "gate-clamped-below",
        "gate clamped from below as well",
        "moe",
        ("bf16", "fp8_per_tensor"),
        _moe(moe.Steps(activate=_gate_clamped_below)),
    ),
    probe("bf16-router-weights", "router weights in BF16", "moe", ("deepseek_fp8", "bf16"), _bf16_weights),
    probe("fc1-in-bf16", "FC1 stored in BF16", "moe", ("deepseek_fp8", "bf16"), _moe(moe.Steps(activate=_fc1_bf16))),
    probe(
        "first-tokens-scales",
        "activation scales of the first token",
        "moe",
        ("deepseek_fp8",),
        _tokens_swapped,
        scale=("ceil",),
    ),
    probe("first-tokens-scales-mx", "the same in MXFP8", "moe", ("mxfp8", "w4a8"), _tokens_swapped, scale=("ceil",)),
    *(
        probe(f"moe-rows-{count}", f"tokens from {count} on unwritten", "moe", ("bf16", "mxfp8"), _rows_from(count))
        for count in (16, 32, 64, 128)
    ),
    probe("ids-in-a-byte", "expert ids in 8 bits", "routing", ("Renormalize",), _ids_in_a_byte, out=("fp32", "bf16")),
    *(
        probe(
            f"tokens-{count}",
            f"tokens from {count} on are zero",
            "routing",
            ("DeepSeekV3", "Sigmoid"),
            _tokens_beyond(count),
        )
        for count in (256, 1024, 2048, 4096)
    ),
    probe("payload-race", "last row lost every other call", "quantize", ("mxfp8",), _order_of_two),
    probe(
        "ragged-block-reads-on",
        "maximum of a ragged block takes in the row below",
        "quantize",
        ("mxfp8", "deepseek_fp8"),
        lambda case, inputs: correct.quantize(case, inputs, amax=_last_column),
        block=("1x32", "1x128"),
    ),
    probe("nibbles", "high nibble first", "quantize", ("mxfp4", "nvfp4"), _nibbles_swapped),
    probe(
        "row-stride-ignored",
        "rows read as if they were contiguous",
        "quantize",
        ("mxfp8", "nvfp4"),
        _inputs_strided,
        stride=("contiguous", "padded"),
    ),
    probe(
        "padding-not-zero",
        "padding of scales filled with 1",
        "scale_layout",
        ("interleave_128x4", "mn_major"),
        _even_pack,
        direction=("pack",),
    ),
)
"""Every probe."""
