"""Models of faults whose cause is an allocator, a gate or a NaN rule, as far as an answer shows them."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.mutants import correct
from fuzz.mutants.base import Inputs, Mutant, Part, Partial
from fuzz.mutants.correct import Parts
from references import layouts, ue8m0
from references.backend import CaseLike
from references.blocks import expand
from references.requantize import mxfp4_to_deepseek_fp8
from references.schemes import Scheme


def _underallocated(case: CaseLike, inputs: Inputs) -> dict[str, Part]:
    packed = layouts.pack(inputs["scales"], case.variant)
    room = case.integer("rows") * case.integer("cols")
    return {"scales": Partial(packed, torch.arange(len(packed)) < room)}


def narrow(offset: Tensor, bits: int) -> Tensor:
    """An offset int64 held in a signed integer of some bits."""
    return (offset + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


INDEX_BITS = 16
"""Width of the model's index; the reports have 32 bits and tensors of more than 2^31 elements."""


def _narrow_offsets(case: CaseLike, inputs: Inputs) -> Parts:
    rows, cols = case.integer("m"), case.integer("k")
    offset = narrow(torch.arange(rows * cols), INDEX_BITS)
    right = correct.dequantise(case, inputs)["output"].view(-1)
    # What lies before the buffer is as good as zero.
    found = torch.where(offset < 0, torch.zeros_like(right), right[offset.clamp(min=0)])
    return {"output": found.view(rows, cols)}


def _powers_of_two(amax: Tensor, kind: Scheme, outer: Tensor | None) -> Tensor:
    exact = correct.stored(amax, kind, outer)
    codes = ue8m0.encode(exact, "ceil")
    return torch.where(exact == 0, exact, ue8m0.decode(codes, torch.float32))


def _nan_ignored(case: CaseLike, inputs: Inputs) -> Parts:
    scales = torch.where(inputs["scales"] == ue8m0.NAN, 0, inputs["scales"]).to(torch.uint8)
    right = mxfp4_to_deepseek_fp8(inputs["payload"], inputs["scales"])
    found = mxfp4_to_deepseek_fp8(inputs["payload"], scales)
    assert found.scales is not None
    # Elements under a NaN scale are NaN still; their block is no longer marked.
    marked = expand(inputs["scales"] == ue8m0.NAN, (1, 32), tuple(found.payload.shape))
    return {"scales": found.scales, "payload": torch.where(marked, right.payload, found.payload)}


MUTANTS = (
    Mutant(
        family="nvfp4-swizzled-scale-underallocated",
        area="memory",
        source="vllm-project/vllm#55643",
        description="buffer of the 128x4 layout sized without padding; what lies behind it is lost",
        operation="scale_layout",
        variants=("interleave_128x4",),
        where={"direction": ("pack",)},
        answer=_underallocated,
    ),
    Mutant(
        family="int32-offset",
        area="memory",
        source="unslothai/unsloth#6884",
        description=f"offset row * columns in {INDEX_BITS} bits",
        operation="dequantize",
        variants=("deepseek_fp8", "mxfp8", "fp8_per_tensor"),
        answer=_narrow_offsets,
    ),
    Mutant(
        family="ue8m0-on-hopper",
        area="gating",
        source="PrimeIntellect-ai/prime-rl#3112",
        description="power-of-two scales although exact ones are asked for",
        operation="quantize",
        variants=("deepseek_fp8",),
        where={"scale": ("fp32",)},
        answer=lambda case, inputs: correct.quantize(case, inputs, scales=_powers_of_two),
    ),
    Mutant(
        family="mx-nan-not-propagated",
        area="robustness",
        source="pytorch/ao#4201",
        description="largest of the scales ignores NaN, so that the new block is not marked",
        operation="requantize",
        variants=("mxfp4_to_deepseek_fp8",),
        answer=_nan_ignored,
    ),
)
