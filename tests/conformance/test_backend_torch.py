"""The backends of plain torch: hand-worked values, and the references' verdicts on small random cases."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from conformance.backends.torch_ops import TorchBackend, backends
from conformance.operations import OPERATIONS
from fuzz.case import Case
from fuzz.inputs import build
from references.backend import Backend

TORCH, TORCH_BF16 = backends()
STATIC = "quantize fp8_per_tensor v=1 block=tensor dtype=%s k=70 m=5 scale=static stride=contiguous values=%s seed=3"
SATURATES = Version(torch.__version__).release >= (2, 13)


def run(backend: TorchBackend, text: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return backend.run(backend.prepare(Case.parse(text), inputs, {}), {})


def failures(backend: TorchBackend, text: str) -> list[str]:
    case = Case.parse(text)
    claim = next(claim for claim in backend.claims("cpu") if claim.refusal(case) is None)
    inputs = build(case)
    outputs = run(backend, text, **inputs)
    return [
        f"{verdict.part}: {verdict.message}"
        for verdict in OPERATIONS[case.operation].judge(case, inputs, outputs, backend.recipe(claim))
        if verdict.verdict != "pass"
    ]


def test_both_are_backends_with_distinct_names() -> None:
    assert [backend.name for backend in backends()] == ["torch", "torch_bf16"]
    assert all(isinstance(backend, Backend) for backend in backends())


def test_every_claim_has_a_recipe_and_survives_json() -> None:
    for backend in backends():
        for claim in backend.claims("cpu"):
            assert type(claim).from_json(claim.to_json()) == claim
            assert backend.recipe(claim).source


def test_nearest_by_hand() -> None:
    values = [0.0, 1.25, 1.5, -3.0, 2.0**-127, 2.0**-127 * 1.25, 1.5 * 2.0**127, float("inf"), float("nan")]
    text = f"ue8m0 nearest v=1 from=scale n={len(values)} values=normal seed=0"
    assert run(TORCH, text, x=torch.tensor(values))["scales"].tolist() == [0, 127, 128, 129, 0, 1, 255, 255, 255]


@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        ("floor", [127, 127, 127]),
        ("ceil_amax", [128, 128, 128]),
        ("even", [127, 127, 128]),
        ("ceil", [127, 128, 128]),
    ],
)
def test_policies_tell_448_449_and_511_apart(policy: str, codes: list[int]) -> None:
    x = torch.zeros(3, 32)
    x[:, 5] = torch.tensor([448.0, 449.0, 511.0])
    text = f"quantize mxfp8 v=1 block=1x32 dtype=fp32 k=32 m=3 scale={policy} stride=contiguous values=normal seed=0"
    assert run(TORCH, text, x=x)["scales"].flatten().tolist() == codes


def test_ceil_goes_up_one_ulp_above_448() -> None:
    x = torch.zeros(2, 32)
    x[:, 0] = torch.tensor([448.0, 448.00003])
    text = "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=32 m=2 scale=ceil stride=contiguous values=normal seed=0"
    parts = run(TORCH, text, x=x)
    assert parts["scales"].flatten().tolist() == [127, 128]
    assert parts["payload"][:, 0].tolist() == [0x7E, 0x76]  # 448, and 448.00003 / 2 to 224


def test_overflow_shows_the_cast_of_this_torch() -> None:
    text = STATIC % ("fp32", "overflow")
    x = torch.tensor([[464.0, 465.0, -1e9, float("nan")]])
    payload = run(TORCH, text, x=x, scale=torch.tensor([1.0]))["payload"]
    assert payload.tolist() == ([[0x7E, 0x7E, 0xFE, 0x7F]] if SATURATES else [[0x7E, 0x7F, 0xFF, 0x7F]])


def test_dequantises_by_hand_and_rounds_to_bf16_after_fp32() -> None:
    text = "dequantize deepseek_fp8 v=1 block=1x128 k=3 m=1 out=bf16 scale=fp32 values=codes seed=0"
    codes = torch.tensor([[0x38, 0x81, 0x7F]], dtype=torch.uint8)  # 1, -2^-9, NaN
    output = run(TORCH, text, payload=codes, scales=torch.tensor([[1.00390625]]))["output"]  # 1 + 2^-8, a tie
    assert output[0, :2].tolist() == [1.0, -(2.0**-9)]
    assert output.dtype == torch.bfloat16
    assert output[0, 2].isnan()


def test_interleave_by_the_formula() -> None:
    rows, cols = 131, 5
    plain = torch.arange(rows * cols).reshape(rows, cols).to(torch.uint8)
    expected = torch.zeros(256 * 8, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            offset = ((r // 128) * 2 + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            expected[offset] = plain[r, c]
    text = f"scale_layout interleave_128x4 v=1 cols={cols} direction=%s rows={rows} values=index seed=0"
    assert torch.equal(run(TORCH, text % "pack", scales=plain)["scales"], expected)
    assert torch.equal(run(TORCH, text % "unpack", scales=expected)["scales"], plain)


def test_packed_mn_major_by_hand() -> None:
    plain = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 255]], dtype=torch.uint8)
    text = "scale_layout mn_major_packed v=1 cols=5 direction=%s rows=2 values=index seed=0"
    packed = run(TORCH, text % "pack", scales=plain)["scales"]
    assert packed.tolist() == [[0x04030201, 0x09080706, 0, 0], [5, 255, 0, 0]]
    assert torch.equal(run(TORCH, text % "unpack", scales=packed)["scales"], plain)


QUANTIZE = [
    f"quantize deepseek_fp8 v=1 block={block} dtype={dtype} k=150 m=131 scale={scale} {rest} seed=3"
    for block, dtype, scale, rest in (
        ("1x128", "fp32", "fp32", "stride=transposed values=normal"),
        ("1x128", "bf16", "ceil", "stride=padded values=pow2_edges"),
        ("128x128", "fp16", "fp32", "stride=offset values=zero_blocks"),
        ("128x128", "fp32", "ceil", "stride=contiguous values=subnormal"),
    )
]
OTHERS = [
    "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=70 m=5 scale=ceil stride=contiguous values=pow2_edges seed=3",
    "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=70 m=5 scale=ceil_amax stride=contiguous values=wide seed=3",
    "quantize fp8_per_tensor v=1 block=tensor dtype=fp32 k=70 m=5 scale=fp32 stride=contiguous values=zeros seed=3",
    "dequantize mxfp8 v=1 block=1x32 k=70 m=5 out=fp16 scale=ue8m0 values=nonfinite seed=3",
    "dequantize deepseek_fp8 v=1 block=128x128 k=150 m=131 out=bf16 scale=fp32 values=subnormal seed=3",
    "dequantize fp8_per_tensor v=1 block=tensor k=70 m=5 out=fp32 scale=fp32 values=codes seed=3",
    "requantize deepseek_fp8 v=1 k=150 n=131 scale=ceil values=scale_ladder seed=3",
    "scale_layout mn_major v=1 cols=7 direction=pack rows=9 values=nonfinite seed=3",
    "scale_layout k_major v=1 cols=7 direction=unpack rows=9 values=nonfinite seed=3",
]


@pytest.mark.parametrize("text", QUANTIZE + OTHERS)
def test_is_admissible(text: str) -> None:
    assert failures(TORCH, text) == []


@pytest.mark.skipif(not SATURATES, reason="this torch's cast answers NaN above 464")
@pytest.mark.parametrize("values", ["overflow", "nonfinite"])
def test_saturating_casts_are_admissible(values: str) -> None:
    assert failures(TORCH, STATIC % ("bf16", values)) == []
    floor = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=70 m=5 scale=floor stride=contiguous values=normal seed=3"
    assert failures(TORCH, floor) == []


def test_bf16_requantises_to_other_bytes_than_fp32() -> None:
    text = "requantize deepseek_fp8 v=1 k=256 n=128 scale=ceil values=random_codes seed=3"
    assert failures(TORCH_BF16, text) == []
    inputs = build(Case.parse(text))
    assert not torch.equal(run(TORCH, text, **inputs)["payload"], run(TORCH_BF16, text, **inputs)["payload"])
