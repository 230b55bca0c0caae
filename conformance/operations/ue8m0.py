"""UE8M0 encoding: a scale or an amax to a power of two under a named policy. Contract: docs/operations.md."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import CLASSES, classify, codes_verdict, show_float, show_ue8m0
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references import ue8m0
from references.admissible import Codes, admissible_scales, judge_codes
from references.elements import ELEMENTS
from references.recipes import Recipe
from references.schemes import Scheme

NAME = "ue8m0"


def open_choices(variant: str) -> frozenset[str]:
    """How amax is brought to a scale, where the policy divides."""
    return frozenset({"scale_arithmetic", "scale_error"}) if variant in ("ceil", "ceil_clamped") else frozenset()


def inputs(case: Case) -> dict[str, Tensor]:
    """``x``: float32 `[n]`."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``scales``: codes `[n]`."""
    return {"scales": OutputSpec((case.integer("n"),), torch.uint8, (torch.float8_e8m0fnu,))}


def admissible(case: Case, x: Tensor, recipe: Recipe) -> Codes:
    """The codes that the policy admits for each number."""
    if case["from"] == "scale":
        codes = ue8m0.encode(x, case.variant).to(torch.int16)
        return Codes(codes, codes, codes, nan=ue8m0.NAN)
    element = ELEMENTS[case["from"].removeprefix("amax_")]
    one_by_one = Scheme("ue8m0", element, (1, 1), "ue8m0", case.variant)
    found = admissible_scales(x.view(-1, 1), one_by_one, recipe)
    assert isinstance(found, Codes)
    return Codes(found.lo.view(-1), found.hi.view(-1), found.nominal.view(-1), nan=ue8m0.NAN)


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Membership of every code."""
    x, actual = inputs["x"], outputs["scales"].to(torch.int16)
    codes = admissible(case, x, recipe.only(open_choices(case.variant)))
    kinds = classify(x)
    kinds[(x < 0) & (kinds != CLASSES.index("nan"))] = len(CLASSES)
    return [
        codes_verdict(
            "scales",
            actual,
            codes,
            judge_codes(actual, codes),
            kinds=kinds,
            classes=(*CLASSES, "negative"),
            show_actual=lambda index: show_ue8m0(int(actual[index])),
            show=show_ue8m0,
            source=lambda index: show_float(float(x[index])),
        )
    ]
