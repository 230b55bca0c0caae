"""What a correct block-scaled GEMM may answer: an interval for every output, or one value where a model is exact.

Contract: docs/gemm.md. The exact sum is computed in FP64 with its own error bounded; the declared accumulator and the
scale multiplications widen it (`references.accumulators`, `references.hopper`); the ends are then rounded to the output
dtype. Where the recipe names an exact model, a sample of rows admits the model's answer alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references import hopper
from references.accumulators import SLACK, Radius, Sums, radius, sums
from references.gemm_formats import Operand
from references.gemm_models import exact_rows, has_model, orders
from references.judging import Interval
from references.recipes import Recipe
from references.rounding import half_ulp, next_down, next_up, round_to
from references.tensor_level import Expectation, around_exact, around_model, blocks_of

SAMPLE = {"cpu": 2**22, "cuda": 2**30}
"""Products that the exact model evaluates for one answer, by device type."""


@dataclass(frozen=True)
class Admissible:
    """The admissible outputs ``[m, n]``.

    interval: FP64 ends; ``nominal`` is the model's answer in modelled rows, elsewhere the exact sum rounded once.
    radii: by stage, each ``[m, n]``: ``accumulation``, ``scaling``, ``output_rounding``, ``evaluation`` (FP64's own).
    modelled: bool ``[m]``, rows where the model's answer is the only one.
    expectation: for tests over the whole tensor, where the recipe has a model of its errors.
    parts: how many parts of K the model's answer adds up, where the recipe admits several.
    """

    interval: Interval
    radii: dict[str, Tensor]
    modelled: Tensor
    expectation: Expectation | None = None
    parts: int = 1


def admissible_gemm(
    a: Operand, b: Operand, recipe: Recipe, dtype: torch.dtype, actual: Tensor | None = None
) -> Admissible:
    """The outputs of ``a @ b.T`` in ``dtype`` that a recipe admits; memory is a few FP64 matrices of the output.

    actual: the answer ``[m, n]``, by which an exact model chooses among the orders that the recipe admits; the first of
    them if None.
    """
    facts = sums(a, b)
    low, high, parts = _bounds(facts, a, b, recipe)
    nominal = round_to(facts.exact, dtype)
    ends = _rounded(low, high, recipe, dtype)
    centre = facts.exact.clone()
    modelled, parts_of_k = torch.zeros(a.values.shape[0], dtype=torch.bool, device=nominal.device), 1
    if has_model(a, b, recipe):
        chosen = sample_rows(a.values.shape[0], b.values.shape[0] * facts.n, nominal.device)
        answer, parts_of_k = _nearest_order(
            a.rows(chosen), b, recipe, dtype, None if actual is None else actual[chosen]
        )
        modelled[chosen] = True
        nominal[chosen], centre[chosen], ends[0][chosen], ends[1][chosen] = answer, answer, answer, answer
    rounding = half_ulp(nominal, dtype)
    reach = rounding
    for end in (*ends, nominal):
        reach = torch.maximum(reach, (end - centre).abs().nan_to_num(nan=0.0, posinf=0.0))
    radii = {
        "accumulation": parts.accumulation,
        "scaling": parts.scaling,
        "output_rounding": rounding,
        "evaluation": facts.error,
    }
    expectation = _expectation(facts, a, b, recipe, parts)
    interval = Interval(ends[0], ends[1], nominal, centre, reach)
    return Admissible(interval, radii, modelled, expectation, parts_of_k)


def _nearest_order(
    a: Operand, b: Operand, recipe: Recipe, dtype: torch.dtype, actual: Tensor | None
) -> tuple[Tensor, int]:
    """The model's answer in the order that agrees with most of the actual one, and its parts of K."""
    blocks = a.width < a.codes.shape[1] or b.width < b.codes.shape[1]
    best: tuple[float, Tensor, int] | None = None
    for spans in orders(a.codes.shape[1], recipe, blocks=blocks):
        answer = round_to(exact_rows(a, b, recipe, spans), dtype)
        equal = 1.0 if actual is None else float((answer == actual.to(answer.dtype)).to(torch.float64).mean())
        if best is None or equal > best[0]:
            best = equal, answer, len(spans)
        if equal == 1.0:
            break
    assert best is not None
    return best[1], best[2]


def _expectation(facts: Sums, a: Operand, b: Operand, recipe: Recipe, parts: Radius) -> Expectation | None:
    """The model of errors, without the outputs that are certain; none where the recipe fixes every bit."""
    found = around_exact(facts, recipe)
    named = replace(recipe, scale_combination="fma_dot_sasb")
    if found is None and has_model(a, b, named) and not has_model(a, b, recipe):
        rows = sample_rows(a.values.shape[0], b.values.shape[0] * facts.n, facts.exact.device)
        spread, model = torch.zeros_like(facts.exact), torch.zeros_like(facts.exact)
        model[rows] = exact_rows(a.rows(rows), b, named)
        some = around_model(model, facts.size, blocks_of(a, b, recipe))
        spread[rows] = some.spread[rows]
        found = Expectation(model, spread, some.bias)
    if found is None:
        return None
    return replace(found, spread=torch.where(parts.total > 0, found.spread, 0.0))


def _bounds(facts: Sums, a: Operand, b: Operand, recipe: Recipe) -> tuple[Tensor, Tensor, Radius]:
    """Real numbers between which the accumulator ends, before it is rounded to the output dtype."""
    if recipe.accumulator == "hopper_fp8":
        shift = hopper.deviation(facts, a, b, recipe)
        low, high = facts.exact + shift.low - facts.error, facts.exact + shift.high + facts.error
        parts = Radius(torch.maximum(-shift.low, shift.high) - shift.scaling, shift.scaling)
    else:
        parts = radius(facts, a, b, recipe)
        width = (parts.total + facts.error) * SLACK
        low, high = facts.exact - width, facts.exact + width
    still = (parts.total == 0) & (facts.error == 0)
    infinity = torch.full((), torch.inf, dtype=low.dtype, device=low.device)
    low = torch.where(still, low, torch.nextafter(low, -infinity))
    high = torch.where(still, high, torch.nextafter(high, infinity))
    return low, high, parts


def _rounded(low: Tensor, high: Tensor, recipe: Recipe, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ends of the admissible numbers of ``dtype``."""
    ends = round_to(low, dtype), round_to(high, dtype)
    if recipe.out_rounding == "nearest":
        return ends
    return (
        torch.where(ends[0] > low, next_down(ends[0], dtype), ends[0]),
        torch.where(ends[1] < high, next_up(ends[1], dtype), ends[1]),
    )


def sample_rows(rows: int, products: int, device: torch.device) -> Tensor:
    """Evenly spread row numbers, the first and the last among them, whose products fit `SAMPLE`; one row at least."""
    count = max(1, min(rows, SAMPLE.get(device.type, SAMPLE["cpu"]) // max(1, products)))
    return torch.div(torch.arange(count, device=device) * (rows - 1), max(1, count - 1), rounding_mode="floor")


def fp32_reference(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """The best of the same precision: operands dequantised to FP32, one FP32 matmul, rounded to ``dtype``; FP64."""
    product = a.values.to(torch.float32) @ b.values.to(torch.float32).T
    return round_to(product.to(torch.float64), dtype)
