"""From replies to records: what the calls of one case and the judge's answers amount to. Pure functions.

A case is called with its outputs poisoned once with NaN and once with finite garbage. Where the two differ, it is
called up to three times more: an answer that keeps what its buffers held is the same whenever they held the same, one
that moves from call to call is not. A worker that dies is replaced and the case is called again, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.messages import POISONS as POISON_BYTES
from conformance.messages import CallReply, JudgeReply, Wire
from reports.record import Record

POISONS = ("nan", "finite", "nan", "nan", "finite")
"""What the output buffers hold before each call of a case; two outcomes that take turns do not fit it."""
DEATHS = ("crash", "hang")
MAX_DEATHS = 5
"""Cases of one operation x variant that may kill a backend's worker before the rest of them is not run."""
MAX_MESSAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the records of one case on one target have in common; the fields are those of `Record`."""

    run: str
    case: str
    id: str
    backend: str
    version: str
    interpreter: str
    device: str
    sm: str
    options: str
    recipe: str = ""

    def record(self, part: str, verdict: str, message: str = "", **fields: Any) -> Record:
        """A record of this subject. The message is put on one line and cut to `MAX_MESSAGE` characters."""
        line = " ".join(message.split())
        line = line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."
        return Record(**vars(self), part=part, verdict=verdict, message=line, **{"input_sha256": "", **fields})


Replies = tuple[CallReply, ...]
"""The calls of one case in the order of `POISONS`; only the last may have failed."""


def call_sequence(call: Callable[[str], CallReply], *, patient: bool = False) -> Replies:
    """Call a case as often as its verdict needs. call: takes the poison. patient: as often as any verdict needs."""
    replies: list[CallReply] = []
    for poison in POISONS:
        replies.append(call(poison))
        settled = len(replies) == 2 and not patient and not differing_parts(*replies)
        if replies[-1].status != "ok" or settled or moving_parts(replies):
            break
    return tuple(replies)


OVERRUN = "wrote outside the buffer"
"""What the message of an error holds where a call has damaged memory."""


def died(replies: Replies) -> bool:
    """Whether the last call killed its worker, or had to be killed with it."""
    return replies[-1].status in DEATHS


def differing_parts(one: CallReply, other: CallReply) -> dict[str, float]:
    """part -> share of elements with equal bits, for the parts whose bits differ."""
    mine, theirs = ({wire.name: wire for wire in reply.outputs} for reply in (one, other))
    names = list(dict.fromkeys([*mine, *theirs]))
    return {name: _share(mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}


def moving_parts(replies: Sequence[CallReply]) -> dict[str, float]:
    """The same for calls with equal poisons, which say that an answer moves by itself; the least share of a part."""
    found: dict[str, float] = {}
    for one, first in zip(POISONS, replies, strict=False):
        for other, second in zip(POISONS, replies, strict=False):
            if one == other and first is not second:
                for name, share in differing_parts(first, second).items():
                    found[name] = min(share, found.get(name, 1.0))
    return found


def _shows_poison(part: str, nan: CallReply, finite: CallReply) -> bool:
    """Whether an element of a part is the poison in both calls."""
    import numpy as np

    found = []
    for reply, byte in ((nan, POISON_BYTES["nan"]), (finite, POISON_BYTES["finite"])):
        wire = next((wire for wire in reply.outputs if wire.name == part), None)
        if wire is None or not wire.data:
            return False
        rows = np.frombuffer(wire.data, dtype=np.uint8).reshape(max(1, math.prod(wire.shape)), -1)
        found.append((rows == byte).all(axis=1))
    return len(found[0]) == len(found[1]) and bool((found[0] & found[1]).any())


def _share(one: Wire | None, other: Wire | None) -> float:
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape) or not one.data:
        return 0.0
    import numpy as np  # only runs that differ need it

    count = max(1, math.prod(one.shape))
    rows = [np.frombuffer(wire.data, dtype=np.uint8).reshape(count, -1) for wire in (one, other)]
    return float((rows[0] == rows[1]).all(axis=1).mean())


def to_judge(replies: Replies) -> list[tuple[Wire, ...]]:
    """The distinct outputs of the calls, in order; none where a call failed.

    Where the harness's own work failed in the backend's process, an empty answer has the judge show that it can do it.
    """
    if replies[-1].suspect:
        return [()]
    if replies[-1].status != "ok":
        return []
    return list(dict.fromkeys(reply.outputs for reply in replies))


def input_mismatch(replies: Replies, judged: Sequence[JudgeReply]) -> str | None:
    """One line if worker and oracle did not see the same inputs: then no verdict means anything."""
    if replies[-1].suspect:
        return None
    hashes = {reply.input_sha256 for reply in replies if reply.status == "ok"}
    expected = {reply.input_sha256 for reply in judged}
    if not judged or (hashes == expected and len(expected) == 1):
        return None
    names = [", ".join(sorted(item[:16] or "none" for item in group)) for group in (hashes, expected)]
    return f"the inputs differ between the worker (SHA-256 {names[0]}) and the oracle ({names[1]})"


def decide(
    subject: Subject,
    replies: Replies,
    judged: Sequence[JudgeReply],
    *,
    run_to_run: bool = True,
    alone: Replies = (),
    before: int = 0,
) -> list[Record]:
    """The records of a claimed case.

    judged: the judge's answers to `to_judge` of the replies that count: ``alone`` if the worker died, else ``replies``.
    run_to_run: the recipe's declaration. alone: the calls in a fresh worker after a death. before: how many cases the
    dead worker had run before this one.
    """
    records = []
    counted = replies
    if died(replies):
        last = replies[-1]
        if not alone or died(alone):
            final = alone[-1] if alone else last
            note = "reproduced alone" if alone else "not run again"
            return [_call(subject, final.status, f"{note}: {final.message or final.status}", replies)]
        message = f"{last.status} after {before} other cases, not reproduced alone: {last.message}"
        records.append(_call(subject, "flaky", message, replies))
        counted = alone
    if counted[-1].status != "ok":
        return [*records, _failed_call(subject, counted)]
    if any(reply.inputs_changed for reply in counted):
        records.append(_call(subject, "wrong", "wrote its inputs", counted))
    return records + _parts(subject, counted, judged, run_to_run)


def beyond_claims(records: Sequence[Record], reason: str) -> list[Record]:
    """What the records of a call mean that no claim covers, but which the library promises to refuse.

    reason: why no claim covers it. Any exception is a refusal; what is wrong or moves is ``ungated``; a right answer is
    one, and a death stays what it is.
    """
    found = []
    for record in records:
        verdict, message = record.verdict, record.message
        if verdict in ("wrong", "flaky") or OVERRUN in message:
            verdict = "ungated"
        elif verdict == "error":
            verdict, message = "refused", message.removeprefix("refused a claimed call: ")
        found.append(replace(record, verdict=verdict, message=f"beyond the claims ({reason}): {message or verdict}"))
    return found


def _call(subject: Subject, verdict: str, message: str, replies: Replies) -> Record:
    shared = {"input_sha256": _input_hash(replies), "seconds": replies[0].seconds}
    return subject.record("call", verdict, message, **shared)


def _input_hash(replies: Replies) -> str:
    return next((reply.input_sha256 for reply in replies if reply.input_sha256), "")


def _failed_call(subject: Subject, replies: Replies) -> Record:
    last = replies[-1]
    verdict, message = last.status, last.message or last.status
    if last.status == "refused":
        verdict, message = "error", f"refused a claimed call: {message}"
    if len(replies) > 1:
        message = f"call {len(replies)} of the case: {message}"
    return _call(subject, verdict, message, replies)


def _parts(subject: Subject, replies: Replies, judged: Sequence[JudgeReply], run_to_run: bool) -> list[Record]:
    shared = {"input_sha256": _input_hash(replies), "seconds": replies[0].seconds}
    differing = differing_parts(*replies[:2]) if len(replies) > 1 else {}
    moving = moving_parts(replies)
    records = []
    for name in dict.fromkeys(part["part"] for reply in judged for part in reply.parts):
        # A malformed answer is judged by its shape alone, so that not every reply has every part.
        answers = [(i, part) for i, reply in enumerate(judged) for part in reply.parts if part["part"] == name]
        number, worst = next((answer for answer in answers if answer[1]["verdict"] != "pass"), answers[0])
        verdict, message = worst["verdict"], worst.get("message") or ""
        fields = {**shared, **_measures(worst)}
        if name in differing or name in moving:
            fields |= {"output_sha256": "", "selection": ""}
        if number:
            message = f"call {number + 1} of the case: {message}"
        followed = name in differing and name not in moving
        if followed and (run_to_run or _shows_poison(name, *replies[:2])):  # else it moved by chance between these
            note = f"depends on the output buffer's previous contents: {1 - differing[name]:.3g} of it is unwritten"
            verdict, message = "wrong", f"{note}; {message}" if message else note
        elif name in differing or name in moving:
            share = min(group[name] for group in (differing, moving) if name in group)
            note = f"identical calls agree on {share:.6g} of the elements"
            message = f"{note}; {message}" if message else note
            if verdict == "pass" and run_to_run:
                verdict = "flaky"
            elif verdict == "pass":
                fields["bit_equal"] = share
        records.append(subject.record(name, verdict, message, **fields))
    return records


def _measures(part: Mapping[str, Any]) -> dict[str, Any]:
    headroom = part.get("headroom")
    if headroom is not None:
        headroom = float(headroom)
        headroom = math.inf if math.isnan(headroom) else headroom
    error = part.get("error")
    radii = {name: float(value) for name, value in (part.get("stage_radii") or {}).items()}
    return {
        "headroom": headroom,
        "worst_index": part.get("worst_index"),
        "bit_equal": part.get("bit_equal"),
        "error": None if error is None else float(error),
        "fp32_error": part.get("fp32_error"),
        "output_sha256": part.get("output_sha256") or "",
        "selection": part.get("selection") or "",
        "stage_radii": {name: value for name, value in radii.items() if math.isfinite(value)},
    }


def unsupported(subject: Subject, reason: str) -> Record:
    """The record of a case that the backend does not claim, and which is therefore not called."""
    return subject.record("call", "unsupported", reason)


def not_run(subject: Subject) -> Record:
    """The record of a case that is left out because its like has killed the worker too often."""
    return subject.record("call", "error", f"not run: {MAX_DEATHS} cases of this claim killed the worker")
