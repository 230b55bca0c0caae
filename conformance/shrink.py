"""Two-level shrinking: a failing case to a simpler one, then its inputs to the few elements that matter.

A `Probe` answers what a case's records are, with the case's own inputs or with explicit ones: in this process for our
own functions (`LocalProbe`), in isolated workers for everything else (`conformance.probe.WorkerProbe`). A candidate
counts only if it fails as the first one did: `Cause`. Torch is imported here, CUDA is never initialised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from conformance.causes import Cause, cause_of, failing
from conformance.examine import Examination
from conformance.messages import CallReply, JudgeReply, Wire
from conformance.operations import OPERATIONS
from conformance.verdicts import Subject, beyond_claims, call_sequence, decide, to_judge
from conformance.worker import interpreter
from conformance.worker_backend import Callee
from conformance.worker_oracle import Oracle
from conformance.worker_tensors import to_wire
from fuzz.anatomy import elements
from fuzz.case import Case
from fuzz.shrink_case import Budget, shrink_case
from fuzz.shrink_inputs import ENOUGH, differing, reduce_inputs
from references.backend import Backend, Claim
from reports.record import Record

TRIES, SECONDS = 3000, 30.0
"""Budget of one shrinking, unless another is given."""
LEVEL_ONE = 0.3
"""Share of the budget that level one may spend."""
FLAKY_TRIES = 4
"""How often a candidate may fail to fail where the fault is one that comes and goes."""
MAX_ELEMENTS = 2**22
"""Elements of the inputs up to which level two is tried."""


class Probe(Protocol):
    """Answers for one backend."""

    def covers(self, case: Case) -> bool:
        """Whether the backend claims a case."""

    def records(self, case: Case, inputs: Sequence[Wire] = ()) -> list[Record]:
        """The records of a case, on explicit inputs if there are any."""

    def examine(self, case: Case, inputs: Sequence[Wire] = (), *, patient: bool = False) -> Examination:
        """The records with the answers and judgements behind them. patient: more calls, for faults that come and go."""


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """What is left of a failing case.

    origin: the case before. text_case: level one's result, which fails with its own inputs. case, inputs: level two's:
    explicit inputs of ``case``; None where they could not be reduced. found: the last examination. differing: elements
    of the inputs that differ from their simplest value, of ``elements``; by_input: the same by input. note: why
    ``differing`` is above 64, or why there was no level two; empty otherwise.
    """

    origin: Case
    text_case: Case
    case: Case
    inputs: Mapping[str, Tensor] | None
    cause: Cause
    found: Examination
    differing: int
    elements: int
    by_input: Mapping[str, int]
    tries: int
    seconds: float
    exhausted: bool
    note: str = ""

    @property
    def wires(self) -> tuple[Wire, ...]:
        """The explicit inputs as they travel; none where the case's own are meant."""
        return () if self.inputs is None else wires_of(self.inputs)

    @property
    def record(self) -> Record:
        """The failing record of ``case`` on ``inputs``."""
        found = failing(self.found.records)
        assert found is not None
        return found


def shrink(
    case: Case, probe: Probe, *, tries: int = TRIES, seconds: float = SECONDS, level_two: bool = True
) -> Shrunk | None:
    """Shrink a failing case; None if it does not fail here.

    tries, seconds: what may be spent after the first verdict, 0.3 of it on the case; one try is a whole verdict, of two
    or more calls.
    level_two: reduce the inputs too, where they have at most 2**22 elements.
    """
    started = time.monotonic()
    search = _Search(case, probe)
    if search.last is None:
        return None
    budget = Budget(tries, seconds)  # a worker that had to be started has cost nothing
    one = budget.part(LEVEL_ONE)
    small = shrink_case(case, search.same, one)
    budget.used += one.used
    common: dict[str, Any] = {"origin": case, "text_case": small, "cause": search.cause}
    own = OPERATIONS[small.operation].inputs(small) if _inputs_fit(small) else None
    note = "" if level_two else "level two was not asked for"
    if own is None:
        note = f"level two was left out: the inputs have more than {MAX_ELEMENTS} elements"
    elif not note and not search.same_inputs(small, own):
        note = "level two was left out: it does not fail on explicit inputs"
    if own is None or note:
        counts = {} if own is None else differing(small, own)
        return Shrunk(
            **common,
            case=small,
            inputs=None,
            found=search.found(small, ()),
            differing=sum(counts.values()),
            elements=0 if own is None else elements(small),
            by_input={name: count for name, count in counts.items() if count},
            tries=budget.used,
            seconds=time.monotonic() - started,
            exhausted=budget.spent,
            note=note,
        )
    left = reduce_inputs(small, own, search.same_inputs, budget)
    if left.differing > ENOUGH:
        why = "the budget is spent" if budget.spent else "none of them can be made simple by itself"
        note = f"{left.differing} elements differ from the simplest value: {why}"
    return Shrunk(
        **common,
        case=left.case,
        inputs=left.inputs,
        found=search.found(left.case, wires_of(left.inputs)),
        differing=left.differing,
        elements=left.elements,
        by_input=left.by_input,
        tries=budget.used,
        seconds=time.monotonic() - started,
        exhausted=budget.spent,
        note=note,
    )


class _Search:
    """The cause that is kept, and the last examination that had it. last: None if the case does not fail."""

    def __init__(self, case: Case, probe: Probe) -> None:
        self._probe = probe
        first = probe.examine(case)
        cause = cause_of(first.records)
        self.cause = cause or Cause("", "")
        self.last: tuple[Case, tuple[Wire, ...], Examination] | None = None if cause is None else (case, (), first)

    def same(self, case: Case, inputs: tuple[Wire, ...] = ()) -> bool:
        """Whether a case fails so."""
        if not self._probe.covers(case):
            return False
        for _ in range(FLAKY_TRIES if self.cause.comes_and_goes else 1):
            found = self._probe.examine(case, inputs, patient=self.cause.comes_and_goes)
            if cause_of(found.records) == self.cause:
                self.last = (case, inputs, found)
                return True
        return False

    def same_inputs(self, case: Case, inputs: Mapping[str, Tensor]) -> bool:
        """Whether a case fails so on explicit inputs."""
        return self.same(case, wires_of(inputs))

    def found(self, case: Case, inputs: tuple[Wire, ...]) -> Examination:
        """An examination that fails: the last one if it is of this case and these inputs, else a new one."""
        assert self.last is not None
        if self.last[:2] != (case, inputs):
            self.same(case, inputs)
        return self.last[2]


def wires_of(inputs: Mapping[str, Tensor]) -> tuple[Wire, ...]:
    """Inputs as they travel."""
    return tuple(to_wire(name, tensor) for name, tensor in inputs.items())


def _inputs_fit(case: Case) -> bool:
    return elements(case) <= MAX_ELEMENTS


class LocalProbe:
    """A backend in this process, without isolation: for functions of our own, such as mutants.

    backend: as a worker would load it. device: ``cpu``. mark: gives failing records their ledger id.
    """

    def __init__(
        self, backend: Backend, device: str = "cpu", mark: Callable[[Record], Record] = lambda record: record
    ) -> None:
        self.backend = backend
        self._claims: list[Claim] = list(backend.claims(device))
        self._callee = Callee(backend.name, {backend.name: backend}, device)
        self._oracle = Oracle(device)
        self._device, self._mark = device, mark

    def claim(self, case: Case) -> tuple[Claim, str] | None:
        """The first claim that covers a case, or that it oversteps, with the reason why it does not cover it."""
        covering = next((claim for claim in self._claims if claim.refusal(case) is None), None)
        if covering is not None:
            return covering, ""
        dared = next((claim for claim in self._claims if claim.dares(case)), None)
        return None if dared is None else (dared, str(dared.refusal(case)))

    def covers(self, case: Case) -> bool:
        """Whether there is such a claim."""
        return self.claim(case) is not None

    def records(self, case: Case, inputs: Sequence[Wire] = ()) -> list[Record]:
        """The records of a case. Raises ValueError for one that is not claimed."""
        return self.examine(case, inputs).records

    def examine(self, case: Case, inputs: Sequence[Wire] = (), *, patient: bool = False) -> Examination:
        """The records with the answers and judgements behind them. Raises ValueError for a case that is not claimed."""
        found = self.claim(case)
        if found is None:
            raise ValueError(f"{self.backend.name} does not claim '{case}'")
        claim, beyond = found
        recipe = self.backend.recipe(claim)

        def call(poison: str) -> CallReply:
            reply, outputs = self._callee.call(case.text, self.backend.name, {"poison": poison}, inputs)
            return CallReply(**{**reply, "outputs": outputs})

        replies = call_sequence(call, patient=patient)
        with torch.no_grad():
            judged = [
                JudgeReply(**self._oracle.judge(case.text, recipe.to_json(), wires, inputs))
                for wires in to_judge(replies)
            ]
        subject = Subject(
            run="shrink",
            case=case.text,
            id=case.id,
            backend=self.backend.name,
            version=self.backend.version(),
            interpreter=interpreter(),
            device=self._device,
            sm="",
            options="",
            recipe=recipe.text(OPERATIONS[case.operation].open_choices(case.variant)),
        )
        records = decide(subject, replies, judged, run_to_run=recipe.run_to_run)
        if beyond:
            records = beyond_claims(records, beyond)
        return Examination([self._mark(record) for record in records], replies, judged)
