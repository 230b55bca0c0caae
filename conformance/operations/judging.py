"""From element-wise facts (inside or not, headroom, equal to the nominal answer) to one `PartVerdict`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import PartVerdict

EXAMPLES = 8
CLASSES = ("zero", "subnormal", "normal", "inf", "nan")


def classify(values: Tensor) -> Tensor:
    """Class of each value as an index into `CLASSES`; subnormal means below FP32's smallest normal, 2^-126."""
    magnitude = values.abs().to(torch.float64)
    kind = torch.full(magnitude.shape, 2, dtype=torch.uint8, device=values.device)
    kind[magnitude < 2.0**-126] = 1
    kind[magnitude == 0] = 0
    kind[torch.isinf(magnitude)] = 3
    kind[torch.isnan(magnitude)] = 4
    return kind


def part_verdict(
    part: str,
    *,
    inside: Tensor,
    headroom: Tensor,
    equal: Tensor,
    kinds: Tensor,
    example: Callable[[tuple[int, ...]], dict[str, Any]],
) -> PartVerdict:
    """Fold element-wise facts into a verdict.

    inside, headroom, equal, kinds: tensors of the part's shape: admissible or not; |out - centre| / radius; equal to the
    nominal answer; class of the element's input (see `classify`).
    example: describes the element at an index (``actual``, ``admissible``, ``input``).
    """
    bit_equal = float(equal.to(torch.float64).mean())
    flat = torch.where(torch.isnan(headroom), torch.inf, headroom.to(torch.float64)).reshape(-1)
    worst = int(flat.argmax())
    worst_index = _unravel(worst, inside.shape)
    common = {"part": part, "headroom": float(flat[worst]), "worst_index": list(worst_index), "bit_equal": bit_equal}
    if bool(inside.all()):
        return PartVerdict(verdict="pass", **common)
    outside = (~inside).reshape(-1).nonzero().reshape(-1)
    classes = tuple(sorted(CLASSES[int(kind)] for kind in kinds.reshape(-1)[outside].unique()))
    examples = [
        {"index": list(index), **example(index)}
        for index in (_unravel(int(position), inside.shape) for position in outside[:EXAMPLES])
    ]
    first = examples[0]
    message = (
        f"{len(outside)} of {inside.numel()} elements outside (inputs: {', '.join(classes)}); "
        f"first at {first['index']}: {first['actual']}, admissible {first['admissible']}, input {first['input']}"
    )
    return PartVerdict(verdict="wrong", message=message, classes=classes, examples=examples, **common)


def _unravel(position: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, coordinate = divmod(position, size)
        index.append(coordinate)
    return tuple(reversed(index))


def show_code(code: int, value: float, digits: int = 2) -> str:
    """A code and what it stands for: ``0x7e (448)``."""
    return f"0x{code:0{digits}x} ({value:.9g})"


def show_float(value: float, dtype: torch.dtype = torch.float32) -> str:
    """A number with its bits in ``dtype``: ``0x3f800000 (1)``."""
    if dtype == torch.float32:
        bits = struct.unpack("<I", torch.tensor([value], dtype=torch.float64).to(torch.float32).numpy().tobytes())[0]
        return f"0x{bits:08x} ({value:.9g})"
    bits = int(torch.tensor([value], dtype=torch.float64).to(dtype).view(torch.int16)[0]) & 0xFFFF
    return f"0x{bits:04x} ({value:.9g})"
