"""The probe with real workers: what agrees, what differs, and what cannot be probed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from conformance.cli import main

PLUGINS = Path(__file__).with_name("plugins")


def probed(out: Path, *words: str) -> tuple[int, list[dict[str, str]]]:
    code = main(["probe", "--device", "cpu", "--out", str(out), *words])
    path = out / "probe.csv"
    return code, list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []


def test_a_right_encoder_agrees_in_everything(tmp_path: Path) -> None:
    code, lines = probed(tmp_path, "--plugin", str(PLUGINS / "good.py"), "--backend", "good")
    assert code == 0
    assert {line["property"]: line["measured"] for line in lines} == {
        "policy": "nearest",
        "code of zero": "0",
        "code of 2^-128": "0",
        "code of infinity": "255",
        "code of NaN": "255",
        "code of -1.5": "128",
    }
    assert {line["agrees"] for line in lines} == {"yes"}


def test_a_wrong_policy_comes_first_and_gives_exit_code_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = probed(tmp_path, "--backend", "torch", "--operation", "ue8m0", "--format", "ceil")
    assert code == 1
    assert (lines[0]["property"], lines[0]["measured"], lines[0]["declared"], lines[0]["agrees"]) == (
        "policy",
        "nearest",
        "ceil",
        "no",
    )
    assert "2 of 6 properties differ" in capfd.readouterr().out
    assert "| ue8m0 | ceil | torch |" in (tmp_path / "probe.md").read_text(encoding="utf-8").splitlines()[4]


def test_hoppers_model_is_what_its_recipe_says(tmp_path: Path) -> None:
    code, lines = probed(tmp_path, "--backend", "hopper_model", "--format", "fp8_per_tensor", "--operation", "gemm")
    assert code == 0
    measured = {(line["property"], line["measured"]) for line in lines}
    assert {("fraction bits", "13"), ("promotion", "none up to 256"), ("products a step", "32")} <= measured
    assert {line["agrees"] for line in lines} == {"yes"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--operation", "moe"), "nothing to probe in operation 'moe'; known: ue8m0, quantize, gemm"),
        (("--backend", "nobody"), "unknown backend 'nobody'"),
        (("--backend", "ml_dtypes", "--operation", "gemm"), "no case was executed: no backend at hand claims"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert probed(tmp_path, *words)[0] == 2
    error = capfd.readouterr().err
    assert error.startswith(f"conformance: {line}")
    assert error.count("\n") == 1
