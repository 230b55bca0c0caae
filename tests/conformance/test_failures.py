"""What a run keeps of failures, with real workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import corpus, runs
from conformance.cli import main
from conformance.corpus import CorpusError, Entry
from conformance.discover import UsageError
from conformance.subjects import subjects
from fuzz.case import Case, CaseError

CASE = "dequantize mxfp8 v=1 block=1x32 k=96 m=2 out=fp32 scale=ue8m0 values=nonfinite seed=5"
BACKEND = "mutant_e8m0-nan-becomes-inf"
PLUGIN = ("--plugin", "conformance.mutant_backends")
BAD = """
import os, time
from references.backend import Claim
from references.recipes import Recipe


class Bad:
    name = "bad"

    def version(self):
        return "1"

    def claims(self, device):
        return [Claim(operation="scale_layout", variant="k_major", source="here", where={"direction": ("pack",)})]

    def recipe(self, claim):
        return Recipe(source="here")

    def prepare(self, case, inputs, options):
        return inputs["scales"]

    def run(self, prepared, out):
        if prepared.shape[0] > 2:
            os._exit(11)
        return {"scales": prepared.t().contiguous()}


def backends():
    return [Bad()]
"""


def test_a_failure_becomes_a_capsule_that_fails_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "run"
    words = ["--backend", BACKEND, *PLUGIN, "--case", CASE, "--jobs", "1", "--out", str(out)]
    assert main(["run", *words, "--shrink", "20s"]) == 1
    run = json.loads((out / "run.json").read_text())
    (failure,) = run["failures"]
    assert failure["case"] == CASE
    assert failure["differing"] <= 2
    (capsule,) = (out / "capsules").glob("*.json")
    said = capfd.readouterr().out
    assert f"nox -s repro -- '{capsule}'" in said
    assert f"corpus {tmp_path / 'out' / 'corpus'}: 1 new case, which later runs replay first (--corpus)\n" in said
    assert main(["repro", str(capsule)]) == 1
    assert "output: wrong" in capfd.readouterr().out
    (of_run,), (of_id,) = subjects(str(out / "run.json"), out), subjects(Case.parse(CASE).id, out)
    assert of_run.capsule is not None
    assert of_run.capsule.id == capsule.stem
    assert (of_id.case, of_id.backend, of_id.plugins) == (CASE, BACKEND, ("conformance.mutant_backends",))
    (kept,) = corpus.read(tmp_path / "out" / "corpus")
    assert (kept.backend, kept.verdict, kept.part) == (BACKEND, "wrong", "output")
    assert kept.case == failure["smallest"]


def test_the_run_json_alone_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    item = {"case": CASE, "backend": BACKEND, "device": "cpu", "options": "graph=1", "input_sha256": "", "capsule": "x"}
    path.write_text(json.dumps({"tool": "blockscale-conformance", "plugins": ["a.py"], "failures": [item]}))
    (found,) = subjects(str(path), tmp_path)
    assert (found.case, found.backend, found.device, found.options) == (CASE, BACKEND, "cpu", {"graph": "1"})
    assert found.plugins == ("a.py",)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"failures": [{"case": "x"}]}, "case: expected"),
        ({"failures": [{"case": CASE, "options": "--evil"}]}, "'--evil' are no options"),
        ({"failures": {}}, "failures is no list"),
        ({"failures": []}, "lists no unexplained failure"),
        ({"tool": "other"}, "not written as a capsule"),
    ],
)
def test_an_odd_run_json_is_one_line(change: dict[str, object], line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"tool": "blockscale-conformance", "failures": [], **change}))
    with pytest.raises((UsageError, CaseError), match=line):
        subjects(str(path), tmp_path)


def test_a_crash_shrinks_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "bad.py"
    plugin.write_text(BAD)
    case = "scale_layout k_major v=1 cols=1 direction=pack rows=4 values=index seed=0"
    words = ["--backend", "bad", "--plugin", str(plugin), "--shrink", "--budget", "4s"]
    script = tmp_path / "crash.py"
    assert main(["repro", case, *words, "--script", str(script)]) == 1
    said = capfd.readouterr().out
    assert "shrunk   scale_layout k_major v=1 cols=1 direction=pack rows=" in said
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 11
    # A case alone fails again on another machine as well: its capsule has the hash that no answer told.
    assert main(["repro", case, *words[:4], "--capsule", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*.json")
    assert main(["repro", str(path), *words[2:4]]) == 1


def test_a_hang_shrinks_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each candidate that hangs costs its deadline twice and a new process; one is enough for a simpler case."""
    plugin = tmp_path / "bad.py"
    plugin.write_text(BAD.replace("os._exit(11)", "time.sleep(600)"))
    case = "scale_layout k_major v=1 cols=2 direction=pack rows=9 values=index seed=3"
    words = ["--backend", "bad", "--plugin", str(plugin), "--deadline", "1s"]
    capsules = tmp_path / "capsules"
    assert main(["repro", case, *words, "--shrink", "--budget", "8s", "--capsule", str(capsules)]) == 1
    said = capfd.readouterr().out
    assert "call: hang" in said
    (path,) = capsules.glob("*.json")
    held = json.loads(path.read_text())
    assert (held["verdict"], held["part"], held["origin"]) == ("hang", "call", case)
    small = Case.parse(held["case"])
    assert 3 <= small.integer("rows") <= 9
    assert (small.seed, small != Case.parse(case)) == (0, True)
    assert main(["repro", str(path), *words[2:]]) == 1
    assert "call: hang" in capfd.readouterr().out


def test_one_cause_is_kept_once(tmp_path: Path) -> None:
    first = Entry(case=CASE, backend="lib", verdict="wrong", part="output")
    again = Entry(case=CASE.replace("seed=5", "seed=6"), backend="lib", verdict="wrong", part="output")
    assert corpus.write(tmp_path, first) == corpus.write(tmp_path, again)
    assert corpus.read(tmp_path) == [first]
    assert corpus.write(tmp_path, Entry(case=CASE, backend="other", verdict="wrong", part="output")).exists()
    assert len(corpus.read(tmp_path)) == 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"version": 2}, "not of format"),
        ({"case": "ue8m0"}, "case: expected"),
        ({"devices": ["tpu"]}, "devices is no list"),
        ({"run": "x"}, "'run' is unknown or missing"),
        ({"source": "\x1b[31m"}, "no line of text"),
    ],
)
def test_odd_entries_are_one_line(change: dict[str, object], line: str, tmp_path: Path) -> None:
    path = corpus.write(tmp_path, Entry(case=CASE))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CorpusError, match=line):
        corpus.read(tmp_path)


def test_the_shipped_cases_are_those_of_the_public_seeds() -> None:
    entries = [*corpus.read(corpus.SHIPPED), *corpus.read(corpus.SHIPPED / "full")]
    seeds = {Case.parse(entry.case).seed for entry in entries}
    assert seeds == {100, 900013, 900017, 900018, 900019, 900020}
    assert all(entry.source.startswith("flashinfer-ai/flashinfer#") for entry in entries)
    full = [Case.parse(entry.case) for entry in corpus.read(corpus.SHIPPED / "full")]
    assert {(case.seed, case["tokens"], case["hidden"], case["intermediate"], case["experts"]) for case in full} >= {
        (100, "127", "3072", "1024", "32"),
        (900013, "256", "2048", "1024", "16"),
        (900017, "128", "1024", "512", "16"),
    }


def test_a_corpus_that_cannot_be_written_is_said_and_costs_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    listed = [{"capsule": ""}, {"capsule": "x", "case": CASE, "smallest": CASE, "backend": "b", "device": "cpu"}]
    listed[1] |= {"verdict": "wrong", "part": "scales", "kind": "", "stage": "", "text": CASE}
    said: list[str] = []
    corpus.keep(tmp_path / "file" / "corpus", listed, said.append)
    assert said == [f"corpus {tmp_path / 'file' / 'corpus'}: nothing can be kept there (Not a directory)"]


def test_a_cause_that_is_kept_already_is_not_told_again(tmp_path: Path) -> None:
    item = {"capsule": "x", "case": CASE, "smallest": CASE, "backend": "b", "device": "cpu"}
    item |= {"verdict": "wrong", "part": "scales", "kind": "", "stage": "", "text": CASE}
    said: list[str] = []
    for _ in range(2):
        corpus.keep(tmp_path / "corpus", [item, {**item, "backend": "c"}], said.append)
    assert said == [f"corpus {tmp_path / 'corpus'}: 2 new cases, which later runs replay first (--corpus)"]


def test_a_failure_that_could_not_be_made_smaller_says_why() -> None:
    item = {"capsule": "", "backend": "b", "part": "call", "verdict": "flaky", "note": ""}
    assert list(runs.kept_lines([item])) == []
    assert list(runs.kept_lines([{**item, "note": "does not fail when it is called again by itself"}])) == [
        "not made smaller: b: call flaky: does not fail when it is called again by itself"
    ]
