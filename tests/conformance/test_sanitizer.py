"""The case of a crash under compute-sanitizer, which a script stands in for."""

import sys
from pathlib import Path

from conformance import sanitizer
from reports.record import Record

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at beyond_the_end(int *)+0x30
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f0000000000 is out of bounds
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""


def crash(**changes) -> Record:
    fields = {
        "run": "r",
        "case": "ue8m0 nearest v=1 from=scale n=1 values=boundary seed=0",
        "id": "0123456789abcdef",
        "input_sha256": "",
        "backend": "wild",
        "version": "1",
        "interpreter": "",
        "device": "cuda:0",
        "sm": "90",
        "options": "graph=replay",
        "recipe": "",
        "part": "call",
        "verdict": "crash",
    }
    return Record(**{**fields, **changes})


def install(monkeypatch, folder: Path) -> None:
    tool = folder / sanitizer.TOOL
    code = "import pathlib, sys; words = sys.argv[1:]; log = pathlib.Path(words[words.index('--log-file') + 1])\n"
    code += f"log.write_text({LOG!r} + '\\n'.join(words))\n"
    tool.write_text(f"#!{sys.executable}\n{code}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_first_error_and_its_kernel_are_named(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)
    [line] = sanitizer.after_crashes([crash(), crash(id="f" * 16)], tmp_path / "out", ("wild.py",))
    assert "wild on cuda:0" in line
    assert "Invalid __global__ write of size 4 bytes at beyond_the_end(int *)+0x30" in line
    log = tmp_path / "out" / "sanitizer" / "wild-0123456789abcdef.log"
    words = log.read_text().splitlines()
    assert words[words.index("repro") + 1] == crash().case
    assert words[words.index("--option") + 1] == "graph=replay"
    assert words[words.index("--plugin") + 1] == "wild.py"


def test_crashes_on_a_cpu_known_ones_and_other_verdicts_are_left_alone(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)
    others = [crash(device="cpu"), crash(ledger_id="known"), crash(verdict="wrong")]
    assert not list(sanitizer.after_crashes(others, tmp_path, ()))


def test_without_the_tool_nothing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not list(sanitizer.after_crashes([crash()], tmp_path, ()))


def test_a_log_without_an_error_says_so():
    assert sanitizer.found("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == "no error found"
