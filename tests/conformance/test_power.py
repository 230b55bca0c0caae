"""Detection power: a fast part of the recorded score, what other checks see, the record, and the command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import power_score, power_words
from conformance.cli import main
from conformance.discover import UsageError
from conformance.journal import read_records
from conformance.mutant_backends import MutantBackend, backends
from conformance.operations import OPERATIONS
from conformance.power import Hunt, hunt, shrunk
from conformance.power_checks import CHECKS, seen_by
from conformance.power_html import page
from fuzz.case import Case
from fuzz.inputs import build
from fuzz.mutants import CONFORMANT, LEGAL, MUTANTS, PROBES
from fuzz.mutants.base import Mutant
from references.recipes import Recipe


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    """As the command does: threads that wait for each other use up a budget of processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BY_FAMILY = {mutant.family: mutant for mutant in MUTANTS}
# One of each area and of each way to be caught, all within a few cases.
GATE = {
    "ue8m0-ceil-via-float-log2": "scales",
    "scale-inflated-vs-data": "payload",
    "group-amax-skips-elements": "scales",
    "zero-block-0-over-0": "payload",
    "e8m0-code-0-lost": "output",
    "noncontig-input-written-with-input-strides": "payload",
    "tp-gather-scale-too-many-blocks": "scales",
    "dirty-padding-scales": "scales",
    "route-group-score-max": "selection",
    "route-raw-logits-as-weights": "weights",
    "route-topk-order-undefined": "selection flaky",
    "groupwise-m-scale-only-first-row": "output",
}


def test_the_record_knows_every_mutant() -> None:
    recorded = power_score.read(power_score.DEFAULT)
    known = {(area, family) for area, families in recorded.areas.items() for family in families}
    assert known == {(mutant.area, mutant.family) for mutant in (*MUTANTS, *PROBES)}


@pytest.mark.parametrize(("family", "check"), GATE.items())
def test_a_recorded_catch_is_caught_again(family: str, check: str) -> None:
    mutant = BY_FAMILY[family]
    assert power_score.read(power_score.DEFAULT).areas[mutant.area][family]
    found = hunt(mutant, 1, cases=64)
    assert found.check == check
    assert found.case
    assert set(found.others) == set(CHECKS)


@pytest.mark.parametrize("mutant", CONFORMANT, ids=lambda mutant: mutant.operation)
def test_a_correct_implementation_raises_no_alarm(mutant: Mutant) -> None:
    found = hunt(mutant, 1, cases=2)
    assert not found.caught, f"{found.case}: {found.message}"
    assert found.cases == 2 * len(mutant.variants)


@pytest.mark.parametrize("mutant", LEGAL, ids=lambda mutant: mutant.family)
def test_a_legal_choice_raises_no_alarm(mutant: Mutant) -> None:
    found = hunt(mutant, 1, cases=4)
    assert not found.caught, f"{found.case}: {found.message}"
    assert found.cases


def test_partial_sums_round_among_the_subnormal_numbers_of_bf16() -> None:
    mutant = next(item for item in LEGAL if item.family == "legal-gemm-split-k")
    words = "k=514 layout=mn_major m=17 n=90 out=fp32 scale=fp32 values=subnormal"
    case = Case.parse(f"gemm deepseek_fp8 v=1 {words} seed=9")
    inputs = build(case)
    output = mutant.answer(case, inputs)["output"]
    assert isinstance(output, torch.Tensor)
    recipe = Recipe(source="a test", accumulator="bf16_split_k", split_k=3)
    assert {part.verdict for part in OPERATIONS["gemm"].judge(case, inputs, {"output": output}, recipe)} == {"pass"}
    doubled = {"output": 2 * output}
    assert OPERATIONS["gemm"].judge(case, inputs, doubled, recipe)[0].verdict == "wrong"


def test_a_catch_shrinks_to_a_smaller_case_that_is_caught_alike() -> None:
    found = shrunk(hunt(BY_FAMILY["gemm-trailing-scale-block-dropped"], 1))
    small = Case.parse(found.smallest)
    assert (small.integer("m"), small.integer("n"), small.integer("k") % 128 % 32, small.seed) == (1, 1, 0, 0)
    assert 0 < found.differing <= 4
    assert found.elements < 600
    assert shrunk(Hunt(mutant=CONFORMANT[0], seed=1, cases=1, seconds=0.0)).smallest == ""


def test_the_picture_has_a_cell_for_every_seed_and_check() -> None:
    text = page(some_hunts(), power_score.score_of(some_hunts(), {}))
    assert text.count("<rect") == 2 * (2 + len(CHECKS))
    assert text.count('class="missed"') == 1
    assert "http" not in text.replace("http-equiv", "")


def test_alarms_count_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--alarms", "100", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    count = int(re.search(r"(\d+) cases of \d+ correct implementations, 0 alarms", said)[1])  # type: ignore[index]
    assert count >= 100
    assert f"**{count} cases, 0 alarms.**" in (tmp_path / "alarms.md").read_text()


def test_a_budget_ends_a_search() -> None:
    found = hunt(CONFORMANT[0], 1, cases=64, budget=0.0)
    assert (found.cases, found.caught) == (0, False)


def test_other_checks_see_what_their_tolerance_lets_them() -> None:
    case = Case.parse("dequantize mxfp8 v=1 block=1x32 k=2 m=2 out=fp32 scale=ue8m0 values=codes seed=0")
    right = torch.tensor([[8.0, 4.0], [2.0, 1.0]])

    def seen(actual: torch.Tensor) -> dict[str, bool]:
        return seen_by(case, {}, {"output": actual}, {"output": right})

    assert not any(seen(right.clone()).values())
    # All zero: FlashInfer's bound holds, 0.15 * 8 + 0.001 + 0.85 * 8 > 8.
    assert seen(torch.zeros(2, 2)) == {"allclose": True, "flashinfer": False, "calc_diff": True, "cosine": True}
    # Twice as large: the direction is right. 8 > 1.2 + 0.001 + 6.8 does not hold.
    assert seen(2 * right) == {"allclose": True, "flashinfer": False, "calc_diff": True, "cosine": False}
    assert all(seen(torch.full((2, 2), float("nan"))).values())
    assert all(seen(torch.zeros(3, 2)).values())
    small = right + torch.tensor([[0.0, 0.0], [0.0, 0.1]])
    assert seen(small) == {"allclose": True, "flashinfer": False, "calc_diff": False, "cosine": False}


def test_a_static_scale_s_answers_are_read_whatever_their_values() -> None:
    words = "block=tensor dtype=fp32 k=2 m=1 scale=static stride=contiguous values=nonfinite"
    case = Case.parse(f"quantize fp8_per_tensor v=1 {words} seed=0")
    inputs = {"x": torch.tensor([[torch.inf, 1.0]]), "scale": torch.tensor([2.0])}
    right = torch.tensor([[0x7E, 0x30]], dtype=torch.uint8)  # 448 and 0.5 under the scale 2
    assert not any(seen_by(case, inputs, {"payload": right}, {"payload": right.clone()}).values())
    assert all(seen_by(case, inputs, {"payload": right | 0x7F}, {"payload": right}).values())


def test_a_nan_that_belongs_there_is_no_difference() -> None:
    case = Case.parse("ue8m0 nearest v=1 from=scale n=2 values=special seed=0")
    codes = torch.tensor([255, 127], dtype=torch.uint8)
    assert not any(seen_by(case, {}, {"scales": codes}, {"scales": codes.clone()}).values())
    assert all(seen_by(case, {}, {"scales": codes}, {"scales": codes.flip(0)}).values())


def some_hunts() -> list[Hunt]:
    first, second = (BY_FAMILY[family] for family in ("e8m0-code-0-lost", "transposed-scales"))
    caught = Hunt(mutant=first, seed=1, cases=3, seconds=0.1, check="output", case="c", others={"allclose": True})
    return [
        caught,
        replace(caught, seed=2),
        replace(caught, mutant=second),
        Hunt(mutant=second, seed=2, cases=9, seconds=1.0),
    ]


def test_a_family_is_caught_under_every_seed_or_not_at_all() -> None:
    score = power_score.score_of(some_hunts(), {})
    assert score.areas == {"dequant": {"e8m0-code-0-lost": True}, "layout": {"transposed-scales": False}}
    assert power_score.summary(score) == ["dequant: 1/1", "layout: 0/1", "all: 1/2 (50.0%)"]


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    score = power_score.score_of(some_hunts(), {"seeds": [1, 2], "cases": 200, "budget": 20.0})
    path = tmp_path / "score.toml"
    path.write_text(power_score.to_toml(score))
    assert power_score.read(path) == score
    path.write_text("[settings]\n")
    with pytest.raises(UsageError, match="no record of a score"):
        power_score.read(path)


def test_a_lost_family_and_a_new_one_are_named() -> None:
    now = power_score.score_of(some_hunts(), {})
    recorded = power_score.Score({}, {"layout": {"transposed-scales": True}, "quant": {"elsewhere": True}})
    assert power_score.losses(now, recorded) == [
        "dequant: e8m0-code-0-lost is not in the record; add it with --record",
        "layout: transposed-scales was caught and escapes now",
    ]
    assert power_score.losses(now, now) == []


def test_the_table_shows_the_seed_that_missed() -> None:
    text = power_score.markdown(some_hunts(), [], power_score.score_of(some_hunts(), {}))
    assert "| e8m0-code-0-lost | dequant | NVIDIA/TransformerEngine#3262 | 2 of 2 | 3 | 0.10 | output | yes |" in text
    assert "| transposed-scales | layout | flashinfer-ai/flashinfer#2147 | 1 of 2 | 9 | 1.00 | - | - |" in text


def test_the_command_holds_the_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score = tmp_path / "score.toml"
    words = ["power", "--family", "transposed-scales", "--seed", "1", "--cases", "8", "--out", str(tmp_path)]
    words += ["--score", str(score)]
    assert main(words) == 2
    assert "No such file" in capsys.readouterr().err
    score.write_text(power_score.to_toml(power_score.Score({}, {"layout": {"transposed-scales": True}})))
    assert main(words) == 0
    assert "1/1" in capsys.readouterr().out
    assert "transposed-scales" in (tmp_path / "power.md").read_text()
    score.write_text(power_score.to_toml(power_score.Score({}, {"layout": {}})))
    assert main(words) == 1
    assert main([*words[:2], "nobody"]) == 2
    assert "unknown family 'nobody'" in capsys.readouterr().err
    assert main([*words, "--record"]) == 2
    assert "every area" in capsys.readouterr().err


def test_words_are_known_without_importing_the_mutants() -> None:
    every = (*MUTANTS, *PROBES)
    areas, families = power_words.areas_and_families()
    assert areas == sorted({mutant.area for mutant in every})
    made = {mutant.family for mutant in every} - set(families)
    assert set(families) <= {mutant.family for mutant in every}
    assert all(name.startswith(power_words.PROBE) for name in made)
    with pytest.raises(UsageError, match=r"unknown family 'tranposed-scales'; like it: transposed-scales"):
        power_words.check((), ("probe-anything", "tranposed-scales"))


def test_mutants_are_backends_by_plugin_only(tmp_path: Path) -> None:
    assert [backend.name for backend in backends()] == [f"mutant_{mutant.family}" for mutant in (*MUTANTS, *PROBES)]
    assert list(MutantBackend(MUTANTS[0]).claims("cuda:0")) == []
    case = "scale_layout k_major v=1 cols=3 direction=unpack rows=2 values=index seed=0"
    words = ["run", "--plugin", "conformance.mutant_backends", "--backend", "mutant_transposed-scales", "--jobs", "1"]
    assert main([*words, "--case", case, "--out", str(tmp_path)]) == 1
    assert [record.verdict for record in read_records(tmp_path / "records.jsonl")] == ["wrong"]
    assert main(["run", "--backend", "mutant_transposed-scales", "--case", case, "--out", str(tmp_path / "other")]) == 2
