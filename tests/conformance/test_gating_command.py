"""The command: tables, files and exit codes, on answers that are given."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from conformance.cli import main
from conformance.gating import command
from conformance.gating.model import Answer, Gap, Gate, Observation, Observed

ROOT = Path(__file__).parent.parent.parent
CLAIMS = """[[support]]
library = "flashinfer"
subject = "R"
variants = ["AxB"]
versions = ""
admits = [100]
refuses = [90]
source = "owner/repo#1"
"""
KNOWN = """[[explained]]
rule = "expected"
library = "flashinfer"
subject = "R"
sms = [90]
versions = ""
reason = "known since"
source = "owner/repo#2"
"""


def row(sm: int, answer: Answer, variant: str = "AxB", detail: str = "") -> Observation:
    gates = (Gate("config", answer, detail),)
    return Observation(library="flashinfer", subject="R", variant=variant, sm=sm, gates=gates)


GOOD = (row(90, "no"), row(100, "yes"))
BAD = (row(90, "yes"), row(100, "yes"))

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command on these observations; further words go to it."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(rows: Sequence[Observation], *words: str, claims: str = CLAIMS, gaps: Sequence[Gap] = ()) -> int:
        file = tmp_path / "claims.toml"
        file.write_text(claims)

        def observe(library: str, sms: Sequence[int], *, subjects: Sequence[str], twins: bool) -> Observed:
            return Observed(library=library, version="0.7.4", observations=tuple(rows), gaps=tuple(gaps))

        monkeypatch.setattr(command, "observe", observe)
        options = ("--library", "flashinfer", "--expected", str(file), "--out", str(tmp_path / "out"))
        return main(["gating", *options, *words])

    return run


def test_agreement_is_0(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(GOOD) == 0
    assert "AGREE: 2 answers, 0 disagreements, 0 known" in capfd.readouterr().out


def test_a_disagreement_is_1_with_the_line_that_shows_it_again(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(BAD) == 1
    out = capfd.readouterr().out
    assert "DISAGREE expected: flashinfer R AxB on SM90: admits where the source says it refuses [owner/repo#1]" in out
    assert "    python -m conformance gating --library flashinfer --subject R --sm 90\n" in out


def test_a_known_disagreement_is_0(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(BAD, claims=CLAIMS + KNOWN) == 0
    assert "[known since]" in capfd.readouterr().out


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_not_observed_counts_with_strict_only(run: Run, strict: bool) -> None:
    words = ["--strict"] * strict
    gap = Gap(library="flashinfer", reason="flashinfer 0.6 is too old")
    assert run((), *words, gaps=[gap]) == strict
    assert run((row(90, "unknown", detail="requires a toolchain"),), *words) == strict  # a claim that nothing meets
    assert run((row(103, "unknown", detail="requires a toolchain"),), *words) == 0  # no claim
    assert run(GOOD, *words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--library", "flashinfr"), "'flashinfr' is none of flashinfer, sglang, vllm, torch, triton, backends"),
        (("--device", "cuda:99"), "--device 'cuda:99' is none of"),
        (("--sm", "91"), "--sm 91 is none of 80,"),
        (("--sm", "ninety"), "'ninety' is no architecture"),
        (("--expected", "/nonexistent/claims.toml"), "No such file"),
        (("--bogus",), "No such option"),
    ],
)
def test_usage_errors_are_2_and_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["gating", "--out", str(tmp_path), *words]) == 2
    err = capfd.readouterr().err
    assert err.startswith("conformance: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_claim_about_a_runner_that_is_gone_is_not_observed(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    other = CLAIMS + CLAIMS.replace('"R"', '"Gone"')
    assert run(GOOD, claims=other) == 0
    assert "not observed: flashinfer: Gone: claims speak of it, flashinfer 0.7.4 has none" in capfd.readouterr().out
    assert run(GOOD, "--strict", claims=other) == 1
    assert run(GOOD, "--strict", "--subject", "R", claims=other) == 0


def test_a_subject_that_names_nothing_is_2(run: Run) -> None:
    assert run((), "--subject", "Nobody") == 2


def test_the_csv_holds_every_answer_disagreements_first(run: Run, tmp_path: Path) -> None:
    rows = (*BAD, row(103, "yes"), row(110, "unknown", detail="requires a toolchain"), row(100, "no", "CxD"))
    run(rows, claims=CLAIMS.replace('["AxB"]', '["AxB", "CxD"]'))
    with (tmp_path / "out" / "gating.csv").open(newline="") as file:
        found = [(line["status"], line["variant"], line["sm"], line["expected"]) for line in csv.DictReader(file)]
    assert found == [
        ("disagree", "AxB", "90", "no"),
        ("disagree", "CxD", "100", "yes"),
        ("not observed", "AxB", "110", ""),
        ("agree", "AxB", "100", "yes"),
        ("no claim", "AxB", "103", ""),
    ]


def test_markdown_marks_each_answer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    unknown = [row(sm, "unknown", detail=f"requires a toolchain for SM{sm}") for sm in (107, 110)]
    run((*BAD, row(103, "yes"), *unknown), gaps=[Gap(library="flashinfer", reason="killed", sm=120)])
    text = (tmp_path / "out" / "gating.md").read_text()
    assert "| `R` | AxB | yes ✗ | yes ✓ | yes | ? | ? |" in text
    assert "| flashinfer | R | SM107, SM110 | requires a toolchain for the architecture |" in text
    assert "| flashinfer |  | SM120 | killed |" in text
    assert text.index("## Disagreements") < text.index("## Not observed here") < text.index("## flashinfer 0.7.4")
    assert summary.read_text() == text


def test_foreign_text_cannot_break_the_page(run: Run, tmp_path: Path) -> None:
    run((row(90, "error", detail="<script>|x"),))
    page = (tmp_path / "out" / "gating.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in (tmp_path / "out" / "gating.md").read_text().replace("\\<script\\>", "")


def test_the_parent_imports_no_torch() -> None:
    code = "import sys, conformance.gating.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
