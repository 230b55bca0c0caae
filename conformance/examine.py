"""One case on one target, outside of a run: calls, judgements and records, on explicit inputs where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance import verdicts
from conformance.messages import CallReply, Claimed, JudgeReply, Wire
from conformance.oracles import HarnessError
from conformance.target import Target
from conformance.verdicts import Replies, Subject
from fuzz.case import Case
from reports.record import Record

JUDGE_DEADLINE = 600.0


@dataclass(frozen=True)
class Examination:
    """What came of a case. replies: those that count; judged: the judge's answers to their distinct outputs."""

    records: list[Record]
    replies: Replies
    judged: list[JudgeReply]

    def examples(self, part: str) -> list[dict[str, Any]]:
        """The elements outside of a part, of the first answer that fails it."""
        return next(iter(self._failing(part)), {}).get("examples") or []

    def radii(self, part: str) -> dict[str, float]:
        """The radius of its worst element by stage."""
        return next(iter(self._failing(part)), {}).get("stage_radii") or {}

    def _failing(self, part: str) -> list[dict[str, Any]]:
        found = [item for reply in self.judged for item in reply.parts if item["part"] == part]
        return [item for item in found if item["verdict"] != "pass"]


class Examiner:
    """Calls and judges cases of one target; also a `shrink.Probe`.

    worker, oracle: as ``process.Worker``; whoever made them closes them. deadline: seconds for one call.
    """

    def __init__(self, target: Target, worker: Any, oracle: Any, deadline: float, run: str = "repro") -> None:
        self.target, self._worker, self._oracle = target, worker, oracle
        self._deadline, self._run = deadline, run

    def claimed(self, case: Case) -> Claimed | str:
        """The claim that covers a case or whose limits it oversteps, or why there is none."""
        found = self.target.claimed(case)
        return (self.target.beyond(case) or found) if isinstance(found, str) else found

    def covers(self, case: Case) -> bool:
        """Whether there is such a claim."""
        return not isinstance(self.claimed(case), str)

    def records(self, case: Case, inputs: Sequence[Wire] = ()) -> list[Record]:
        """The records of a case, with their ledger ids."""
        return self.examine(case, inputs).records

    def judge(self, case: Case, outputs: Sequence[Wire], inputs: Sequence[Wire] = ()) -> JudgeReply:
        """The judge's answer to some outputs. Raises ValueError for a case without a claim."""
        explicit = {"inputs": inputs} if inputs else {}
        return self._oracle.judge(case.text, self._known(case).recipe, outputs, JUDGE_DEADLINE, **explicit)  # type: ignore[no-any-return]

    def examine(self, case: Case, inputs: Sequence[Wire] = (), *, patient: bool = False) -> Examination:
        """Call a case as a run does, judge the answers, decide. patient: more calls, for faults that come and go.

        Raises `HarnessError` and ``process.WorkerFailed``.
        """
        claimed, about = self._known(case), self.target.description
        explicit = {"inputs": inputs} if inputs else {}

        def call(poison: str) -> CallReply:
            options = {**self.target.options, "poison": poison}
            return self._worker.call(case.text, about.backend, options, self._deadline, **explicit)  # type: ignore[no-any-return]

        replies = verdicts.call_sequence(call, patient=patient)
        alone: Replies = ()
        if verdicts.died(replies):
            self._worker.stop()  # the next call starts a fresh process
            alone = verdicts.call_sequence(call)
        counted = alone or replies
        judged = [self.judge(case, outputs, inputs) for outputs in verdicts.to_judge(counted)]
        problem = verdicts.input_mismatch(counted, judged)
        if problem:
            raise HarnessError(problem)
        subject = Subject(
            run=self._run,
            case=case.text,
            id=case.id,
            backend=about.backend,
            version=about.version,
            interpreter=about.interpreter,
            device=about.device,
            sm=about.sm,
            options=self.target.options_text,
            recipe=claimed.recipe_text,
        )
        strict = bool(claimed.recipe.get("run_to_run", True))
        records = verdicts.decide(subject, replies, judged, run_to_run=strict, alone=alone)
        reason = self.target.claimed(case)
        if isinstance(reason, str):
            records = verdicts.beyond_claims(records, reason)
        return Examination([self.target.ledger.marked(record) for record in records], counted, judged)

    def _known(self, case: Case) -> Claimed:
        claimed = self.claimed(case)
        if isinstance(claimed, str):
            raise ValueError(f"{self.target.description.backend} does not claim '{case}': {claimed}")
        return claimed
