"""Detection power: which mutants the ordinary operations, strategies and judges catch within a budget.

Every mutant goes through what a backend goes through (plan, poisoned buffers, repeated calls, inputs hashed again, the
judge, the verdict), in this process: the functions are our own, so that no worker has to guard against them, and
starting one for each would be most of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from conformance import shrink
from conformance.messages import CallReply
from conformance.mutant_backends import MutantBackend
from conformance.operations import OPERATIONS
from conformance.power_checks import seen_by
from conformance.shrink import LocalProbe
from conformance.worker_tensors import from_wire
from fuzz.case import Case
from fuzz.mutants import CONFORMANT
from fuzz.mutants.base import Mutant, Partial, Racing
from fuzz.plan import draw_plan
from reports.record import Record

BUDGET = 20.0
"""Seconds of one core for one mutant under one seed."""
CASES = 200
"""Cases for each operation x variant at most, as many as a backend gets at least in an ordinary run."""
SEEDS = (1, 2, 3)
SHRINK = 5.0
"""Seconds for making one catch smaller."""


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """One mutant under one seed.

    cases, seconds: until the first catch, or in all; seconds of processor time, which other work does not stretch.
    check: what caught it: the part, with the verdict unless it is ``wrong``; empty if nothing did. case, message: of
    the catch. others: other check -> whether it saw that answer. smallest: a smaller case that fails alike with its own
    inputs (`shrunk`), empty before; differing, elements: of its inputs made smaller too, those that differ from the
    simplest value, of all.
    """

    mutant: Mutant
    seed: int
    cases: int
    seconds: float
    check: str = ""
    case: str = ""
    message: str = ""
    smallest: str = ""
    differing: int = 0
    elements: int = 0
    others: Mapping[str, bool] = field(default_factory=dict)

    @property
    def caught(self) -> bool:
        """Whether anything did."""
        return bool(self.check)


def hunt(mutant: Mutant, seed: int, *, cases: int = CASES, budget: float = BUDGET) -> Hunt:
    """Search until something catches the mutant, the plan ends or the budget is spent (the plan costs nothing)."""
    probe = LocalProbe(MutantBackend(mutant))
    plan = [case for case in _plan(mutant.operation, mutant.variants, cases, seed) if probe.covers(case)]
    started = time.process_time()
    count = 0
    for case in plan:
        if time.process_time() - started >= budget:
            break
        count += 1
        found = probe.examine(case)
        failing = next((record for record in found.records if record.failing), None)
        if failing is None:
            continue
        seconds = time.process_time() - started
        return Hunt(
            mutant=mutant,
            seed=seed,
            cases=count,
            seconds=seconds,
            check=_check(failing),
            case=case.text,
            message=failing.message,
            others=_others(case, found.replies[0]),
        )
    return Hunt(mutant=mutant, seed=seed, cases=count, seconds=time.process_time() - started)


def shrunk(item: Hunt, seconds: float = SHRINK) -> Hunt:
    """A catch with a smaller case beside its own, by the shrinker that users have; as it is if it was no catch."""
    if not item.caught or not seconds:
        return item
    found = shrink.shrink(Case.parse(item.case), LocalProbe(MutantBackend(item.mutant)), seconds=seconds)
    if found is None:
        return item
    return replace(item, smallest=found.text_case.text, differing=found.differing, elements=found.elements)


def _check(failing: Record) -> str:
    return failing.part if failing.verdict == "wrong" else f"{failing.part} {failing.verdict}"


def clean(mutant: Mutant, seed: int, *, cases: int) -> Hunt:
    """`hunt` for a correct implementation without a budget: the first alarm ends it."""
    return hunt(mutant, seed, cases=cases, budget=math.inf)


def hunts(mutants: Iterable[Mutant], seeds: Sequence[int], *, cases: int = CASES, budget: float = BUDGET) -> list[Hunt]:
    """Every mutant under every seed."""
    return [hunt(mutant, seed, cases=cases, budget=budget) for mutant in mutants for seed in seeds]


@lru_cache(maxsize=64)
def _plan(operation: str, variants: tuple[str, ...], cases: int, seed: int) -> list[Case]:
    return draw_plan([(operation, variant) for variant in variants], cases, seed)


def _others(case: Case, first: CallReply) -> dict[str, bool]:
    """What the other checks say of the answer of the first call, beside a correct one."""
    if first.status != "ok":
        return {}
    inputs = OPERATIONS[case.operation].inputs(case)
    answer = next(item.answer for item in CONFORMANT if item.operation == case.operation)
    right = {}
    for name, part in answer(case, inputs).items():
        assert not isinstance(part, (Partial, Racing))
        right[name] = part
    actual = {wire.name: from_wire(wire) for wire in first.outputs}
    with torch.no_grad():
        return seen_by(case, inputs, actual, right)
