"""The pytest plugin, as its users see it. Most tests run pytest in this process, with made-up backends."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

# pytester forgets what a run has imported, which neither pandas nor our own modules would survive.
import reports.build
import reports.summary  # noqa: F401
from conformance import cli, plugin, plugin_controller, runs  # noqa: F401
from conformance.engine import Engine, Limits
from conformance.journal import read_records
from conformance.ledger import load
from conformance.oracles import Oracles
from conformance.plugin_bench import Bench, Blueprint
from conformance.plugin_checks import checks
from conformance.target import Target
from fuzz.case import Case
from reports.record import Record

pytest_plugins = "pytester"
ROOT = Path(__file__).parent.parent.parent
PLUGINS = Path(__file__).with_name("plugins")
WITNESS = "ue8m0 floor v=1 from=scale n=4 values=normal seed=3"
ENTRY = f"""
[[entry]]
id = "odd-seeds"
backend = "odd"
versions = ""
operation = "ue8m0"
variants = ["floor"]
part = "scales"
verdict = "wrong"
message = "off by one"
reason = "odd seeds are off by one"
issue = "owner/repo#7"
witness = "{WITNESS}"
"""
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def pretend(pytester: pytest.Pytester) -> ModuleType:
    pytester.syspathinsert(PLUGINS)
    return importlib.import_module("pretend")


@pytest.fixture
def run(pytester: pytest.Pytester, pretend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    pytester.path.joinpath("ledger.toml").write_text(ENTRY)

    def run(*words: str, backends: tuple[str, ...] = ("odd",), ledger: bool = False) -> pytest.RunResult:
        chosen = [f"--conformance-backend={name}" for name in backends]
        known = ["--conformance-ledger=ledger.toml"] if ledger else ["--conformance-no-ledger"]
        options = ["--conformance-operation=ue8m0", "--conformance-cases=6", *chosen, *known]
        plugins = ("-p", "pretend", "-p", "conformance.plugin", "--strict-markers")
        return pytester.runpytest_inprocess(
            *plugins, "--pyargs", "conformance.suite", *options, *words, no_reraise_ctrlc=True
        )

    return run


def ids(result: pytest.RunResult, word: str) -> list[str]:
    """What is in brackets on the lines with a word."""
    return [line.partition("[")[2].partition("]")[0] for line in result.outlines if word in line and "::" in line]


def settled(path: Path) -> list[dict[str, object]]:
    """The records without what differs from run to run."""
    records = [replace(record, run="", seconds=0.0) for record in read_records(path / "records.jsonl")]
    return sorted((json.loads(record.to_line()) for record in records), key=str)


def test_one_item_for_each_group_and_target(run: Run) -> None:
    result = run("--collect-only", "-q", backends=("odd", "narrow"), ledger=True)
    assert result.ret == 0
    assert ids(result, "test_conformance") == [
        "ue8m0-ceil-narrow-cpu",
        "ue8m0-floor-narrow-cpu",
        "ledger-odd-seeds",
        "ue8m0-ceil-odd-cpu",
        "ue8m0-floor-odd-cpu",
    ]


def test_the_outcomes(run: Run) -> None:
    result = run("-v", "-rfs", backends=("odd", "narrow"))
    assert result.ret == 1
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    assert ids(result, "PASSED") == ["ue8m0-ceil-narrow-cpu", "ue8m0-ceil-odd-cpu"]
    assert ids(result, "FAILED")[0] == "ue8m0-floor-odd-cpu"
    result.stdout.fnmatch_lines(
        [
            "3 of 6 cases of ue8m0 floor fail unexplained (3 wrong) in odd 1.5 on cpu",
            "wrong: odd on cpu: scales: off by one",
            "    nox -s repro -- 'ue8m0 floor *' --backend odd",
            "*= conformance =*",
            "NOT CONFORMANT: 3 unexplained failures (3 wrong)",
            "FAILED *ue8m0-floor-odd-cpu* - Failed: *",
            "SKIPPED *test_conformance.py:*: not claimed by narrow 1.5 on cpu: no claim for ue8m0 floor",
        ]
    )
    assert not [
        line for line in result.outlines if "traceback" in line.lower() or "plugin.py:" in line or line[:2] == "E "
    ]


def test_known_failures_are_xfailed_with_their_entry(run: Run) -> None:
    result = run("-rx", ledger=True)
    assert result.ret == 0
    result.assert_outcomes(passed=1, xfailed=2)
    reason = "ledger odd-seeds: odd seeds are off by one (owner/repo#7)"
    result.stdout.fnmatch_lines(
        [f"XFAIL *ledger-odd-seeds* - {reason}", f"XFAIL *ue8m0-floor-odd* - {reason}: 4 of 7*"]
    )
    result = run("--runxfail", ledger=True)
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=2)


def test_a_witness_that_passes_fails(run: Run, pytester: pytest.Pytester) -> None:
    run()
    path = pytester.path / "ledger.toml"
    path.write_text(ENTRY.replace("seed=3", "seed=4"))
    result = run("-k", "ledger", ledger=True)
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines(
        ["ledger odd-seeds: the witness passes: remove the entry*", "    nox -s repro -- *seed=4*"]
    )
    # It turns the run red even if the item that would say so is left out.
    result = run("-k", "floor-odd", ledger=True)
    assert result.ret == 1
    result.assert_outcomes(xfailed=1, deselected=2)
    result.stdout.fnmatch_lines(["Problem: ledger odd-seeds: the witness passes*"])


def test_entries_whose_witness_was_not_selected_are_not_listed(run: Run) -> None:
    said = "Known to fail: odd-seeds:*"
    run("-k", "floor-odd", ledger=True).stdout.fnmatch_lines([said])
    result = run("-k", "ceil-odd", ledger=True)
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.no_fnmatch_line(said)


def test_selection_by_keyword_and_marker(run: Run) -> None:
    words = ("--collect-only", "-q")
    assert ids(run(*words, "-k", "ceil and not narrow", backends=("odd", "narrow")), "::") == ["ue8m0-ceil-odd-cpu"]
    assert len(ids(run(*words, "-m", "ue8m0 and cpu"), "::")) == 2
    for marker in ("gpu", "quantize", "dequantize", "scale_layout", "requantize"):
        assert run(*words, "-m", marker).ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result = run("-k", "ceil", "--conformance-out=out")
    assert result.ret == 0
    assert json.loads(Path("out/run.json").read_text())["complete"] is True


def test_last_failed_runs_what_failed(run: Run) -> None:
    run().assert_outcomes(passed=1, failed=1)
    run("--lf").assert_outcomes(failed=1)


def test_the_first_failure_can_end_the_run(run: Run) -> None:
    result = run("-x", "--conformance-out=out", backends=("odd", "right"))
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1)
    about = json.loads(Path("out/run.json").read_text())
    assert (about["complete"], about["stopped"]) == (False, "stopping after 1 failures")
    assert about["pairs"] == {"planned": 24, "settled": 12}


def test_junit(run: Run) -> None:
    run("--junitxml=junit.xml", ledger=True)
    cases = {case.get("name", "")[17:-1]: case for case in ET.parse("junit.xml").iter("testcase")}
    assert sorted(cases) == ["ledger-odd-seeds", "ue8m0-ceil-odd-cpu", "ue8m0-floor-odd-cpu"]
    properties = {item.get("name"): item.get("value") for item in cases["ue8m0-floor-odd-cpu"].iter("property")}
    assert properties == {"cases": "7", "outcome": "known"}
    skipped = cases["ue8m0-floor-odd-cpu"].find("skipped")
    assert skipped is not None
    assert "odd seeds are off by one" in skipped.get("message", "")


def test_the_seed_of_hypothesis_is_the_plan_s(run: Run) -> None:
    def header(*words: str) -> str:
        lines = run("--collect-only", "--conformance-cases=50", *words).outlines
        return next(line for line in lines if line.startswith("conformance: seed"))

    assert header("--hypothesis-seed=7") == header("--conformance-seed=7")
    assert header("--hypothesis-seed=7", "--conformance-seed=8").startswith("conformance: seed 8, ")
    assert header("--hypothesis-seed=7").partition("SHA")[2] != header().partition("SHA")[2]
    assert header(f"--hypothesis-seed={2**100 + 7}") == header("--conformance-seed=7")


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--conformance-backend=nobody", "unknown backend 'nobody'"),
        ("--conformance-operation=nothing", "unknown operation 'nothing'; known: *"),
        ("--conformance-case=ue8m0", "*'ue8m0'*"),
        ("--conformance-cases=0", "--conformance-cases: 0 is less than 1"),
        ("--conformance-seed=-1", "--conformance-seed: -1 is not within 0*"),
        ("--hypothesis-seed=word", "--hypothesis-seed: 'word' is no number*"),
        ("--conformance-deadline=soon", "--conformance-deadline: 'soon' is not a duration*"),
        ("--conformance-memory-limit=big", "--conformance-memory-limit: 'big' is not a size*"),
        ("--conformance-out=full", "--out *full: holds other*"),
    ],
)
def test_usage_errors(run: Run, pytester: pytest.Pytester, word: str, line: str) -> None:
    pytester.mkdir("full").joinpath("other").touch()
    result = run(word)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: conformance: {line}"])


def test_other_usage_errors(run: Run, pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.path.joinpath("ledger.toml").write_text("[[entry]]\n")
    assert run(ledger=True).ret == pytest.ExitCode.USAGE_ERROR
    # pytest would make a directory that follows a blank its rootdir.
    result = run("--conformance-out", str(tmp_path.parent / "elsewhere"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: conformance: write --conformance-out=*elsewhere, without a blank*"])
    assert not (tmp_path.parent / "elsewhere").exists()


def test_nothing_executed_is_not_green(run: Run) -> None:
    result = run("-k", "floor", backends=("narrow", "right"))
    result.assert_outcomes(passed=1, skipped=1, deselected=2)
    assert result.ret == 0
    result = run("-k", "floor-narrow", backends=("narrow", "right"))
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["NOTHING RAN: no case was executed"])
    assert run(f"--conformance-case={WITNESS}", backends=("narrow",)).ret == pytest.ExitCode.USAGE_ERROR


def test_a_failure_of_the_harness_gives_no_verdict(run: Run) -> None:
    result = run("--conformance-out=out", backends=("confused", "right"))
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.stdout.fnmatch_lines(["the harness failed, so that nothing can be said: confused on cpu, *inputs differ*"])
    result.assert_outcomes(failed=1)
    assert json.loads(Path("out/run.json").read_text())["exit_code"] == 3


def test_ctrl_c_keeps_what_is_done(run: Run) -> None:
    result = run("--conformance-out=out", backends=("interrupts",))
    assert result.ret == pytest.ExitCode.INTERRUPTED
    about = json.loads(Path("out/run.json").read_text())
    assert (about["complete"], about["stopped"], about["exit_code"]) == (False, "interrupted", 130)
    assert {item["verdict"] for item in settled(Path("out"))} == {"pass"}
    assert about["pairs"]["settled"] == len(settled(Path("out"))) < 12


def test_a_worker_serves_its_target_until_the_next_one(run: Run, pretend: ModuleType) -> None:
    run(backends=("right", "odd"))
    log = [line for line in pretend.Pretender.log if "oracle" not in line]
    assert log == ["start odd", "close odd", "start right", "close right"]


def test_foreign_tests_are_left_alone(pytester: pytest.Pytester, run: Run, pretend: ModuleType) -> None:
    pytester.makepyfile("def test_mine(): pass")
    result = pytester.runpytest_inprocess("-p", "pretend", "-p", "conformance.plugin", "--conformance-backend=nobody")
    result.assert_outcomes(passed=1)
    assert pretend.PretendFleet.made == 0
    assert not [line for line in result.outlines if line.startswith("conformance:") or "= conformance =" in line]


def test_the_suite_asks_for_its_plugin(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--pyargs", "conformance.suite")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["the suite needs its plugin: python -m pytest -p conformance.plugin*"])


def test_the_suite_can_be_imported(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile("from conformance.suite.test_conformance import *")
    words = ("-p", "pretend", "-p", "conformance.plugin", "--conformance-cases=2", "--conformance-operation=ue8m0")
    result = pytester.runpytest_inprocess(*words, "--conformance-backend=right", "--conformance-no-ledger")
    result.assert_outcomes(passed=2)
    result = pytester.runpytest_inprocess(*words, "--conformance-backend=nobody")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["conformance: unknown backend 'nobody'"])


class Silent:
    def start(self, total: int) -> None: ...
    def advance(self, records: object) -> None: ...
    def finish(self) -> None: ...


class Book:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def launching(self, key: object) -> None: ...
    def write(self, records: list[Record]) -> None:
        self.records += records


@pytest.mark.parametrize("name", ["odd", "deadly", "half", "narrow"])
def test_checks_give_the_records_of_a_whole_run(pretend: ModuleType, tmp_path: Path, name: str) -> None:
    """With the witness first, five deaths in a group at most, and the pace of a slow backend."""
    (tmp_path / "ledger.toml").write_text(ENTRY.replace('"odd"', f'"{name}"'))
    about = pretend.description(name)
    groups = [("ue8m0", "ceil"), ("ue8m0", "floor")]
    ledger = load(tmp_path / "ledger.toml").narrowed(about, groups)
    assert len(ledger.entries) == 1
    target = Target(description=about, start=lambda: pretend.Pretender(name), ledger=ledger)
    plan = [
        Case("ue8m0", v, (("from", "scale"), ("n", "4"), ("values", "normal")), s)
        for s in range(20, 34)
        for _, v in groups
    ]
    oracles = Oracles(lambda: pretend.Pretender("oracle"), 1, 1.0)
    book = Book()
    Engine("r", [target], oracles, book, Limits(jobs=2), Silent()).run(plan)
    blueprint = Blueprint(
        run="r",
        plan=tuple(plan),
        targets=(target,),
        sources=(),
        plugins=(),
        ledger=None,
        logs=None,
        limits=Limits(),
        memory_limit=None,
    )
    bench = Bench(blueprint, lambda: pretend.Pretender("oracle"))
    found = [record for check in checks(plan, [target]) for record in bench.run(check, lambda records: None)]
    bench.close()
    assert {item.to_line() for item in found} == {item.to_line() for item in book.records}
    assert {item.ledger_id for item in found} == ({"", "odd-seeds"} if name == "odd" else {""})
    if name == "deadly":
        # 21, 23, 25, 27 and 29 die, or the witness and the first four of them.
        assert sum("not run" in item.message for item in book.records) == len(range(30, 34)) + len(range(28, 34))


def test_a_crash_that_needs_company_names_it_across_checks(pretend: ModuleType) -> None:
    class Tired(pretend.Pretender):  # type: ignore[name-defined]
        calls = 0

        def call(self, case: str, *rest: object) -> object:
            self.calls += 1
            dead = pretend.CallReply(status="crash", message="SIGSEGV")
            return dead if self.calls == 7 else super().call(case, *rest)

    target = Target(description=pretend.description("right"), start=lambda: Tired("right"))
    plan = [
        Case("ue8m0", v, (("from", "scale"), ("n", "4"), ("values", "normal")), s)
        for s in range(2)
        for v in ("ceil", "floor")
    ]
    blueprint = Blueprint(
        run="r",
        plan=tuple(plan),
        targets=(target,),
        sources=(),
        plugins=(),
        ledger=None,
        logs=None,
        limits=Limits(),
        memory_limit=None,
    )
    bench = Bench(blueprint, lambda: pretend.Pretender("oracle"))
    found = [record for check in checks(plan, [target]) for record in bench.run(check, lambda records: None)]
    bench.close()
    assert [item.message for item in found if item.verdict == "flaky"] == [
        "crash after 3 other cases, not reproduced alone: SIGSEGV"
    ]


def test_a_blueprint_travels_as_json(pretend: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "ledger.toml").write_text(ENTRY)
    plan = (Case.parse(WITNESS), Case.parse(WITNESS.replace("seed=3", "seed=9")))
    about = pretend.description("odd")
    source = pretend.BackendSource(kind="plugin_file", location="/x.py", name="odd", roots=(("a", "/a"),))
    blueprint = Blueprint(
        run="r",
        plan=plan,
        targets=(Target(description=about, start=lambda: None, ledger=load(tmp_path / "ledger.toml")),),
        sources=(source,),
        plugins=("x.py",),
        ledger=tmp_path / "ledger.toml",
        logs=tmp_path,
        limits=Limits(deadline=3.0),
        memory_limit=5,
    )
    again, fleet = Blueprint.from_json(blueprint.to_json())
    fleet.close()
    assert (again.plan, again.sources, again.plugins, again.limits.deadline) == (plan, (source,), ("x.py",), 3.0)
    assert (again.ledger, again.logs, again.memory_limit) == (tmp_path / "ledger.toml", tmp_path, 5)
    assert again.targets[0].description == about
    assert [(c.id, c.cases) for c in again.checks().values()] == [(c.id, c.cases) for c in blueprint.checks().values()]
    assert list(again.checks()) == ["ledger-odd-seeds", "ue8m0-floor-odd-cpu"]


def test_under_xdist(pytester: pytest.Pytester, run: Run, pretend: ModuleType) -> None:
    pytester.path.joinpath("ledger.toml").write_text(ENTRY)
    words = "-p pretend -p conformance.plugin --strict-markers --pyargs conformance.suite --conformance-operation=ue8m0"
    words += " --conformance-cases=6 --conformance-backend=odd --conformance-backend=narrow -v"
    run("--conformance-out=one", backends=("odd", "narrow"), ledger=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PLUGINS), str(ROOT)])}
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *words.split(),
            "-n2",
            "--conformance-ledger=ledger.toml",
            "--conformance-out=two",
        ],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed, 1 skipped, 2 xfailed" in result.stdout
    assert "test_conformance.py::test_conformance[ue8m0-ceil-odd-cpu]" in result.stdout
    assert settled(Path("one")) == settled(Path("two"))
    assert len(settled(Path("two"))) == 25
    about = json.loads(Path("two/run.json").read_text())
    assert (about["complete"], about["jobs"], about["exit_code"]) == (True, 2, 0)
    assert Path("two/report.md").exists()


def test_real_workers(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are those of the command line, what fails is made smaller, and torch is imported for that alone."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    pytester.makepyfile(
        spy="""
        import os, pathlib, sys
        import pytest
        @pytest.hookimpl(tryfirst=True)
        def pytest_sessionfinish():
            pathlib.Path(f"torch-{os.getpid()}").write_text(str("torch" in sys.modules))
        """
    )
    options = [("backend", "thirds"), ("operation", "ue8m0"), ("cases", "8"), ("plugin", str(PLUGINS / "thirds.py"))]
    words = [f"--conformance-{name}={value}" for name, value in options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(pytester.path), str(ROOT)])}
    start = [sys.executable, "-m", "pytest", "-p", "spy", "-p", "conformance.plugin", "--pyargs", "conformance.suite"]
    result = subprocess.run(
        [*start, *words, "-n2", "--conformance-out=two", "--conformance-shrink=20s"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed, 1 passed" in result.stdout
    assert f"--backend thirds --plugin {PLUGINS / 'thirds.py'}" in result.stdout
    assert [path.read_text() for path in Path().glob("torch-*")] == ["False"] * 3
    selection = [word for name, value in options for word in (f"--{name}", value)]
    assert cli.main(["run", *selection, "--out", "command", "--jobs", "1", "--corpus", "none", "--shrink", "0s"]) == 1
    assert settled(Path("two")) == settled(Path("command"))
    assert {item["verdict"] for item in settled(Path("two"))} == {"pass", "wrong", "unsupported"}
    assert "conformance: shrinking 1 failure, at most 20 s" in result.stdout
    (failure,) = json.loads(Path("two/run.json").read_text())["failures"]
    assert (failure["differing"], failure["elements"], failure["calls"] > 0) == (0, 1, True)
    assert f"{Path('two').absolute() / failure['capsule']}" in result.stdout
    assert cli.main(["repro", f"two/{failure['capsule']}", "--plugin", str(PLUGINS / "thirds.py")]) == 1
