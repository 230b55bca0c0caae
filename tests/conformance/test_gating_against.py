"""Two versions of a library: what vanishes, what appears, what a published claim explains, and what cannot be had."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from conformance import environments
from conformance.discover import UsageError
from conformance.gating import against, command
from conformance.gating.expected import Expected, Support
from conformance.gating.model import Answer, Finding, Gap, Gate, Observation, Observed

PAIR = ("0.7.2", "0.7.4")


def observed(version: str, **answers: Answer) -> Observed:
    """answers: such as ``R100="yes"``, subject and architecture."""
    rows = tuple(
        Observation(library="flashinfer", subject=name[0], variant="AxB", sm=int(name[1:]), gates=(Gate("g", answer),))
        for name, answer in answers.items()
    )
    return Observed(library="flashinfer", version=version, observations=rows)


def changes(old: Observed, new: Observed, expected: Expected | None = None) -> list[Finding]:
    return against.changes(old, new, expected or Expected(), "flashinfer==0.7.2")


def claim(versions: str, admits: set[int], refuses: set[int]) -> Support:
    return Support(
        library="flashinfer",
        subject="R",
        variants=("AxB",),
        versions=SpecifierSet(versions),
        admits=frozenset(admits),
        refuses=frozenset(refuses),
        facts=(),
        without=(),
        source="owner/repo#1",
    )


def test_what_is_the_same_or_cannot_be_told_is_no_change() -> None:
    old = observed("0.7.2", R90="no", R100="yes", R103="unknown", R120="error")
    new = observed("0.7.4", R90="no", R100="yes", R103="yes", R120="no")
    assert changes(old, new) == []


def test_claims_vanish_and_appear() -> None:
    old = observed("0.7.2", R90="yes", R100="yes", R103="no", S90="yes")
    new = observed("0.7.4", R90="no", R100="error", R103="yes", T90="yes")
    assert [(item.rule, item.subject, item.sms, item.message) for item in changes(old, new)] == [
        ("appeared", "R", (103,), "no in 0.7.2, yes in 0.7.4"),
        ("appeared", "T", (90,), "no such runner or format in 0.7.2, yes in 0.7.4"),
        ("vanished", "R", (90,), "yes in 0.7.2, no in 0.7.4"),
        ("vanished", "R", (100,), "yes in 0.7.2, raises in 0.7.4"),
        ("vanished", "S", (90,), "yes in 0.7.2, no such runner or format in 0.7.4"),
    ]
    assert changes(old, new)[0].repro == (
        "python -m conformance gating --library flashinfer --subject R --against flashinfer==0.7.2"
    )


def test_a_published_claim_explains_a_change_that_agrees_with_it() -> None:
    old, new = observed("0.7.2", R107="no"), observed("0.7.4", R107="yes")
    (finding,) = changes(old, new, Expected(support=(claim(">=0.7.4", {107}, set()),)))
    assert finding.explained == "as published: owner/repo#1"
    for wrong in (claim(">=0.7.4", set(), {107}), claim(">=0.7", {107}, set()), claim("<0.7.4", set(), {107})):
        (finding,) = changes(old, new, Expected(support=(wrong,)))
        assert not finding.explained


@pytest.mark.parametrize(
    ("text", "libraries", "message"),
    [
        ("0.7.2", (), "of which library"),
        ("0.7.2", ("flashinfer", "torch"), "of which library"),
        ("newest", ("torch",), "'newest' is no version"),
        ("vlllm==0.1", (), "'vlllm' is none of"),
        ("./nowhere", (), "no Python executable"),
    ],
)
def test_what_cannot_be_meant_is_one_line(text: str, libraries: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        against.parse(text, libraries)
    assert "\n" not in str(caught.value)


def test_versions_and_interpreters_are_read() -> None:
    assert against.parse("0.7.2.post1", ("flashinfer",)).spec == "flashinfer==0.7.2.post1"
    assert against.parse("torch==2.12.0", ()).spec == "torch==2.12.0"
    assert against.parse(sys.executable, ()).python == sys.executable


def test_a_version_is_asked_in_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def create(release: environments.Release, *, dependencies: bool) -> str:
        made.append((str(release), dependencies))
        return "/somewhere/python"

    monkeypatch.setattr(environments, "create", create)
    assert against.interpreter(against.Against("flashinfer", "0.7.2.post1")) == "/somewhere/python"
    assert made == [("flashinfer-python==0.7.2.post1", False)]
    assert against.interpreter(against.Against(python=sys.executable)) == sys.executable


@pytest.mark.parametrize("strict", [False, True])
def test_changes_are_listed_and_count_with_strict_only(
    strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from conformance.cli import main

    def observe(library: str, sms: Sequence[int], *, python: str = "", **_: object) -> Observed:
        return observed("0.7.2", R90="yes") if python else observed("0.7.4", R90="no")

    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr(command, "observe", observe)
    claims = tmp_path / "claims.toml"
    claims.write_text("")
    words = ["gating", "--library", "flashinfer", "--out", str(tmp_path), "--expected", str(claims)]
    assert main([*words, "--against", sys.executable, *["--strict"] * strict]) == strict
    assert "changed vanished: flashinfer R AxB on SM90: yes in 0.7.2, no in 0.7.4" in capfd.readouterr().out
    assert "## Changed from the other version" in (tmp_path / "gating.md").read_text()


def test_one_version_beside_itself_is_not_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from conformance.cli import main

    def observe(library: str, sms: Sequence[int], *, python: str = "", **_: object) -> Observed:
        if python and library == "torch":
            return Observed(library=library, version="", gaps=(Gap(library=library, reason="torch is not installed"),))
        return observed("0.7.4", R90="yes")

    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr(command, "observe", observe)
    claims = tmp_path / "claims.toml"
    claims.write_text("")
    words = ["gating", "--library", "flashinfer", "--out", str(tmp_path), "--expected", str(claims)]
    assert main([*words, "--against", sys.executable]) == 0
    assert f"not comparable with {sys.executable}: it is 0.7.4 too" in capfd.readouterr().out
