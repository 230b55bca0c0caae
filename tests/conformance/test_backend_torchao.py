"""The torchao backend: hand-worked values, its known deviations at their smallest, and the references' verdicts."""

from __future__ import annotations

import pytest
import torch

from conformance.operations import OPERATIONS
from fuzz.case import Case
from fuzz.inputs import build
from references.backend import Backend

torchao_mx = pytest.importorskip("conformance.backends.torchao_mx", exc_type=ImportError)
(BACKEND,) = torchao_mx.backends()


def run(text: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return BACKEND.run(BACKEND.prepare(Case.parse(text), inputs, {}), {})


def failures(text: str) -> list[str]:
    case = Case.parse(text)
    claim = next(claim for claim in BACKEND.claims("cpu") if claim.refusal(case) is None)
    inputs = build(case)
    outputs = {
        name: part.view(torch.uint8) if part.element_size() == 1 else part for name, part in run(text, **inputs).items()
    }
    verdicts = OPERATIONS[case.operation].judge(case, inputs, outputs, BACKEND.recipe(claim))
    return [f"{verdict.part}: {verdict.message}" for verdict in verdicts if verdict.verdict != "pass"]


def scale_codes(policy: str, element: str, values: list[float]) -> list[int]:
    text = f"ue8m0 {policy} v=1 from=amax_{element} n={len(values)} values=normal seed=0"
    return run(text, x=torch.tensor(values))["scales"].tolist()


def test_is_a_backend() -> None:
    assert isinstance(BACKEND, Backend)


@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        ("floor", [127, 127, 127]),
        ("ceil_amax", [128, 128, 128]),
        ("even", [127, 127, 128]),
        ("ceil", [127, 128, 128]),
    ],
)
def test_the_four_modes_by_hand(policy: str, codes: list[int]) -> None:
    assert scale_codes(policy, "e4m3", [448.0, 449.0, 511.0]) == codes


@pytest.mark.parametrize("element", ["e5m2", "e2m1", "e2m3", "e3m2"])
def test_floor_is_the_exponent_less_emax(element: str) -> None:
    emax = {"e5m2": 15, "e2m1": 2, "e2m3": 2, "e3m2": 4}[element]
    assert scale_codes("floor", element, [1.0, 3.9, 0.0, float("nan")]) == [127 - emax, 128 - emax, 0, 255]


def test_rceil_misses_a_power_of_two_by_one_ulp() -> None:
    """log2(2^-5 (1 + 2^-23)) is -5 in FP32: a code too low, and an element above 6. 2^-4 is too small to lose it."""
    fifth, fourth = (torch.nextafter(torch.tensor(6.0 * 2.0**k), torch.tensor(1.0)).item() for k in (-5, -4))
    assert scale_codes("ceil", "e2m1", [6.0 * 2.0**-5, fifth, fourth]) == [122, 122, 124]


def test_code_zero_is_not_the_scale_that_was_used() -> None:
    """Scales of 2^-127: FLOOR divides by 2^-126 instead, RCEIL by 1."""
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0**-120
    text = "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=32 m=1 scale=%s stride=contiguous values=normal seed=0"
    floor, ceil = run(text % "floor", x=x), run(text % "ceil", x=x)
    assert floor["scales"].view(torch.uint8).tolist() == ceil["scales"].view(torch.uint8).tolist() == [[0]]
    payload = [parts["payload"].view(torch.float8_e4m3fn)[0, 0].item() for parts in (floor, ceil)]
    assert payload == [64.0, 0.0]  # 2^-120 / 2^-127 = 128


def test_nvfp4_floor_and_low_nibble_first() -> None:
    x = torch.zeros(2, 16)
    x[0, :2] = torch.tensor([6.0, -1.0])
    text = "quantize nvfp4 v=1 block=1x16 dtype=fp32 k=16 m=2 scale=e4m3 stride=contiguous values=normal seed=0"
    parts = run(text, x=x, global_scale=torch.tensor([1.0]))
    assert parts["scales"].view(torch.float8_e4m3fn).float().tolist() == [[1.0], [2.0**-6]]
    assert parts["payload"][:, 0].tolist() == [0xA7, 0]


@pytest.mark.parametrize("values", ["normal", "scale_ladder", "rounding", "outliers", "zero_blocks"])
@pytest.mark.parametrize(
    "text",
    [
        "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=96 m=5 scale=floor stride=contiguous values=%s seed=3",
        "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=96 m=5 scale=ceil stride=contiguous values=%s seed=3",
        "quantize mxfp4 v=1 block=1x32 dtype=fp32 k=96 m=5 scale=even stride=contiguous values=%s seed=3",
        "quantize nvfp4 v=1 block=1x16 dtype=bf16 k=96 m=5 scale=e4m3 stride=contiguous values=%s seed=3",
    ],
)
def test_quantises_admissibly(text: str, values: str) -> None:
    assert failures(text % values) == []


@pytest.mark.parametrize(
    "text",
    [
        "dequantize mxfp8 v=1 block=1x32 k=96 m=5 out=fp32 scale=ue8m0 values=extreme_scales seed=3",
        "dequantize mxfp4 v=1 block=1x32 k=96 m=5 out=bf16 scale=ue8m0 values=nonfinite seed=3",
        "dequantize nvfp4 v=1 block=1x16 k=96 m=5 out=fp16 scale=e4m3 values=codes seed=3",
        "scale_layout interleave_128x4 v=1 cols=7 direction=pack rows=130 values=index seed=3",
        "scale_layout interleave_128x4 v=1 cols=7 direction=unpack rows=130 values=index seed=3",
    ],
)
def test_other_operations_are_admissible(text: str) -> None:
    assert failures(text) == []
