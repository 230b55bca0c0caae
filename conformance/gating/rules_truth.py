"""What must hold between gates and what calls on a real device come to.

| rule | a finding is |
|---|---|
| `answers-wrongly` | a call that answers, and wrongly, on either side of the gate |
| `admits-but-fails` | a call that is refused, raises or dies, though every gate admits |
| `refuses-uncleanly` | a call outside of the gate that ends the process, hangs, or raises what is no refusal |
| `works-though-refused` | calls that answer rightly though a gate refuses: the gate takes a working kernel away |
| `fake-against-real` | a gate that answers otherwise on the real device than on the faked one: a fault of the fake |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conformance.gating.model import Finding, Observation, Observed, Truth


def from_truth(observed: Observed, truths: Sequence[Truth]) -> list[Finding]:
    """Findings of one library on the device at hand."""
    answers = {(item.subject, item.variant, item.sm): item.answer for item in observed.observations}
    return [
        finding
        for truth in truths
        if truth.library == observed.library
        for finding in _judged(truth, answers.get((truth.subject, truth.variant, truth.sm), "unknown"))
    ]


def _judged(truth: Truth, answer: str) -> Iterator[Finding]:
    said = f"{truth.outcome}{f': {truth.detail}' if truth.detail else ''}"
    if truth.outcome == "wrong":
        where = {"yes": "inside of its gate", "no": "outside of its gate"}.get(answer, "where no gate could be seen")
        yield _finding("answers-wrongly", truth, f"{where}: {said}")
    elif answer == "yes" and truth.outcome != "right":
        yield _finding("admits-but-fails", truth, said)
    elif answer != "yes" and truth.outcome in ("crashed", "hung", "raised"):
        yield _finding("refuses-uncleanly", truth, said)
    elif answer == "no" and truth.outcome == "right" and truth.library != "backends":
        # A backend of this project may claim less than its library can do, where no recipe is known.
        yield _finding("works-though-refused", truth, f"{truth.calls} calls right, though a gate refuses")


def fake_against_real(faked: Observed, real: Observed) -> list[Finding]:
    """`fake-against-real`: where both can tell."""
    answers: dict[tuple[str, str, int], Observation] = {
        (item.subject, item.variant, item.sm): item for item in faked.observations
    }
    found = []
    for item in real.observations:
        other = answers.get((item.subject, item.variant, item.sm))
        if other is None or "unknown" in (item.answer, other.answer) or item.answer == other.answer:
            continue
        message = f"{other.answer} on the faked device, {item.answer} on the real one ({item.detail or other.detail})"
        found.append(
            Finding(
                rule="fake-against-real",
                library=item.library,
                subject=item.subject,
                variants=(item.variant,),
                sms=(item.sm,),
                message=message,
            )
        )
    return found


def _finding(rule: str, truth: Truth, message: str) -> Finding:
    return Finding(
        rule=rule,
        library=truth.library,
        subject=truth.subject,
        variants=(truth.variant,) if truth.variant else (),
        sms=(truth.sm,),
        message=message,
        line=truth.repro,
        explained="known to the ledger" if truth.detail.startswith("known as ") else "",
    )
