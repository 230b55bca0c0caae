from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.cli import main
from conformance.messages import CallReply
from fuzz.case import Case

CASE = "ue8m0 ceil v=1 from=scale n=4 values=normal seed=2"
Say = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def repro(capfd: pytest.CaptureFixture[str]) -> Say:
    def repro(*words: str, case: str = CASE, backend: str = "lib") -> tuple[int, list[str], str]:
        code = main(["repro", case, "--backend", backend, *words])
        said = capfd.readouterr()
        return code, said.out.splitlines(), said.err

    return repro


def test_a_case_that_passes(repro: Say, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    code, lines, err = repro()
    assert (code, err) == (0, "")
    assert lines == [
        f"case     {CASE}",
        "backend  lib 1.5 on cpu",
        "with     CPython 3.11.7, torch 2.13.0; torch 2.13.0",
        "recipe   default (file.py)",
        f"inputs   SHA-256 {Case.parse(CASE).id}",
        "scales: pass, headroom 0.5",
    ]


def test_a_case_that_fails_shows_where(repro: Say, fakes: Any) -> None:
    fakes.offer(lib=fakes.wrong)
    code, lines, _ = repro()
    assert code == 1
    assert lines[-2:] == [
        "scales: wrong, headroom inf, off by one",
        "    [2]: actual 0x21, admissible 0x7f; input 1.5 (0x3fc00000)",
    ]


def test_a_case_is_repeated(repro: Say, fakes: Any) -> None:
    calls: list[str] = []

    def sometimes(case: Case) -> CallReply:
        calls.append(case.text)
        return fakes.wrong(case) if len(calls) in (3, 4) else fakes.right(case)

    fakes.offer(lib=sometimes)
    code, lines, _ = repro("--times", "3")
    assert code == 1
    assert len(calls) == 6
    assert lines[-1] == "failed 1 of 3 times (33.3%)"


def test_a_crash_is_repeated_alone(repro: Say, fakes: Any) -> None:
    fakes.offer(lib=lambda case: CallReply(status="crash", message="SIGSEGV"))
    code, lines, _ = repro()
    assert (code, lines[-1]) == (1, "call: crash, reproduced alone: SIGSEGV")


def test_options_reach_the_call_and_are_shown(repro: Say, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    code, lines, _ = repro("--option", "inputs=strided")
    assert code == 0
    assert "options  inputs=strided" in lines


def test_inputs_other_than_expected_are_a_failure_of_the_harness(repro: Say, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    code, _, err = repro("--expect-sha256", "0" * 64)
    assert code == 3
    assert "the inputs hash to " in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--option", "tactic"), "--option 'tactic' is not KEY=VALUE"),
        (("--option", "poison=nan"), "--option 'poison=nan' is not KEY=VALUE"),
        (("--option", "a=1", "--option", "a=2"), "--option 'a=2' is not KEY=VALUE"),
        (("--option", "tactic=3"), "lib has no call option 'tactic' for this case; known: graph, inputs, stream"),
        (("--option", "graph=reply"), "call option graph=reply is none of replay"),
        (("--option", "stream=side"), "call option stream=side: cpu has no streams"),
        (("--expect-sha256", "12"), "--expect-sha256 is not 64 hexadecimal digits"),
        (("--device", "cuda:0"), "unknown device 'cuda:0'; known: cpu"),
        (("--times", "0"), "Invalid value for '--times'"),
        (("--backend", "other"), "unknown backend 'other'; known: lib"),
    ],
)
def test_bad_input_is_one_line(repro: Say, fakes: Any, words: tuple[str, ...], line: str) -> None:
    fakes.offer(lib=fakes.right)
    code, lines, err = repro(*words)
    assert (code, lines) == (2, [])
    assert err.startswith(f"conformance: {line}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("case", ["", "ue8m0", "ue8m0 ceil v=1 from=scale n=4 values=normal seed=02", "\x1b[31m a b c"])
def test_a_malformed_case_is_one_line(repro: Say, fakes: Any, case: str) -> None:
    fakes.offer(lib=fakes.right)
    code, _, err = repro(case=case)
    assert code == 2
    assert err.startswith("conformance: case: ")
    assert "\x1b" not in err


def test_a_case_that_is_not_claimed_is_not_run(repro: Say, fakes: Any) -> None:
    fakes.offer(lib=fakes.right)
    code, _, err = repro(case="ue8m0 even v=1 from=amax_e4m3 n=4 values=normal seed=1")
    assert code == 2
    assert err == "conformance: lib on cpu does not claim this case: no claim for ue8m0 even\n"
