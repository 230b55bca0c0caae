"""Grouped GEMM: the rows of A belong to groups, each with a B of its own. Contract: docs/gemm.md.

Rows that belong to no group (padding, and rows past a slab's count) are not judged, whatever a backend leaves there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from conformance.operations import gemm
from conformance.operations.base import OutputSpec, PartVerdict
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references.gemm import Admissible, admissible_gemm, fp32_reference
from references.gemm_formats import Operand, plain_scales, sides
from references.judging import Interval
from references.recipes import Recipe
from references.tensor_level import Expectation

NAME = "grouped_gemm"


def open_choices(variant: str) -> frozenset[str]:
    """Those of a GEMM."""
    return gemm.CHOICES


def inputs(case: Case) -> dict[str, Tensor]:
    """Operands and scales; ``m_indices`` int32 `[m]` or ``masked_m`` int32 `[groups]`."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``output`` `[m, n]`, or `[groups, m, n]` where rows are masked."""
    shape: tuple[int, ...] = (case.integer("m"), case.integer("n"))
    if case["grouping"] == "masked":
        shape = (case.integer("groups"), *shape)
    return {"output": OutputSpec(shape, gemm.DTYPES[case["out"]])}


def row_groups(case: Case, inputs: Mapping[str, Tensor]) -> Tensor:
    """The group of every row of the output, int64, slabs one after another; -1 where it belongs to none."""
    if case["grouping"] != "masked":
        return inputs["m_indices"].to(torch.int64)
    counts = inputs["masked_m"]
    groups, m = case.integer("groups"), case.integer("m")
    number = torch.arange(groups, device=counts.device)[:, None].expand(groups, m)
    used = torch.arange(m, device=counts.device)[None, :] < counts[:, None]
    return torch.where(used, number, -1).reshape(-1)


def settle(case: Case, inputs: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts with rows that are not judged set to zero: what lies there may differ from call to call."""
    output = parts.get("output")
    if output is None or tuple(output.shape) != outputs(case)["output"].shape:
        return dict(parts)
    unused = (row_groups(case, inputs) < 0).view(output.shape[:-1]).to(output.device)
    return {**parts, "output": output.masked_fill(unused[..., None], 0.0)}


def group_operands(
    case: Case, inputs: Mapping[str, Tensor], rows: Tensor, numbers: Tensor | None = None, columns: Tensor | None = None
) -> Iterator[tuple[Tensor, Operand, Operand]]:
    """For every group with rows: which they are of the rows given, and both operands.

    rows: the group of each. numbers: of these rows in the output, all of them if None. columns: of B's rows, whole
    strips.
    """
    first, second = sides(case.variant, case["scale"])
    masked = case["grouping"] == "masked"
    m, n, k = (case.integer(key) for key in ("m", "n", "k"))
    for group in range(case.integer("groups")):
        where = (rows == group).nonzero().view(-1)
        if not len(where):
            continue
        local = where if numbers is None else numbers[where]
        local = local - group * m if masked else local
        slab = {name: tensor[group] if masked else tensor for name, tensor in inputs.items() if name[:1] == "a"}
        expert = {name: tensor[group] for name, tensor in inputs.items() if name[:1] == "b"}
        found = []
        for side, name, part, height in ((first, "a", slab, m), (second, "b", expert, n)):
            scales = part.get(f"{name}_scales")
            if scales is not None:
                scales = plain_scales(scales, side, case["layout"], (height, k), activation=name == "a")
            picked = local if name == "a" else columns
            found.append(gemm.some_rows(part[name], scales, side, part.get(f"{name}_global_scale"), picked))
        yield where, found[0], found[1]


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Membership of every output in a row that belongs to a group."""
    recipe, dtype = recipe.only(gemm.CHOICES), gemm.DTYPES[case["out"]]
    output = outputs["output"]
    rows = row_groups(case, inputs)
    actual = output.reshape(len(rows), case.integer("n"))
    numbers, columns = judged_rows(case, rows), gemm.judged_columns(case)
    masked = case["grouping"] == "masked"
    if numbers is not None or columns is not None:
        problem = gemm.not_finite(actual, used=rows >= 0, slab=case.integer("m") if masked else None)
        if problem is not None:
            return [problem]
    if numbers is not None:
        actual, rows = actual[numbers], rows[numbers]
    if columns is not None:
        columns = columns.to(actual.device)
        actual = actual[:, columns]
    shape = (actual.shape[0], actual.shape[1])
    whole = _anything(shape, actual.device, wide=recipe.accumulator == "fp64")
    rival = torch.zeros(shape, dtype=torch.float64, device=actual.device)
    known = True
    for where, a, b in group_operands(case, inputs, rows, numbers, columns):
        part = admissible_gemm(a, b, recipe, dtype, actual[where])
        known = known and part.expectation is not None
        _place(whole, part, where)
        rival[where] = fp32_reference(a, b, dtype)
    places = numbers
    if numbers is not None and masked:
        places = torch.stack((numbers // case.integer("m"), numbers % case.integer("m")), dim=1)
    part_shape = (*output.shape[:-1], shape[1]) if numbers is None else shape
    verdict = gemm.output_verdict(
        actual, whole, rival, dtype, shape=part_shape, unjudged=rows < 0, numbers=places, columns=columns
    )
    return [verdict, *(gemm.tensor_verdict(case, actual, whole, dtype) if known else ())]


def judged_rows(case: Case, rows: Tensor) -> Tensor | None:
    """Numbers of the rows that are judged where an output is too large for all of them; None if all are.

    rows: the group of each. Evenly spread over the rows that belong to a group, with every group's first and last.
    """
    columns = gemm.judged_columns(case)
    width = case.integer("n") if columns is None else len(columns)
    count = gemm.most_rows(len(rows), width, case.integer("k"))
    if count >= len(rows):
        return None
    used = (rows >= 0).nonzero().view(-1)
    if not len(used):
        return used.new_zeros(1)  # one row of no group: anything will do, but something is said
    owner = rows[used]
    border = torch.ones(len(used) + 1, dtype=torch.bool, device=used.device)
    border[1:-1] = owner[1:] != owner[:-1]
    picked = border[1:] | border[:-1]
    picked[gemm.spread(len(used), count).to(used.device)] = True
    return used[picked]


def _anything(shape: tuple[int, int], device: torch.device, *, wide: bool) -> Admissible:
    """An admissible set to be filled in. wide: see `Expectation`."""
    zeros = [torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(12)]
    names = ("accumulation", "scaling", "output_rounding", "evaluation")
    modelled = torch.zeros(shape[0], dtype=torch.bool, device=device)
    radii = dict(zip(names, zeros[5:9], strict=True))
    return Admissible(Interval(*zeros[:5]), radii, modelled, Expectation(zeros[9], zeros[10], zeros[11], wide))


def _place(whole: Admissible, part: Admissible, where: Tensor) -> None:
    for name in ("lo", "hi", "nominal", "centre", "radius"):
        getattr(whole.interval, name)[where] = getattr(part.interval, name)
    for name, radius in part.radii.items():
        whole.radii[name][where] = radius
    whole.modelled[where] = part.modelled
    if whole.expectation is not None and part.expectation is not None:
        for name in ("sum", "spread", "bias"):
            getattr(whole.expectation, name)[where] = getattr(part.expectation, name)
