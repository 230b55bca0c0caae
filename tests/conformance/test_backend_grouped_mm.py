"""torch's grouped products: offsets by hand, BF16 on a CPU under the judge, FP8 through a stand-in of the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.backends import torch_grouped_mm
from conformance.backends.torch_grouped_mm import backends, ends_of_groups
from conformance.operations import grouped_gemm
from fuzz.case import Case
from references.backend import Backend, Unsupported
from references.recipes import Recipe

BF16, FP8, FAST = backends()
LINE = "grouped_gemm %s v=1 grouping=%s groups=5 k=64 layout=plain m=140 n=48 out=bf16 scale=%s values=%s seed=%d"


def case_of(variant: str, grouping: str, values: str = "normal", seed: int = 3) -> Case:
    return Case.parse(LINE % (variant, grouping, "none" if variant == "bf16" else "fp32", values, seed))


def test_they_are_backends_for_gpus():
    assert all(isinstance(backend, Backend) for backend in (BF16, FP8, FAST))
    assert [*BF16.claims("cpu"), *FP8.claims("cpu"), *FAST.claims("cpu")] == []


@pytest.mark.parametrize(("major", "formats"), [(7, 0), (8, 1), (9, 4), (10, 1)])
def test_scaled_products_are_claimed_on_sm90_alone(monkeypatch: pytest.MonkeyPatch, major: int, formats: int):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    claims = [claim for backend in (BF16, FP8, FAST) for claim in backend.claims("cuda:0")]
    assert len(claims) == formats
    assert {claim.variant for claim in claims} <= {"bf16", "fp8_per_tensor"}


def test_the_operators_refuse_1024_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for backend in (BF16, FP8, FAST):
        case = case_of("bf16" if backend is BF16 else "fp8_per_tensor", "contiguous")
        for groups, covered in ((1023, True), (1024, False)):
            asked = case.replace(groups=groups)
            assert any(claim.refusal(asked) is None for claim in backend.claims("cuda:0")) is covered


@pytest.mark.parametrize(
    ("rows", "ends"),
    [
        ([0, 0, 2, 2, 2], [2, 2, 5, 5]),
        ([1, -1, -1, 3], [0, 1, 1, 4]),  # padding goes to the group behind it
        ([0, -1], [1, 1, 1, 1]),  # or to none
        ([-1, -1], [0, 0, 0, 0]),
        ([3], [0, 0, 0, 1]),
    ],
)
def test_ends_of_groups_by_hand(rows: list[int], ends: list[int]):
    case = Case.parse(
        "grouped_gemm bf16 v=1 grouping=contiguous groups=4 k=8 layout=plain m=1 n=8 out=bf16 scale=none values=normal"
        " seed=0"
    )
    found = ends_of_groups(case, {"m_indices": torch.tensor(rows, dtype=torch.int32)})
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.int32, ends)


@pytest.mark.parametrize("grouping", ["contiguous", "contiguous_128", "masked"])
@pytest.mark.parametrize("values", ["normal", "cancellation", "integer"])
def test_bf16_products_pass_on_a_cpu(grouping: str, values: str):
    recipe = Recipe(source="Intel SDM, VDPBF16PS", subnormals="flush")
    for seed in (0, 1, 2):
        case = case_of("bf16", grouping, values, seed)
        inputs = grouped_gemm.inputs(case)
        outputs = BF16.run(BF16.prepare(case, inputs, {}), {})
        verdicts = grouped_gemm.judge(case, inputs, outputs, recipe)
        assert {verdict.verdict for verdict in verdicts} == {"pass"}


def operator(a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, **rest: Any) -> Tensor:
    """The documented product, group by group, in FP32."""
    assert kind_a == kind_b == F.ScalingType.RowWise
    assert rest["output_dtype"] == torch.bfloat16
    assert b.stride(-2) == 1  # column-major
    assert scale_b.shape == (b.shape[0], b.shape[-1])
    right = b.float() * scale_b[:, None, :]
    assert scale_a.shape == a.shape[:-1]
    left = a.float() * scale_a[..., None]
    if rest["offs"] is None:
        return (left @ right).bfloat16()
    output = torch.full((len(a), b.shape[-1]), torch.nan)
    begin = 0
    for group, end in enumerate(rest["offs"].tolist()):
        output[begin:end] = left[begin:end] @ right[group]
        begin = end
    return output.bfloat16()


@pytest.mark.parametrize("grouping", ["contiguous", "contiguous_128", "masked"])
@pytest.mark.parametrize("backend", [FP8, FAST])
def test_scaled_products_are_called_as_documented(monkeypatch: pytest.MonkeyPatch, grouping: str, backend: Any):
    asked = []

    def stand_in(*arguments: Any, **rest: Any) -> Tensor:
        asked.append(rest["use_fast_accum"])
        return operator(*arguments, **rest)

    monkeypatch.setattr(torch_grouped_mm.F, "scaled_grouped_mm", stand_in)
    case = case_of("fp8_per_tensor", grouping)
    inputs = grouped_gemm.inputs(case)
    outputs = backend.run(backend.prepare(case, inputs, {}), {})
    verdicts = grouped_gemm.judge(case, inputs, outputs, Recipe(source="test"))
    assert {verdict.verdict for verdict in verdicts} == {"pass"}
    assert asked == [backend is FAST]


def test_an_expert_too_many_is_found(monkeypatch: pytest.MonkeyPatch):
    """The stand-in with the offsets shifted by one group."""

    def shifted(*arguments: Any, offs: Tensor, **rest: Any) -> Tensor:
        return operator(*arguments, offs=offs.roll(1), **rest)

    monkeypatch.setattr(torch_grouped_mm.F, "scaled_grouped_mm", shifted)
    case = case_of("fp8_per_tensor", "contiguous")
    inputs = grouped_gemm.inputs(case)
    outputs = FP8.run(FP8.prepare(case, inputs, {}), {})
    assert grouped_gemm.judge(case, inputs, outputs, Recipe(source="test"))[0].verdict == "wrong"


@pytest.mark.parametrize("backend", [BF16, FP8])
def test_other_formats_are_refused(backend: Any):
    text = "grouped_gemm mxfp8 v=1 grouping=masked groups=1 k=32 layout=plain m=1 n=1 out=bf16 scale=ue8m0"
    case = Case.parse(f"{text} values=normal seed=0")
    with pytest.raises(Unsupported, match="mxfp8"):
        backend.prepare(case, {}, {})
