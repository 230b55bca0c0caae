from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from conformance import verdicts
from conformance.messages import CallReply, JudgeReply, Wire
from conformance.verdicts import Subject, call_sequence, decide, differing_parts, input_mismatch, to_judge

SUBJECT = Subject(
    run="r",
    case="ue8m0 ceil v=1 from=scale n=4 values=normal seed=1",
    id="0" * 16,
    backend="b",
    version="1",
    interpreter="i",
    device="cpu",
    sm="",
    options="",
)


def wire(data: bytes, name: str = "scales") -> Wire:
    return Wire(name=name, dtype="uint8", shape=(len(data),), data=data)


def ok(data: bytes = b"\1\2\3\4", **fields: object) -> CallReply:
    return CallReply(**{"status": "ok", "input_sha256": "aa", "outputs": (wire(data),), "seconds": 0.5, **fields})


def bad(status: str, message: str = "boom") -> CallReply:
    return CallReply(status=status, message=message, input_sha256="")


def answer(verdict: str = "pass", message: str = "", **fields: object) -> JudgeReply:
    part = {"part": "scales", "verdict": verdict, "message": message, "headroom": 0.25, "bit_equal": 1.0, **fields}
    return JudgeReply(input_sha256="aa", parts=[part])


def played(*replies: CallReply) -> tuple[tuple[CallReply, ...], list[str]]:
    left: Iterator[CallReply] = iter(replies)
    poisons: list[str] = []

    def call(poison: str) -> CallReply:
        poisons.append(poison)
        return next(left)

    return call_sequence(call), poisons


def test_equal_outputs_need_two_calls() -> None:
    replies, poisons = played(ok(), ok())
    assert poisons == ["nan", "finite"]
    assert len(to_judge(replies)) == 1


OTHER = b"\1\2\3\5"


@pytest.mark.parametrize(
    ("outputs", "verdict"),
    [
        ([None, OTHER, None, None, OTHER], "wrong"),  # follows the buffer
        ([None, OTHER, OTHER], "flaky"),
        ([None, OTHER, None, OTHER], "flaky"),  # outcomes in turn
        ([None, OTHER, None, None, None], "flaky"),
        ([None, OTHER, None, None, b"\1\2\3\6"], "flaky"),
    ],
)
def test_different_outputs_need_more_calls_until_one_moves(outputs: list[bytes | None], verdict: str) -> None:
    replies, poisons = played(*(ok() if output is None else ok(output) for output in outputs))
    assert poisons == ["nan", "finite", "nan", "nan", "finite"][: len(outputs)]
    assert len(replies) == len(outputs)
    (record,) = decide(SUBJECT, replies, [answer()] * len(to_judge(replies)))
    assert record.verdict == verdict
    assert ("previous contents" in record.message) == (verdict == "wrong")


@pytest.mark.parametrize("status", ["refused", "error", "oom", "crash", "hang"])
def test_a_call_that_fails_is_the_last(status: str) -> None:
    replies, poisons = played(bad(status))
    assert poisons == ["nan"]
    assert to_judge(replies) == []


def test_a_conformant_case_passes_with_the_judges_measures() -> None:
    (record,) = decide(SUBJECT, (ok(), ok()), [answer(worst_index=[3], stage_radii={"a": 1.5})])
    assert (record.part, record.verdict, record.headroom, record.bit_equal) == ("scales", "pass", 0.25, 1.0)
    assert (record.worst_index, record.stage_radii, record.seconds, record.input_sha256) == ([3], {"a": 1.5}, 0.5, "aa")


def test_measures_that_strict_json_cannot_hold_are_made_fit() -> None:
    reply = answer("wrong", headroom=math.nan, stage_radii={"a": math.inf, "b": 1.0})
    (record,) = decide(SUBJECT, (ok(), ok()), [reply])
    assert record.headroom == math.inf
    assert record.stage_radii == {"b": 1.0}
    assert '"headroom":"inf"' in record.to_line()


def test_a_wrong_part_is_wrong() -> None:
    (record,) = decide(SUBJECT, (ok(), ok()), [answer("wrong", "off by one")])
    assert (record.verdict, record.message) == ("wrong", "off by one")


def test_a_refusal_of_a_claimed_call_is_an_error() -> None:
    (record,) = decide(SUBJECT, (bad("refused", "k is odd"),), [])
    assert (record.part, record.verdict, record.message) == ("call", "error", "refused a claimed call: k is odd")


@pytest.mark.parametrize("status", ["error", "oom"])
def test_exceptions_keep_their_verdict_and_lose_their_line_breaks(status: str) -> None:
    (record,) = decide(SUBJECT, (bad(status, "a\n  b"),), [])
    assert (record.verdict, record.message) == (status, "a b")


def test_an_error_in_the_second_call_names_it() -> None:
    (record,) = decide(SUBJECT, (ok(), bad("error")), [])
    assert (record.verdict, record.message) == ("error", "call 2 of the case: boom")


def test_a_changed_input_is_wrong_beside_the_parts() -> None:
    records = decide(SUBJECT, (ok(), ok(inputs_changed=True)), [answer()])
    assert [(item.part, item.verdict) for item in records] == [("call", "wrong"), ("scales", "pass")]
    assert records[0].message == "wrote its inputs"


def test_output_that_follows_the_poison_is_unwritten() -> None:
    replies = (ok(), ok(b"\1\2\3\5"), ok())
    (record,) = decide(SUBJECT, replies, [answer(), answer()])
    assert record.verdict == "wrong"
    assert record.message == "depends on the output buffer's previous contents: 0.25 of it is unwritten"


def test_output_that_differs_between_equal_calls_is_flaky() -> None:
    replies = (ok(), ok(b"\1\2\3\5"), ok(b"\1\2\0\0"))
    assert len(to_judge(replies)) == 3
    (record,) = decide(SUBJECT, replies, [answer()] * 3)
    assert (record.verdict, record.message) == ("flaky", "identical calls agree on 0.5 of the elements")


def test_without_run_to_run_the_share_of_equal_elements_is_reported() -> None:
    replies = (ok(), ok(b"\1\2\3\5"), ok(b"\1\2\3\6"))
    (record,) = decide(SUBJECT, replies, [answer()] * 3, run_to_run=False)
    assert (record.verdict, record.bit_equal) == ("pass", 0.75)


def test_without_run_to_run_answers_that_seem_to_follow_the_poison_may_do_so_by_chance() -> None:
    """Sums by atomics have few outcomes: five calls fall in this pattern now and then. NaN shows all the same."""
    replies = (ok(), ok(OTHER), ok(), ok(), ok(OTHER))
    (record,) = decide(SUBJECT, replies, [answer()] * len(to_judge(replies)), run_to_run=False)
    assert (record.verdict, record.bit_equal) == ("pass", 0.75)
    assert record.message == "identical calls agree on 0.75 of the elements"
    (record,) = decide(SUBJECT, replies, [answer("wrong", "nan"), answer()], run_to_run=False)
    assert record.verdict == "wrong"


def test_the_poison_itself_is_unwritten_whatever_moves() -> None:
    nan, finite = b"\1\2\3\xff", b"\1\2\3\x5a"
    replies = (ok(nan), ok(finite), ok(nan), ok(nan), ok(finite))
    for strict in (True, False):
        (record,) = decide(SUBJECT, replies, [answer(), answer()], run_to_run=strict)
        assert record.verdict == "wrong"
        assert record.message == "depends on the output buffer's previous contents: 0.25 of it is unwritten"


@pytest.mark.parametrize("run_to_run", [True, False])
def test_every_distinct_answer_must_be_admissible(run_to_run: bool) -> None:
    replies = (ok(), ok(b"\1\2\3\5"), ok(b"\1\2\3\6"))
    (record,) = decide(SUBJECT, replies, [answer(), answer("wrong", "bad"), answer()], run_to_run=run_to_run)
    assert record.verdict == "wrong"
    assert record.message.endswith("call 2 of the case: bad")


def test_a_part_that_only_one_judgement_has_counts() -> None:
    payload = JudgeReply(input_sha256="aa", parts=[{"part": "payload", "verdict": "wrong", "message": "missing"}])
    replies = (ok(), ok(b"\1\2\3\5"), ok(b"\1\2\3\6"))
    records = decide(SUBJECT, replies, [answer(), payload, answer()], run_to_run=False)
    assert [(item.part, item.verdict) for item in records] == [("scales", "pass"), ("payload", "wrong")]


def test_a_part_that_only_one_call_returned_differs_entirely() -> None:
    other = CallReply(status="ok", outputs=(wire(b"\1\2\3\4"), wire(b"\1", "payload")))
    assert differing_parts(ok(), other) == {"payload": 0.0}


def test_elements_are_compared_whole() -> None:
    one = Wire(name="o", dtype="float32", shape=(2,), data=bytes([0, 0, 0, 0, 1, 0, 0, 0]))
    two = Wire(name="o", dtype="float32", shape=(2,), data=bytes([0, 0, 0, 0, 1, 0, 0, 9]))
    replies = [CallReply(status="ok", outputs=(item,)) for item in (one, two)]
    assert differing_parts(*replies) == {"o": 0.5}


@pytest.mark.parametrize("status", ["crash", "hang"])
def test_a_death_that_repeats_alone_is_reproduced(status: str) -> None:
    (record,) = decide(SUBJECT, (bad(status, "SIGSEGV"),), [], alone=(bad(status, "SIGSEGV"),), before=7)
    assert (record.part, record.verdict, record.message) == ("call", status, "reproduced alone: SIGSEGV")


def test_a_death_that_does_not_repeat_is_flaky_and_the_case_is_judged_all_the_same() -> None:
    records = decide(SUBJECT, (bad("crash", "SIGSEGV"),), [answer("wrong")], alone=(ok(), ok()), before=7)
    assert [(item.part, item.verdict) for item in records] == [("call", "flaky"), ("scales", "wrong")]
    assert records[0].message == "crash after 7 other cases, not reproduced alone: SIGSEGV"


def test_a_death_whose_repetition_raises_gives_both_records() -> None:
    records = decide(SUBJECT, (bad("crash"),), [], alone=(bad("error", "late"),), before=1)
    assert [(item.verdict, item.part) for item in records] == [("flaky", "call"), ("error", "call")]


def test_inputs_that_differ_between_worker_and_oracle_are_named() -> None:
    assert input_mismatch((ok(), ok()), [answer()]) is None
    assert input_mismatch((bad("error"),), []) is None
    line = input_mismatch((ok(input_sha256="bb"), ok(input_sha256="bb")), [answer()])
    assert line == "the inputs differ between the worker (SHA-256 bb) and the oracle (aa)"
    assert input_mismatch((ok(), ok(input_sha256="bb")), [answer()]) is not None


def test_what_is_not_called_says_why() -> None:
    assert verdicts.unsupported(SUBJECT, "no claim").verdict == "unsupported"
    record = verdicts.not_run(SUBJECT)
    assert (record.verdict, record.message) == ("error", "not run: 5 cases of this claim killed the worker")


def test_long_messages_are_cut() -> None:
    message = SUBJECT.record("call", "error", "x" * 5000).message
    assert len(message) == verdicts.MAX_MESSAGE
    assert message.endswith("...")


def test_the_judge_has_to_show_that_it_can_do_what_failed_in_a_backend_s_process() -> None:
    spoiled = replace(bad("crash"), suspect=True)
    assert to_judge((spoiled,)) == to_judge((ok(), spoiled)) == [()]
    assert input_mismatch((spoiled,), [answer()]) is None
    (record,) = decide(SUBJECT, (spoiled,), [answer()], alone=(spoiled,))
    assert (record.part, record.verdict) == ("call", "crash")
