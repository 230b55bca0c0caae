"""The command line with real workers: what a user or a CI job sees."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.cli import main
from conformance.journal import read_records

ROOT = Path(__file__).parent.parent.parent
PLUGINS = Path(__file__).with_name("plugins")
GOOD, HOSTILE = ("--plugin", str(PLUGINS / "good.py")), ("--plugin", str(PLUGINS / "hostile.py"))
NEAREST = ("--operation", "ue8m0", "--format", "nearest")
CASE = "ue8m0 nearest v=1 from=scale n=64 values=wide seed=5"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "conformance", *words]


def test_the_parent_imports_no_torch() -> None:
    code = "import sys, conformance.cli, conformance.runs, conformance.repro, conformance.listing, reports.build\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_wrong_words_are_named_without_torch_and_without_a_worker(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    taken = f"--out={tmp_path / 'file'}"
    wrong = {
        "run --backend torhc": "unknown backend 'torhc' (do you mean 'torch'?); known: ",
        "run --operation quantise": "unknown operation 'quantise' (do you mean 'quantize'?); known: ",
        "run --format nothing": "unknown format 'nothing'; known: ",
        "run --device tpu": "unknown device 'tpu'; known: cpu",
        "run --judge cuda:9": "--judge: unknown device 'cuda:9'; known: cpu",
        "run --resume DIR": "--resume takes no value, 'DIR' follows it; it goes on with the run in",
        "run --no-ledger my.toml": "--no-ledger takes no value, 'my.toml' follows it",
        "run stray": "Got unexpected extra argument",
        f"run {taken}": f"--out {tmp_path / 'file'}: nothing can be written there (File exists)",
        "fuzz --backend nosuch": "unknown backend 'nosuch'; known: ",
        "fuzz --format nothing": "unknown format 'nothing'; known: ",
        "probe --backend nosuch": "unknown backend 'nosuch'; known: ",
        "probe --operation moe": "nothing to probe in operation 'moe'; known: ",
        "probe --format nothing": "unknown format 'nothing'; known: ",
        "compare torch nosuch": "unknown backend 'nosuch'; known: ",
        "compare torch torch_bf16 --operation x": "unknown operation 'x'; known: ",
        f"repro '{CASE}' --backend nosuch": "unknown backend 'nosuch'; known: ",
        "gating --library nosuch": "--library 'nosuch' is none of ",
        f"gating {taken}": f"--out {tmp_path / 'file'}: nothing can be written there",
        "power --area nosuch": "unknown area 'nosuch'; known: ",
        "power --family nosuch": "unknown family 'nosuch'; there are ",
        "replay --backend nosuch": "unknown backend 'nosuch'; known: ",
        "replay --method nosuch": "unknown method 'nosuch'; known: ",
    }
    code = """
import contextlib, io, json, shlex, sys
from conformance import process
from conformance.cli import main
process.Worker.__init__ = None
said = {}
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        said[words] = [main(shlex.split(words)), stream.getvalue(), "torch" in sys.modules]
print(json.dumps(said))
"""
    script = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(
        script, input=json.dumps(list(wrong)), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    for words, (exit_code, message, torch) in json.loads(done.stdout).items():
        assert (words, exit_code, message.count("\n"), torch) == (words, 2, 1, False)
        assert message.startswith(f"conformance: {wrong[words]}")


def test_a_plugin_that_is_right_conforms(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ("run", *NEAREST, *GOOD, "--backend", "good", "--cases", "12", "--jobs", "2", "--out", str(out))
    assert main(words) == 0
    records = read_records(out / "records.jsonl")
    assert {item.verdict for item in records} <= {"pass", "unsupported"}
    assert sum(item.verdict == "pass" for item in records) >= 8
    assert all(len(item.input_sha256) == 64 for item in records if item.verdict == "pass")
    assert "CONFORMANT" in capfd.readouterr().out


def test_a_plugin_that_crashes_is_named_and_the_rest_still_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ("run", *GOOD, *HOSTILE, "--backend", "good", "--backend", "segfault", "--case", CASE, "--out", str(out))
    assert main(words) == 1
    verdicts = {item.backend: (item.part, item.verdict, item.message) for item in read_records(out / "records.jsonl")}
    assert verdicts["good"][:2] == ("scales", "pass")
    assert verdicts["segfault"][:2] == ("call", "crash")
    assert verdicts["segfault"][2].startswith("reproduced alone: killed by SIGSEGV")
    assert f"nox -s repro -- '{CASE}' --backend segfault --plugin" in capfd.readouterr().out


def test_repro_shows_the_elements_that_differ(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["repro", CASE, *HOSTILE, "--backend", "zeros"]) == 1
    lines = capfd.readouterr().out.splitlines()
    digest = next(line.split()[-1] for line in lines if line.startswith("inputs"))
    assert any(line.startswith("scales: wrong") for line in lines)
    assert any(line.startswith("    [") and "actual" in line and "admissible" in line for line in lines)
    assert main(["repro", CASE, *GOOD, "--backend", "good", "--expect-sha256", digest]) == 0


@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        ("raise RuntimeError('no\\nluck')\n", "plugin mine.py: RuntimeError: no luck"),
        ("", "plugin mine.py: offers no function backends()"),
        ("def backends(): return [3]\n", "plugin mine.py: int is no Backend"),
        ("def backends(): return []\n", "plugin mine.py: backends() yields no backend"),
        pytest.param(
            f"import sys\nsys.modules['conformance.worker'] = None\n{(PLUGINS / 'good.py').read_text()}",
            "plugin mine.py: ModuleNotFoundError: ",
            id="hides a module of ours",
        ),
    ],
)
def test_a_plugin_that_does_not_load_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, fragment: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    words = ("run", "--plugin", str(tmp_path / "mine.py"), "--backend", "mine", "--out", str(tmp_path / "out"))
    assert main(words) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"conformance: {fragment}")
    assert said.err.count("\n") == 1


def test_two_backends_of_one_name_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "copy.py").write_text((PLUGINS / "good.py").read_text())
    words = ("run", *GOOD, "--plugin", str(tmp_path / "copy.py"), "--backend", "good", "--out", str(tmp_path / "out"))
    assert main(words) == 2
    line = "conformance: two backends are named 'good': plugin good.py and plugin copy.py\n"
    assert capfd.readouterr().err == line


def test_ctrl_c_in_the_middle_of_a_hang(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("run", *HOSTILE, "--backend", "sleep", "--backend", "zeros", "--case", CASE, "--out", str(out))
    process = subprocess.Popen(command(*words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (out / "records.jsonl").exists() or '"zeros"' not in (out / "records.jsonl").read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped (interrupted) after 1 of 2" in said
    assert json.loads((out / "run.json").read_text())["complete"] is False
    assert {item.backend for item in read_records(out / "records.jsonl")} == {"zeros"}
    assert (out / "report.md").exists()


def test_an_encoding_that_lacks_a_character_ends_no_command(tmp_path: Path) -> None:
    text = (PLUGINS / "good.py").read_text().replace('return inputs["x"]', "raise ValueError('\u6f22')")
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    words = ("repro", CASE, "--plugin", str(tmp_path / "mine.py"), "--backend", "good")
    ran = subprocess.run(
        command(*words), cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (ran.returncode, ran.stderr) == (1, "")
    assert "call: error, ValueError: \\u6f22 (in prepare, mine.py:" in ran.stdout


def test_a_full_disk_is_one_line_and_keeps_what_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("conformance.journal.Journal.write", full)
    assert main(("run", *GOOD, "--backend", "good", "--case", CASE, "--out", str(tmp_path / "out"))) == 2
    assert capfd.readouterr().err == (
        "conformance: cannot write: No space left on device; what was written stays, and a run goes on with --resume\n"
    )
    assert json.loads((tmp_path / "out/run.json").read_text())["complete"] is False
    assert not (tmp_path / "out/report.md").exists()


def test_a_full_pipe_end_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(command("backends", "--help"), cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("conformance: cannot write: No space left on device")


def test_the_version_names_the_commit_and_python(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    said = capfd.readouterr()
    assert re.fullmatch(
        r"blockscale-conformance [\w. ]+(, commit [0-9a-f]{40}(\+changes)?)?, Python 3\.\d+\.\S+\n", said.out
    )
    assert said.err == ""


def test_a_message_stays_short_and_printable(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plugin", "\x1b[31m" + "x" * 5000]) == 2
    said = capfd.readouterr().err
    assert said.startswith(r"conformance: --plugin \x1b[31mxxx")
    assert len(said) < 2100
    assert said.endswith("characters)\n")


def test_a_project_s_own_packages_of_these_names_are_not_taken_for_ours(tmp_path: Path) -> None:
    for name in ("fuzz", "references", "reports"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('another project')\n")
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ("run", *GOOD, "--backend", "good", "--case", CASE, "--shrink", "0s")
    ran = subprocess.run(command(*words), cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "out/conformance/report.html").exists()


def test_brackets_in_what_a_backend_says_of_itself_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.discover.builtin_sources", list)
    monkeypatch.setenv("COLUMNS", "400")  # a long path beside it would break the line
    text = (PLUGINS / "good.py").read_text().replace('"1.0"', '"1[/i]"')
    (tmp_path / "mine.py").write_text(text.replace('SOURCE = "tests', 'SOURCE = "a[/b] [red] tests'))
    assert main(["backends", "--plugin", str(tmp_path / "mine.py")]) == 0
    said = capfd.readouterr().out
    assert "good 1[/i] on cpu" in said
    assert "a[/b] [red] tests" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_backends_start_is_one_line(tmp_path: Path, number: int) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "slow.py").write_text(f"import pathlib, time\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(600)\n")
    words = ("run", "--plugin", str(tmp_path / "slow.py"), "--backend", "slow", "--out", str(tmp_path / "out"))
    process = subprocess.Popen(
        command(*words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not mark.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "conformance: interrupted\n")
