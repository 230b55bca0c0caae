"""Plans of real shapes, and products that are judged on a sample of their rows."""

from __future__ import annotations

import pytest
import torch

from conformance import planning
from conformance.discover import UsageError
from conformance.messages import Claimed, Description
from conformance.operations import gemm, grouped_gemm
from fuzz.case import Case
from references.backend import Claim
from references.gemm import admissible_gemm
from references.recipes import Recipe

CASE = Case.parse("gemm deepseek_fp8 v=1 k=130 layout=mn_major m=33 n=5 out=fp32 scale=ue8m0 values=normal seed=3")
RECIPE = Recipe(source="test", accumulator="fp32_rn")


def described(claim: Claim, device: str = "cpu") -> Description:
    claimed = Claimed(claim=claim.to_json(), recipe={}, recipe_text="", claim_text="")
    return Description(
        backend="b", version="1", interpreter="", device=device, device_name="", sm="", pace=1.0, claims=[claimed]
    )


def test_words_are_bent_to_the_claims_and_sizes_are_not() -> None:
    claim = Claim(
        operation="grouped_gemm",
        variant="deepseek_fp8",
        source="s",
        where={"grouping": ("masked",), "out": ("bf16",)},
        multiples={"k": 128},
        maxima={"k": 5000},
    )
    plan = planning.real([("grouped_gemm", "deepseek_fp8"), ("gemm", "bf16")], [described(claim)])
    assert [case.integer("k") for case in plan] == [2048, 4096, 2048]
    assert {(case["grouping"], case["out"]) for case in plan} == {("masked", "bf16")}


def test_the_vast_output_is_for_gpus() -> None:
    claim = Claim(operation="gemm", variant="bf16", source="s")
    largest = [
        max(case.integer("m") for case in planning.real([("gemm", "bf16")], [described(claim, device)]))
        for device in ("cpu", "cuda:0")
    ]
    assert largest == [8192, 65552]


def test_nothing_real_is_a_usage_error() -> None:
    claim = Claim(operation="moe", variant="bf16", source="s", maxima={"hidden": 64})
    with pytest.raises(UsageError, match="--shapes real"):
        planning.real([("moe", "bf16")], [described(claim)])


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "JUDGED_PRODUCTS", 4 * 5 * 130)


@pytest.mark.usefixtures("sampled")
def test_rows_are_spread_from_the_first_to_the_last() -> None:
    rows = gemm.judged_rows(CASE)
    assert rows is not None
    assert rows.tolist() == [0, 10, 21, 32]
    assert gemm.judged_rows(CASE.replace(m=4)) is None


@pytest.mark.usefixtures("sampled")
def test_faults_in_judged_rows_and_numbers_that_are_not_finite_are_found() -> None:
    inputs = gemm.inputs(CASE)
    a, b = gemm.operands(CASE, inputs)
    output = admissible_gemm(a, b, RECIPE, torch.float32).interval.nominal.to(torch.float32)

    def judged(changed: dict[tuple[int, int], float]) -> tuple[str, list[int] | None, str]:
        actual = output.clone()
        for place, value in changed.items():
            actual[place] = value
        verdict = gemm.judge(CASE, inputs, {"output": actual}, RECIPE)[0]
        return verdict.verdict, verdict.worst_index, verdict.message

    verdict, _, message = judged({})
    assert verdict == "pass"
    assert message.endswith("; 4 rows judged, the others finite")
    verdict, worst, message = judged({(21, 3): 2.0 * float(output[21, 3]) + 1.0})
    assert (verdict, worst) == ("wrong", [21, 3])
    assert "first at [21, 3]" in message
    assert judged({(20, 3): 1e9})[0] == "pass"  # between the rows of the sample
    verdict, worst, message = judged({(20, 3): float("nan")})
    assert (verdict, worst) == ("wrong", [20, 3])
    assert message == "not finite at [20, 3]: nan; nothing here overflows"


WIDE = Case.parse("gemm deepseek_fp8 v=1 k=130 layout=mn_major m=9 n=1000 out=fp32 scale=ue8m0 values=normal seed=5")
BLOCKS = [*range(128), *range(384, 512), *range(896, 1000)]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "JUDGED_COLUMNS", 3 * 128)
    monkeypatch.setattr(gemm, "JUDGED_ELEMENTS", 4 * 360)


@pytest.mark.usefixtures("narrow")
def test_columns_are_whole_strips_and_rows_fewer() -> None:
    columns, rows = gemm.judged_columns(WIDE), gemm.judged_rows(WIDE)
    assert columns is not None
    assert columns.tolist() == BLOCKS
    assert rows is not None
    assert rows.tolist() == [0, 2, 5, 8]
    assert gemm.judged_columns(WIDE.replace(n=384)) is None


def test_b_is_never_decoded_beyond_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """739968 columns of K = 128, and as many of K = 4096; every strip counts once."""
    for k, most in ((128, gemm.JUDGED_COLUMNS), (4096, 2**14)):
        columns = gemm.judged_columns(WIDE.replace(n=739968, k=k))
        assert columns is not None
        assert len(columns) == len(set(columns.tolist())) == most
        assert (int(columns[0]), int(columns[-1])) == (0, 739967)
        rows = gemm.judged_rows(WIDE.replace(m=4096, n=739968, k=k))
        assert rows is not None
        assert len(rows) * len(columns) <= gemm.JUDGED_ELEMENTS


@pytest.mark.parametrize(
    "case",
    [
        WIDE,
        WIDE.replace(layout="plain", scale="fp32"),
        Case.parse("gemm mxfp8 v=1 k=96 layout=interleave_128x4 m=9 n=1000 out=fp32 scale=ue8m0 values=normal seed=5"),
        Case.parse("gemm nvfp4 v=1 k=64 layout=plain m=9 n=1000 out=fp32 scale=e4m3 values=normal seed=5"),
        Case.parse("gemm fp8_per_tensor v=1 k=40 layout=plain m=9 n=1000 out=fp32 scale=fp32 values=normal seed=5"),
        Case.parse("gemm bf16 v=1 k=40 layout=plain m=9 n=1000 out=fp32 scale=none values=normal seed=5"),
    ],
)
def test_a_sample_of_columns_has_the_scales_of_its_columns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = gemm.inputs(case)
    a, b = gemm.operands(case, inputs)
    output = admissible_gemm(a, b, RECIPE, torch.float32).interval.nominal.to(torch.float32)
    for key, value in (("JUDGED_COLUMNS", 3 * 128), ("JUDGED_ELEMENTS", 4 * 360)):
        monkeypatch.setattr(gemm, key, value)

    def judged(changed: dict[tuple[int, int], float]) -> tuple[str, list[int] | None, str]:
        actual = output.clone()
        for place, value in changed.items():
            actual[place] = value
        verdict = gemm.judge(case, inputs, {"output": actual}, RECIPE)[0]
        return verdict.verdict, verdict.worst_index, verdict.message

    verdict, _, message = judged({})
    assert verdict == "pass"
    assert message.endswith("; 4 rows and 360 columns judged, the others finite")
    for column in (0, 400, 999):
        wrong = 2.0 * float(output[5, column]) + 1.0
        verdict, worst, message = judged({(5, column): wrong})
        assert (verdict, worst) == ("wrong", [5, column])
        assert f"first at [5, {column}]" in message
    assert judged({(5, 200): 1e9, (6, 0): 1e9})[0] == "pass"  # between the columns, and between the rows
    assert judged({(5, 200): float("inf")})[:2] == ("wrong", [5, 200])


GROUPED = (
    "grouped_gemm deepseek_fp8 v=1 grouping=%s groups=4 k=130 layout=%s m=150 n=600 out=fp32 scale=%s values=normal "
    "seed=%d"
)


@pytest.mark.parametrize("grouping", ["contiguous", "contiguous_128", "masked"])
@pytest.mark.parametrize(("layout", "scale"), [("plain", "fp32"), ("mn_major", "ue8m0")])
def test_groups_are_judged_on_samples_with_their_first_and_last_rows(
    grouping: str, layout: str, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.parse(GROUPED % (grouping, layout, scale, 7))
    inputs = grouped_gemm.inputs(case)
    rows = grouped_gemm.row_groups(case, inputs)
    output = torch.full((len(rows), 600), torch.nan)
    for where, a, b in grouped_gemm.group_operands(case, inputs, rows):
        output[where] = admissible_gemm(a, b, RECIPE, torch.float32).interval.nominal.to(torch.float32)
    assert grouped_gemm.judged_rows(case, rows) is None
    monkeypatch.setattr(gemm, "JUDGED_COLUMNS", 3 * 128)
    monkeypatch.setattr(gemm, "JUDGED_ELEMENTS", 10 * 344)
    chosen = grouped_gemm.judged_rows(case, rows)
    assert chosen is not None
    owners = [int(group) for group in rows.unique() if group >= 0]
    for group in owners:
        mine = (rows == group).nonzero().view(-1)
        assert {int(mine[0]), int(mine[-1])} <= set(chosen.tolist())
    assert bool((rows[chosen] >= 0).all())
    assert len(chosen) <= 10 + 2 * len(owners)
    shape = grouped_gemm.outputs(case)["output"].shape

    def judged(row: int | None = None, column: int = 0, value: float = 1e9) -> tuple[str, list[int] | None]:
        actual = output.clone()
        if row is not None:
            actual[row, column] = value
        verdict = grouped_gemm.judge(case, inputs, {"output": actual.view(shape)}, RECIPE)[0]
        if row is None:
            assert verdict.message.endswith(f"; {len(chosen)} rows and 344 columns judged, the others finite")
        return verdict.verdict, verdict.worst_index

    def place(row: int, column: int) -> list[int]:
        return [*divmod(row, 150), column] if grouping == "masked" else [row, column]

    assert judged()[0] == "pass"
    row = int(chosen[len(chosen) // 2])
    for column in (0, 599):
        assert judged(row, column) == ("wrong", place(row, column))
    assert judged(row, 200)[0] == "pass"  # between the strips
    used = (rows >= 0).nonzero().view(-1).tolist()
    between = next(number for number in used if number not in set(chosen.tolist()))
    assert judged(between)[0] == "pass"
    assert judged(between, 200, float("inf")) == ("wrong", place(between, 200))


def test_samples_of_groups_without_any_row_are_judged_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(GROUPED % ("masked", "plain", "fp32", 7))
    inputs = {**grouped_gemm.inputs(case)}
    inputs["masked_m"] = torch.zeros_like(inputs["masked_m"])
    monkeypatch.setattr(gemm, "JUDGED_COLUMNS", 3 * 128)
    monkeypatch.setattr(gemm, "JUDGED_ELEMENTS", 10 * 344)
    spec = grouped_gemm.outputs(case)["output"]
    verdict = grouped_gemm.judge(case, inputs, {"output": torch.zeros(spec.shape, dtype=spec.dtype)}, RECIPE)[0]
    assert (verdict.part, verdict.verdict) == ("output", "pass")
    assert "no row belongs to a group" in verdict.message
