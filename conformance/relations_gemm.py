"""Properties of matrix products: rows, groups and blocks of K in another order, doubling, and what is not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm

import torch
from torch import Tensor

from conformance.operations import grouped_gemm
from conformance.relations import Expected, Inputs, Parts, Relation, Twin, everywhere, order
from fuzz.case import Case
from references.gemm_formats import Side, sides

ROUGH = ("wide", "subnormal", "end_scales")
"""Profiles whose numbers reach FP32's ends, where doubling is not exact."""


OTHER = 0x55
"""What the bytes of rows that belong to no group are changed by."""


def _sides(case: Case) -> tuple[Side, Side]:
    return sides(case.variant, case["scale"])


def _pick(inputs: Inputs, rows: Tensor, side: Side) -> dict[str, Tensor]:
    """A's rows; plain scales."""
    found = {"a": inputs["a"][rows]}
    if side.block is not None:
        found["a_scales"] = inputs["a_scales"][rows]
    return found


def rows(case: Case, inputs: Inputs) -> Twin | None:
    """Rows of A in another order."""
    side = _sides(case)[0]
    if case["layout"] != "plain" or case.integer("m") < 2:
        return None
    moved = order(case, case.integer("m"))
    return Twin(
        case,
        {**inputs, **_pick(inputs, moved, side)},
        lambda parts: {"output": everywhere(parts["output"][moved])},
    )


def subset(case: Case, inputs: Inputs) -> Twin | None:
    """The first half of A's rows."""
    some = case.integer("m") // 2
    if case["layout"] != "plain" or not some:
        return None
    return Twin(
        case.replace(m=some),
        {**inputs, **_pick(inputs, torch.arange(some), _sides(case)[0])},
        lambda parts: {"output": everywhere(parts["output"][:some])},
    )


def _per_byte(side: Side) -> int:
    return 2 if side.element is not None and side.element.bits == 4 else 1


def _width(case: Case) -> int:
    """Columns of K that can be moved together."""
    return lcm(*(side.block[1] if side.block is not None else 2 for side in _sides(case)))


def k_blocks(case: Case, inputs: Inputs) -> Twin | None:
    """Blocks of K in another order, of both operands: the same sum in another order."""
    k, width = case.integer("k"), _width(case)
    if case["layout"] != "plain" or k % width or k // width < 2:
        return None
    blocks, found = order(case, k // width), dict(inputs)
    for name, side in zip("ab", _sides(case), strict=True):
        found[name] = _moved(inputs[name], blocks, width // _per_byte(side))
        if side.block is not None:
            found[f"{name}_scales"] = _moved(inputs[f"{name}_scales"], blocks, width // side.block[1])
    return Twin(case, found, lambda parts: {"output": everywhere(parts["output"])})


def _moved(values: Tensor, blocks: Tensor, width: int) -> Tensor:
    return values[..., (blocks[:, None] * width + torch.arange(width)).reshape(-1)]


def padded(case: Case, inputs: Inputs) -> Twin | None:
    """A block of zeros more at the end of K."""
    k, width = case.integer("k"), _width(case)
    if case["layout"] != "plain" or k % width:
        return None
    found = dict(inputs)
    for name, side in zip("ab", _sides(case), strict=True):
        found[name] = torch.nn.functional.pad(inputs[name], (0, width // _per_byte(side)))
        if side.block is not None:
            scales = inputs[f"{name}_scales"]
            found[f"{name}_scales"] = torch.cat([scales, scales[..., : width // side.block[1]]], dim=-1)
    return Twin(case.replace(k=k + width), found, lambda parts: {"output": everywhere(parts["output"])})


def doubled(case: Case, inputs: Inputs) -> Twin | None:
    """Every scale of B twice as large, or every number of an operand without scales: twice the output.

    With a fixed order of operations every intermediate result doubles, exactly, as long as none leaves FP32's normal
    range, which the profiles outside of `ROUGH` stay far away from.
    """
    if case["values"] in ROUGH:
        return None
    side = _sides(case)[1]
    name = "b" if side.scale is None else "b_global_scale" if side.scale == "e4m3" else "b_scales"
    given = inputs[name]
    if given.dtype == torch.uint8:
        # In any stored order; codes in the padding are garbage before and after.
        larger = torch.where(given < 254, given + 1, given)
    else:
        larger = given * 2
        if side.scale is None and not bool(larger.isfinite().all()):
            return None
    return Twin(case, {**inputs, name: larger}, _times(2.0))


def _times(factor: float) -> Callable[[Parts], Mapping[str, Expected]]:
    def expected(parts: Parts) -> Mapping[str, Expected]:
        values = parts["output"] * factor
        return {"output": Expected(values, values.isfinite())}

    return expected


def negated(case: Case, inputs: Inputs) -> Twin | None:
    """Every number of A with the other sign: the other sign of every output, since no rounding prefers one."""
    a = inputs["a"]
    flipped = a ^ (0x88 if _per_byte(_sides(case)[0]) == 2 else 0x80) if a.dtype == torch.uint8 else -a
    return Twin(case, {**inputs, "a": flipped}, _times(-1.0))


def _live(case: Case, inputs: Inputs) -> Tensor:
    return grouped_gemm.row_groups(case, inputs)


def rows_within(case: Case, inputs: Inputs) -> Twin | None:
    """Rows of A in another order within their groups."""
    owner = _live(case, inputs)
    if case["layout"] != "plain":
        return None
    key = torch.where(owner < 0, len(owner) + torch.arange(len(owner)), owner)
    # Rows that belong to nobody stay; each other place gets a row of its own group.
    shuffled = order(case, len(owner))
    moved = torch.arange(len(owner))
    for group in torch.unique(owner[owner >= 0]).tolist():
        places = (key == group).nonzero().view(-1)
        moved[places] = shuffled[torch.isin(shuffled, places)]
    side, shape = _sides(case)[0], inputs["a"].shape
    found = {"a": inputs["a"].reshape(-1, shape[-1])[moved].view(shape)}
    if side.block is not None:
        grid = inputs["a_scales"]
        found["a_scales"] = grid.reshape(-1, grid.shape[-1])[moved].view(grid.shape)
    live = owner >= 0

    def expected(parts: Parts) -> Mapping[str, Expected]:
        output = parts["output"]
        flat = output.reshape(len(owner), -1)[moved.to(output.device)]
        where = live.to(output.device)[:, None].expand(flat.shape)
        return {"output": Expected(flat.view(output.shape), where.reshape(output.shape))}

    return Twin(case, {**inputs, **found}, expected)


def unused(case: Case, inputs: Inputs) -> Twin | None:
    """Other bytes in rows that belong to no group, and other matrices for groups without rows."""
    owner = _live(case, inputs)
    shape = inputs["a"].shape
    a = inputs["a"].reshape(-1, shape[-1]).clone()
    dead = owner < 0
    a[dead] = (a[dead].view(torch.uint8) ^ OTHER).view(a.dtype)
    b = inputs["b"].clone()
    idle = [group for group in range(case.integer("groups")) if not bool((owner == group).any())]
    if not idle and not bool(dead.any()):
        return None
    b[idle] = b[idle].flip(-1)
    found = {**inputs, "a": a.view(shape), "b": b}

    def expected(parts: Parts) -> Mapping[str, Expected]:
        output = parts["output"]
        where = (~dead).to(output.device).view(*output.shape[:-1], 1).expand(output.shape)
        return {"output": Expected(output, where)}

    return Twin(case, found, expected)


def groups(case: Case, inputs: Inputs) -> Twin | None:
    """Groups in another order, each with its slab of rows."""
    if case["grouping"] != "masked" or case.integer("groups") < 2:
        return None
    moved = order(case, case.integer("groups"))
    found = {name: tensor[moved] for name, tensor in inputs.items()}
    used = grouped_gemm.row_groups(case, found) >= 0

    def expected(parts: Parts) -> Mapping[str, Expected]:
        output = parts["output"][moved.to(parts["output"].device)]
        where = used.to(output.device).view(*output.shape[:-1], 1).expand(output.shape)
        return {"output": Expected(output, where)}

    return Twin(case, found, expected)


def doubled_live(case: Case, inputs: Inputs) -> Twin | None:
    """`doubled`, compared in the rows that belong to a group."""
    return _live_only(doubled(case, inputs), _live(case, inputs) >= 0)


def negated_live(case: Case, inputs: Inputs) -> Twin | None:
    """`negated`, compared likewise."""
    return _live_only(negated(case, inputs), _live(case, inputs) >= 0)


def _live_only(twin: Twin | None, live: Tensor) -> Twin | None:
    if twin is None:
        return None
    whole = twin.expected

    def expected(parts: Parts) -> Mapping[str, Expected]:
        item = whole(parts)["output"]
        rows = live.to(item.where.device).view(*item.where.shape[:-1], 1)
        return {"output": Expected(item.values, item.where & rows)}

    return Twin(twin.case, twin.inputs, expected)


DENSE = (
    Relation("rows", "rows of A in another order", "permutation_invariant", rows),
    Relation("subset", "the first half of A's rows alone", "batch_invariant", subset),
    Relation("k_blocks", "blocks of K in another order", "", k_blocks),
    Relation("padded", "a block of zeros more at the end of K", "", padded),
    Relation("doubled", "B twice as large", "run_to_run", doubled),
    Relation("negated", "A negated", "run_to_run", negated),
)
"""The properties of ``gemm``."""
GROUPED = (
    Relation("rows", "rows in another order within their groups", "permutation_invariant", rows_within),
    Relation("groups", "groups in another order", "permutation_invariant", groups),
    Relation("unused", "rows of no group and matrices of empty groups changed", "run_to_run", unused),
    Relation("doubled", "B twice as large", "run_to_run", doubled_live),
    Relation("negated", "A negated", "run_to_run", negated_live),
)
"""The properties of ``grouped_gemm``."""
