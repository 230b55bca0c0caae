"""From element-wise facts (inside or not, headroom, equal to the nominal answer) to one `PartVerdict`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import PartVerdict
from references import ue8m0
from references.blocks import block_size
from references.elements import Element, decode, from_ordinal, ordinal
from references.judging import Codes, Judgement, judge_payload
from references.rounding import bits

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
    classes: tuple[str, ...] = CLASSES,
    error: Tensor | None = None,
    example: Callable[[tuple[int, ...]], dict[str, Any]],
    place: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple,
) -> PartVerdict:
    """Fold element-wise facts into a verdict.

    inside, headroom, equal, kinds: tensors of the part's shape: admissible or not; |out - centre| / radius; equal to
        the nominal answer; class of the element's input, an index into ``classes`` (see `classify`).
    error: FP64 |out - exact| of each element (see `distance`); None where there is none.
    example: describes the element at an index (``actual``, ``admissible``, ``input``).
    place: the index to be told of an element, where these tensors are a sample of the part.
    """
    bit_equal = float(equal.to(torch.float64).mean())
    flat = torch.where(torch.isnan(headroom), torch.inf, headroom.to(torch.float64)).reshape(-1)
    worst = int(flat.argmax())
    worst_index = _unravel(worst, inside.shape)
    common: dict[str, Any] = {
        "part": part,
        "headroom": float(flat[worst]),
        "worst_index": list(place(worst_index)),
        "bit_equal": bit_equal,
        "error": None if error is None else root_mean_square(error),
    }
    if bool(inside.all()):
        return PartVerdict(verdict="pass", **common)
    outside = (~inside).reshape(-1).nonzero().reshape(-1)
    present = set(kinds.reshape(-1)[outside].tolist())
    seen = tuple(sorted(classes[int(kind)] for kind in present))
    examples = [
        {"index": list(place(index)), **example(index)}
        for index in (_unravel(int(position), inside.shape) for position in outside[:EXAMPLES])
    ]
    first = examples[0]
    message = (
        f"{len(outside)} of {inside.numel()} elements outside (inputs: {', '.join(seen)}); "
        f"first at {first['index']}: {first['actual']}, admissible {first['admissible']}, input {first['input']}"
    )
    return PartVerdict(verdict="wrong", message=message, classes=seen, examples=examples, **common)


def distance(actual: Tensor, exact: Tensor) -> Tensor:
    """FP64 |actual - exact|: inf where only ``exact`` is finite, 0 where it is not finite itself."""
    apart = (actual.to(torch.float64) - exact.to(torch.float64)).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(exact.isfinite(), apart, 0.0)


def root_mean_square(values: Tensor) -> float:
    """Of non-negative FP64 numbers; scaled by the largest, so that no square underflows or overflows."""
    top = float(values.max()) if values.numel() else 0.0
    if top == 0.0 or math.isinf(top):
        return top
    return top * math.sqrt(float(((values / top) ** 2).mean()))


def _unravel(position: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, coordinate = divmod(position, size)
        index.append(coordinate)
    return tuple(reversed(index))


def show_ue8m0(code: int) -> str:
    """A UE8M0 code: ``0x80 (2^1)``."""
    return f"0x{code:02x} (NaN)" if code == ue8m0.NAN else f"0x{code:02x} (2^{code - 127})"


def show_code(code: int, element: Element) -> str:
    """An element's code and its value: ``0x7e (448)``."""
    value = float(decode(torch.tensor([code], dtype=torch.uint8), element)[0])
    return f"0x{code:0{element.bits // 4}x} ({value:.9g})"


def show_ordinal(ordinal: int, element: Element) -> str:
    """`show_code` of the code at an ordinal."""
    return show_code(int(from_ordinal(torch.tensor([ordinal]), element)[0]), element)


def show_float(value: float, dtype: torch.dtype = torch.float32) -> str:
    """A number that ``dtype`` holds exactly, with its bits: ``0x3f800000 (1)``."""
    held = torch.tensor([value], dtype=torch.float64).to(dtype)
    digits = 2 * held.element_size()
    return f"0x{int(bits(held)[0]) & (16**digits - 1):0{digits}x} ({value:.9g})"


def codes_verdict(
    part: str,
    actual: Tensor,
    codes: Codes,
    judgement: Judgement,
    *,
    kinds: Tensor,
    classes: tuple[str, ...] = CLASSES,
    show_actual: Callable[[tuple[int, ...]], str],
    show: Callable[[int], str],
    source: Callable[[tuple[int, ...]], str],
) -> PartVerdict:
    """The verdict on a part of codes, given as ordinals.

    show_actual: the code at an index as text. show: an admissible ordinal as text. source: the input at an index.
    """

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        low, high = int(codes.lo[index]), int(codes.hi[index])
        admissible = show(low) if low == high else f"{show(low)} .. {show(high)}"
        if codes.negative is not None and low == high == 0 and bool(codes.negative[index]):
            admissible = f"-{admissible}"
        if codes.zero is not None and bool(codes.zero[index]):
            admissible += " or 0"
        return {"actual": show_actual(index), "admissible": admissible, "input": source(index)}

    return part_verdict(
        part,
        inside=judgement.inside,
        headroom=judgement.headroom,
        equal=actual.to(torch.int32) == codes.nominal.to(torch.int32),
        kinds=kinds,
        classes=classes,
        error=_steps(actual, codes),
        example=example,
    )


def _steps(actual: Tensor, codes: Codes) -> Tensor:
    """Distance in codes from the nominal answer; inf where only one of both is NaN."""
    found, nominal = actual.to(torch.int64), codes.nominal.to(torch.int64)
    apart = (found - nominal).abs().to(torch.float64)
    return apart.masked_fill((found == codes.nan) != (nominal == codes.nan), torch.inf)


def payload_verdict(
    payload: Tensor, codes: Codes, element: Element, zero_sign: str, x: Tensor, source: Callable[[tuple[int, ...]], str]
) -> PartVerdict:
    """The verdict on a payload: unpacked codes uint8 `[m, k]` of the matrix ``x`` `[m, k]`."""
    return codes_verdict(
        "payload",
        ordinal(payload, element),
        codes,
        judge_payload(payload, codes, element, zero_sign),
        kinds=classify(x),
        show_actual=lambda index: show_code(int(payload[index]), element),
        show=lambda position: show_ordinal(position, element),
        source=source,
    )


def block_text(x: Tensor, index: tuple[int, ...], block: tuple[int, int] | None, dtype: torch.dtype) -> str:
    """A few words on the block of grid position ``index``: where it starts, its amax and its first elements."""
    height, width = block_size(tuple(x.shape), block)
    rows, cols = (slice(place * size, (place + 1) * size) for place, size in zip(index, (height, width), strict=True))
    values = x[rows, cols]
    largest = values.abs().to(torch.float64).max()
    first = ", ".join(f"{value:.6g}" for value in values.reshape(-1)[:4].tolist())
    rest = ", ..." if values.numel() > 4 else ""
    where = f"{values.shape[0]}x{values.shape[1]} block at [{rows.start}, {cols.start}]"
    return f"{where}, amax {show_float(float(largest), dtype)}, [{first}{rest}]"
