"""Calls on a device: what each comes to, what becomes of the process, and what follows beside the gates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance.gating import truth
from conformance.gating.model import Answer, Gate, Observation, Observed, Truth
from conformance.gating.rules_truth import fake_against_real, from_truth
from reports.record import Record

STAND_IN = """
import os, sys, time
from types import ModuleType

def right(device): return TENSOR(1.0), TENSOR(1.0)
def wrong(device): return TENSOR(1.0), TENSOR(2.0)
def shape(device): return TENSOR(1.0)[:, :1], TENSOR(1.0)
def refused(device): raise NotImplementedError("supports SM100 only")
def raised(device): raise TypeError("odd")
def dies(device): os.abort()
def hangs(device): time.sleep(600)
def TENSOR(value):
    import torch
    return torch.full((2, 2), value, dtype=torch.float64)

module = ModuleType("conformance.gating.torch_calls")
names = ("right", "dies", "wrong", "shape", "refused", "hangs", "raised")
module.CALLS = {("f", name): globals()[name] for name in names}
sys.modules[module.__name__] = module
"""


def test_every_call_is_a_row_whatever_it_does_to_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(truth, "CALL_S", 2.0)
    rows = {row.variant: row for row in truth.called("torch", "cpu")}
    assert {name: row.outcome for name, row in rows.items()} == {
        "right": "right",
        "dies": "crashed",
        "wrong": "wrong",
        "shape": "wrong",
        "refused": "refused",
        "hangs": "hung",
        "raised": "raised",
    }
    assert rows["wrong"].detail == "4 of 4; [0, 0] is 1, exactly 2"
    assert rows["dies"].detail == "the process ended with -6"
    assert rows["refused"].detail == "supports SM100 only"


def test_a_process_that_never_starts_gives_no_rows() -> None:
    assert truth.called("torch", "cpu", python="/bin/false") == []


def test_torch_answers_exactly_on_a_cpu_or_refuses() -> None:
    torch = pytest.importorskip("torch")
    from conformance.gating.torch_calls import CALLS

    answered = 0
    for call in CALLS.values():
        try:
            answer, exact = call("cpu")
        except (NotImplementedError, RuntimeError, ValueError):
            continue
        answered += 1
        assert torch.equal(answer.double(), exact)
    assert answered >= (2 if torch.__version__ >= "2.13" else 0)


def test_the_calls_tell_neighbouring_blocks_apart() -> None:
    """A scale taken from the next block, or the last block left out, changes the exact answer."""
    torch = pytest.importorskip("torch")
    from conformance.gating import torch_calls as calls

    for block in ((1, 16), (1, 32), (1, 128), (128, 128)):
        indices, exponents, values = calls._operand(calls.M, block, 1)
        moved = exponents.roll(1, 1).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        other = calls.INTEGERS[indices] * torch.pow(torch.tensor(2.0, dtype=torch.float64), moved)
        b = calls._operand(calls.N, block, 2)[2]
        assert not torch.equal(calls._exact(values, b), calls._exact(other, b))
        cut = values.clone()
        cut[:, -block[1] :] = 0
        assert not torch.equal(calls._exact(values, b), calls._exact(cut, b))


def seen(answer: Answer, library: str = "torch", sm: int = 90) -> Observed:
    row = Observation(library=library, subject="f", variant="V", sm=sm, gates=(Gate("g", answer),))
    return Observed(library=library, version="1", observations=(row,))


def came_to(outcome: str, library: str = "torch", detail: str = "") -> Truth:
    return Truth(library=library, subject="f", variant="V", sm=90, outcome=outcome, detail=detail, repro="line")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "outcome", "rule"),
    [
        ("yes", "right", None),
        ("yes", "wrong", "answers-wrongly"),
        ("yes", "refused", "admits-but-fails"),
        ("yes", "crashed", "admits-but-fails"),
        ("no", "refused", None),
        ("no", "wrong", "answers-wrongly"),
        ("no", "crashed", "refuses-uncleanly"),
        ("no", "raised", "refuses-uncleanly"),
        ("no", "right", "works-though-refused"),
        ("unknown", "right", None),
        ("unknown", "refused", None),
        ("unknown", "wrong", "answers-wrongly"),
        ("unknown", "hung", "refuses-uncleanly"),
    ],
)
def test_a_call_is_held_against_its_gate(answer: Answer, outcome: str, rule: str | None) -> None:
    found = from_truth(seen(answer), [came_to(outcome)])
    assert [item.rule for item in found] == ([rule] if rule else [])
    assert all(item.repro == "line" for item in found)


def test_a_backend_of_ours_may_claim_less_than_works() -> None:
    assert from_truth(seen("no", "backends"), [came_to("right", "backends")]) == []


def test_records_become_rows_and_refusals_beyond_the_claims_do_not() -> None:
    verdicts = ("pass", "refused", "error", "unsupported")
    rows = truth.from_records([record(verdict, f"q{number} x") for number, verdict in enumerate(verdicts)])
    assert [(row.subject, row.variant, row.outcome) for row in rows] == [
        ("mylib", "q0 x", "right"),
        ("mylib", "q2 x", "refused"),
    ]
    assert truth.from_records([record("pass", "q x", sm="")]) == []
    (row,) = truth.from_records([record("pass", "q x"), record("crash", "q x")])
    assert (row.outcome, row.sm, row.calls) == ("crashed", 90, 1)


def record(verdict: str, group: str, sm: str = "90") -> Record:
    operation, _, variant = group.partition(" ")
    message = "refused a claimed call: not today" if verdict == "error" else ""
    return SimpleNamespace(  # type: ignore[return-value]
        verdict=verdict,
        operation=operation,
        variant=variant,
        sm=sm,
        backend="mylib",
        message=message,
        ledger_id="",
        case=f"{group} v=1 seed=0",
        device="cuda:0",
        options="",
    )


def test_a_wrong_answer_that_the_ledger_knows_is_explained() -> None:
    (finding,) = from_truth(seen("yes", "backends"), [came_to("wrong", "backends", "known as x: 3 differ")])
    assert finding.explained


def test_the_fake_is_held_against_the_real_device() -> None:
    assert fake_against_real(seen("yes"), seen("yes")) == []
    assert fake_against_real(seen("unknown"), seen("yes")) == []
    (finding,) = fake_against_real(seen("yes"), seen("no"))
    assert (finding.rule, finding.sms) == ("fake-against-real", (90,))
