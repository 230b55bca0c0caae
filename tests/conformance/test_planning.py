from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import planning, units
from conformance.discover import UsageError
from conformance.messages import Claimed, Description
from conformance.target import Target
from fuzz.case import Case
from fuzz.extent import extent, is_large
from fuzz.plan import draw_plan, write_plan
from references.backend import Claim

QUANTIZE = Case.parse(
    "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=77 m=5 scale=ceil stride=contiguous values=normal seed=4294967295"
)


def description(name: str, *claims: Claim) -> Description:
    return Description(
        backend=name,
        version="1",
        interpreter="i",
        device="cpu",
        device_name="",
        sm="",
        pace=1.0,
        claims=[Claimed(claim=claim.to_json(), recipe={}, recipe_text="", claim_text="") for claim in claims],
    )


def claim(variant: str = "mxfp8", **fields: Any) -> Claim:
    return Claim(operation="quantize", variant=variant, source="s", **fields)


def test_no_selection_is_everything() -> None:
    every = planning.groups((), ())
    assert ("ue8m0", "ceil") in every
    assert ("quantize", "nvfp4") in every
    assert len(every) == len(set(every))


def test_selections_are_combined() -> None:
    assert planning.groups(("dequantize",), ("mxfp8", "ceil")) == [("dequantize", "mxfp8")]


@pytest.mark.parametrize(
    ("operations", "formats", "line"),
    [
        (("gemv",), (), "unknown operation 'gemv' (do you mean 'gemm'?); known: ue8m0, quantize"),
        ((), ("fp7",), "unknown format 'fp7'; known: "),
        (("ue8m0",), ("mxfp8",), "no operation ue8m0 has a format mxfp8"),
    ],
)
def test_what_is_unknown_is_named_beside_what_is_known(
    operations: tuple[str, ...], formats: tuple[str, ...], line: str
) -> None:
    with pytest.raises(UsageError) as caught:
        planning.groups(operations, formats)
    assert str(caught.value).startswith(line)


def test_groups_take_turns() -> None:
    plan = draw_plan([("ue8m0", "ceil")], 3, 1) + draw_plan([("ue8m0", "floor")], 2, 1)
    assert [case.variant for case in planning.interleaved(plan)] == ["ceil", "floor", "ceil", "floor", "ceil"]


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = draw_plan([("ue8m0", "ceil")], 5, 1)
    write_plan(tmp_path / "plan.txt", plan)
    assert planning.read(tmp_path / "plan.txt") == plan
    assert planning.digest(plan) == planning.digest(planning.read(tmp_path / "plan.txt"))
    assert planning.digest(plan) != planning.digest(plan[::-1])


@pytest.mark.parametrize("content", [None, "ue8m0 ceil v=2\n"])
def test_a_plan_that_cannot_be_read_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "plan.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"--plan .*plan\.txt"):
        planning.read(path)


def test_each_backend_gets_enough_of_each_operation_whatever_it_claims() -> None:
    ceil = Claim(operation="ue8m0", variant="ceil", source="s")
    narrow = claim(where={"scale": ("floor",), "dtype": ("bf16",), "stride": ("contiguous",)}, multiples={"k": 64})
    subjects = [description("narrow", narrow), description("wide", claim(), claim("mxfp4"), ceil)]
    chosen = [("quantize", "mxfp8"), ("quantize", "mxfp4"), ("ue8m0", "ceil")]
    plan = planning.draw(chosen, subjects, 1, None)
    assert len(plan) == len(set(plan))
    assert sum(narrow.refusal(case) is None for case in plan) >= planning.LEAST
    assert sum(case.operation == "quantize" for case in plan) >= planning.LEAST
    assert plan == planning.draw(chosen, subjects[::-1], 1, None)
    assert plan != planning.draw(chosen, subjects, 2, None)


def test_each_backend_gets_the_least_of_each_format_that_is_asked_for() -> None:
    narrow = claim(where={"scale": ("floor",), "stride": ("contiguous",)}, multiples={"k": 64})
    other = claim("mxfp4", where={"stride": ("padded",)})
    chosen = [("quantize", "mxfp8"), ("quantize", "mxfp4")]
    plan = planning.draw(chosen, [description("narrow", narrow, other)], 1, 10, least=60)
    assert len(plan) == len(set(plan))
    assert sum(narrow.refusal(case) is None for case in plan) == 60
    assert sum(other.refusal(case) is None for case in plan) == 60


def test_a_slow_backend_gets_its_share_of_enough() -> None:
    subject = replace(description("slow", claim(where={"scale": ("floor",)})), pace=0.5)
    plan = planning.draw([("quantize", "mxfp8")], [subject], 1, None)
    share = Target(description=subject, start=lambda: pytest.fail("started")).share(plan)
    assert sum(case["scale"] == "floor" for case in share) == planning.LEAST // 2
    assert sum(case["scale"] == "floor" for case in plan) == planning.LEAST


def test_what_nobody_claims_is_not_drawn() -> None:
    chosen = [("quantize", "mxfp8"), ("quantize", "mxfp4"), ("ue8m0", "ceil")]
    plan = planning.draw(chosen, [description("b", claim())], 1, 5)
    assert {(case.operation, case.variant) for case in plan} == {("quantize", "mxfp8")}
    assert len(planning.draw(chosen, [], 1, 5)) == 15


def test_a_number_of_cases_is_taken_at_its_word() -> None:
    plan = planning.draw([("quantize", "mxfp8")], [description("b", claim(maxima={"k": 1}))], 1, 7)
    assert len(plan) == 7


@given(
    number=st.integers(0, 100),
    turn=st.integers(1, 200),
    multiple=st.sampled_from([1, 16, 128]),
    scales=st.lists(st.sampled_from(["floor", "even"]), min_size=1, max_size=2, unique=True),
)
def test_a_bent_case_is_claimed_and_keeps_the_rest(number: int, turn: int, multiple: int, scales: list[str]) -> None:
    wanted = claim(where={"scale": tuple(scales)}, multiples={"k": multiple}, maxima={"m": 3})
    bent = planning.bend(QUANTIZE, wanted, number, turn)
    assert bent is not None
    assert wanted.refusal(bent) is None
    assert bent.integer("m") == 3
    assert (bent["values"], bent["dtype"]) == ("normal", "fp32")
    assert bent.seed == turn * 1_000_003 - 1


def test_a_case_that_cannot_be_bent_is_left() -> None:
    case = Case.parse(
        "quantize fp8_per_tensor v=1 block=tensor dtype=fp32 k=8 m=5 scale=static stride=contiguous "
        "values=overflow seed=1"
    )
    assert planning.bend(case, claim("fp8_per_tensor", where={"scale": ("fp32",)}), 0, 1) is None


GROUPED = (
    "grouped_gemm bf16 v=1 grouping=masked groups=12 k=64 layout=plain m=128 n=1152 out=bf16 scale=none "
    "values=integer seed=7"
)


def test_sizes_beside_a_raised_one_are_halved_the_largest_first_and_groups_last() -> None:
    wanted = Claim(operation="grouped_gemm", variant="bf16", source="here", multiples={"m": 128, "n": 8, "k": 64})
    whole = Case.parse(GROUPED)  # 12 * (128 * 1152 + 128 * 64 + 1152 * 64) = 2,752,512 elements
    assert extent(whole) == 2_752_512
    assert planning.moderate(whole, wanted, 2_752_512) == whole
    half = planning.moderate(whole, wanted, 2_752_511)
    assert half == whole.replace(n=576)  # 12 * (128 * 576 + 8192 + 576 * 64) = 1,425,408
    quarter = planning.moderate(whole, wanted, 12 * 12_000)
    assert quarter == whole.replace(n=16)  # 1152, 576, 288, 144, 72, 32, 16: whole eights
    assert planning.moderate(whole, wanted, 1) == whole.replace(groups=1, n=8)  # m and k are the claim's least


def test_a_size_that_takes_little_away_or_is_claimed_alone_is_kept() -> None:
    text = (
        "moe bf16 v=1 experts=64 gate=first hidden=256 ids=spread intermediate=256 limit=none out=bf16 scale=none "
        "scaling=1 tokens=33 topk=2 values=normal weight=output seed=1"
    )
    layer = Case.parse(text)
    wanted = Claim(
        operation="moe",
        variant="bf16",
        source="here",
        where={"hidden": ("256",)},
        multiples={"intermediate": 128},
        maxima={"tokens": 33},
    )
    assert planning.moderate(layer, wanted, 2**20) == layer.replace(intermediate=128, experts=8)
    assert extent(layer.replace(intermediate=128, experts=8)) == 3 * 8 * 256 * 128 + 2 * 33 * 256


@pytest.mark.parametrize(
    ("text", "value"), [("60s", 60.0), ("1.5h", 5400.0), ("5m", 300.0), ("2min", 120.0), ("7", 7.0)]
)
def test_durations(text: str, value: float) -> None:
    assert units.seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "0s", "-1s", "1d", "nan", "inf", "1e3s", "60 s ", "٣s"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        units.seconds(text)


@pytest.mark.parametrize(("text", "value"), [("8GiB", 2**33), ("512MiB", 2**29), ("1.5KiB", 1536), ("100", 100)])
def test_sizes(text: str, value: int) -> None:
    assert units.size(text) == value


@pytest.mark.parametrize("text", ["", "8GB", "0", "-1", "8gib"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        units.size(text)


def test_cases_that_take_long_to_draw_are_few() -> None:
    """A backend of one vast shape is not given two hundred of them, which every other backend would run too."""
    sizes = {"experts": ("256",), "hidden": ("2048",), "intermediate": ("512",), "scale": ("fp32",)}
    vast = Claim(operation="moe", variant="deepseek_fp8", source="s", where=sizes, maxima={"tokens": 8})
    every = Claim(operation="moe", variant="deepseek_fp8", source="s")
    plan = planning.draw([("moe", "deepseek_fp8")], [description("vast", vast), description("z", every)], 1, None)
    assert sum(vast.refusal(case) is None for case in plan) == planning.MOST_LARGE
    assert len(plan) >= planning.LEAST


def test_large_cases_among_small_ones_do_not_end_the_search() -> None:
    """Many drawn cases become large ones on the way to such a claim; enough small ones lie between them."""
    narrow = Claim(
        operation="gemm",
        variant="deepseek_fp8",
        source="s",
        where={"layout": ("mn_major",), "out": ("bf16",), "scale": ("fp32",)},
        multiples={"k": 128, "n": 64},
    )
    plan = planning.draw([("gemm", "deepseek_fp8")], [description("narrow", narrow)], 20261130, None, 500)
    claimed = [case for case in plan if narrow.refusal(case) is None]
    assert len(claimed) >= 500
    assert sum(map(is_large, claimed)) <= planning.MOST_LARGE + 2
