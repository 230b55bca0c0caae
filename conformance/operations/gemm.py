"""Block-scaled GEMM: two quantised operands to a matrix. Contract: docs/gemm.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import classify, distance, part_verdict, root_mean_square, show_float
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references.gemm import Admissible, admissible_gemm, fp32_reference
from references.gemm_formats import Operand, Side, operand, plain_scales, sides
from references.judging import judge_interval
from references.recipes import Recipe
from references.tensor_level import examine

NAME = "gemm"
JUDGED_PRODUCTS = 2**33
"""Products up to which every row of an output is judged."""
JUDGED_ELEMENTS = 2**23
"""Most elements of an output that are judged."""
JUDGED_COLUMNS = 2**18
"""Most columns that are judged; a sample then has rows enough to be one."""
JUDGED_WEIGHTS = 2**26
"""Most elements of B that are decoded."""
STRIP = 128
"""Columns that are judged together: the height of a block of B's scales."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHOICES = frozenset(
    {"accumulator", "promotion", "scale_combination", "split_k", "k_parts", "out_rounding", "subnormals"}
)


def open_choices(variant: str) -> frozenset[str]:
    """The accumulator, the order of scale multiplications, the last rounding, and FP32 subnormals."""
    return CHOICES


def inputs(case: Case) -> dict[str, Tensor]:
    """``a`` `[m, k]`, ``b`` `[n, k]`, their scales in the stored order, and global scales (nvfp4)."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``output`` `[m, n]`."""
    return {"output": OutputSpec((case.integer("m"), case.integer("n")), DTYPES[case["out"]])}


def operands(
    case: Case, inputs: Mapping[str, Tensor], chosen: Tensor | None = None, columns: Tensor | None = None
) -> tuple[Operand, Operand]:
    """Both operands, decoded; of A the rows chosen, of B those of the columns, which are whole strips."""
    found = []
    for name, rows, side in zip("ab", ("m", "n"), sides(case.variant, case["scale"]), strict=True):
        scales = inputs.get(f"{name}_scales")
        if scales is not None:
            shape = case.integer(rows), case.integer("k")
            scales = plain_scales(scales, side, case["layout"], shape, activation=name == "a")
        picked = chosen if name == "a" else columns
        found.append(some_rows(inputs[name], scales, side, inputs.get(f"{name}_global_scale"), picked))
    return found[0], found[1]


def some_rows(
    numbers: Tensor, scales: Tensor | None, side: Side, global_scale: Tensor | None, picked: Tensor | None
) -> Operand:
    """`operand` of some of the rows; whole strips of them where rows share a scale."""
    if picked is not None:
        where = picked.to(numbers.device)
        numbers = numbers[where]
        if scales is not None and side.block is not None:
            height = side.block[0]
            scales = scales[where if height == 1 else where[::height] // height]
    return operand(numbers, scales, side, global_scale)


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Membership of every output, equality with an exact model in a sample of rows, and errors of the whole matrix."""
    recipe, dtype = recipe.only(open_choices(case.variant)), DTYPES[case["out"]]
    actual, rows, columns = outputs["output"], judged_rows(case), judged_columns(case)
    a, b = operands(case, inputs, rows, columns)
    if rows is not None or columns is not None:
        problem = not_finite(actual)
        if problem is not None:
            return [problem]
        actual = actual if rows is None else actual[rows.to(actual.device)]
        actual = actual if columns is None else actual[:, columns.to(actual.device)]
    found = admissible_gemm(a, b, recipe, dtype, actual)
    verdict = output_verdict(actual, found, fp32_reference(a, b, dtype), dtype, numbers=rows, columns=columns)
    return [verdict, *tensor_verdict(case, actual, found, dtype)]


def judged_rows(case: Case) -> Tensor | None:
    """Numbers of the rows that are judged where an output is too large for all of them; None if all are.

    Evenly spread, the first and the last among them. Of the others only that they are finite is asked.
    """
    m, n, k = (case.integer(key) for key in "mnk")
    columns = judged_columns(case)
    count = most_rows(m, n if columns is None else len(columns), k)
    return spread(m, count) if count < m else None


def most_rows(rows: int, width: int, k: int) -> int:
    """How many of the rows are judged, ``width`` outputs of each."""
    if rows * width * k <= JUDGED_PRODUCTS and rows * width <= JUDGED_ELEMENTS:
        return rows
    return max(2, min(rows, JUDGED_PRODUCTS // (width * k), JUDGED_ELEMENTS // width))


def judged_columns(case: Case) -> Tensor | None:
    """Numbers of the columns that are judged where B is too large for all of them; None if all are.

    Whole strips, evenly spread, the first and the last (which may be shorter) among them.
    """
    n, k = (case.integer(key) for key in "nk")
    most = min(JUDGED_COLUMNS, JUDGED_WEIGHTS // k)
    if n <= most:
        return None
    strips = spread(-(-n // STRIP), max(2, most // STRIP))
    columns = (strips[:, None] * STRIP + torch.arange(STRIP)).flatten()
    return columns[columns < n]


def spread(size: int, count: int) -> Tensor:
    """So many numbers below ``size``, all if there are fewer: evenly spread, the first and the last among them."""
    count = min(count, size)
    return torch.div(torch.arange(count) * (size - 1), max(1, count - 1), rounding_mode="floor")


def not_finite(actual: Tensor, *, used: Tensor | None = None, slab: int | None = None) -> PartVerdict | None:
    """The verdict on an output ``[rows, n]`` that holds anything but finite numbers; None if it does not.

    used: bool ``[rows]``, the rows to look at. slab: rows of a slab, where the part is made of slabs.
    """
    for start in range(0, len(actual), step := max(1, 2**26 // actual.shape[1])):
        wrong = ~torch.isfinite(actual[start : start + step])
        bad = (wrong if used is None else wrong & used[start : start + step, None]).nonzero()
        if len(bad):
            row, column = start + int(bad[0, 0]), int(bad[0, 1])
            place = [row, column] if slab is None else [*divmod(row, slab), column]
            message = f"not finite at {place}: {float(actual[row, column])}; nothing here overflows"
            return PartVerdict(part="output", verdict="wrong", headroom=math.inf, worst_index=place, message=message)
    return None


def tensor_verdict(case: Case, actual: Tensor, found: Admissible, dtype: torch.dtype) -> list[PartVerdict]:
    """``property:tensor`` where the recipe has a model of its errors: errors of the whole matrix have its size.

    Left out for ``codes``, whose outputs are sums over the same sequences of products and so round alike.
    """
    if found.expectation is None or case["values"] == "codes":
        return []
    finding = examine(actual.to(torch.float64), found.expectation, dtype)
    if finding is None:
        return []
    verdict = "pass" if finding.headroom <= 1 else "wrong"
    return [PartVerdict(part="property:tensor", verdict=verdict, headroom=finding.headroom, message=finding.message)]


def output_verdict(
    actual: Tensor,
    found: Admissible,
    rival: Tensor,
    dtype: torch.dtype,
    *,
    shape: tuple[int, ...] | None = None,
    unjudged: Tensor | None = None,
    numbers: Tensor | None = None,
    columns: Tensor | None = None,
) -> PartVerdict:
    """The verdict on an output matrix ``[rows, n]``.

    rival: the answer of an FP32 matmul on dequantised operands; the message compares errors with it. shape: of the
    part, where it has more dimensions. unjudged: bool ``[rows]``, rows where everything is admissible. numbers,
    columns: of the rows and columns within a larger part, where these are a sample; a row there may have two numbers.

    bit_equal counts the modelled rows where there are any, else every judged row against the exact sum rounded once.
    """
    interval = found.interval
    shape = shape or tuple(actual.shape)
    skipped = unjudged if unjudged is not None else torch.zeros_like(found.modelled)
    wide = actual.to(torch.float64)
    judgement = judge_interval(wide, interval)
    inside, headroom = judgement.inside | skipped[:, None], judgement.headroom.masked_fill(skipped[:, None], 0.0)
    equal = (wide == interval.nominal) | skipped[:, None]

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        flat = row_of(index, shape), index[-1]
        low, high = (float(end[flat]) for end in (interval.lo, interval.hi))
        ends = show_float(low, dtype) if low == high else f"{show_float(low, dtype)} .. {show_float(high, dtype)}"
        model = " (exact model)" if bool(found.modelled[flat[0]]) else ""
        return {
            "actual": show_float(float(actual[flat]), dtype),
            "admissible": ends + model,
            "input": f"an exact sum of {float(interval.centre[flat]):.9g}",
        }

    verdict = part_verdict(
        "output",
        inside=inside.view(shape),
        headroom=headroom.view(shape),
        equal=equal.view(shape),
        kinds=classify(interval.centre).view(shape),
        example=example,
        place=lambda index: _placed(index, numbers, columns),
    )
    counted = equal[found.modelled] if bool(found.modelled.any()) else equal[~skipped]
    worst = divmod(int(headroom.nan_to_num(nan=math.inf).argmax()), headroom.shape[1])
    note = compared(wide[~skipped], rival[~skipped], interval.centre[~skipped])
    note += f"; K in {found.parts} parts" if found.parts > 1 else ""
    sampled = [f"{len(some)} {name}" for name, some in (("rows", numbers), ("columns", columns)) if some is not None]
    note += f"; {' and '.join(sampled)} judged, the others finite" if sampled else ""
    return replace(
        verdict,
        error=root_mean_square(distance(wide[~skipped], interval.centre[~skipped])),
        fp32_error=root_mean_square(distance(rival[~skipped], interval.centre[~skipped])),
        bit_equal=float(counted.to(torch.float64).mean()) if counted.numel() else None,
        stage_radii={name: float(radius[worst]) for name, radius in found.radii.items()},
        message=f"{verdict.message}; {note}" if verdict.message else note,
    )


def _placed(index: tuple[int, ...], rows: Tensor | None, columns: Tensor | None) -> tuple[int, ...]:
    """Where an element of a sample lies in the whole part."""
    first = index[:-1] if rows is None else tuple(rows[index[0]].view(-1).tolist())
    last = index[-1] if columns is None else int(columns[index[-1]])
    return (*first, last)


def row_of(index: Sequence[int], shape: tuple[int, ...]) -> int:
    """The row of an element, all dimensions but the last counted as one."""
    row = 0
    for place, size in zip(index[:-1], shape[:-1], strict=True):
        row = row * size + place
    return row


def compared(actual: Tensor, rival: Tensor, exact: Tensor) -> str:
    """The largest error and that of an FP32 matmul, in a few words."""
    if not actual.numel():
        return "no row belongs to a group"
    mine, theirs = (float((item - exact).abs().nan_to_num(nan=torch.inf).max()) for item in (actual, rival))
    return f"largest error {mine:.3g}, of an FP32 matmul {theirs:.3g}"
