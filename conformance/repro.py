"""One case on one backend again: its inputs' hash, a verdict for each part, and the elements that differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from conformance import verdicts
from conformance.discover import UsageError
from conformance.engine import HarnessError, Target
from conformance.ledger import Ledger
from conformance.messages import CallReply, Claimed, JudgeReply
from conformance.process import Worker, WorkerFailed
from conformance.targets import Fleet
from conformance.verdicts import Subject
from fuzz.case import Case
from reports.record import Record

JUDGE_DEADLINE = 600.0
_OPTION = re.compile(r"([a-z_]+)=([A-Za-z0-9_.+,:-]+)\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be shown. times: how often. expected: SHA-256 that the inputs must have, any if empty."""

    case: str
    backend: str
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    times: int = 1
    expected: str = ""
    deadline: float = 30.0
    memory_limit: int | None = None


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """Call options from ``key=value`` words. Raises `UsageError`."""
    options: dict[str, str] = {}
    for word in words:
        match = _OPTION.match(word)
        if match is None or match[1] in options or match[1] == "poison":
            raise UsageError(f"--option {word!r} is not KEY=VALUE with a new key")
        options[match[1]] = match[2]
    return options


def repro(request: Request, ledger: Ledger, console: Console) -> int:
    """Show the case and return the exit code: 0 if every time everything passes, else 1.

    Raises `UsageError`, or `HarnessError` where the inputs are not those that were expected.
    """
    case = Case.parse(request.case)
    if request.expected and not _HASH.match(request.expected):
        raise UsageError("--expect-sha256 is not 64 hexadecimal digits in lower case")
    fleet = Fleet(request.plugins, None, request.memory_limit)
    try:
        survey = fleet.survey((request.backend,), (request.device,), 2)
        if not survey.found:
            raise UsageError(f"{request.backend} does not run: {survey.absent[0].reason}")
        found = survey.found[0]
        target = Target(
            description=found.description,
            start=found.start,
            options=request.options,
            ledger=ledger.narrowed(found.description, [(case.operation, case.variant)]),
        )
        claimed = target.claimed(case)
        if isinstance(claimed, str):
            claimed = target.beyond(case) or claimed
        if isinstance(claimed, str):
            raise UsageError(f"{request.backend} on {request.device} does not claim this case: {claimed}")
        return _Repro(request, case, target, claimed, fleet.oracle(), found.start(), console).show()
    except WorkerFailed as error:
        raise HarnessError(str(error)) from None
    finally:
        fleet.close()


class _Repro:
    def __init__(
        self,
        request: Request,
        case: Case,
        target: Target,
        claimed: Claimed,
        oracle: Worker,
        worker: Worker,
        console: Console,
    ) -> None:
        self._request, self._case, self._target, self._claimed = request, case, target, claimed
        self._oracle, self._worker, self._console = oracle, worker, console

    def show(self) -> int:
        """See `repro`."""
        request, about = self._request, self._target.description
        say = self._say
        say(f"case     {self._case}")
        say(f"backend  {about.backend} {about.version} on {about.device} {about.device_name}".rstrip())
        say(f"with     {about.interpreter}; " + ", ".join(f"{k} {v}" for k, v in sorted(about.libraries.items())))
        say(f"recipe   {self._claimed.recipe_text} ({self._claimed.recipe.get('source', '')})")
        if request.options:
            say(f"options  {self._target.options_text}")
        digest = self._judge(()).input_sha256
        say(f"inputs   SHA-256 {digest}")
        if request.expected and digest != request.expected:
            raise HarnessError(f"the inputs hash to {digest}, expected {request.expected}")
        failed = 0
        for number in range(1, request.times + 1):
            if request.times > 1:
                say(f"time {number} of {request.times}")
            failed += self._once()
        if request.times > 1:
            say(f"failed {failed} of {request.times} times")
        return 1 if failed else 0

    def _once(self) -> bool:
        replies = verdicts.call_sequence(self._call)
        alone: verdicts.Replies = ()
        if verdicts.died(replies):
            self._worker.stop()  # the next call starts a fresh process
            alone = verdicts.call_sequence(self._call)
        counted = alone or replies
        judged = [self._judge(outputs) for outputs in verdicts.to_judge(counted)]
        problem = verdicts.input_mismatch(counted, judged)
        if problem:
            raise HarnessError(problem)
        about = self._target.description
        subject = Subject(
            run="repro",
            case=self._case.text,
            id=self._case.id,
            backend=about.backend,
            version=about.version,
            interpreter=about.interpreter,
            device=about.device,
            sm=about.sm,
            options=self._target.options_text,
            recipe=self._claimed.recipe_text,
        )
        strict = bool(self._claimed.recipe.get("run_to_run", True))
        records = verdicts.decide(subject, replies, judged, run_to_run=strict, alone=alone)
        reason = self._target.claimed(self._case)
        if isinstance(reason, str):
            records = verdicts.beyond_claims(records, reason)
        for record in map(self._target.ledger.marked, records):
            self._show(record, judged)
        return any(record.failing for record in records)

    def _show(self, record: Record, judged: Sequence[JudgeReply]) -> None:
        words = [f"{record.part}: {record.verdict}"]
        if record.headroom is not None:
            words.append(f"headroom {record.headroom:.4g}")
        if record.bit_equal is not None:
            words.append(f"bits equal {record.bit_equal:.6g}")
        words += [f"known to the ledger as {record.ledger_id}"] * bool(record.ledger_id)
        words += [record.message] * bool(record.message)
        self._say(", ".join(words))
        if not record.failing:
            return
        parts = (part for reply in judged for part in reply.parts if part["part"] == record.part)
        for part in parts:
            if part["verdict"] != "pass":
                for example in part.get("examples") or ():
                    self._say(f"    {_example(example)}")
                for name, radius in sorted((part.get("stage_radii") or {}).items()):
                    self._say(f"    radius from {name}: {radius:.6g}")
                return

    def _call(self, poison: str) -> CallReply:
        request = self._request
        options = {**request.options, "poison": poison}
        return self._worker.call(self._case.text, request.backend, options, request.deadline)

    def _judge(self, outputs: Any) -> JudgeReply:
        return self._oracle.judge(self._case.text, self._claimed.recipe, outputs, JUDGE_DEADLINE)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _example(example: Mapping[str, Any]) -> str:
    """``[3, 17]: actual 0x7e, admissible 0x7d or 0x7c; input ...``; what else there is follows."""
    known = ("index", "actual", "admissible", "input")
    line = f"{example.get('index')}: actual {example.get('actual')}, admissible {example.get('admissible')}"
    if example.get("input") is not None:
        line += f"; input {example['input']}"
    return line + "".join(f"; {key} {value}" for key, value in example.items() if key not in known)
