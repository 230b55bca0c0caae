"""Scale layouts: a plain matrix of scales to its stored order and back, bit for bit. Contract: docs/operations.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict
from conformance.operations.judging import part_verdict
from fuzz import inputs as fuzz_inputs
from fuzz.case import Case
from references import layouts
from references.recipes import Recipe

NAME = "scale_layout"


def open_choices(variant: str) -> frozenset[str]:
    """``padding``: what a packed layout's padding holds."""
    return frozenset({"padding"}) if variant != "k_major" else frozenset()


def inputs(case: Case) -> dict[str, Tensor]:
    """``scales``: plain `[rows, cols]` to pack, or packed to unpack."""
    return fuzz_inputs.build(case)


def outputs(case: Case) -> dict[str, OutputSpec]:
    """``scales``: the other form."""
    rows, cols = case.integer("rows"), case.integer("cols")
    if case["direction"] == "pack":
        shape = layouts.packed_shape(case.variant, rows, cols)
        return {"scales": OutputSpec(shape, layouts.packed_dtype(case.variant))}
    dtype = layouts.plain_dtype(case.variant)
    also = (torch.float8_e8m0fnu, torch.float8_e4m3fn) if dtype == torch.uint8 else ()
    return {"scales": OutputSpec((rows, cols), dtype, also)}


def judge(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], recipe: Recipe) -> list[PartVerdict]:
    """Every slot holds the bits that belong there; padding holds zero, or anything where the recipe says so."""
    recipe = recipe.only(open_choices(case.variant))
    rows, cols = case.integer("rows"), case.integer("cols")
    if case["direction"] == "pack":
        expected = layouts.slots(layouts.pack(inputs["scales"], case.variant), case.variant)
        actual = layouts.slots(outputs["scales"], case.variant)
        padding = layouts.padding_mask(case.variant, rows, cols, actual.device)
    else:
        expected = _integers(layouts.unpack(inputs["scales"], case.variant, rows, cols))
        actual = _integers(outputs["scales"])
        padding = torch.zeros(rows, cols, dtype=torch.bool, device=actual.device)
    equal = actual == expected
    inside = equal | padding if recipe.padding == "any" else equal
    digits = 2 * expected.element_size()
    mask = 16**digits - 1

    def example(index: tuple[int, ...]) -> dict[str, Any]:
        where = "padding" if bool(padding[index]) else "scale"
        return {
            "actual": f"0x{int(actual[index]) & mask:0{digits}x}",
            "admissible": f"0x{int(expected[index]) & mask:0{digits}x}",
            "input": f"a {where} slot",
        }

    return [
        part_verdict(
            "scales",
            inside=inside,
            headroom=torch.where(inside, 0.0, torch.inf),
            equal=equal,
            kinds=padding.to(torch.uint8),
            classes=("scale", "padding"),
            example=example,
        )
    ]


def _integers(plain: Tensor) -> Tensor:
    """The bits of a plain matrix: floats as int32, bytes as they are."""
    return (
        plain.contiguous().view(torch.int32) if plain.dtype == torch.float32 else plain.contiguous().view(torch.uint8)
    )
