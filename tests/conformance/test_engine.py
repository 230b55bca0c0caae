from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance import verdicts
from conformance.engine import Engine, Limits, RunResult
from conformance.journal import Journal, key_of
from conformance.ledger import Ledger, load
from conformance.messages import CallReply, Claimed, Description, JudgeReply, Wire
from conformance.oracles import HarnessError, Oracles
from conformance.target import Target
from fuzz.case import Case
from references.backend import Claim
from reports.record import Record

PLAN = [
    Case.parse(f"ue8m0 {policy} v=1 from=scale n={n} values=normal seed={seed}")
    for seed in range(4)
    for policy, n in (("ceil", 4), ("floor", 8))
]
Behaviour = Callable[[Case, str, int], CallReply]


def right(case: Case, poison: str, before: int) -> CallReply:
    data = case.id.encode()[:4]
    return CallReply(
        status="ok", input_sha256=case.id, outputs=(Wire(name="scales", dtype="uint8", shape=(4,), data=data),)
    )


def wrong(case: Case, poison: str, before: int) -> CallReply:
    return replace(right(case, poison, before), outputs=(Wire(name="scales", dtype="uint8", shape=(1,), data=b"!"),))


class FakeWorker:
    started = 0

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.cases, self.closed = behaviour, [], False
        type(self).started += 1

    def call(self, case: str, backend: str, options: Mapping[str, str], deadline: float) -> CallReply:
        assert not self.closed
        if case not in self.cases:
            self.cases.append(case)
        return self.behaviour(Case.parse(case), options["poison"], len(self.cases) - 1)

    def close(self) -> None:
        self.closed = True


class FakeOracle:
    judged: list[str]

    def __init__(self, sha: Callable[[Case], str] = lambda case: case.id) -> None:
        self.sha, self.judged = sha, []

    def judge(self, case: str, recipe: Mapping[str, Any], wires: Sequence[Wire], deadline: float) -> JudgeReply:
        self.judged.append(case)
        good = wires[0].data == Case.parse(case).id.encode()[:4]
        part = {"part": "scales", "verdict": "pass" if good else "wrong", "message": "" if good else "not the id"}
        return JudgeReply(input_sha256=self.sha(Case.parse(case)), parts=[part])

    def close(self) -> None:
        pass


class Silent:
    def start(self, total: int) -> None:
        self.total, self.count = total, 0

    def advance(self, records: Sequence[Record]) -> None:
        self.count += 1

    def finish(self) -> None:
        pass


def target(name: str, behaviour: Behaviour = right, *, claims: Sequence[Claim] | None = None, **fields: Any) -> Target:
    if claims is None:
        claims = [Claim(operation="ue8m0", variant=policy, source="s") for policy in ("ceil", "floor")]
    claimed = [Claimed(claim=item.to_json(), recipe={}, recipe_text="default", claim_text="all") for item in claims]
    description = Description(
        backend=name,
        version="1",
        interpreter="i",
        device="cpu",
        device_name="",
        sm="",
        pace=fields.pop("pace", 1.0),
        claims=claimed,
    )
    return Target(description=description, start=lambda: FakeWorker(behaviour), **fields)


def execute(
    tmp_path: Path,
    targets: Sequence[Target],
    plan: Sequence[Case] = PLAN,
    *,
    oracle: Callable[[], Any] = FakeOracle,
    done: frozenset[Any] = frozenset(),
    before: Callable[[Engine], None] = lambda engine: None,
    progress: Silent | None = None,
    **limits: Any,
) -> tuple[list[Record], RunResult]:
    journal = Journal(tmp_path)
    settings = Limits(**limits)
    oracles = Oracles(oracle, settings.jobs, 1.0)
    engine = Engine("r", targets, oracles, journal, settings, progress or Silent())
    try:
        before(engine)
        result = engine.run(plan, done)
    finally:
        oracles.close()
        journal.close()
    return journal.records, result


def verdict_counts(records: Sequence[Record]) -> dict[str, int]:
    names = [record.verdict for record in records]
    return {name: names.count(name) for name in set(names)}


def test_every_case_of_every_target_is_settled(tmp_path: Path) -> None:
    records, result = execute(tmp_path, [target("a"), target("b", wrong)], jobs=2)
    assert (result.planned, result.settled, result.complete, result.stopped) == (16, 16, True, "")
    assert {(item.backend, item.verdict) for item in records} == {("a", "pass"), ("b", "wrong")}
    assert len(records) == 16


def test_neither_jobs_nor_order_changes_the_records(tmp_path: Path) -> None:
    def moody(case: Case, poison: str, before: int) -> CallReply:
        match case.seed:
            case 1:
                return wrong(case, poison, before)
            case 2:
                return CallReply(status="crash", message="SIGSEGV")
            case 3:
                return CallReply(status="refused", message="no")
        return right(case, poison, before)

    targets = [target("a", moody), target("b", moody), target("c", pace=0.5)]
    seen = []
    for jobs, plan in ((1, PLAN), (4, PLAN), (3, PLAN)):
        records, _ = execute(tmp_path, targets, plan, jobs=jobs)
        seen.append({record.to_line() for record in records})
    backwards, _ = execute(tmp_path, targets[:2], PLAN[::-1], jobs=2)
    assert seen[0] == seen[1] == seen[2]
    assert {record.to_line() for record in backwards} == {line for line in seen[0] if '"backend":"c"' not in line}


def together(count: int) -> Behaviour:
    """Right answers, of which the first ones wait for each other: so many workers must be calling at a time."""
    barrier, first = threading.Barrier(count), set[int]()

    def behaviour(case: Case, poison: str, before: int) -> CallReply:
        if threading.get_ident() not in first:
            first.add(threading.get_ident())
            barrier.wait(30)
        return wrong(case, poison, before) if case.seed == 1 else right(case, poison, before)

    return behaviour


def test_several_workers_share_the_cases_of_a_backend_and_record_the_same(tmp_path: Path) -> None:
    seen = []
    for workers, started in ((1, 1), (3, 3), (100, len(PLAN))):
        FakeWorker.started = 0
        records, result = execute(tmp_path, [target("a", together(started))], jobs=8, workers=workers)
        assert FakeWorker.started == started
        assert (result.planned, result.settled) == (len(PLAN), len(PLAN))
        seen.append(sorted(record.to_line() for record in records))
    assert seen[0] == seen[1] == seen[2]


def test_a_backend_has_workers_by_its_share_of_the_calls(tmp_path: Path) -> None:
    plan = [PLAN[0].replace(seed=seed) for seed in range(2, 34)]
    FakeWorker.started = 0
    targets = [target("many", together(4)), target("few", together(2), most=2)]
    records, result = execute(tmp_path, targets, plan, jobs=8, workers=4)
    assert (result.complete, len(records)) == (True, 34)
    assert FakeWorker.started == 4 + 2  # 4 x 8 jobs by 32 of 34 calls, of which 4 are allowed, and by 2 of 34


def test_what_is_not_claimed_or_done_already_is_no_share_of_the_calls(tmp_path: Path) -> None:
    plan = [PLAN[0].replace(seed=seed) for seed in range(2, 34)]
    narrow = [Claim(operation="ue8m0", variant="ceil", source="s", maxima={"n": 1})]
    FakeWorker.started = 0
    others = [target(f"narrow{number}", claims=narrow) for number in range(30)]
    finished = target("finished")
    done = frozenset(finished.key(case) for case in plan)
    records, _ = execute(tmp_path, [target("busy", together(4)), *others, finished], plan, jobs=4, workers=4, done=done)
    assert FakeWorker.started == 4
    assert sum(record.verdict == "pass" for record in records) == 32


def test_deaths_count_for_all_workers_of_a_backend(tmp_path: Path) -> None:
    plan = [PLAN[0].replace(seed=seed) for seed in range(40)]
    targets = [target("a", lambda *_: CallReply(status="hang"))]
    records, _ = execute(tmp_path, targets, plan, jobs=1, workers=2)
    assert verdict_counts(records)["hang"] <= 6  # the second worker may be in the middle of its call


def test_what_is_not_claimed_is_recorded_and_never_called(tmp_path: Path) -> None:
    claims = [Claim(operation="ue8m0", variant="ceil", source="s", maxima={"n": 2})]
    records, _ = execute(tmp_path, [target("a", lambda *_: pytest.fail("called"), claims=claims)])
    assert {(item.variant, item.verdict, item.message) for item in records} == {
        ("ceil", "unsupported", "n=4 is above 2"),
        ("floor", "unsupported", "no claim for ue8m0 floor"),
    }


def test_progress_counts_the_calls_to_make_and_no_others(tmp_path: Path) -> None:
    claims = [Claim(operation="ue8m0", variant="ceil", source="s", maxima={"n": 1})]
    progress = Silent()
    targets = [target("a"), target("b", claims=claims)]
    done = frozenset([targets[0].key(PLAN[0]), targets[1].key(PLAN[0])])
    execute(tmp_path, targets, done=done, progress=progress)
    claimed = sum(case.variant == "ceil" and case.integer("n") == 1 for case in PLAN)
    resumed = 1 + (PLAN[0].variant == "ceil" and PLAN[0].integer("n") == 1)
    assert progress.total == progress.count == len(PLAN) + claimed - resumed


def test_a_slow_backend_takes_the_first_share_of_each_group(tmp_path: Path) -> None:
    records, result = execute(tmp_path, [target("a", pace=0.3)])
    assert {(item.variant, item.case[-1]) for item in records} == {
        ("ceil", "0"),
        ("floor", "0"),
        ("ceil", "1"),
        ("floor", "1"),
    }
    assert result.left_out == {("a", "cpu"): 4}
    assert result.complete


def test_a_backend_is_called_on_no_more_cases_than_asked(tmp_path: Path) -> None:
    claims = [Claim(operation="ue8m0", variant="ceil", source="s")]
    records, result = execute(tmp_path, [target("a", claims=claims, most=1)])
    assert [item.case for item in records if item.verdict == "pass"] == [PLAN[0].text]
    assert verdict_counts(records)["unsupported"] == 1  # one of the unclaimed says why
    assert result.left_out == {("a", "cpu"): sum(case.variant == "ceil" for case in PLAN) - 1}


def test_a_crash_that_needs_company_is_flaky_and_names_it(tmp_path: Path) -> None:
    def third(case: Case, poison: str, before: int) -> CallReply:
        return CallReply(status="crash", message="SIGSEGV") if before == 2 else right(case, poison, before)

    records, _ = execute(tmp_path, [target("a", third)], PLAN[:4])
    flaky = [item for item in records if item.verdict == "flaky"]
    assert [(item.case, item.message) for item in flaky] == [
        (PLAN[2].text, "crash after 2 other cases, not reproduced alone: SIGSEGV")
    ]
    assert verdict_counts(records) == {"flaky": 1, "pass": 4}


def test_after_five_deaths_the_rest_of_the_group_is_recorded_as_not_run(tmp_path: Path) -> None:
    def ceil_kills(case: Case, poison: str, before: int) -> CallReply:
        return CallReply(status="hang") if case.variant == "ceil" else right(case, poison, before)

    plan = [case.replace(seed=seed) for seed in range(8) for case in PLAN[:2]]
    records, result = execute(tmp_path, [target("a", ceil_kills)], plan)
    assert verdict_counts([item for item in records if item.variant == "ceil"]) == {"hang": 5, "error": 3}
    assert verdict_counts([item for item in records if item.variant == "floor"]) == {"pass": 8}
    assert {item.message for item in records if item.verdict == "error"} == {
        f"not run: {verdicts.MAX_DEATHS} cases of this claim killed the worker"
    }
    assert result.complete


def test_a_worker_that_died_is_replaced_and_others_are_kept(tmp_path: Path) -> None:
    FakeWorker.started = 0
    execute(tmp_path, [target("a")])
    assert FakeWorker.started == 1

    def kills(case: Case, poison: str, before: int) -> CallReply:
        return CallReply(status="crash") if case == PLAN[3] else right(case, poison, before)

    FakeWorker.started = 0
    execute(tmp_path, [target("a", kills)])
    assert FakeWorker.started == 3  # the first, one alone, one for the rest


def test_identical_answers_are_judged_once(tmp_path: Path) -> None:
    oracle = FakeOracle()
    execute(tmp_path, [target("a"), target("b"), target("c", wrong)], oracle=lambda: oracle, jobs=1)
    assert sorted(oracle.judged) == sorted([case.text for case in PLAN] * 2)


@pytest.mark.parametrize(("device", "verdict"), [("cuda:0", "pass"), ("cpu", "oom")])
def test_a_call_that_lacks_a_shared_device_s_memory_is_made_again_alone(
    device: str, verdict: str, tmp_path: Path
) -> None:
    flying: set[str] = set()
    company: list[set[str]] = []
    both = threading.Barrier(2)

    def busy(case: Case, poison: str, before: int) -> CallReply:
        flying.add(case.text)
        if (case, poison) == (PLAN[0], "nan"):
            both.wait(10)
            time.sleep(0.2)  # the other one asks for memory meanwhile
        flying.discard(case.text)
        return right(case, poison, before)

    tried: list[str] = []

    def greedy(case: Case, poison: str, before: int) -> CallReply:
        tried.append(case.text)
        if len(tried) == 1:
            both.wait(10)
            return CallReply(status="oom", message="CUDA out of memory")
        company.append(set(flying))
        return right(case, poison, before)

    targets = [target("busy", busy), target("greedy", greedy, most=1)]
    targets = [replace(item, description=replace(item.description, device=device)) for item in targets]
    records, result = execute(tmp_path, targets, jobs=2)
    assert result.complete
    assert {record.verdict for record in records if record.backend == "busy"} == {"pass"}
    found = [record.verdict for record in records if record.backend == "greedy" and record.case == tried[0]]
    assert found == [verdict]
    if verdict == "pass":
        assert not company[0]


def on_gpu(*targets: Target) -> list[Target]:
    return [replace(item, description=replace(item.description, device="cuda:0")) for item in targets]


def test_a_crash_whose_repetition_lacked_memory_stays_one(tmp_path: Path) -> None:
    """With jobs or without: the repetition is made again, not the crash forgotten."""
    said = iter([CallReply(status="crash", message="SIGSEGV"), CallReply(status="oom", message="CUDA out of memory")])

    def crashing(case: Case, poison: str, before: int) -> CallReply:
        return next(said, None) or right(case, poison, before)

    records, result = execute(tmp_path, on_gpu(target("a", crashing, most=1)), jobs=2)
    assert result.complete
    first = [record for record in records if record.case == records[0].case]
    assert [record.verdict for record in first] == ["flaky", "pass"]
    assert "crash after 0 other cases, not reproduced alone: SIGSEGV" in first[0].message


def test_what_would_be_made_again_when_the_run_ends_is_not_settled(tmp_path: Path) -> None:
    called: list[str] = []

    def greedy(case: Case, poison: str, before: int) -> CallReply:
        called.append(case.text)
        time.sleep(0.3)
        return CallReply(status="oom", message="CUDA out of memory")

    records, result = execute(tmp_path, on_gpu(target("a", greedy)), jobs=2, budget=0.1)
    assert (records, result.settled, result.stopped, len(called)) == ([], 0, "budget", 1)


def test_memory_that_is_lacking_alone_as_well_is_lacking(tmp_path: Path) -> None:
    def greedy(case: Case, poison: str, before: int) -> CallReply:
        return CallReply(status="oom", message="CUDA out of memory")

    records, result = execute(tmp_path, on_gpu(target("one", greedy), target("other", greedy)), jobs=3)
    assert (result.complete, verdict_counts(records)) == (True, {"oom": 16})


def test_inputs_that_differ_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="the inputs differ between the worker"):
        execute(tmp_path, [target("a")], oracle=lambda: FakeOracle(lambda case: "0"))


def test_an_oracle_that_fails_is_replaced_once_and_then_stops_the_run(tmp_path: Path) -> None:
    started = []

    class Broken(FakeOracle):
        def judge(self, *_: Any) -> JudgeReply:
            raise ConnectionError("gone\naway")

    def mend() -> FakeOracle:
        started.append(None)
        return Broken() if len(started) == 1 else FakeOracle()

    records, _ = execute(tmp_path, [target("a")], oracle=mend)
    assert verdict_counts(records) == {"pass": 8}
    with pytest.raises(HarnessError, match=f"the oracle failed on '{PLAN[0].text}': ConnectionError: gone away"):
        execute(tmp_path, [target("a")], oracle=Broken)


def test_a_spoiled_process_is_the_backend_s_crash_if_the_oracle_can_do_what_failed_there(tmp_path: Path) -> None:
    def spoiled(case: Case, poison: str, before: int) -> CallReply:
        return CallReply(status="crash", message="its process is spoiled", suspect=True)

    class Able(FakeOracle):
        def judge(self, case: str, recipe: Any, wires: Sequence[Wire], deadline: float) -> JudgeReply:
            return super().judge(case, recipe, wires, deadline) if wires else JudgeReply(input_sha256="", parts=[])

    class Unable(FakeOracle):
        def judge(self, *_: Any) -> JudgeReply:
            raise ConnectionError("ours")

    records, _ = execute(tmp_path, [target("a"), target("b", spoiled)], oracle=Able)
    assert {record.verdict for record in records if record.backend == "a"} == {"pass"}
    assert {record.verdict for record in records if record.backend == "b"} == {"crash"}
    with pytest.raises(HarnessError, match=r"the oracle failed on .*: ConnectionError: ours"):
        execute(tmp_path, [target("b", spoiled)], oracle=Unable)


def test_a_case_that_the_oracle_cannot_judge_costs_itself_alone(tmp_path: Path) -> None:
    class Odd(FakeOracle):
        def judge(self, case: str, recipe: Any, wires: Sequence[Wire], deadline: float) -> JudgeReply:
            if case == PLAN[2].text:
                raise ConnectionError("odd")
            return super().judge(case, recipe, wires, deadline)

    records, result = execute(tmp_path, [target("a"), target("b")], oracle=Odd)
    assert {(record.case, record.backend) for record in records} == {
        (case.text, name) for case in PLAN if case != PLAN[2] for name in ("a", "b")
    }
    assert (result.planned, result.settled, result.complete, result.stopped) == (16, 14, False, "")
    assert result.unjudged == (f"the oracle failed on '{PLAN[2].text}': ConnectionError: odd",) * 2
    with pytest.raises(HarnessError, match="ConnectionError: odd"):
        result.sure()


def test_an_error_of_ours_is_a_harness_error(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="the engine failed: ZeroDivisionError"):
        execute(tmp_path, [target("a", lambda *_: 1 // 0)])


def test_the_budget_ends_the_run_and_says_how_far_it_came(tmp_path: Path) -> None:
    def slow(case: Case, poison: str, before: int) -> CallReply:
        time.sleep(0.05)
        return right(case, poison, before)

    records, result = execute(tmp_path, [target("a", slow)], budget=0.15)
    assert (result.stopped, result.complete) == ("budget", False)
    assert 1 <= result.settled == len(records) < 8


def test_fail_fast_ends_the_run_at_the_first_unexplained_failure(tmp_path: Path) -> None:
    def slow_wrong(case: Case, poison: str, before: int) -> CallReply:
        time.sleep(0.02)
        return wrong(case, poison, before)

    _, result = execute(tmp_path, [target("a", slow_wrong)], fail_fast=True)
    assert result.stopped == "fail-fast"
    assert result.settled < 8


def test_an_interrupt_keeps_what_is_done_and_records_no_killed_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, reached = threading.Event(), threading.Event()

    class Killable(FakeWorker):
        def close(self) -> None:
            killed.set()

    def hangs(case: Case, poison: str, before: int) -> CallReply:
        if before < 3:
            return right(case, poison, before)
        reached.set()
        assert killed.wait(10)
        return CallReply(status="crash", message="killed")

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        if timeout == 0.2:
            assert reached.wait(10)
            raise KeyboardInterrupt
        join(self, timeout)

    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    subject = replace(target("a"), start=lambda: Killable(hangs))
    records, result = execute(tmp_path, [subject])
    assert result.stopped == "interrupted"
    assert len(records) <= 3
    assert {item.verdict for item in records} <= {"pass"}


def test_what_an_earlier_run_settled_is_not_run_again(tmp_path: Path) -> None:
    records, _ = execute(tmp_path, [target("a")])
    done = frozenset(key_of(record) for record in records[:5])
    again, result = execute(tmp_path, [target("a")], done=done)
    assert len(again) == 3
    assert result.complete
    other, _ = execute(tmp_path, [target("a", options={"tactic": "1"})], done=done)
    assert len(other) == 8


def test_witnesses_come_first_and_explained_failures_carry_their_entry(tmp_path: Path) -> None:
    witness = "ue8m0 floor v=1 from=scale n=9 values=normal seed=77"
    path = tmp_path / "ledger.toml"
    path.write_text(
        f"""[[entry]]
id = "e"
backend = "a"
versions = ""
operation = "ue8m0"
variants = ["floor"]
part = "scales"
verdict = "wrong"
message = "not the id"
reason = "r"
witness = "{witness}"
"""
    )
    subject = target("a", wrong)
    book: Ledger = load(path).narrowed(subject.description, [("ue8m0", "floor")])
    out = tmp_path / "out"
    out.mkdir()
    records, _ = execute(out, [replace(subject, ledger=book)])
    assert records[0].case == witness
    assert len(records) == 9
    assert {(item.variant, item.ledger_id) for item in records} == {("floor", "e"), ("ceil", "")}
    assert book.problems(records) == []


def test_the_records_on_disk_are_the_records(tmp_path: Path) -> None:
    records, _ = execute(tmp_path, [target("a"), target("b")], jobs=3)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [Record.from_line(line) for line in lines] == records
