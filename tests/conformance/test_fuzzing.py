"""Fuzzing with real workers: what it finds, what it leaves behind, and that one seed gives one search."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conformance import corpus
from conformance.cli import main
from conformance.journal import read_records
from fuzz.case import Case
from fuzz.plan import cornerstones, read_plan

PLUGINS = Path(__file__).with_name("plugins")
NEAREST = ("--operation", "ue8m0", "--format", "nearest")


def fuzz(out: Path, plugin: str, *words: str) -> int:
    name = Path(plugin).stem
    return main(
        ["fuzz", "--plugin", str(PLUGINS / plugin), "--backend", name, "--jobs", "1", "--out", str(out), *words]
    )


def test_a_rare_fault_is_found_and_pasted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--seed", "1", "--budget", "60s", "--fail-fast", "--shrink", "20s")
    assert fuzz(tmp_path / "out", "rare.py", *NEAREST, *words) == 1
    wrong = [item for item in read_records(tmp_path / "out" / "records.jsonl") if item.verdict == "wrong"]
    assert len(wrong) == 1
    assert wrong[0].case not in {case.text for case in cornerstones(("ue8m0", "nearest"))}
    assert f"nox -s repro -- '{wrong[0].case}' --backend rare --plugin" in capfd.readouterr().out
    assert main(["repro", wrong[0].case, "--plugin", str(PLUGINS / "rare.py"), "--backend", "rare"]) == 1
    (failure,) = json.loads((tmp_path / "out" / "run.json").read_text())["failures"]
    assert (failure["case"], failure["differing"], failure["elements"]) == (wrong[0].case, 1, 1)
    capsule = tmp_path / "out" / failure["capsule"]
    assert main(["repro", str(capsule), "--plugin", str(PLUGINS / "rare.py")]) == 1


def test_kept_cases_are_tried_first(tmp_path: Path) -> None:
    kept = [f"ue8m0 nearest v=1 from=scale n=64 values=uniform_bits seed={seed}" for seed in range(3)]
    for case in kept:
        corpus.write(tmp_path / "corpus", corpus.Entry(case=case, backend="rare", verdict=case[-1], part="scales"))
    assert fuzz(tmp_path / "out", "rare.py", *NEAREST, "--seed", "1", "--budget", "1s", "--shrink", "0s") in (0, 1)
    first = [record.case for record in read_records(tmp_path / "out" / "records.jsonl")][:3]
    assert sorted(first) == kept


def test_a_search_that_ends_with_its_budget_is_whole(tmp_path: Path) -> None:
    assert fuzz(tmp_path / "out", "good.py", "--seed", "3", "--budget", "3s") == 0
    described = json.loads((tmp_path / "out" / "run.json").read_text())
    plan = read_plan(tmp_path / "out" / "plan.txt")
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert (described["complete"], described["seed"], described["exit_code"]) == (True, 3, 0)
    assert described["plan"]["cases"] == len(plan) == len(set(plan)) == len(records) > 10
    assert {item.verdict for item in records} == {"pass"}
    assert {(case.operation, case.variant) for case in plan} == {("ue8m0", "nearest")}, (
        "what nobody claims is not drawn"
    )


def test_one_seed_gives_one_search(tmp_path: Path) -> None:
    found = []
    for name, seed in (("one", "3"), ("two", "3")):
        assert fuzz(tmp_path / name, "good.py", "--seed", seed, "--budget", "1s") == 0
        found.append(read_plan(tmp_path / name / "plan.txt"))
    shared = min(map(len, found))
    assert found[0][:shared] == found[1][:shared]
    assert shared > 10


def test_cases_are_bent_to_what_is_claimed(tmp_path: Path) -> None:
    assert fuzz(tmp_path / "out", "rare.py", "--seed", "7", "--budget", "2s", "--shrink", "0s") in (0, 1)
    plan = read_plan(tmp_path / "out" / "plan.txt")
    assert all(isinstance(case, Case) and case["from"] == "scale" and case.integer("n") <= 64 for case in plan)
    assert len(plan) > 10


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--profile", "weekly"), "--profile 'weekly' is none of ci, dev, nightly"),
        (("--budget", "soon"), "--budget: 'soon' is not a duration"),
        (("--operation", "gemm"), "no case to execute: good claims nothing of what is asked for"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fuzz(tmp_path / "out", "good.py", *words) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"conformance: {line}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["fuzz", "probe", "run"])
def test_a_backend_that_does_not_run_here_says_why(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (PLUGINS / "good.py").read_text()
    (tmp_path / "idle.py").write_text(text.replace("return [Claim(", "return [] and [Claim("))
    words = ("--plugin", str(tmp_path / "idle.py"), "--backend", "good", "--out", str(tmp_path / "out"))
    assert main([command, *words]) == 2
    error = capfd.readouterr().err
    assert re.match(r"conformance: no case (to execute|was executed): good: claims nothing on cpu", error)
