"""Correct answers to every operation, in steps that a mutant may replace; unchanged they raise no alarm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuzz.mutants.base import Inputs, Mutant
from references import layouts, ue8m0
from references.backend import CaseLike
from references.blocks import block_amax, dequantize, divisor, expand, scale_values, scales_from_amax
from references.elements import ELEMENTS, encode
from references.packing import pack_fp4, unpack_fp4
from references.recipes import Recipe, Via
from references.requantize import intermediate, mxfp4_to_deepseek_fp8, requantize_deepseek
from references.rounding import round_to
from references.schemes import Scheme, scheme

F32, F64 = torch.float32, torch.float64
PLAIN = Recipe(source="fuzz/mutants/correct.py")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Parts = dict[str, Tensor]
Amax = Callable[[Tensor, Scheme], Tensor]
Scales = Callable[[Tensor, Scheme, Tensor | None], Tensor]
Divide = Callable[[Tensor, Tensor], Tensor]
Encode = Callable[[Tensor, Scheme], Tensor]


def encode_ue8m0(case: CaseLike, inputs: Inputs) -> Parts:
    """``scales`` of a ``ue8m0`` case."""
    source = case["from"]
    if source == "scale":
        return {"scales": ue8m0.encode(inputs["x"], case.variant)}
    return {"scales": ue8m0.from_amax(inputs["x"], ELEMENTS[source.removeprefix("amax_")], case.variant)}


def scheme_of(case: CaseLike) -> Scheme:
    """The block scheme of a ``quantize`` or ``dequantize`` case."""
    return scheme(case.variant, case["block"], case["scale"])


def largest(x: Tensor, kind: Scheme) -> Tensor:
    """Block maxima, FP32 grid."""
    return block_amax(x, kind.block)


def stored(amax: Tensor, kind: Scheme, outer: Tensor | None) -> Tensor:
    """Scales as stored, from block maxima and the global scale."""
    return scales_from_amax(amax, kind, PLAIN, global_scale=outer)


def quotient(x: Tensor, divisors: Tensor) -> Tensor:
    """FP32 ``x / divisors``, both ``[m, k]``; a zero divided by zero stays zero."""
    return torch.where((x == 0) & (divisors == 0), x, x / divisors)


def codes(scaled: Tensor, kind: Scheme) -> Tensor:
    """Payload codes of scaled elements, one a byte."""
    return encode(scaled, kind.element)


def quantize(
    case: CaseLike,
    inputs: Inputs,
    *,
    amax: Amax = largest,
    scales: Scales = stored,
    divide: Divide = quotient,
    to_codes: Encode = codes,
) -> Parts:
    """``scales`` and ``payload`` of a ``quantize`` case."""
    kind, x, outer = scheme_of(case), inputs["x"], inputs.get("global_scale")
    if kind.scale == "static":
        return {"payload": payload(x, inputs["scale"].to(F64).view(1, 1), kind, None, divide, to_codes)}
    found = scales(amax(x, kind), kind, outer)
    return {"scales": found, "payload": payload(x, scale_values(found, kind), kind, outer, divide, to_codes)}


def payload(
    x: Tensor,
    values: Tensor,
    kind: Scheme,
    outer: Tensor | None,
    divide: Divide = quotient,
    to_codes: Encode = codes,
) -> Tensor:
    """The payload as stored, of a matrix under the scale values (FP64 grid) and the global scale."""
    divisors = expand(divisor(values, kind, outer), kind.block, tuple(x.shape))
    return packed(to_codes(divide(x.to(F32), divisors), kind), kind)


def packed(found: Tensor, kind: Scheme) -> Tensor:
    """Codes as stored: E2M1 two to a byte."""
    return pack_fp4(found) if kind.element.bits == 4 else found


def plain_codes(case: CaseLike, inputs: Inputs) -> Tensor:
    """The payload of a ``dequantize`` case, one code a byte ``[m, k]``."""
    stored_ = inputs["payload"]
    return unpack_fp4(stored_) if scheme_of(case).element.bits == 4 else stored_


def multiply(case: CaseLike, inputs: Inputs, elements: Tensor, values: Tensor) -> Parts:
    """``output`` from FP64 elements ``[m, k]`` and scale values ``[m, k]`` without the global scale, rounded once."""
    product = elements * values
    if "global_scale" in inputs:
        product = product * inputs["global_scale"].to(F64)
    dtype = DTYPES[case["out"]]
    return {"output": round_to(product, dtype).to(dtype)}


def dequantise(case: CaseLike, inputs: Inputs) -> Parts:
    """``output`` of a ``dequantize`` case."""
    kind = scheme_of(case)
    found = plain_codes(case, inputs)
    dtype = DTYPES[case["out"]]
    outer = inputs.get("global_scale")
    return {"output": dequantize(found, inputs["scales"], kind, global_scale=outer, dtype=dtype)}


def move_scales(case: CaseLike, inputs: Inputs) -> Parts:
    """``scales`` of a ``scale_layout`` case."""
    if case["direction"] == "pack":
        return {"scales": layouts.pack(inputs["scales"], case.variant)}
    rows, cols = case.integer("rows"), case.integer("cols")
    return {"scales": layouts.unpack(inputs["scales"], case.variant, rows, cols)}


def requantised_values(inputs: Inputs, via: Via) -> Tensor:
    """What a ``requantize deepseek_fp8`` case quantises again, FP32 ``[n, k]``, rounded to BF16 for ``bf16``."""
    return intermediate(inputs["payload"], inputs["scales"], Recipe(source=PLAIN.source, via=via))


def requantise(case: CaseLike, inputs: Inputs) -> Parts:
    """``scales`` and ``payload`` of a ``requantize`` case."""
    if case.variant == "deepseek_fp8":
        found = requantize_deepseek(inputs["payload"], inputs["scales"], PLAIN)
    else:
        found = mxfp4_to_deepseek_fp8(inputs["payload"], inputs["scales"])
    assert found.scales is not None
    return {"scales": found.scales, "payload": found.payload}


def conformant(operation: str, variants: tuple[str, ...], answer: Callable[[CaseLike, Inputs], Parts]) -> Mutant:
    """A correct implementation in a mutant's clothes, to count false alarms with."""
    return Mutant(
        family=f"correct-{operation}",
        area="none",
        source="docs/operations.md",
        description="no fault",
        operation=operation,
        variants=variants,
        answer=answer,
    )
