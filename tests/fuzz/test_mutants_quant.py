"""Every mutant of the area quant is wrong on the small input of its own bug report."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuzz.case import Case
from fuzz.mutants import MUTANTS, correct, quant
from references.elements import E4M3FN, E4M3FNUZ, decode, encode
from references.packing import unpack_fp4

FAULTY = {mutant.family: mutant.answer for mutant in MUTANTS}
BLOCKS = {"deepseek_fp8": "1x128", "mxfp8": "1x32", "mxfp4": "1x32", "nvfp4": "1x16", "fp8_per_tensor": "tensor"}
Answers = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def quantised(
    family: str,
    variant: str,
    scale: str,
    x: Sequence[Sequence[float]],
    dtype: str = "fp32",
    divisor: float = 1.0,
    **more: torch.Tensor,
) -> Answers:
    """The parts of the mutant and of a correct implementation."""
    case = Case.make(
        "quantize",
        variant,
        seed=0,
        block=BLOCKS[variant],
        dtype=dtype,
        k=len(x[0]),
        m=len(x),
        scale=scale,
        stride="contiguous",
        values="normal",
    )
    given = {"x": torch.tensor(x, dtype=correct.DTYPES[dtype]), **more}
    if scale == "static":
        given["scale"] = torch.tensor([divisor])
    return dict(FAULTY[family](case, given)), correct.quantize(case, given)


def values(parts: dict[str, torch.Tensor]) -> list[float]:
    return decode(parts["payload"], E4M3FN).view(-1).tolist()


def is_nan(parts: dict[str, torch.Tensor]) -> list[bool]:
    return decode(parts["payload"], E4M3FN).isnan().view(-1).tolist()


def test_a_zero_block_becomes_nan() -> None:
    mutant, right = quantised("zero-block-0-over-0", "deepseek_fp8", "fp32", [[0.0] * 128])
    assert all(is_nan(mutant))
    assert values(right) == [0.0] * 128


def test_a_tiny_amax_has_an_infinite_multiplier() -> None:
    mutant, right = quantised("tiny-amax-infinite-scale", "deepseek_fp8", "fp32", [[1e-37, 0.0]])
    assert is_nan(mutant)[1]
    assert values(right) == [448.0, 0.0]


def test_a_cast_does_not_saturate() -> None:
    mutant, right = quantised("e4m3-cast-not-saturating", "fp8_per_tensor", "static", [[1000.0, 464.0]])
    assert is_nan(mutant) == [True, False]
    assert values(right) == [448.0, 448.0]


def test_the_top_binade_saturates() -> None:
    mutant, right = quantised("software-e4m3-saturates-early", "fp8_per_tensor", "static", [[256.0, 300.0, 255.0]])
    assert values(mutant) == [448.0, 448.0, 256.0]
    assert values(right) == [256.0, 288.0, 256.0]


def test_a_reciprocal_crosses_a_tie() -> None:
    # The ties between neighbouring codes under every BF16 amax of a binade: some cross, most do not.
    differing = 0
    for amax in torch.arange(1.0, 2.0, 2.0**-7).tolist():
        ties = [amax * tie / 448 for tie in (17.0, 19.0, 21.0, 136.0, 208.0, 400.0, 432.0)]
        mutant, right = quantised("reciprocal-multiply-instead-of-divide", "deepseek_fp8", "fp32", [[amax, *ties]])
        assert values(mutant)[0] == values(right)[0] == 448.0
        differing += int((mutant["payload"] != right["payload"]).sum())
    assert differing > 5


def test_an_fp16_inverse_overflows() -> None:
    x = [[448 * 2.0**-17, 0.0, 2.0**-17]]
    mutant, right = quantised("fp16-inverse-scale-overflow", "mxfp8", "ceil", x, "fp16")
    assert int(mutant["scales"]) == int(right["scales"]) == 127 - 17
    assert is_nan(mutant) == [False, True, False]
    assert values(mutant)[2] == 448.0
    assert values(right) == [448.0, 0.0, 1.0]


def test_a_global_scale_is_applied_the_other_way() -> None:
    given = {"global_scale": torch.tensor([1 / 64])}
    mutant, right = quantised("global-scale-direction", "nvfp4", "e4m3", [[3.0, 0.0]], **given)
    assert [float(decode(parts["scales"], E4M3FN)) for parts in (mutant, right)] == [0.0078125, 32.0]


def test_a_multiplier_is_inverted() -> None:
    given = {"global_scale": torch.tensor([1 / 448])}
    found = quantised("nvfp4-precise-path-inverted-multiplier", "nvfp4", "e4m3", [[3.0, 0.0]], **given)
    assert [float(decode(parts["scales"], E4M3FN)) for parts in found] == [224.0, 224.0]
    assert [int(unpack_fp4(parts["payload"])[0, 0]) for parts in found] == [0b011, 0b111]  # 1.5 and 6


def test_an_encoder_has_no_sticky_bit() -> None:
    found = quantised("mx-element-encoder-odd-mantissa", "mxfp4", "floor", [[6.0, 0.25000006]])
    assert [unpack_fp4(parts["payload"]).tolist() for parts in found] == [[[7, 0]], [[7, 1]]]


def test_every_other_element_is_skipped() -> None:
    found = quantised("group-amax-skips-elements", "deepseek_fp8", "fp32", [[1.0, 100.0, 2.0, -3.0]])
    assert [float(parts["scales"]) * 448 for parts in found] == pytest.approx([2.0, 100.0])


def test_a_short_row_is_not_scaled() -> None:
    mutant, right = quantised("small-tensor-scale-skipped", "deepseek_fp8", "fp32", [[1000.0, 1.0]])
    assert (values(mutant), values(right)) == ([448.0, 1.0], [448.0, 0.4375])


def test_amax_is_taken_before_the_rounding() -> None:
    # 448 * (1 + 2^-10) rounds to 448 in BF16: a scale of 1 suffices.
    case = Case.parse("requantize deepseek_fp8 v=1 k=1 n=1 scale=ceil values=codes seed=0")
    inputs = {"payload": torch.tensor([[0x7E]], dtype=torch.uint8), "scales": torch.tensor([[1 + 2.0**-10]])}
    assert int(FAULTY["fused-norm-amax-in-fp32-not-output-type"](case, inputs)["scales"]) == 128
    assert float(correct.requantised_values(inputs, "bf16")) == 448.0


def test_a_rank_is_read_with_the_scale_of_another() -> None:
    mutant, right = quantised("tp-rank-local-dynamic-scale", "fp8_per_tensor", "fp32", [[448.0], [896.0]])
    assert (float(mutant["scales"]), values(mutant)) == (1.0, [448.0, 448.0])
    assert (float(right["scales"]), values(right)) == (2.0, [224.0, 448.0])


def test_scales_are_powers_of_two_unasked() -> None:
    mutant, right = quantised("ue8m0-on-hopper", "deepseek_fp8", "fp32", [[500.0, 100.0]])
    assert (float(mutant["scales"]), float(right["scales"])) == (2.0, pytest.approx(500 / 448))


def test_a_nan_scale_is_overlooked() -> None:
    case = Case.parse("requantize mxfp4_to_deepseek_fp8 v=1 k=128 n=128 values=codes seed=0")
    scales = torch.full((128, 4), 127, dtype=torch.uint8)
    scales[3, 2] = 255
    inputs = {"payload": torch.full((128, 64), 0x22, dtype=torch.uint8), "scales": scales}
    found = FAULTY["mx-nan-not-propagated"](case, inputs), correct.requantise(case, inputs)
    assert [int(parts["scales"]) for parts in found] == [121, 255]


def test_a_small_negative_number_is_a_fnuz_nan() -> None:
    x = torch.tensor([-1e-5, -0.0, 1e-5, -1.0])
    right = encode(x, E4M3FNUZ)
    found = quant.sign_kept(right, x, E4M3FNUZ)
    assert [int(code) for code in found] == [0x80, 0, 0, int(right[3])]
    assert right[0] == 0
    mutant, correct_ = quantised("fnuz-small-negative-becomes-nan", "fp8_per_tensor", "static", [[-1e-5, 1e-5]])
    assert is_nan(mutant) == [True, False]
    assert values(correct_) == [0.0, 0.0]


def test_the_scale_of_an_fp8_output_is_ignored() -> None:
    # The report multiplies by 0.25; a static scale divides by 4.
    mutant, right = quantised("scaled-mm-result-scale-ignored", "fp8_per_tensor", "static", [[1000.0]], divisor=4.0)
    assert (values(mutant), values(right)) == ([448.0], [256.0])
