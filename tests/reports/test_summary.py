import math
import random

import pytest

from reports.frame import order
from reports.groups import FAIL, KNOWN, PASS, REFUSED, UNSUPPORTED, Call
from reports.summary import headline, summarise
from reports.tables import results


def by_name(summary):
    return {(group.operation, group.backend): group for group in summary.groups}


def test_counts_are_of_calls_and_add_up(records, run):
    summary = summarise(records, run)
    assert summary.counts == {FAIL: 2, KNOWN: 1, PASS: 3, UNSUPPORTED: 2}
    assert summary.executed == 6
    assert summary.cases == 5
    assert summary.failing == {"wrong": 1, "crash": 1}
    for group in summary.groups:
        assert group.judged + group.counts[UNSUPPORTED] == len(group.calls)


def test_a_group_has_its_verdicts_headroom_bits_and_time(records, run):
    group = by_name(summarise(records, run))["quantize", "alpha"]
    assert group.judged == 4
    assert group.failing == {"wrong": 1, "crash": 1}
    assert group.known == {"wrong": 1}
    assert group.headroom == math.inf
    # scales 1, .75, 1 and payload .5, .25, 1: the crash has none.
    assert group.bit_equal == pytest.approx((1 + 0.5 + 0.75 + 0.25 + 1 + 1) / 6)
    assert group.seconds == 4 * 0.25  # the parts of a call share one time
    assert group.claims == ("k%2=0",)
    assert group.recipes == ("amax_floor=1e-10",)


def test_a_property_says_nothing_of_equal_bits(make, run, records):
    case = "ue8m0 ceil v=1 from=scale n=8 values=special seed=3"
    twin = make(case, part="property:k_blocks", bit_equal=0.125)
    group = by_name(summarise([*records, twin], run))["ue8m0", "alpha"]
    assert group.bit_equal == 1


def test_several_recipes_have_their_shares_of_equal_bits(make, run):
    case = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=32 m={m} scale=ceil stride=contiguous values=normal seed=0"
    records = [
        make(case.format(m=1), part="payload", recipe="accumulator=exact", bit_equal=1.0),
        make(case.format(m=2), part="payload", recipe="accumulator=exact", bit_equal=1.0),
        make(case.format(m=3), part="payload", recipe="default", bit_equal=0.5),
        make(case.format(m=4), part="call", recipe="never", bit_equal=None, headroom=None, verdict="crash"),
    ]
    [row] = results(summarise(records, run))
    assert row.bit_equal == pytest.approx(2.5 / 3)
    assert row.recipe == (
        "accumulator=exact (bits equal 100 %, 2 outputs); default (bits equal 50.00 %, 1 output); never"
    )
    [row] = results(summarise(records[:2], run))
    assert row.recipe == "accumulator=exact"


def test_errors_are_compared_with_those_of_fp32(make, run):
    case = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=32 m=1 scale=ceil stride=contiguous values=normal seed=0"
    pairs = [(2.0, 1.0), (0.5, 1.0), (3.0, 1.0), (1.0, 0.0), (None, 1.0), (1.0, None)]
    records = [
        make(case.replace("seed=0", f"seed={number}"), error=mine, fp32_error=theirs)
        for number, (mine, theirs) in enumerate(pairs)
    ]
    (group,) = summarise(records, run).groups
    assert group.over_fp32 == 2.0
    (none,) = summarise(records[3:], run).groups
    assert none.over_fp32 is None


def test_failures_come_first_then_known_then_the_rest(records, run, make):
    known = make(backend="aardvark", verdict="wrong", ledger_id="L9")
    statuses = [group.status for group in summarise([*records, known], run).groups]
    assert statuses == [FAIL, KNOWN, PASS, PASS]


def test_the_worst_call_is_the_first_failure_by_size_not_by_text(records, run):
    # As text k=10 comes before k=2; as a size after it. k=2 passes, so the first failure is k=10, scales first.
    worst = by_name(summarise(records, run))["quantize", "alpha"].worst
    assert " k=10 " in worst.lead.case
    assert worst.lead.part == "scales"


def test_without_a_failure_the_worst_call_is_the_known_one_then_the_largest_headroom(make, run):
    cases = [f"gemm deepseek_fp8 v=1 k={k} seed=1" for k in (1, 2, 3)]
    passing = [make(case, headroom=value) for case, value in zip(cases, (0.2, 0.9, 0.4), strict=True)]
    assert " k=2 " in summarise(passing, run).groups[0].worst.lead.case
    known = make(cases[2], part="output", verdict="wrong", headroom=1.5, ledger_id="L1")
    assert " k=3 " in summarise([*passing, known], run).groups[0].worst.lead.case


def test_a_call_is_unexplained_if_any_failing_part_is(make):
    known = make(part="scales", verdict="wrong", ledger_id="L1")
    assert Call((known, make(part="payload"))).status == KNOWN
    mixed = Call((known, make(part="payload", verdict="wrong", message="new")))
    assert mixed.status == FAIL
    assert mixed.lead.message == "new"


def test_a_ledger_id_on_a_passing_record_is_no_failure(make):
    assert Call((make(ledger_id="L1"),)).status == PASS


def test_options_make_another_call(make, run):
    summary = summarise([make(), make(options="graph=1")], run)
    assert summary.executed == 2
    assert summary.cases == 1


def test_refused_is_neither_pass_nor_failure(make, run):
    summary = summarise([make(verdict="refused", headroom=None)], run)
    assert summary.counts == {REFUSED: 1}
    assert summary.outcome == "failed"  # exit code 1 of the run
    assert summarise([make(verdict="refused")], {}).outcome == "conformant"


def test_known_failures_are_tied_to_their_entries(records, run):
    (entry,) = summarise(records, run).known
    assert (entry.id, entry.reason, len(entry.calls)) == ("L1", "takes log2", 1)


def test_a_ledger_id_that_the_run_does_not_list_is_still_told(make):
    (entry,) = summarise([make(verdict="wrong", ledger_id="L7")], {}).known
    assert (entry.id, entry.backend, entry.reason) == ("L7", "alpha", "")


def test_a_passing_witness_is_a_problem(make, run):
    run["ledger"][0]["witness_verdict"] = "pass"
    run["exit_code"] = None
    summary = summarise([make()], run)
    assert summary.outcome == "failed"
    assert len(summary.problems) == 1
    assert "L1" in summary.problems[0]


def test_a_problem_that_the_run_names_is_not_repeated(make, run):
    run["ledger"][0]["witness_verdict"] = "pass"
    run["problems"] = ["ledger L1: the witness passes"]
    assert summarise([make()], run).problems == ("ledger L1: the witness passes",)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "conformant"),
        ({"complete": False}, "incomplete"),
        ({"complete": False, "exit_code": 130}, "incomplete"),
        ({"exit_code": 3}, "failed"),
        ({"problems": ["x"]}, "failed"),
        ({"problems": ["x"], "complete": False}, "failed"),
    ],
)
def test_outcome(make, change, outcome):
    assert summarise([make()], change).outcome == outcome


def test_nothing_ran(make):
    assert summarise([], {}).outcome == "empty"
    assert summarise([make(verdict="unsupported")], {}).outcome == "empty"


def test_headline_of_a_failing_run(records, run):
    said = headline(records, run)
    assert said == [
        "NOT CONFORMANT: 2 unexplained failures (1 crash, 1 wrong)",
        "Ran 5 cases in 6 calls: 3 passed, 1 failed as known, 2 failed unexplained."
        " 2 calls were not made: not claimed.",
        "On cpu: alpha 1.0",
        "On cuda:0 (GPU 9000, sm90): beta 1.0",
        "Known to fail: L1: 1 call of alpha: takes log2 (owner/repo#12)",
        "Did not run: gamma on cuda:0: no module named gamma",
    ]


def test_headline_of_a_conformant_run(make):
    assert headline([make()], {})[0] == "CONFORMANT: no unexplained failure in 1 call"


@pytest.mark.parametrize(
    ("planned", "said"), [(3, "2 of 3 planned cases were reached"), (1, "2 cases were reached")]
)  # ledger witnesses are in no plan
def test_headline_of_a_run_that_the_harness_ended(make, planned, said):
    first = make()
    run = {"complete": False, "plan": {"cases": planned}}
    second = make(case=first.case.replace("seed=", "seed=1"))
    assert any(said in line for line in headline([first, second], run))


def test_headline_of_a_run_that_stopped(make):
    run = {"complete": False, "stopped": "budget", "pairs": {"planned": 2000, "settled": 1}}
    first, second, *_ = headline([make()], run)
    assert first == "INCOMPLETE: no unexplained failure so far"
    assert second.startswith("The run stopped before its end (budget): 1 of 2,000 (case, backend) pairs were settled;")


def test_what_a_slow_backend_leaves_out_is_told(make):
    run = {"left_out": [{"backend": "slow", "device": "cpu", "cases": 40}]}
    assert "Ran in part: slow on cpu: 40 cases of the plan left out, beyond its share" in headline([make()], run)


def test_headline_is_plain_text_whatever_the_records_hold(make):
    hostile = make(backend="evil\x1b[31m\nsecond line", verdict="wrong", message="\x00")
    said = headline([hostile], {"problems": ["\x1b]0;title\x07"], "not_run": [{"reason": None}, "no mapping"]})
    assert all(line.isprintable() for line in said)


def test_the_order_of_records_does_not_matter(records):
    shuffled = random.Random(5).sample(records, len(records))
    assert order(shuffled) == order(records)


def test_equal_places_are_ordered_too(make):
    one, two = make(message="a"), make(message="b")
    assert order([one, two]) == order([two, one])


def test_parts_are_ordered_as_they_condition_each_other(make):
    parts = ["property:rerun", "output", "weights", "payload", "selection", "scales", "call"]
    found = [record.part for record in order(make(part=part) for part in parts)]
    assert found == ["call", "scales", "selection", "weights", "payload", "output", "property:rerun"]
