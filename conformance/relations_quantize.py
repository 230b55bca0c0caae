"""Properties of quantisation: rows and blocks do not know of each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.relations import Expected, Inputs, Parts, Relation, Twin, everywhere, order
from fuzz.case import Case
from fuzz.inputs import block_of


def rows(case: Case, inputs: Inputs) -> Twin | None:
    """Blocks of rows in another order; rows of one block where there is one for the whole matrix."""
    m, whole = case.integer("m"), case["block"] == "tensor"
    height = 1 if whole else block_of(case)[0]
    if m % height or m // height < 2:
        return None
    blocks = order(case, m // height)
    every = (blocks[:, None] * height + torch.arange(height)).reshape(-1)

    def expected(parts: Parts) -> Mapping[str, Expected]:
        found = {"payload": everywhere(parts["payload"][every])}
        if "scales" in parts:
            found["scales"] = everywhere(parts["scales"] if whole else parts["scales"][blocks])
        return found

    return Twin(case, {**inputs, "x": inputs["x"][every]}, expected)


def subset(case: Case, inputs: Inputs) -> Twin | None:
    """The first half of the rows, whole blocks of them."""
    if case["block"] == "tensor" and case["scale"] != "static":
        return None
    height = 1 if case["block"] == "tensor" else block_of(case)[0]
    some = case.integer("m") // 2 // height * height
    if not some:
        return None

    def expected(parts: Parts) -> Mapping[str, Expected]:
        found = {"payload": everywhere(parts["payload"][:some])}
        if "scales" in parts:
            found["scales"] = everywhere(parts["scales"][: some // height])
        return found

    return Twin(case.replace(m=some), {**inputs, "x": inputs["x"][:some]}, expected)


def columns(case: Case, inputs: Inputs) -> Twin | None:
    """Blocks of columns in another order."""
    k, whole = case.integer("k"), case["block"] == "tensor"
    width = 1 if whole else block_of(case)[1]
    if k % width or k // width < 2:
        return None
    blocks = order(case, k // width)

    def moved(values: Tensor, width: int) -> Tensor:
        return values[:, (blocks[:, None] * width + torch.arange(width)).reshape(-1)]

    def expected(parts: Parts) -> Mapping[str, Expected]:
        per_byte = k // parts["payload"].shape[1]
        found = {"payload": everywhere(moved(parts["payload"], width // per_byte))}
        if "scales" in parts:
            found["scales"] = everywhere(parts["scales"] if whole else moved(parts["scales"], 1))
        return found

    return Twin(case, {**inputs, "x": moved(inputs["x"], width)}, expected)


def negated(case: Case, inputs: Inputs) -> Twin | None:
    """Every number with the other sign: the same scales, payloads with the other sign."""
    four = case.variant in ("mxfp4", "nvfp4")

    def expected(parts: Parts) -> Mapping[str, Expected]:
        payload = parts["payload"]
        nibbles = torch.stack((payload & 15, payload >> 4), dim=-1) if four else payload[..., None]
        sign_bit = 8 if four else 0x80
        size = nibbles & (sign_bit - 1)
        some = ((size != 0) & ((size != 0x7F) | four)).all(-1)  # neither zeros nor NaN, whose sign is free
        found = {"payload": Expected(payload ^ (0x88 if four else 0x80), some)}
        if "scales" in parts:
            found["scales"] = everywhere(parts["scales"])
        return found

    return Twin(case, {**inputs, "x": -inputs["x"]}, expected)


RELATIONS = (
    Relation("rows", "rows in another order", "permutation_invariant", rows),
    Relation("subset", "the first half of the rows alone", "batch_invariant", subset),
    Relation("columns", "blocks of columns in another order", "permutation_invariant", columns),
    Relation("negated", "every number negated", "run_to_run", negated),
)
"""The properties of ``quantize``."""
