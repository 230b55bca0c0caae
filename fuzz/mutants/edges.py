"""More faults that no report describes, one place of a kernel each: edges of rows, single codes, other tokens' values.

Like `fuzz.mutants.probes` they do not count; each was written before anybody knew whether the search finds it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuzz.mutants import correct, routing
from fuzz.mutants.base import Answer, Inputs, Mutant
from fuzz.mutants.correct import F32, Parts
from fuzz.mutants.probes import probe
from references import layouts
from references.backend import CaseLike
from references.blocks import expand, scale_values
from references.elements import decode, encode
from references.schemes import Scheme

BF16, FP16 = torch.bfloat16, torch.float16


def _quantize(amax: correct.Amax = correct.largest, to_codes: correct.Encode = correct.codes) -> Answer:
    return lambda case, inputs: correct.quantize(case, inputs, amax=amax, to_codes=to_codes)


def changed(name: str, change: Callable[[Tensor], Tensor], answer: Answer) -> Answer:
    """An answer on other inputs: one of them changed."""
    return lambda case, inputs: answer(case, {**inputs, name: change(inputs[name])})


def neighbours(period: int, place: int, step: int) -> Callable[[Tensor], Tensor]:
    """Rows whose number is ``place`` modulo ``period`` are those ``step`` rows on, where there is one."""

    def change(rows: Tensor) -> Tensor:
        own = torch.arange(len(rows))
        other = own + step
        moved = (own % period == place) & (other >= 0) & (other < len(rows))
        return rows[torch.where(moved, other, own)]

    return change


# Quantisers and their inverse.


def _tie_away(scaled: Tensor, kind: Scheme) -> Tensor:
    # A quarter, half of the smallest E2M1 number, is rounded up.
    found = encode(scaled, kind.element)
    return torch.where(scaled == 0.25, 1, found).to(found.dtype)


def _through_fp16(scaled: Tensor, kind: Scheme) -> Tensor:
    limit = kind.element.max
    return encode(scaled.clamp(-limit, limit).to(FP16).to(F32), kind.element)


def _sign_of_overflow_lost(scaled: Tensor, kind: Scheme) -> Tensor:
    return encode(torch.where(scaled < -kind.element.max, -scaled, scaled), kind.element)


def _nan_clipped(scaled: Tensor, kind: Scheme) -> Tensor:
    return encode(torch.where(scaled.isnan(), kind.element.max, scaled), kind.element)


def _lane_lost(x: Tensor, kind: Scheme) -> Tensor:
    kept = x.clone()
    kept[:, 31::32] = 0
    return correct.largest(kept, kind)


def _half_of_a_block(x: Tensor, kind: Scheme) -> Tensor:
    kept = x.clone()
    kept[torch.arange(len(x)) % 128 >= 64] = 0
    return correct.largest(kept, kind)


def _eighth_block(x: Tensor, kind: Scheme) -> Tensor:
    found = correct.largest(x, kind).clone()
    found[:, 7:8] = found[:, 6:7][:, : found[:, 7:8].shape[1]]
    return found


def _square_transposed(case: CaseLike, inputs: Inputs) -> Parts:
    x = inputs["x"]
    return correct.quantize(case, {**inputs, "x": x.t() if x.shape[0] == x.shape[1] else x})


def _offset_ignored(case: CaseLike, inputs: Inputs) -> Parts:
    x = inputs["x"]
    return correct.quantize(case, {**inputs, "x": torch.as_strided(x, tuple(x.shape), x.stride(), 0)})


def _rows_lost(count: int) -> Answer:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        found = correct.quantize(case, inputs)
        found["payload"][count:] = 0
        return found

    return answer


def _fp32_through_bf16(case: CaseLike, inputs: Inputs) -> Parts:
    return {"output": correct.dequantise(case, inputs)["output"].to(BF16).to(F32)}


def _one_code_negated(case: CaseLike, inputs: Inputs) -> Parts:
    payload, kind = inputs["payload"], correct.scheme_of(case)
    elements = torch.where(payload == 0x81, -1.0, 1.0) * decode(payload, kind.element)
    values = expand(scale_values(inputs["scales"], kind), kind.block, tuple(payload.shape))
    return correct.multiply(case, inputs, elements, values)


# Layouts.


def _sign_extended(case: CaseLike, inputs: Inputs) -> Parts:
    # Bytes of 128 and more, taken for negative numbers, set every bit above them in the word.
    rows, cols = inputs["scales"].shape
    padded = torch.zeros(-(-rows // 4) * 4, -(-cols // 4) * 4, dtype=torch.int64)
    padded[:rows, :cols] = inputs["scales"].view(torch.int8).to(torch.int64)
    first, second, third, fourth = (padded[:, place::4] << 8 * place for place in range(4))
    return {"scales": (first | second | third | fourth).to(torch.int32).t().contiguous()}


def _columns_wrap(case: CaseLike, inputs: Inputs) -> Parts:
    columns = torch.arange(inputs["scales"].shape[1]) % 128
    return {"scales": layouts.pack(inputs["scales"][:, columns].contiguous(), case.variant)}


def _square_not_transposed(case: CaseLike, inputs: Inputs) -> Parts:
    scales = inputs["scales"]
    square = scales.shape[0] == scales.shape[1]
    return {"scales": scales.contiguous().clone() if square else layouts.pack(scales, case.variant)}


# Routers.


def _all_but_one(case: CaseLike, inputs: Inputs) -> Parts:
    ids, weights = routing.selected(case, inputs)
    if ids.shape[1] > 1 and case["topk"] == case["experts"]:
        last = case.integer("topk") - 1
        ids = ids.index_copy(1, torch.tensor([last]), ids[:, last - 1 : last])
    return routing.finished(case, ids, weights, inputs.get("expert_map"))


def _token_of_another(period: int) -> Answer:
    def answer(case: CaseLike, inputs: Inputs) -> Parts:
        ids, weights = routing.selected(case, inputs)
        change = neighbours(period, period - 1, 1 - period)
        return routing.finished(case, change(ids), change(weights), inputs.get("expert_map"))

    return answer


def _one_more_real_token(case: CaseLike, inputs: Inputs) -> Parts:
    ids, weights = (part.clone() for part in routing.selected(case, inputs))
    if case["padding"] == "some":
        real = case.integer("tokens") * 3 // 4 + 1
        ids[real:], weights[real:] = -1, 0.0
    return routing.finished(case, ids, weights, inputs.get("expert_map"), masked=False)


def _bias_of_first(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda score, bias: score + torch.where(torch.arange(len(bias)) < count, bias, 0.0)


def _later_warps_first(choice: Tensor) -> Tensor:
    # Ties go to the lowest expert of the last 32 instead of the first.
    places = torch.arange(choice.shape[1])
    turned = places[torch.argsort(-(places // 32), stable=True)]
    return turned[routing.descending(choice[:, turned])]


E4M3, BLOCKS = ("mxfp8", "deepseek_fp8"), ("1x32", "1x128")
EDGES: tuple[Mutant, ...] = (
    probe("one-tie-away", "0.25 rounded up to 0.5", "quantize", ("nvfp4",), _quantize(to_codes=_tie_away)),
    probe("twice-rounded", "payloads by way of FP16", "quantize", E4M3, _quantize(to_codes=_through_fp16)),
    probe(
        "sign-of-overflow",
        "numbers below -448 saturate at 448",
        "quantize",
        ("fp8_per_tensor",),
        _quantize(to_codes=_sign_of_overflow_lost),
        scale=("static",),
    ),
    probe(
        "nan-clipped",
        "NaN becomes 448",
        "quantize",
        ("fp8_per_tensor",),
        _quantize(to_codes=_nan_clipped),
        scale=("static",),
    ),
    probe("lane-31", "maximum without each 32nd element", "quantize", E4M3, _quantize(amax=_lane_lost), block=BLOCKS),
    probe(
        "half-block",
        "maximum of 128 rows over the first 64",
        "quantize",
        ("deepseek_fp8",),
        _quantize(amax=_half_of_a_block),
        block=("128x128",),
    ),
    probe("eighth-block", "eighth block scaled as the seventh", "quantize", E4M3, _quantize(amax=_eighth_block)),
    probe(
        "row-128",
        "each 129th row scaled as the one before",
        "quantize",
        (*E4M3, "nvfp4"),
        _quantize(amax=lambda x, kind: neighbours(128, 0, -1)(correct.largest(x, kind))),
        block=(*BLOCKS, "1x16"),
    ),
    probe("square-input", "a square input read the other way", "quantize", E4M3, _square_transposed),
    probe("storage-offset", "a view read from its storage's beginning", "quantize", E4M3, _offset_ignored),
    probe("rows-256", "rows from 256 on are zero", "quantize", ("mxfp8", "nvfp4"), _rows_lost(256)),
    probe(
        "input-subnormals",
        "subnormal inputs flushed",
        "quantize",
        ("mxfp4",),
        changed("x", lambda x: torch.where(x.abs() < 2.0**-126, torch.zeros_like(x), x), correct.quantize),
        dtype=("fp32", "bf16"),
    ),
    probe(
        "row-16-scales",
        "each 16th row under the next row's scales",
        "dequantize",
        E4M3,
        changed("scales", neighbours(16, 15, 1), correct.dequantise),
    ),
    probe("fp32-by-bf16", "FP32 outputs by way of BF16", "dequantize", ("nvfp4",), _fp32_through_bf16, out=("fp32",)),
    probe("one-code", "code 0x81 positive", "dequantize", ("mxfp8", "fp8_per_tensor"), _one_code_negated),
    probe(
        "sign-extended",
        "codes above 127 spill over the word",
        "scale_layout",
        ("mn_major_packed",),
        _sign_extended,
        direction=("pack",),
    ),
    probe(
        "columns-wrap",
        "columns wrap at 128",
        "scale_layout",
        ("interleave_128x4",),
        _columns_wrap,
        direction=("pack",),
    ),
    probe(
        "square-scales",
        "a square matrix is not transposed",
        "scale_layout",
        ("k_major",),
        _square_not_transposed,
        direction=("pack",),
    ),
    probe("all-experts", "last of all experts is the one before", "routing", ("DeepSeekV3", "Sigmoid"), _all_but_one),
    probe("token-31", "each 32nd token routed as the first", "routing", ("Renormalize",), _token_of_another(32)),
    probe("real-padding", "first padded token is real", "routing", ("DeepSeekV3",), _one_more_real_token),
    probe(
        "bias-128",
        "bias of the first 128 experts alone",
        "routing",
        ("DeepSeekV3", "MiniMax2"),
        lambda case, inputs: routing.route(case, inputs, routing.Steps(bias=_bias_of_first(128))),
    ),
    probe(
        "later-warps",
        "ties go to later warps",
        "routing",
        ("Renormalize",),
        lambda case, inputs: routing.route(case, inputs, routing.Steps(order=_later_warps_first)),
    ),
)
"""Those of stored formats and of routers."""
