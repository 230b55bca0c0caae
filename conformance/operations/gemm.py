"""Block-scaled GEMM: two quantised operands to a matrix. Contract: docs/gemm.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import classify, part_verdict, show_float
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references.gemm import Admissible, admissible_gemm, fp32_reference
from references.gemm_formats import Operand, operand, plain_scales, sides
from references.judging import judge_interval
from references.recipes import Recipe

NAME = "gemm"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHOICES = frozenset({"accumulator", "promotion", "scale_combination", "split_k", "out_rounding", "subnormals"})


def open_choices(variant: str) -> frozenset[str]:
    """The accumulator, the order of scale multiplications, the last rounding, and FP32 subnormals."""
    return CHOICES


def inputs(case: Case) -> dict[str, Tensor]:
    """``a`` `[m, k]`, ``b`` `[n, k]`, their scales in the stored order, and global scales (nvfp4)."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``output`` `[m, n]`."""
    return {"output": OutputSpec((case.integer("m"), case.integer("n")), DTYPES[case["out"]])}


def operands(case: Case, inputs: Mapping[str, Tensor]) -> tuple[Operand, Operand]:
    """Both operands, decoded."""
    found = []
    for name, rows, side in zip("ab", ("m", "n"), sides(case.variant, case["scale"]), strict=True):
        scales = inputs.get(f"{name}_scales")
        if scales is not None:
            shape = case.integer(rows), case.integer("k")
            scales = plain_scales(scales, side, case["layout"], shape, activation=name == "a")
        found.append(operand(inputs[name], scales, side, inputs.get(f"{name}_global_scale")))
    return found[0], found[1]


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Membership of every output; equality with the exact model in a sample of rows where the recipe has one."""
    recipe, dtype = recipe.only(open_choices(case.variant)), DTYPES[case["out"]]
    a, b = operands(case, inputs)
    found = admissible_gemm(a, b, recipe, dtype)
    return [output_verdict(outputs["output"], found, fp32_reference(a, b, dtype), dtype)]


def output_verdict(actual: Tensor, found: Admissible, rival: Tensor, dtype: torch.dtype) -> PartVerdict:
    """The verdict on an output matrix.

    rival: the answer of an FP32 matmul on dequantised operands; the message compares errors with it. bit_equal counts
    the modelled rows where there are any, else every element against the exact sum rounded once.
    """
    interval = found.interval
    wide = actual.to(torch.float64)
    judgement = judge_interval(wide, interval)
    equal = wide == interval.nominal

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        low, high = (float(end[index]) for end in (interval.lo, interval.hi))
        ends = show_float(low, dtype) if low == high else f"{show_float(low, dtype)} .. {show_float(high, dtype)}"
        model = " (exact model)" if bool(found.modelled[index[0]]) else ""
        return {
            "actual": show_float(float(actual[index]), dtype),
            "admissible": ends + model,
            "input": f"an exact sum of {float(interval.centre[index]):.9g}",
        }

    verdict = part_verdict(
        "output",
        inside=judgement.inside,
        headroom=judgement.headroom,
        equal=equal,
        kinds=classify(interval.centre),
        example=example,
    )
    worst = tuple(verdict.worst_index or ())
    share = float(equal[found.modelled].to(torch.float64).mean()) if bool(found.modelled.any()) else verdict.bit_equal
    note = compared(wide, rival, interval.centre)
    return replace(
        verdict,
        bit_equal=share,
        stage_radii={name: float(radius[worst]) for name, radius in found.radii.items()},
        message=f"{verdict.message}; {note}" if verdict.message else note,
    )


def compared(actual: Tensor, rival: Tensor, exact: Tensor) -> str:
    """The largest error and that of an FP32 matmul, in a few words."""
    mine, theirs = (float((item - exact).abs().nan_to_num(nan=torch.inf).max()) for item in (actual, rival))
    return f"largest error {mine:.3g}, of an FP32 matmul {theirs:.3g}"
