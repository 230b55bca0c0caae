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

from conformance.messages import CallReply, JudgeReply
from conformance.mutant_backends import MutantBackend
from conformance.operations import OPERATIONS
from conformance.power_checks import seen_by
from conformance.power_smaller import smaller
from conformance.verdicts import Subject, beyond_claims, call_sequence, decide, to_judge
from conformance.worker_backend import Callee
from conformance.worker_oracle import Oracle
from conformance.worker_tensors import from_wire
from fuzz.case import Case
from fuzz.mutants import CONFORMANT
from fuzz.mutants.base import Mutant, Partial, Racing
from fuzz.plan import draw_plan
from references.backend import Claim
from reports.record import Record

BUDGET = 20.0
"""Seconds of one core for one mutant under one seed."""
CASES = 200
"""Cases for each operation x variant at most, as many as a backend gets at least in an ordinary run."""
SEEDS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """One mutant under one seed.

    cases, seconds: until the first catch, or in all; seconds of processor time, which other work does not stretch.
    check: what caught it: the part, with the verdict unless it is ``wrong``; empty if nothing did. case, message: of
    the catch. smallest: a smaller case that is caught in the same way (`shrunk`), empty before. others: other check ->
    whether it saw that answer.
    """

    mutant: Mutant
    seed: int
    cases: int
    seconds: float
    check: str = ""
    case: str = ""
    message: str = ""
    smallest: str = ""
    others: Mapping[str, bool] = field(default_factory=dict)

    @property
    def caught(self) -> bool:
        """Whether anything did."""
        return bool(self.check)


def hunt(mutant: Mutant, seed: int, *, cases: int = CASES, budget: float = BUDGET) -> Hunt:
    """Search until something catches the mutant, the plan ends or the budget is spent (the plan costs nothing)."""
    backend, claims, callee, oracle = _seated(mutant)
    plan = [case for case in _plan(mutant.operation, mutant.variants, cases, seed) if _called(claims, case)]
    started = time.process_time()
    count = 0
    for case in plan:
        if time.process_time() - started >= budget:
            break
        count += 1
        records, first = judged(case, backend, claims[case.variant], callee, oracle)
        failing = next((record for record in records if record.failing), None)
        if failing is None:
            continue
        seconds = time.process_time() - started
        check = _check(failing)
        return Hunt(
            mutant=mutant,
            seed=seed,
            cases=count,
            seconds=seconds,
            check=check,
            case=case.text,
            message=failing.message,
            others=_others(case, first),
        )
    return Hunt(mutant=mutant, seed=seed, cases=count, seconds=time.process_time() - started)


def shrunk(item: Hunt) -> Hunt:
    """A catch with a smaller case beside its own."""
    if not item.caught:
        return item
    backend, claims, callee, oracle = _seated(item.mutant)

    def fails(case: Case) -> bool:
        if not _called(claims, case):
            return False
        records, _ = judged(case, backend, claims[case.variant], callee, oracle)
        failing = next((record for record in records if record.failing), None)
        return failing is not None and _check(failing) == item.check

    return replace(item, smallest=smaller(Case.parse(item.case), fails).text)


def _seated(mutant: Mutant) -> tuple[MutantBackend, dict[str, Claim], Callee, Oracle]:
    backend = MutantBackend(mutant)
    claims = {claim.variant: claim for claim in backend.claims("cpu")}
    return backend, claims, Callee("fuzz.mutants", {backend.name: backend}, "cpu"), Oracle("cpu")


def _check(failing: Record) -> str:
    return failing.part if failing.verdict == "wrong" else f"{failing.part} {failing.verdict}"


def clean(mutant: Mutant, seed: int, *, cases: int) -> Hunt:
    """`hunt` for a correct implementation without a budget: the first alarm ends it."""
    return hunt(mutant, seed, cases=cases, budget=math.inf)


def judged(
    case: Case, backend: MutantBackend, claim: Claim, callee: Callee, oracle: Oracle
) -> tuple[list[Record], CallReply]:
    """The records of one case, and its first call."""
    recipe = backend.recipe(claim)

    def call(poison: str) -> CallReply:
        reply, outputs = callee.call(case.text, backend.name, {"poison": poison})
        return CallReply(**{**reply, "outputs": outputs})

    replies = call_sequence(call)
    answers = [JudgeReply(**oracle.judge(case.text, recipe.to_json(), wires)) for wires in to_judge(replies)]
    subject = Subject(
        run="power",
        case=case.text,
        id=case.id,
        backend=backend.name,
        version=backend.version(),
        interpreter="",
        device="cpu",
        sm="",
        options="",
    )
    records = decide(subject, replies, answers, run_to_run=recipe.run_to_run)
    reason = claim.refusal(case)
    return records if reason is None else beyond_claims(records, reason), replies[0]


def hunts(mutants: Iterable[Mutant], seeds: Sequence[int], *, cases: int = CASES, budget: float = BUDGET) -> list[Hunt]:
    """Every mutant under every seed."""
    return [hunt(mutant, seed, cases=cases, budget=budget) for mutant in mutants for seed in seeds]


@lru_cache(maxsize=64)
def _plan(operation: str, variants: tuple[str, ...], cases: int, seed: int) -> list[Case]:
    return draw_plan([(operation, variant) for variant in variants], cases, seed)


def _called(claims: Mapping[str, Claim], case: Case) -> bool:
    """Whether a run calls it: where it is claimed, and where the backend promises to refuse it."""
    claim = claims[case.variant]
    return claim.refusal(case) is None or claim.dares(case)


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
