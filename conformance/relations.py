"""Metamorphic properties: a second question whose answer follows from that to the first.

One case in `EVERY` (seeds 7, 39, 71, ...) is followed by its twin: the same case with its rows in another order, half
of them, its experts relabelled, its scales doubled, what it does not depend on changed, and so on. The twin's answer
has to be admissible by itself, which holds for any correct implementation. It has to be what follows from the first
answer bit for bit only where arithmetic says so whatever the order of sums (``run_to_run``: doubling and negation, and
inputs that are not used), or where the recipe declares that rows do not know where they lie
(``permutation_invariant``) or how many they are (``batch_invariant``); elsewhere the share of equal elements is
reported. docs/properties.md lists all of them.

Everything follows from the case and its inputs, so that the worker that calls and the oracle that judges make the same
twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from conformance.messages import Wire
from conformance.operations import OPERATIONS
from conformance.operations.base import PartVerdict
from conformance.operations.checks import canonical, check_outputs
from fuzz.anatomy import laid_out, problem
from fuzz.case import Case, CaseError
from fuzz.philox import key_of, words
from references.recipes import Recipe

EVERY = 32
"""Of this many seeds one has its case followed by a twin."""
FIRST = 7
TWIN = "twin:"
"""What the names of a twin's outputs start with on the wire."""

Inputs = Mapping[str, Tensor]
Parts = Mapping[str, Tensor]
Demand = Literal["run_to_run", "permutation_invariant", "batch_invariant", ""]


@dataclass(frozen=True)
class Expected:
    """What a twin's part is where it follows bit for bit. where: bool of the same shape, the elements compared."""

    values: Tensor
    where: Tensor


@dataclass(frozen=True)
class Twin:
    """A second question. expected: from the first answer's parts, which the judge has found admissible."""

    case: Case
    inputs: Inputs
    expected: Callable[[Parts], Mapping[str, Expected]]


@dataclass(frozen=True)
class Relation:
    """A property. text: what is done to the first question. demand: the declaration that asks for equal bits.

    twin: None where the case or its inputs have no such twin.
    """

    name: str
    text: str
    demand: Demand
    twin: Callable[[Case, Inputs], Twin | None]


def relations(operation: str) -> Sequence[Relation]:
    """The properties of an operation; none where every answer is one value already."""
    from conformance import relations_gemm, relations_moe, relations_quantize, relations_routing

    return {
        "quantize": relations_quantize.RELATIONS,
        "gemm": relations_gemm.DENSE,
        "grouped_gemm": relations_gemm.GROUPED,
        "routing": relations_routing.RELATIONS,
        "moe": relations_moe.RELATIONS,
    }.get(operation, ())


def is_followed(case: Case) -> bool:
    """Whether a case is one of those that a twin follows."""
    return case.seed % EVERY == FIRST


def twin_of(case: Case, inputs: Inputs) -> tuple[Relation, Twin] | None:
    """The property and the twin of a case on some inputs on the CPU, with the strides that the twin's text names.

    The properties take turns from seed to seed, variants out of step; one that the case has no twin for gives its turn
    to the next. None for a case that is not followed, or has no twin at all.
    """
    known = relations(case.operation) if is_followed(case) else ()
    for turn in range(len(known)):
        relation = known[(case.seed // EVERY + crc32(case.variant.encode()) + turn) % len(known)]
        try:
            found = relation.twin(case, inputs)
        except CaseError:  # such as half of the rows where a grammar asks for more
            continue
        if found is not None and problem(found.case, found.inputs) is None:
            return relation, replace(found, inputs=laid_out(found.case, found.inputs))
    return None


def order(case: Case, count: int, salt: str = "order") -> Tensor:
    """A permutation of ``count`` that follows from the case, int64; not the one that moves nothing."""
    found = np.argsort(words(key_of(case.text, salt), 0, count), kind="stable")
    return torch.from_numpy(np.roll(found, 1) if bool((found == np.arange(count)).all()) else found)


def everywhere(values: Tensor) -> Expected:
    """All elements of a part."""
    return Expected(values, torch.ones(values.shape, dtype=torch.bool, device=values.device))


def split(wires: Sequence[Wire]) -> tuple[list[Wire], list[Wire]]:
    """An answer's own parts, and its twin's under their plain names."""
    own = [wire for wire in wires if not wire.name.startswith(TWIN)]
    twin = [replace_name(wire, wire.name.removeprefix(TWIN)) for wire in wires if wire.name.startswith(TWIN)]
    return own, twin


def replace_name(wire: Wire, name: str) -> Wire:
    """The same tensor under another name."""
    return replace(wire, name=name)


def judge(case: Case, inputs: Inputs, parts: Parts, answer: Parts, recipe: Recipe) -> list[PartVerdict]:
    """``property:NAME``: the twin's answer, given the first answer's parts, which are admissible.

    inputs, parts, answer: on one device. Empty where the case has no twin.
    """
    known = twin_of(case, {name: tensor.cpu() for name, tensor in inputs.items()})
    if known is None:
        return []
    relation, twin = known
    part, operation = f"property:{relation.name}", OPERATIONS[case.operation]
    specs = operation.outputs(twin.case)
    problems = check_outputs(specs, answer)
    if problems:
        first = problems[0]
        return [_wrong(part, f"{relation.text}: {first.part}: {first.message}")]
    device = next(iter(parts.values())).device
    answer = {name: canonical(spec, answer[name]).to(device) for name, spec in specs.items()}
    moved = {name: tensor.to(device) for name, tensor in twin.inputs.items()}
    found = operation.judge(twin.case, moved, answer, recipe)
    headroom = max((verdict.headroom for verdict in found if verdict.headroom is not None), default=None)
    for verdict in found:
        if verdict.verdict != "pass":
            message = f"{relation.text}: {verdict.part}: {verdict.message}"
            return [replace(_wrong(part, message), headroom=headroom, worst_index=verdict.worst_index)]
    return [_compared(part, relation, twin.expected(parts), answer, recipe, headroom)]


def _wrong(part: str, message: str) -> PartVerdict:
    return PartVerdict(part=part, verdict="wrong", message=message)


def _compared(
    part: str,
    relation: Relation,
    expected: Mapping[str, Expected],
    answer: Parts,
    recipe: Recipe,
    headroom: float | None,
) -> PartVerdict:
    """Equality as numbers: either zero stands for a zero, and NaN for NaN."""
    unequal = {}
    same = count = 0
    for name, item in expected.items():
        values, mine = item.values.to(answer[name].device), answer[name]
        equal = (values == mine) | ((values != values) & (mine != mine))
        unequal[name] = ~equal & item.where.to(equal.device)
        same += int((equal & item.where.to(equal.device)).sum())
        count += int(item.where.sum())
    share = same / count if count else None
    verdict = PartVerdict(part=part, verdict="pass", headroom=headroom, bit_equal=share)
    if same == count or not relation.demand or not getattr(recipe, relation.demand):
        return verdict
    name, where = next((name, where) for name, where in unequal.items() if bool(where.any()))
    index = where.nonzero()[0].tolist()
    shown = [f"{float(tensor[tuple(index)]):.9g}" for tensor in (answer[name], expected[name].values)]
    message = (
        f"{relation.text}: {count - same} of {count} elements are not what follows from the first answer "
        f"({relation.demand}); first {name}{index}: {shown[0]}, expected {shown[1]}"
    )
    return replace(verdict, verdict="wrong", message=message, worst_index=index)
