import json
import math
from dataclasses import replace

import pytest

from reports import comparison_pages
from reports.comparison import (
    BOTH_WRONG,
    FIXED,
    LOST,
    REGRESSED,
    SAME,
    ComparisonError,
    Side,
    compare,
    shape_class,
)

CASE = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=128 m=4 scale=ceil stride=contiguous values=normal seed={}"
ROUTING = "routing Renormalize v=1 tokens=3 values=normal seed=1"


def side(records, label="x", **run):
    return Side(label=label, records=records, run=run)


def one(make, seed=0, **fields):
    return make(CASE.format(seed), **{"part": "payload", "output_sha256": "aa", "error": 0.0, **fields})


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("pass", "pass", SAME),
        ("pass", "wrong", REGRESSED),
        ("pass", "crash", REGRESSED),
        ("unsupported", "wrong", REGRESSED),
        ("wrong", "pass", FIXED),
        ("wrong", "error", BOTH_WRONG),
        ("pass", "unsupported", LOST),
    ],
)
def test_outcomes(make, before, after, outcome):
    found = compare(side([one(make, verdict=before)]), side([one(make, verdict=after)]))
    assert found.counts == {outcome: 1}
    assert (found.verdict == "regressed") == (outcome == REGRESSED)


def test_a_regression_counts_though_the_ledger_knows_it(make):
    found = compare(side([one(make)]), side([one(make, verdict="wrong", ledger_id="known-one")]))
    assert found.verdict == "regressed"
    assert comparison_pages.headline(found)[0].startswith("DO NOT MERGE: 1 call regressed: quantize mxfp8")


def test_equal_answers_are_clean_and_other_bits_are_drift(make):
    base = [one(make, seed) for seed in range(4)]
    assert compare(side(base), side(base)).verdict == "clean"
    found = compare(side(base), side([*base[:3], replace(base[3], output_sha256="bb")]))
    assert found.verdict == "drift"
    assert found.drift == ("answers differ in bits in 1 of 4 calls that pass on both sides",)
    assert found.rows[0].bits == (3, 4)


def test_bits_that_are_not_known_are_no_drift(make):
    base = [one(make)]
    found = compare(side(base), side([one(make, output_sha256="")]))
    assert (found.verdict, found.rows[0].bits) == ("clean", (0, 0))


def test_errors_that_grow_more_often_than_chance_explains(make):
    base = [one(make, seed, error=1.0) for seed in range(20)]
    head = [one(make, seed, error=2.0) for seed in range(20)]
    found = compare(side(base), side(head))
    trend = found.rows[0].error
    assert (trend.less, trend.more, trend.same) == (0, 20, 0)
    assert trend.ratio == pytest.approx(2.0)
    assert trend.p == 2.0**-19
    assert found.drift == ("errors against FP64 larger than chance explains: quantize mxfp8, few rows, aligned",)
    assert compare(side(head), side(base)).verdict == "clean"  # smaller errors are no drift
    few = compare(side(base[:10]), side(head[:10]))  # 2^-9 is not below one in a thousand
    assert few.verdict == "clean"


def test_tokens_whose_experts_changed(make):
    base = make(ROUTING, part="selection", selection="000000010000000200000003", output_sha256="a")
    head = replace(base, selection="000000010000000900000003", output_sha256="b")
    found = compare(side([base]), side([head]))
    assert found.rows[0].selections == (1, 3)
    assert "selected experts differ for 1 of 3 tokens" in found.drift


def test_pairs_of_backends(make):
    alpha, beta = one(make, backend="alpha"), one(make, backend="beta")
    assert compare(side([alpha]), side([beta])).rows[0].subject == "alpha → beta"
    found = compare(side([alpha, beta]), side([replace(alpha, device="cuda:0")]))
    assert found.rows[0].subject == "alpha on cpu → alpha on cuda:0"
    assert found.unpaired == ("beta on cpu (only in x)",)
    with pytest.raises(ComparisonError, match="no backend in common"):
        compare(side([alpha, beta]), side([one(make, backend="gamma")]))


def test_other_plans_are_compared_where_they_meet_and_said(make):
    found = compare(side([one(make, 1), one(make, 2)], "old"), side([one(make, 2), one(make, 3)], "new"))
    assert (found.compared, found.only_base, found.only_head) == (1, 1, 1)
    assert "Other plans: 1 call only in old, 1 only in new; nothing is said of these" in comparison_pages.headline(
        found
    )
    with pytest.raises(ComparisonError, match="no case in common"):
        compare(side([one(make, 1)]), side([one(make, 2)]))


def test_other_inputs_are_refused(make):
    with pytest.raises(ComparisonError, match="other inputs"):
        compare(side([one(make, input_sha256="aa")]), side([one(make, input_sha256="bb")]))


def test_recipes_claims_and_versions(make):
    def about(recipe, *variants):
        claims = [{"operation": "gemm", "variant": name, "claim": "all", "recipe": recipe} for name in variants]
        entry = {"backend": "alpha", "device": "cpu", "version": recipe, "claims": claims}
        return {"backends": [{**entry, "libraries": {"torch": recipe}}]}

    records = [one(make)]
    found = compare(side(records, **about("1", "bf16", "mxfp8")), side(records, **about("2", "bf16")))
    assert found.declared == (
        "alpha: gemm bf16: recipe 1 → 2",
        "alpha: gemm mxfp8: claimed by the base only",
    )
    assert ("torch", "1", "2") in found.versions
    assert found.verdict == "drift"


@pytest.mark.parametrize(
    ("case", "shapes"),
    [
        (CASE.format(0), "few rows, aligned"),
        (CASE.format(0).replace("k=128", "k=130").replace("m=4", "m=1"), "one row, ragged"),
        ("gemm bf16 v=1 k=256 m=65 n=3 seed=0", "many rows, aligned"),
        ("moe bf16 v=1 hidden=128 intermediate=96 tokens=64 seed=0", "few rows, ragged"),
        ("ue8m0 ceil v=1 from=scale n=65 values=normal seed=0", "many rows"),
    ],
)
def test_shape_classes(case, shapes):
    assert shape_class(case) == shapes


def test_pages_are_bounded_whole_and_escaped(make):
    message = "<script>|`*" * 30
    base = [one(make, seed) for seed in range(300)]
    head = [replace(record, verdict="wrong", message=f"{message} {n}", error=math.inf) for n, record in enumerate(base)]
    found = compare(side(base, "a|b<c>"), side(head))
    page = comparison_pages.markdown(found)
    assert len(page.encode()) <= comparison_pages.LIMIT
    assert page.startswith("### ❌ DO NOT MERGE")
    assert page.count("<details>") == page.count("</details>")
    assert "<script>" not in page.replace("\\<script\\>", "")
    assert "<script>" not in comparison_pages.page(found)
    json.dumps(comparison_pages.data(found), allow_nan=False)
    short = comparison_pages.markdown(found, 2000)
    assert len(short.encode()) <= 2000
    assert "Truncated" in short
