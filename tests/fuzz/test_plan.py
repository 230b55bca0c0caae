"""A plan is fixed by its arguments, covers every word, and survives its text form."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch

from conformance.planning import DEFAULT_CASES
from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR, Choice
from fuzz.inputs import build
from fuzz.plan import cornerstones, draw_plan, pace, read_plan, write_plan
from fuzz.scale_profiles import SPECIAL
from references import ue8m0
from references.blocks import block_amax
from references.schemes import scheme

GROUPS = [(operation, variant) for operation in GRAMMAR for variant in GRAMMAR[operation]]
FEW = [("ue8m0", "ceil"), ("quantize", "fp8_per_tensor"), ("requantize", "mxfp4_to_deepseek_fp8")]


def choices(group):
    return {key: d.values for key, d in GRAMMAR[group[0]][group[1]].keys.items() if isinstance(d, Choice)}


def digest(plan):
    return hashlib.sha256("\n".join(case.text for case in plan).encode()).hexdigest()


@pytest.mark.parametrize("per_group", [1, 7, 40])
def test_every_group_gets_exactly_its_cases_in_turn(per_group):
    plan = draw_plan(GROUPS, per_group, 0)
    assert len(set(plan)) == len(plan) == per_group * len(GROUPS)
    assert [(case.operation, case.variant) for case in plan] == GROUPS * per_group


@pytest.mark.parametrize("group", GROUPS)
def test_cornerstones_hold_every_pair_of_words_that_the_grammar_allows(group):
    fixed = cornerstones(group)
    assert len(set(fixed)) == len(fixed)
    words = choices(group)
    for (one, ones), (other, others) in combinations(words.items(), 2):
        found = {(case[one], case[other]) for case in fixed}
        expected = {(a, b) for a in ones for b in others}
        if group[0] == "quantize" and {one, other} == {"scale", "values"}:
            expected -= {("fp32", "overflow"), ("fp32", "nonfinite")}
        assert found == expected


@pytest.mark.parametrize("group", GROUPS)
def test_the_first_cornerstones_hold_every_word(group):
    words = choices(group)
    first = cornerstones(group)[: max(map(len, words.values()))]
    for key, list_ in words.items():
        assert {case[key] for case in first} == set(list_)


@pytest.mark.parametrize("policy", GRAMMAR["ue8m0"])
def test_boundary_sets_are_complete(policy):
    for source in choices(("ue8m0", policy))["from"]:
        sizes = Counter()
        for case in cornerstones(("ue8m0", policy)):
            if case["from"] == source:
                sizes[case["values"]] = max(sizes[case["values"]], case.integer("n"))
        assert (sizes["boundary"], sizes["special"], sizes["pow2_edges"]) == (1536, len(SPECIAL), 254 * 21)


def test_blocks_of_128_have_neighbours_on_all_sides():
    for group, rows in ((("quantize", "deepseek_fp8"), "m"), (("requantize", "mxfp4_to_deepseek_fp8"), "n")):
        grids = {(-(-case.integer(rows) // 128), -(-case.integer("k") // 128)) for case in cornerstones(group)}
        assert any(height >= 2 and width >= 2 for height, width in grids)


def test_a_plan_begins_with_cornerstones_and_ends_with_drawn_cases():
    group = ("quantize", "mxfp8")
    plan = draw_plan([group], 100, 1)
    fixed = cornerstones(group)
    assert plan[:75] == fixed[:75]
    assert not set(plan[80:]) & set(fixed)
    other = draw_plan([group], 100, 2)
    assert other[:75] == plan[:75]
    assert not set(other[80:]) & set(plan[80:])


def test_a_group_draws_the_same_beside_other_groups():
    alone = draw_plan(FEW[:1], 60, 5)
    assert [case for case in draw_plan(FEW, 60, 5) if case.operation == "ue8m0"] == alone


def test_a_plan_is_the_same_in_another_process(tmp_path):
    # A local module full of integers: Hypothesis would mix them into wide ranges.
    (tmp_path / "numbers_of_mine.py").write_text("X = [" + ", ".join(map(str, range(100, 900))) + "]\n")
    script = (
        "import hashlib, numbers_of_mine\nfrom fuzz.plan import draw_plan\n"
        f"plan = draw_plan({FEW!r}, 150, 42)\n"
        "print(hashlib.sha256('\\n'.join(case.text for case in plan).encode()).hexdigest())\n"
    )
    root = str(Path(__file__).parents[2])
    found = set()
    for hash_seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "CI": "true"}
        environment["PYTHONPATH"] = os.pathsep.join([root, str(tmp_path)])
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
        )
        found.add(done.stdout.strip())
    assert found == {digest(draw_plan(FEW, 150, 42))}


def test_pace_keeps_the_first_share_of_every_group():
    plan = draw_plan(FEW, 10, 0)
    assert pace(plan, 1.0) == plan
    assert pace(plan, 0.0) == []
    assert pace(plan, 0.25) == plan[: 3 * len(FEW)]
    uneven = [*plan, *draw_plan(FEW[:1], 30, 0)[10:]]
    assert Counter(case.operation for case in pace(uneven, 0.5)) == {"ue8m0": 15, "quantize": 5, "requantize": 5}
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="share"):
            pace(plan, share)


def test_a_plan_file_round_trips(tmp_path):
    plan = draw_plan(FEW, 5, 0)
    path = tmp_path / "plan.txt"
    write_plan(path, plan, ["drawn with seed 0", "two lines"])
    assert path.read_text().startswith(f"# drawn with seed 0\n# two lines\n{plan[0].text}\n")
    assert read_plan(path) == plan
    path.write_text(path.read_text().replace("\n", "\r\n\r\n"), newline="")
    assert read_plan(path) == plan


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "plan.txt"
    path.write_text(f"# comment\n\n{Case.parse(draw_plan(FEW, 1, 0)[0].text)}\nquantize\n")
    with pytest.raises(CaseError, match=r"plan\.txt:4: case: expected") as caught:
        read_plan(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        read_plan(tmp_path / "none.txt")


def test_unknown_groups_are_refused():
    with pytest.raises(ValueError, match="no operation quantize with variant fp7"):
        draw_plan([("quantize", "fp7")], 1, 0)


@pytest.mark.parametrize(
    ("variant", "policy"),
    [("deepseek_fp8", "ceil"), ("mxfp8", "ceil"), ("mxfp8", "floor"), ("mxfp4", "ceil"), ("mxfp4", "floor")],
)
def test_a_run_tells_a_policy_from_a_logarithm(variant, policy):
    """FP32 ``log2`` one ulp beside 2^k is k, from k = 3 on: the commonest fault of a quantiser."""
    found = []
    for case in draw_plan([("quantize", variant)], DEFAULT_CASES, 20261130):
        if (case["scale"], case["values"], case["dtype"]) == (policy, "pow2_edges", "fp32"):
            kind = scheme(variant, case["block"], policy)
            amax = block_amax(build(case)["x"], kind.block)
            scale = amax / kind.element.max if policy == "ceil" else amax * 2.0**-kind.element.emax
            codes = (getattr(torch, policy)(torch.log2(scale)) + 127).clamp(0, 254)
            found += [case] * bool((codes != ue8m0.from_amax(amax, kind.element, policy)).any())
    assert found
