"""Rules on hand-made observations: each fires on its fault, and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from packaging.specifiers import SpecifierSet

from conformance.gating.expected import Expected, Explained, Support
from conformance.gating.model import ARCHITECTURES, Answer, Gate, Observation, Observed, classify
from conformance.gating.rules import findings

CAUGHT = (NotImplementedError, ValueError, RuntimeError)


def seen(
    sm: int,
    config: Answer = "yes",
    runner: Answer = "yes",
    detail: str = "",
    variant: str = "AxB",
    facts: tuple[str, ...] = (),
) -> Observation:
    gates = (Gate("config", config), Gate("runner", runner, detail))
    return Observation(library="flashinfer", subject="R", variant=variant, sm=sm, gates=gates, facts=facts)


def library(*rows: Observation, version: str = "0.7.4") -> Observed:
    return Observed(library="flashinfer", version=version, observations=rows)


def claim(admits: set[int], refuses: set[int], versions: str = "", **rest: tuple[str, ...]) -> Expected:
    row = Support(
        library="flashinfer",
        subject="R",
        variants=("AxB",),
        versions=SpecifierSet(versions),
        admits=frozenset(admits),
        refuses=frozenset(refuses),
        facts=rest.get("facts", ()),
        without=rest.get("without", ()),
        source="owner/repo#1",
    )
    return Expected(support=(row,))


def shown(observed: Observed, expected: Expected | None = None) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.rule, finding.sms) for finding in findings(observed, expected or Expected())]


def test_agreement_is_silent() -> None:
    rows = library(seen(90, "no", "no", "supports only SM100, got SM90"), seen(100))
    assert shown(rows, claim({100}, {90})) == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [(seen(100), [("expected", (100,))]), (seen(90, "no", "no"), [("expected", (90,))]), (seen(103), [])],
)
def test_a_published_claim_is_held_against_what_all_gates_say(
    row: Observation, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert shown(library(row), claim({90}, {100})) == expected


def test_a_format_that_a_runner_no_longer_offers_is_a_disagreement() -> None:
    rows = library(seen(90, variant="CxD"), seen(100, variant="CxD"))
    (finding,) = findings(rows, claim({100, 103}, {90}))
    assert (finding.rule, finding.variants, finding.sms) == ("expected", ("AxB",), (100,))
    assert shown(rows, claim(set(), {90})) == []


def test_a_claim_holds_in_its_versions_only() -> None:
    rows = seen(107, "no", "no")
    assert shown(library(rows, version="0.7.2"), claim({107}, set(), ">=0.7.2"))
    assert not shown(library(rows, version="0.7.1"), claim({107}, set(), ">=0.7.2"))


def test_one_gate_that_refuses_is_enough() -> None:
    assert seen(90, "yes", "no").answer == "no"
    assert seen(90, "no", "yes").answer == "no"
    assert seen(90, "no", "unknown").answer == "no"
    assert seen(90, "yes", "unknown").answer == "unknown"
    assert seen(90, "error", "no").answer == "error"


def test_a_runner_wider_than_its_config() -> None:
    rows = library(seen(90, "no", "yes"), seen(100), seen(90, "no", "no", variant="CxD"))
    (finding,) = findings(rows, Expected())
    assert (finding.rule, finding.sms) == ("config-against-runner", (90,))
    assert "admits AxB where its config refuses" in finding.message


def test_a_config_wider_than_every_format_of_its_runner() -> None:
    assert shown(library(seen(120, "yes", "no"), seen(120, "yes", "no", variant="CxD"))) == [
        ("config-against-runner", (120,))
    ]
    assert shown(library(seen(120, "yes", "no"), seen(120, "yes", "yes", variant="CxD"))) == []
    assert shown(library(seen(120, "yes", "no"), seen(120, "yes", "unknown", variant="CxD"))) == []


@pytest.mark.parametrize(
    ("refusal", "admitted", "fires"),
    [
        ("enabled only on SM100/SM103 targets, got sm90.", 107, True),
        ("enabled only on SM100/SM103 targets, got sm90.", 103, False),
        ("does not support SM90; supported architectures are (100, 103, 107).", 107, False),
        ("does not support SM90; supported architectures are (100, 103).", 107, True),
        ("does not support SM90", 107, False),
        ("requires >=sm_100 (Blackwell)", 121, False),
        ("requires SM120+ and a package", 121, False),
        ("requires SM120+ and a package", 110, True),
        ("requires sm_10x (Blackwell)", 107, False),
        ("requires sm_10x (Blackwell)", 110, True),
        ("requires sm_100 or sm_12x", 121, False),
        ("requires sm_100 or sm_12x", 103, True),
        ("requires SM100-family GPU", 103, False),
        ("requires SM100-family GPU", 120, True),
        ("requires SM107a or SM120a", 107, False),
    ],
)
def test_what_refusals_name_is_the_list(refusal: str, admitted: int, fires: bool) -> None:
    rows = library(seen(90, "no", "no", refusal), seen(admitted))
    assert shown(rows) == ([("admits-more-than-it-says", (admitted,))] if fires else [])


def test_one_instruction_set_has_one_answer() -> None:
    rows = library(seen(120), seen(121, "no", "no"), seen(103), seen(100, "no", "no"))
    (finding,) = findings(rows, Expected())
    assert (finding.rule, finding.sms, finding.message) == ("same-family", (120, 121), "SM120 yes, SM121 no")


def test_equal_findings_of_several_formats_are_one() -> None:
    rows = library(
        *(seen(sm, answer, answer, variant=variant) for variant in ("A", "B") for sm, answer in PAIR.items())
    )
    (finding,) = findings(rows, Expected())
    assert finding.variants == ("A", "B")


PAIR: Mapping[int, Answer] = {120: "yes", 121: "no"}


def test_a_gate_that_raises_what_no_caller_expects() -> None:
    assert shown(library(seen(90, "no", "error", "TypeError: oops"))) == [("gate-raises", (90,))]


def test_scales_of_a_library_that_is_off() -> None:
    assert shown(library(seen(100, variant="dense (flag off)"), seen(100, variant="dense"))) == [("flag-off", (100,))]


def test_compiled_code_is_held_against_its_claim() -> None:
    rows = library(seen(90, facts=("mma.sync", "div.full")))
    assert shown(rows, claim({90}, set(), facts=("wgmma",))) == [("expected", (90,))]
    assert shown(rows, claim({90}, set(), without=("div.full",))) == [("expected", (90,))]
    assert shown(rows, claim({90}, set(), facts=("mma.sync",), without=("div.approx",))) == []


def known(*sms: int, versions: str = "") -> Expected:
    row = Explained(
        rule="config-against-runner",
        library="flashinfer",
        subject="R",
        variants=(),
        sms=frozenset(sms),
        versions=SpecifierSet(versions),
        reason="because",
        source="owner/repo#2",
    )
    return Expected(explained=(row,))


def everywhere(**changed: Answer) -> Observed:
    return library(*(seen(sm, "no", changed.get(f"sm{sm}", "no")) for sm in ARCHITECTURES))


def test_a_known_disagreement_is_explained_where_it_is_known() -> None:
    (finding,) = findings(everywhere(sm80="yes"), known(80))
    assert (finding.explained, finding.source) == ("because", "owner/repo#2")
    assert all(not item.explained for item in findings(everywhere(sm80="yes", sm90="yes"), known(80)))
    assert [item.explained for item in findings(everywhere(sm80="yes"), known(80, versions="<0.7"))] == [""]


def test_a_known_disagreement_that_is_gone_is_a_finding() -> None:
    assert shown(everywhere(), known(80)) == [("explained-no-longer", (80,))]
    assert ("explained-no-longer", (90,)) in shown(everywhere(sm80="yes"), known(80, 90))
    assert shown(library(seen(80, "no", "no")), known(80)) == []  # part of the architectures proves nothing
    assert shown(everywhere(), known(80, versions="<0.7")) == []


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (NotImplementedError("enabled only on SM100/SM103, got SM90."), "no"),
        (RuntimeError("does not support this architecture"), "no"),
        (RuntimeError("requires cuda-tile and a toolchain that supports SM120."), "unknown"),
        (RuntimeError("requires CUDA 12.8 or newer."), "unknown"),
        (NotImplementedError("routes with Renormalize only"), "unknown"),
        (ImportError("No module named 'cutlass'"), "unknown"),
        (AssertionError("Torch not compiled with CUDA enabled"), "unknown"),
        (RuntimeError("the faked device has no clock_rate"), "unknown"),
        (FileNotFoundError(2, "No such file", "selected_kernels.json"), "unknown"),
        (TypeError("SM100 is no number"), "error"),
        (KeyError(120), "error"),
    ],
)
def test_refusals_are_told_from_a_missing_toolchain_and_from_bugs(error: Exception, answer: Answer) -> None:
    assert classify(error, CAUGHT).answer == answer


def test_the_repro_line_asks_no_more_than_it_needs() -> None:
    (finding,) = findings(library(seen(90, "no", "yes")), Expected())
    assert finding.repro == "python -m conformance gating --library flashinfer --subject R --sm 90"
    (finding,) = findings(library(seen(90, "no", "no", "only SM100"), seen(107)), Expected())
    assert finding.repro.endswith("--subject R")  # the refusal that it is held against is on another architecture
