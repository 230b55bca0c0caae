from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance import runs
from conformance.cli import main
from conformance.gating import command
from conformance.gating.model import Gate, Observation, Observed
from conformance.journal import read_records
from conformance.messages import CallReply
from fuzz.case import Case
from references.backend import Claim

PASSING = "ue8m0 ceil v=1 from=scale n=4 values=normal seed=2"
FAILING = "ue8m0 ceil v=1 from=scale n=4 values=normal seed=3"
LEDGER = f"""
[[entry]]
id = "odd-seeds"
backend = "lib"
versions = ""
operation = "ue8m0"
variants = ["ceil", "floor"]
part = "scales"
verdict = "wrong"
message = "off by one"
reason = "odd seeds are off by one"
issue = "owner/repo#7"
witness = "{FAILING}"
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*words: str, cases: str | None = "6", out: Path = tmp_path / "out") -> tuple[int, str, str]:
        selection = ["--operation", "ue8m0", "--format", "ceil", "--format", "floor"]
        count = ["--cases", cases] if cases else []
        code = main(["run", *selection, *count, "--jobs", "2", "--shrink", "0s", "--out", str(out), *words])
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def described(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "run.json").read_text())


def test_a_conformant_run(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"seed 20261130, plan of 12 cases (SHA-256 {described(tmp_path)['plan']['sha256'][:16]}")
    assert lines[1] == "lib 1.5 on cpu: 12 cases to run"
    assert lines[2] == "does not run: gpulib on cpu: ModuleNotFoundError: No module named 'gpulib'"
    assert any(line.startswith("CONFORMANT") for line in lines)
    written = {item.name for item in (tmp_path / "out").iterdir()}
    assert written >= {"records.jsonl", "run.json", "report.md", "report.html", "junit.xml", "results.csv", "plan.txt"}
    assert "launched.jsonl" not in written
    about = described(tmp_path)
    assert (about["complete"], about["exit_code"], about["seed"], about["plan"]["cases"]) == (True, 0, 20261130, 12)
    assert about["backends"][0]["libraries"] == {"torch": "2.13.0"}
    assert about["not_run"][0]["backend"] == "gpulib"
    assert about["hypothesis"]


def test_an_unexplained_failure(run: Run, fakes: Any) -> None:
    fakes.offer(lib=fakes.right, bad=fakes.wrong)
    code, out, _ = run("--case", PASSING, cases=None)
    assert code == 1
    assert "NOT CONFORMANT" in out
    assert f"    nox -s repro -- '{PASSING}' --backend bad\n" in out
    assert "--backend lib" not in out


def test_failures_alike_are_shown_once(run: Run, fakes: Any) -> None:
    fakes.offer(bad=fakes.wrong)
    _, out, _ = run()
    assert out.count("nox -s repro") == 2
    assert out.count("and 5 more like it of ue8m0 ") == 2


def test_a_known_failure(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(lib=fakes.flaky_seed)
    (tmp_path / "ledger.toml").write_text(LEDGER)
    code, out, _ = run("--ledger", str(tmp_path / "ledger.toml"))
    assert code == 0
    assert "known to fail: odd-seeds: lib: odd seeds are off by one (owner/repo#7)" in out
    assert described(tmp_path)["ledger"][0]["witness_verdict"] == "wrong"
    assert FAILING in (tmp_path / "out" / "records.jsonl").read_text()
    code, _, _ = run("--no-ledger", "--case", FAILING, cases=None)
    assert code == 1


def test_a_witness_that_passes_turns_the_run_red(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    (tmp_path / "ledger.toml").write_text(LEDGER)
    code, out, _ = run("--ledger", str(tmp_path / "ledger.toml"))
    line = "ledger odd-seeds: the witness passes: remove the entry or narrow its versions"
    assert code == 1
    assert line in out
    assert described(tmp_path)["problems"] == [line]
    assert line in (tmp_path / "out" / "report.md").read_text().replace("`", "")


def test_entries_of_other_operations_are_left_alone(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    (tmp_path / "ledger.toml").write_text(LEDGER.replace('"ceil", "floor"', '"ceil"'))
    code, _, _ = run("--ledger", str(tmp_path / "ledger.toml"), "--case", PASSING.replace("ceil", "floor"), cases=None)
    assert code == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--backend", "none"), "unknown backend 'none'; known: lib"),
        (("--device", "cuda:7"), "unknown device 'cuda:7'; known: cpu"),
        (("--operation", "gemv"), "unknown operation 'gemv' (do you mean 'gemm'?); known: ue8m0"),
        (("--format", "fp7"), "unknown format 'fp7'; known: "),
        (("--case", "ue8m0 ceil v=1 seed=1"), "case: ue8m0 ceil lacks from, n, values"),
        (("--case", PASSING.replace("n=4", "n=0")), "case: n=0 is not an integer within 1.."),
        (("--case", "quantize mxfp8 v=1 seed=1"), "case: "),
        (("--plan", "/none/plan.txt"), "--plan /none/plan.txt: No such file or directory"),
        (("--case", PASSING, "--plan", "x"), "--case and --plan exclude each other"),
        (("--budget", "soon"), "--budget: 'soon' is not a duration"),
        (("--deadline", "0s"), "--deadline: '0s' is not a duration"),
        (("--memory-limit", "much"), "--memory-limit: 'much' is not a size"),
        (("--ledger", "/none"), "ledger: cannot read /none: No such file or directory"),
        (("--order", "random"), "--order 'random' is neither plan nor reversed"),
        (("--jobs", "0"), "Invalid value for '--jobs'"),
        (("--cases", "0"), "Invalid value for '--cases'"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--resume",), "--resume: "),
        (("--corpus", __file__), f"corpus {__file__}: not a directory"),
        (("--wrong",), "No such option: --wrong"),
    ],
)
def test_bad_input_is_one_line_and_nothing_runs(
    run: Run, tmp_path: Path, fakes: Any, words: tuple[str, ...], line: str
) -> None:
    fakes.offer(lib=fakes.right)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"conformance: {line}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out" / "run.json").exists()


def test_nothing_to_run_is_a_usage_error(run: Run, fakes: Any) -> None:
    fakes.offer()
    code, _, err = run()
    assert code == 2
    assert err.startswith("conformance: no case to execute: gpulib: ModuleNotFoundError")


def test_a_number_of_cases_that_holds_none_of_a_narrow_claim_is_told_from_an_empty_one(
    run: Run, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.offer(lib=fakes.right)
    narrow = Claim(operation="ue8m0", variant="ceil", source="s", where={"n": ("4097",)})
    monkeypatch.setattr(runs.Fleet, "offers", {"lib": (fakes.right, [narrow])})
    code, _, err = run()
    assert code == 2
    assert err.startswith("conformance: no case to execute: lib on cpu: n=")
    assert err.endswith(" is none of 4097; --least 6 adds cases that are claimed\n")
    assert run("--least", "6")[0] == 0


def test_a_plan_that_nobody_claims_is_a_usage_error(run: Run, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    text = "ue8m0 even v=1 from=amax_e4m3 n=4 values=normal seed=1"
    code, _, err = run("--format", "even", "--case", text, cases=None)
    assert (code, err) == (2, "conformance: no case to execute: lib on cpu: no claim for ue8m0 even\n")


def test_an_output_directory_that_cannot_be_used(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    code, _, err = run(out=tmp_path / "mine")
    assert code == 2
    assert "holds thesis.tex, which no run wrote" in err
    code, _, err = run(out=Path("/proc/here"))
    assert (code, err.count("\n")) == (2, 1)


def test_the_order_of_the_plan_does_not_change_the_records(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(lib=fakes.flaky_seed)
    seen = []
    for words in (("--order", "plan"), ("--order", "reversed", "--jobs", "5")):
        run(*words)
        records = read_records(tmp_path / "out" / "records.jsonl")
        seen.append({(item.case, item.part, item.verdict, item.message) for item in records})
    assert seen[0] == seen[1]


def test_a_resumed_run_repeats_no_case_that_is_complete(run: Run, tmp_path: Path, fakes: Any) -> None:
    calls: list[str] = []

    def counted(case: Case) -> CallReply:
        calls.append(case.text)
        return fakes.right(case)

    fakes.offer(lib=counted)
    run()
    whole = {item.case for item in read_records(tmp_path / "out" / "records.jsonl")}
    path = tmp_path / "out" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:40])  # as a killed run leaves it
    about = described(tmp_path)
    (tmp_path / "out" / "run.json").write_text(json.dumps({**about, "complete": False}))
    calls.clear()
    code, _, _ = run("--resume")
    assert code == 0
    assert len(set(calls)) == 8  # four are kept: the fifth was the last to be written
    assert {item.case for item in read_records(path)} == whole
    assert len(read_records(path)) == 12
    assert (described(tmp_path)["complete"], described(tmp_path)["run"]) == (True, about["run"])
    calls.clear()
    run("--resume")
    assert calls == []


@pytest.mark.parametrize(
    ("words", "change", "line"),
    [(("--seed", "5"), {}, "its plan is"), ((), {"version": "1.6"}, "lib on cpu: its version was 1.5, not 1.6")],
)
def test_a_journal_of_another_run_is_not_resumed(
    run: Run, tmp_path: Path, fakes: Any, words: tuple[str, ...], change: dict[str, str], line: str
) -> None:
    fakes.offer(lib=fakes.right)
    run(cases="50")  # more than the cornerstones, which no seed changes
    before = (tmp_path / "out" / "records.jsonl").read_text()
    fakes.offer(lib=fakes.right, **change)
    code, _, err = run("--resume", *words, cases="50")
    assert code == 2
    assert "belongs to another run: " + line in err
    assert (tmp_path / "out" / "records.jsonl").read_text() == before


def test_a_run_that_is_cut_short_says_so(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(bad=fakes.wrong)
    code, out, _ = run("--fail-fast", "--jobs", "1", cases="60")
    assert code == 1
    about = described(tmp_path)
    assert (about["complete"], about["stopped"]) == (False, "fail-fast")
    assert f"stopped (fail-fast) after {about['pairs']['settled']} of 120 (case, backend) pairs" in out


def test_ctrl_c_writes_the_files_and_marks_them_incomplete(run: Run, tmp_path: Path, fakes: Any) -> None:
    def cancelled(case: Case) -> CallReply:
        if case.text == FAILING and not fakes.closed.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            assert fakes.closed.wait(10)
        return fakes.right(case)

    fakes.offer(lib=cancelled)
    code, out, _ = run("--case", PASSING, "--case", FAILING, cases=None)
    assert code == 130
    assert "stopped (interrupted)" in out
    assert described(tmp_path)["complete"] is False
    assert (tmp_path / "out" / "report.md").exists()


def test_ctrl_c_before_anything_was_executed_is_still_an_interrupt(run: Run, tmp_path: Path, fakes: Any) -> None:
    def cancelled(case: Case) -> CallReply:
        if not fakes.closed.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            assert fakes.closed.wait(10)
        return fakes.right(case)

    fakes.offer(lib=cancelled)
    code, out, err = run("--case", PASSING, cases=None)
    assert (code, err) == (130, "")
    assert "interrupted: writing the reports" in out
    assert (tmp_path / "out" / "report.md").exists()


def test_a_failure_of_the_harness_is_exit_3(run: Run, tmp_path: Path, fakes: Any) -> None:
    fakes.offer(lib=lambda case: CallReply(status="ok", input_sha256="0", outputs=fakes.right(case).outputs))
    code, _, err = run()
    assert code == 3
    assert err.startswith("conformance: the harness failed: lib on cpu, 'ue8m0 ")
    assert err.count("\n") == 1
    assert (described(tmp_path)["complete"], described(tmp_path)["exit_code"]) == (False, 3)


def test_a_call_that_cannot_be_judged_costs_neither_the_reports_nor_the_rest(
    run: Run, tmp_path: Path, fakes: Any
) -> None:
    def odd(case: Case) -> CallReply:
        right = fakes.right(case)
        return dataclasses.replace(right, input_sha256="0") if case.text == FAILING else right

    fakes.offer(lib=odd)
    code, out, err = run("--case", PASSING, "--case", FAILING, cases=None)
    assert code == 3
    assert err.startswith(f"conformance: the harness failed: lib on cpu, '{FAILING}': the inputs differ")
    assert "INCOMPLETE: no unexplained failure so far" in out
    assert "(the harness failed on 1 of its calls): 1 of 2 (case, backend) pairs were settled" in out
    about = described(tmp_path)
    assert (about["complete"], about["exit_code"], about["stopped"]) == (
        False,
        3,
        "the harness failed on 1 of its calls",
    )
    assert "INCOMPLETE" in (tmp_path / "out" / "report.md").read_text()
    fakes.offer(lib=fakes.right)
    assert run("--case", PASSING, "--case", FAILING, "--resume", cases=None)[0] == 0


def test_an_unexpected_exception_leaves_its_traceback_in_a_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(runs, "run", broken)
    code, _, err = run()
    assert code == 3
    assert err.startswith("conformance: the harness failed: ZeroDivisionError: oops (traceback in ")
    path = Path(err.rpartition(" in ")[2].strip().removesuffix(")"))
    assert "in broken" in path.read_text()
    path.unlink()


def test_the_reports_are_made_again_from_the_records(
    run: Run, tmp_path: Path, fakes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    fakes.offer(lib=fakes.flaky_seed)
    run()
    before = {name: (tmp_path / "out" / name).read_bytes() for name in ("report.md", "junit.xml", "results.csv")}
    for name in before:
        (tmp_path / "out" / name).unlink()
    assert main(["report", str(tmp_path / "out")]) == 0
    assert {name: (tmp_path / "out" / name).read_bytes() for name in before} == before
    assert main(["report", str(tmp_path)]) == 2
    assert capfd.readouterr().err.startswith("conformance: ")


def test_gates_are_a_section_of_the_reports_and_a_disagreement_is_a_problem(
    run: Run, tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observe(library: str, sms: Sequence[int], **_: Any) -> Observed:
        answers = {sm: "no" if sm < 120 else {120: "yes", 121: other}[sm] for sm in sms}
        rows = [
            Observation(library=library, subject="Runner", variant="AxB", sm=sm, gates=(Gate("config", answer),))
            for sm, answer in answers.items()
        ]
        return Observed(library=library, version="9.9", observations=tuple(rows))

    monkeypatch.setattr(command, "observe", observe)
    fakes.offer(lib=fakes.right)
    other = "yes"
    code, out, _ = run("--gates", "flashinfer")
    assert code == 0
    assert "Architecture gates: AGREE: 10 answers, 0 disagreements" in out
    other = "no"
    code, out, _ = run("--gates", "flashinfer")
    assert code == 1
    assert "DISAGREE same-family: flashinfer Runner AxB on SM120, SM121: SM120 yes, SM121 no" in out
    assert "Problem: architecture gates: 1 disagreement, see gating/gating.md" in out
    page = (tmp_path / "out" / "report.md").read_text()
    assert page.startswith("# ❌ NOT CONFORMANT: 1 problem")
    assert "`python -m conformance gating --library flashinfer --subject Runner --sm 120 --sm 121`" in page
    assert "| `Runner` | AxB | - | - | - | - | - | - | - | - | yes ✗ | - ✗ |" in page
    assert (tmp_path / "out" / "gating" / "gating.csv").exists()
    assert main(["report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.md").read_text() == page
    assert run()[0] == 0  # and without the option nothing of it is left
    assert not (tmp_path / "out" / "gating").exists()


def test_gates_of_no_library_are_a_usage_error(run: Run, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    code, _, err = run("--gates", "flashinfr")
    assert (code, err.count("\n")) == (2, 1)
    assert "--gates 'flashinfr' is none of flashinfer" in err


@pytest.mark.parametrize("there", [True, False])
def test_a_repro_line_says_what_to_type_where_nox_is_not(
    run: Run, tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    if there:
        (tmp_path / "noxfile.py").touch()
    fakes.offer(bad=fakes.wrong)
    _, out, _ = run("--case", PASSING, cases=None)
    assert f"nox -s repro -- '{PASSING}' --backend bad" in out
    assert ("python -m conformance repro takes the same words" in out) is not there
