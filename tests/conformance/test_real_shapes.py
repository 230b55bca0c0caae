"""Plans of real shapes, and products that are judged on a sample of their rows."""

from __future__ import annotations

import pytest
import torch

from conformance import planning
from conformance.discover import UsageError
from conformance.messages import Claimed, Description
from conformance.operations import gemm
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
    claim = Claim(operation="moe", variant="bf16", source="s")
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
