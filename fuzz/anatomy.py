"""What a case's inputs are made of: which size a dimension follows, what the simplest values are, how to cut it down.

A shrinker works on explicit inputs: the tensors of a case, some of their rows, blocks or elements gone or simplified.
`parts` says what there is, `drop` takes a range of a size out of a case and its tensors together, `laid_out` gives
tensors the strides that the case asks for, and `problem` says why tensors are not those of a case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Literal

import torch
from torch import Tensor

from fuzz.case import Case, CaseError
from fuzz.grammar import RANKS
from fuzz.inputs import TORCH_FLOATS, block_of, element_of, quantize_matrix, strided
from fuzz.moe_inputs import is_mapped
from fuzz.routing_inputs import logits_matrix
from references import layouts
from references.gemm_formats import Side, scale_order, sides
from references.moe.config import config_of

ONE = {torch.float32: 0x3F800000, torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
"""Bits of 1."""
E4M3_ONE, E2M1_ONE, UE8M0_ONE = 0x38, 2, 127
SCALE_ONE = {"ue8m0": UE8M0_ONE, "e4m3": E4M3_ONE, "fp32": ONE[torch.float32]}

Unit = Literal["element", "row", "whole"]


@dataclass(frozen=True)
class Axis:
    """A dimension that follows a size of the case: one entry for every ``per`` positions of ``key``.

    halves: how many such runs lie one after another (gate and up rows).
    """

    key: str
    per: int = 1
    halves: int = 1

    def length(self, case: Case) -> int:
        """Entries of the dimension."""
        return -(-case.integer(self.key) * self.halves // self.per)


@dataclass(frozen=True)
class Part:
    """One input of a case.

    dims: an axis, or a number where the dimension follows no size. fills: bits of the simplest values, the simplest
    first; empty for ``ids``, whose simplest rows are 0, 1, 2, ... unit: what may be simplified by itself. nibbles: two
    elements in a byte.
    """

    dtype: torch.dtype
    dims: tuple[Axis | int, ...]
    fills: tuple[int, ...]
    unit: Unit = "element"
    nibbles: bool = False

    def shape(self, case: Case) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(dim if isinstance(dim, int) else dim.length(case) for dim in self.dims)


Parts = dict[str, Part]


def parts(case: Case) -> Parts:
    """The inputs of a case, by name."""
    match case.operation:
        case "ue8m0":
            one = ONE[torch.float32]
            return {"x": Part(torch.float32, (Axis("n"),), (one, 0))}
        case "quantize":
            return _quantize(case)
        case "dequantize" | "requantize":
            return _stored(case)
        case "scale_layout":
            return _scale_layout(case)
        case "routing":
            return _routing(case)
        case "moe":
            return _moe(case)
    return _gemm(case)


def _number() -> Part:
    return Part(torch.float32, (1,), (ONE[torch.float32],))


def _quantize(case: Case) -> Parts:
    dtype = TORCH_FLOATS[case["dtype"]]
    found = {"x": Part(dtype, (Axis("m"), Axis("k")), (0, ONE[dtype]))}
    if case["scale"] == "static":
        found["scale"] = _number()
    if case.variant == "nvfp4":
        found["global_scale"] = _number()
    return found


def _codes(*dims: Axis | int, packed: bool) -> Part:
    """A payload; its last dimension holds two elements a byte if packed."""
    last = dims[-1]
    if packed:
        assert isinstance(last, Axis)
        dims = (*dims[:-1], Axis(last.key, 2))
    return Part(torch.uint8, dims, (0, E2M1_ONE if packed else E4M3_ONE), nibbles=packed)


def _grid(rows: Axis | int, cols: Axis | int, block: tuple[int, int] | None, kind: str, *lead: Axis | int) -> Part:
    """Plain scales of a matrix under a block scheme; one for the whole matrix without a block."""
    dtype = torch.float32 if kind == "fp32" else torch.uint8
    if block is None:
        return Part(dtype, (*lead, 1, 1), (SCALE_ONE[kind],))
    dims: list[Axis | int] = list(lead)
    for dim, size in zip((rows, cols), block, strict=True):
        assert isinstance(dim, Axis)
        dims.append(Axis(dim.key, size, dim.halves))
    return Part(dtype, tuple(dims), (SCALE_ONE[kind],))


def _stored(case: Case) -> Parts:
    rows = Axis("n" if case.operation == "requantize" else "m")
    packed = element_of(case) == "e2m1"
    if case.operation == "dequantize":
        kind = case["scale"]
        block = None if case["block"] == "tensor" else block_of(case)
    else:
        kind, block = ("ue8m0", (1, 32)) if packed else ("fp32", (128, 128))
    found = {"payload": _codes(rows, Axis("k"), packed=packed), "scales": _grid(rows, Axis("k"), block, kind)}
    if case.variant == "nvfp4":
        found["global_scale"] = _number()
    return found


def _scale_layout(case: Case) -> Parts:
    if case["direction"] == "pack":
        return {"scales": Part(layouts.plain_dtype(case.variant), (Axis("rows"), Axis("cols")), (0, 1))}
    shape = layouts.packed_shape(case.variant, case.integer("rows"), case.integer("cols"))
    return {"scales": Part(layouts.packed_dtype(case.variant), shape, (0, 1))}


def _routing(case: Case) -> Parts:
    dtype = TORCH_FLOATS[case["dtype"]]
    found = {"logits": Part(dtype, (Axis("tokens"), Axis("experts")), (0, ONE[dtype]))}
    if "bias" in dict(case.params):
        dtype = TORCH_FLOATS[case["bias_dtype"]]
        found["bias"] = Part(dtype, (Axis("experts"),), (0,))
    if case["out"] == "local":
        found["expert_map"] = _map(case.integer("experts") + case.integer("shared"))
    return found


def _operand(name: str, side: Side, rows: Axis, cols: Axis, *lead: Axis | int) -> Parts:
    """Payload, plain scales and global scale of a GEMM's operand."""
    if side.element is None:
        dtype = torch.float16 if side.plain == "f16" else torch.bfloat16
        return {name: Part(dtype, (*lead, rows, cols), (0, ONE[dtype]))}
    found = {
        name: _codes(*lead, rows, cols, packed=side.element.bits == 4),
        f"{name}_scales": _grid(rows, cols, side.block, str(side.scale), *lead),
    }
    if side.scale == "e4m3":
        found[f"{name}_global_scale"] = Part(torch.float32, (*lead, 1), (ONE[torch.float32],))
    return found


def _gemm(case: Case) -> Parts:
    first, second = sides(case.variant, case["scale"])
    groups: tuple[Axis, ...] = (Axis("groups"),) if case.operation == "grouped_gemm" else ()
    masked = groups if groups and case["grouping"] == "masked" else ()
    found: Parts = {}
    for name, side, key, lead in (("a", first, "m", masked), ("b", second, "n", groups)):
        found |= _operand(name, side, Axis(key), Axis("k"), *lead)
        order = scale_order(side, case["layout"], activation=name == "a")
        if order is not None:  # a stored order has no rows and columns that could be cut out
            block = side.block or (case.integer(key), case.integer("k"))
            grid = -(-case.integer(key) // block[0]), -(-case.integer("k") // block[1])
            shape = layouts.packed_shape(order, *grid)
            fill = SCALE_ONE[str(side.scale)]
            word = fill * 0x01010101 if order == "mn_major_packed" else fill
            found[f"{name}_scales"] = Part(layouts.packed_dtype(order), (*lead, *shape), (word,))
    if masked:
        found["masked_m"] = Part(torch.int32, groups, (0,))
    elif groups:
        found["m_indices"] = Part(torch.int32, (Axis("m"),), (0,), unit="whole")
    return found


def _map(experts: int) -> Part:
    """A map of experts, which no range can be cut out of; the simplest has none of them here."""
    return Part(torch.int32, (experts,), (0xFFFFFFFF,), unit="whole")


def _moe(case: Case) -> Parts:
    experts, tokens, hidden = Axis("experts"), Axis("tokens"), Axis("hidden")
    side = config_of(case).sides[1]
    found = {
        "x": Part(torch.bfloat16, (tokens, hidden), (0, ONE[torch.bfloat16])),
        "ids": Part(torch.int32, (tokens, Axis("topk")), (), unit="row"),
        "weights": Part(torch.float32, (tokens, Axis("topk")), (ONE[torch.float32], 0)),
    }
    if is_mapped(case):
        found["expert_map"] = _map(RANKS * case.integer("experts"))
    found |= _operand("w1", side, Axis("intermediate", halves=2), hidden, experts)
    found |= _operand("w2", side, hidden, Axis("intermediate"), experts)
    for name in ("w1", "w2"):
        if f"{name}_global_scale" in found:
            found[f"{name}_global_scale"] = Part(torch.float32, (experts,), (ONE[torch.float32],))
    for name in "xh":
        if case.variant == "fp8_per_tensor":
            found[f"{name}_scale"] = _number()
        elif case.variant == "nvfp4":
            found[f"{name}_global_scale"] = _number()
    return found


def elements(case: Case) -> int:
    """Elements of all inputs together, found without making any."""
    return sum(prod(part.shape(case)) * (2 if part.nibbles else 1) for part in parts(case).values())


def problem(case: Case, inputs: Mapping[str, Tensor]) -> str | None:
    """Why these are no inputs of the case, in a few words; None if they have its names, shapes and dtypes."""
    expected = parts(case)
    if set(inputs) != set(expected):
        return f"the inputs are {', '.join(sorted(inputs)) or 'none'}, the case has {', '.join(sorted(expected))}"
    for name, part in expected.items():
        tensor = inputs[name]
        if tensor.dtype != part.dtype or tuple(tensor.shape) != part.shape(case):
            wanted = f"{str(part.dtype).removeprefix('torch.')} {list(part.shape(case))}"
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, the case has {wanted}"
    return _structure_problem(case, inputs)


def _structure_problem(case: Case, inputs: Mapping[str, Tensor]) -> str | None:
    if "ids" in inputs:
        ids, experts = inputs["ids"], case.integer("experts") * (RANKS if is_mapped(case) else 1)
        for row in ids.tolist():
            used = [item for item in row if item != -1]
            if len(set(used)) < len(used) or not all(0 <= item < experts for item in used):
                return f"ids {row} are not distinct experts of {experts}, or -1"
    if "expert_map" in inputs:
        # A router's case does not say how many experts are here.
        here = case.integer("experts") + (case.integer("shared") if case.operation == "routing" else 0)
        used = [item for item in inputs["expert_map"].tolist() if item != -1]
        if len(set(used)) < len(used) or not all(0 <= item < here for item in used):
            return f"expert_map does not hold distinct numbers within 0..{here - 1}, or -1"
    if "masked_m" in inputs and not bool(((inputs["masked_m"] >= 0) & (inputs["masked_m"] <= case.integer("m"))).all()):
        return f"masked_m is not within 0..{case['m']}"
    if "m_indices" in inputs:
        rows = inputs["m_indices"]
        if not bool(((rows >= -1) & (rows < case.integer("groups"))).all()):
            return f"m_indices is not within -1..{case.integer('groups') - 1}"
        owners = rows[rows >= 0]
        if not bool((owners[1:] >= owners[:-1]).all()):
            return "m_indices is not ascending"
    return None


def laid_out(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, contiguous or not, with the strides that the case names and garbage beside them."""
    found = {name: tensor.contiguous() for name, tensor in inputs.items()}
    if "stride" not in dict(case.params):
        return found
    name, matrix = ("x", quantize_matrix(case)) if case.operation == "quantize" else ("logits", logits_matrix(case))
    values = found[name]
    place = strided((values.shape[0], values.shape[1]), case["stride"], matrix)
    place.copy_(values.view(place.dtype))
    found[name] = place.view(values.dtype)
    return found


def granule(case: Case, key: str) -> int:
    """Positions of a size that can only be dropped together."""
    pers = [dim.per for part in parts(case).values() for dim in part.dims if isinstance(dim, Axis) and dim.key == key]
    if key == "m" and case.operation == "grouped_gemm" and case["grouping"] == "contiguous_128":
        pers.append(128)
    return lcm(*pers, 1)


def droppable(case: Case) -> list[str]:
    """The sizes that `drop` can take a range out of, the most outer first."""
    keys = [dim.key for part in parts(case).values() for dim in part.dims if isinstance(dim, Axis)]
    return list(dict.fromkeys((*(["groups"] if _router_groups(case) > 1 else []), *keys)))


def _router_groups(case: Case) -> int:
    return case.integer("groups") if case.operation == "routing" and "groups" in dict(case.params) else 1


def drop(
    case: Case, inputs: Mapping[str, Tensor], key: str, start: int, stop: int
) -> tuple[Case, dict[str, Tensor]] | None:
    """The case and inputs without positions ``start..stop`` of a size; None where that is no case.

    Both ends lie on a `granule`, or ``stop`` is the size itself. A range of experts goes only where no id names one of
    them, a range of groups only where no row belongs to one.
    """
    if key == "groups" and case.operation == "routing":
        return _drop_router_groups(case, inputs, start, stop)
    if key == "experts" and _router_groups(case) > 1:
        return None
    size = case.integer(key)
    try:
        smaller = case.replace(**{key: size - (stop - start)})
    except CaseError:
        return None
    found = {}
    for name, part in parts(case).items():
        tensor = inputs[name]
        for place, dim in enumerate(part.dims):
            if isinstance(dim, Axis) and dim.key == key:
                kept = _kept(dim, size, start, stop)
                if kept is None:
                    return None
                tensor = tensor.index_select(place, kept)
        found[name] = tensor
    if not _renumber(found, inputs, key, start, stop):
        return None
    if problem(smaller, found) is not None:
        return None
    return smaller, found


def _kept(dim: Axis, size: int, start: int, stop: int) -> Tensor | None:
    """Entries of a dimension that stay; None where the cut does not fall between two of them."""
    if start % dim.per or (stop % dim.per and stop != size) or (dim.halves > 1 and (size % dim.per or stop % dim.per)):
        return None
    run = -(-size // dim.per)
    one = torch.cat([torch.arange(start // dim.per), torch.arange(-(-stop // dim.per), run)])
    return torch.cat([one + half * run for half in range(dim.halves)])


def _renumber(found: dict[str, Tensor], inputs: Mapping[str, Tensor], key: str, start: int, stop: int) -> bool:
    """Adjust what counts or names dropped positions, in place; whether that is possible."""
    if key == "m" and "masked_m" in inputs:
        counts = inputs["masked_m"]
        found["masked_m"] = counts - (counts.clamp(max=stop) - start).clamp(min=0)
    for name, owner in (("m_indices", "groups"), ("ids", "experts")):
        if key == owner and name in inputs:
            numbers = inputs[name]
            if bool(((numbers >= start) & (numbers < stop)).any()):
                return False
            found[name] = torch.where(numbers >= stop, numbers - (stop - start), numbers)
    return True


def _drop_router_groups(
    case: Case, inputs: Mapping[str, Tensor], start: int, stop: int
) -> tuple[Case, dict[str, Tensor]] | None:
    if case["out"] == "local":  # the map names every expert
        return None
    groups = case.integer("groups")
    size = case.integer("experts") // groups
    left = groups - (stop - start)
    try:
        smaller = case.replace(
            groups=left, experts=left * size, topk_group=min(case.integer("topk_group"), max(left, 1))
        )
    except CaseError:
        return None
    kept = torch.cat([torch.arange(start * size), torch.arange(stop * size, groups * size)])
    return smaller, {name: tensor.index_select(tensor.dim() - 1, kept) for name, tensor in inputs.items()}
