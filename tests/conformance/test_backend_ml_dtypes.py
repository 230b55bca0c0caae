"""The ml_dtypes backend: hand-worked values, its one known deviation, and the references' verdicts."""

from __future__ import annotations

import pytest
import torch

from conformance.operations import OPERATIONS
from fuzz.case import Case
from fuzz.inputs import build
from references.backend import Backend

ml_dtypes_casts = pytest.importorskip("conformance.backends.ml_dtypes_casts", exc_type=ImportError)
(BACKEND,) = ml_dtypes_casts.backends()


def run(text: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return BACKEND.run(BACKEND.prepare(Case.parse(text), inputs, {}), {})


def failures(text: str) -> list[str]:
    case = Case.parse(text)
    claim = next(claim for claim in BACKEND.claims("cpu") if claim.refusal(case) is None)
    inputs = build(case)
    verdicts = OPERATIONS[case.operation].judge(case, inputs, run(text, **inputs), BACKEND.recipe(claim))
    return [f"{verdict.part}: {verdict.message}" for verdict in verdicts if verdict.verdict != "pass"]


def test_is_a_backend_on_the_cpu_only() -> None:
    assert isinstance(BACKEND, Backend)
    assert list(BACKEND.claims("cuda:0")) == []


def test_nearest_ties_up_but_zero_and_negative_numbers_are_nan() -> None:
    values = [1.25, 1.5, 2.0**-127, 2.0**-127 * 1.25, 1.5 * 2.0**127, 0.0, -2.0]
    text = f"ue8m0 nearest v=1 from=scale n={len(values)} values=normal seed=0"
    assert run(text, x=torch.tensor(values))["scales"].tolist() == [127, 128, 0, 1, 255, 255, 255]


def test_e2m1_by_hand() -> None:
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6.0, 5.0, 2.5, 0.25, -0.25, 0.26, -6.0, 1.75])
    text = "quantize mxfp4 v=1 block=1x32 dtype=fp32 k=32 m=1 scale=ceil stride=contiguous values=normal seed=0"
    parts = run(text, x=x)
    assert parts["scales"].tolist() == [[127]]
    # Ties to even codes: 5 to 4, 2.5 to 2, 0.25 to 0, 1.75 to 2; low nibble first.
    assert parts["payload"][0, :4].tolist() == [0x67, 0x04, 0x18, 0x4F]


def test_nvfp4_scale_by_hand() -> None:
    x = torch.full((1, 16), 12.0)
    text = "quantize nvfp4 v=1 block=1x16 dtype=fp32 k=16 m=1 scale=e4m3 stride=contiguous values=normal seed=0"
    parts = run(text, x=x, global_scale=torch.tensor([0.5]))
    assert parts["scales"].tolist() == [[0x48]]  # 12 / 6 / 0.5 = 4
    assert parts["payload"].tolist() == [[0x77] * 8]


def test_mxfp4_becomes_e4m3_by_hand() -> None:
    payload = torch.full((128, 64), 0x22, dtype=torch.uint8)  # 1.0 everywhere
    scales = torch.full((128, 4), 130, dtype=torch.uint8)
    scales[0, 0] = 133
    parts = run("requantize mxfp4_to_deepseek_fp8 v=1 k=128 n=128 values=codes seed=0", payload=payload, scales=scales)
    assert parts["scales"].tolist() == [[127]]
    assert parts["payload"][0, 0] == 0x68  # 1 * 2^6 / 2^0 = 64
    assert parts["payload"][1, 0] == 0x50  # 1 * 2^3 / 2^0 = 8


@pytest.mark.parametrize("values", ["normal", "pow2_edges", "subnormal", "zero_blocks", "rounding"])
@pytest.mark.parametrize(
    "text",
    [
        "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=70 m=5 scale=floor stride=padded values=%s seed=3",
        "quantize mxfp4 v=1 block=1x32 dtype=fp32 k=70 m=5 scale=even stride=contiguous values=%s seed=3",
        "quantize nvfp4 v=1 block=1x16 dtype=fp16 k=70 m=5 scale=e4m3 stride=transposed values=%s seed=3",
        "quantize fp8_per_tensor v=1 block=tensor dtype=fp32 k=70 m=5 scale=static stride=contiguous values=%s seed=3",
    ],
)
def test_quantises_admissibly(text: str, values: str) -> None:
    assert failures(text % values) == []


@pytest.mark.parametrize("values", ["codes", "nonfinite", "extreme_scales"])
@pytest.mark.parametrize(
    "text",
    [
        "dequantize mxfp4 v=1 block=1x32 k=70 m=5 out=fp16 scale=ue8m0 values=%s seed=3",
        "dequantize nvfp4 v=1 block=1x16 k=70 m=5 out=bf16 scale=e4m3 values=%s seed=3",
        "dequantize deepseek_fp8 v=1 block=128x128 k=150 m=131 out=fp32 scale=ue8m0 values=%s seed=3",
        "requantize mxfp4_to_deepseek_fp8 v=1 k=256 n=128 values=%s seed=3",
    ],
)
def test_dequantises_admissibly(text: str, values: str) -> None:
    assert failures(text % values) == []
