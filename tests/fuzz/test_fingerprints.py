"""Fingerprints read back what is put in: exact models, hand-made accumulators, references, odd quantisers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conformance.operations.gemm import operands
from fuzz.case import Case
from fuzz.fingerprint_gemm import GemmProbe
from fuzz.fingerprint_quantize import QuantizeProbe, Ue8m0Probe
from references import ue8m0
from references.blocks import quantize
from references.elements import decode
from references.gemm_models import exact_rows
from references.packing import pack_fp4
from references.recipes import Recipe
from references.rounding import round_to

FP8 = "gemm deepseek_fp8 v=1 k=1024 layout=plain m=256 n=8 out={} scale=fp32 values=codes seed=0"
BF16 = "gemm bf16 v=1 k=1024 layout=plain m=256 n=8 out=fp32 scale=none values=normal seed=0"


def model(probe: GemmProbe, **choices: str) -> Tensor:
    a, b = operands(probe.case, probe.inputs())
    return exact_rows(a, b, Recipe(source="here", scale_combination="fma_dot_sasb", **choices))  # type: ignore[arg-type]


def in_turn(probe: GemmProbe, keep: Callable[[Tensor], Tensor]) -> Tensor:
    """One product after another, the running sum kept by ``keep``."""
    a, b = operands(probe.case, probe.inputs())
    total = torch.zeros(a.values.shape[0], dtype=torch.float64)
    for k in range(a.values.shape[1]):
        total = keep(total + a.values[:, k] * b.values[0, k])
    return total[:, None]


def cut(values: Tensor, bits: int) -> Tensor:
    """Toward zero to ``bits`` significant bits."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.trunc(mantissa * 2.0**bits), exponent - bits)


def test_hopper_fp8_reads_as_it_was_measured() -> None:
    probe = GemmProbe(Case.parse(FP8.format("fp32")))
    expected = {"fraction bits": "13", "rounding": "addends toward zero", "products a step": "32", "promotion": "128"}
    assert probe.read(model(probe, accumulator="hopper_fp8")) == expected
    assert probe.read(model(probe, accumulator="f16_upcast"))["fraction bits"] == "25"


def test_without_promotion_nothing_far_away_survives() -> None:
    probe = GemmProbe(Case.parse(FP8.replace("deepseek_fp8", "fp8_per_tensor").format("fp32")))
    read = probe.read(model(probe, accumulator="hopper_fp8", promotion="none"))
    assert read["promotion"] == "none up to 256"
    assert probe.read(model(probe, accumulator="hopper_fp8"))["promotion"] == "128"


def test_hopper_bf16_reads_as_it_was_measured() -> None:
    probe = GemmProbe(Case.parse(BF16))
    read = probe.read(model(probe, accumulator="hopper_f16", promotion="none"))
    assert read == {"fraction bits": "25", "rounding": "addends toward zero", "products a step": "16"}


@pytest.mark.parametrize(
    ("keep", "bits", "rounding"),
    [
        (lambda values: round_to(values, torch.float32), "23", "nearest"),
        (lambda values: cut(values, 24), "23", "sums toward zero"),
        (lambda values: cut(values, 15), "14", "sums toward zero"),
        (lambda values: values, ">=40", None),
    ],
)
def test_scalar_accumulators(keep: Callable[[Tensor], Tensor], bits: str, rounding: str | None) -> None:
    read = GemmProbe(Case.parse(BF16)).read(in_turn(GemmProbe(Case.parse(BF16)), keep))
    assert (read["fraction bits"], read.get("rounding")) == (bits, rounding)
    assert read.get("products a step", "<=8") == "<=8"


@pytest.mark.parametrize(
    ("rounded", "name"),
    [
        (lambda values: round_to(values, torch.bfloat16), "nearest even"),
        (lambda values: cut(values, 8), "toward zero"),
        (lambda values: cut(values + values.sign() * cut(values.abs(), 1) * 2.0**-8, 8), "ties away"),
    ],
)
def test_output_rounding(rounded: Callable[[Tensor], Tensor], name: str) -> None:
    probe = GemmProbe(Case.parse(FP8.format("bf16")))
    assert probe.read(rounded(model(probe, accumulator="hopper_fp8")))["output rounding"] == name


def test_what_has_no_room_says_so() -> None:
    assert "span 4 exponents" in str(
        GemmProbe(
            Case.parse(FP8.format("fp32").replace("deepseek_fp8", "nvfp4").replace("scale=fp32", "scale=e4m3"))
        ).usable()
    )
    assert GemmProbe(Case.parse(FP8.format("fp32").replace("m=256", "m=16"))).usable() == "M is below 137"


QUANTIZE = {
    "mxfp8": "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=32 m=1 scale=floor stride=contiguous values=normal seed=0",
    "mxfp4": "quantize mxfp4 v=1 block=1x32 dtype=bf16 k=32 m=1 scale=even stride=contiguous values=normal seed=0",
    "block": "quantize deepseek_fp8 v=1 block=128x128 dtype=bf16 k=128 m=1 scale=fp32 stride=offset values=wide seed=0",
    "nvfp4": "quantize nvfp4 v=1 block=1x16 dtype=fp32 k=16 m=1 scale=e4m3 stride=contiguous values=normal seed=0",
}


def quantizer(name: str) -> QuantizeProbe:
    case = Case.parse(QUANTIZE[name])
    return QuantizeProbe(case.replace(**QuantizeProbe.sizes(case)))


def answers(probe: QuantizeProbe, recipe: Recipe) -> tuple[Tensor, Tensor]:
    inputs = probe.inputs()
    found = quantize(inputs["x"], probe.kind, recipe, global_scale=inputs.get("global_scale"))
    return found.scales, found.payload


def read(probe: QuantizeProbe, scales: Tensor, payload: Tensor) -> dict[str, str]:
    return probe.read(scales, pack_fp4(payload) if probe.element.bits == 4 else payload)


@pytest.mark.parametrize(
    ("name", "recipe", "expected"),
    [
        ("mxfp8", Recipe(source="here"), ("floor", "2^-127", "2^-108", "nearest even", "saturates")),
        ("mxfp4", Recipe(source="here"), ("even", "2^-127", "2^-102", "nearest even", "does not occur")),
        (
            "block",
            Recipe(source="here", amax_floor=1e-4),
            ("divide", "2.23214e-07", "2.23214e-07", "nearest even", "does not occur"),
        ),
        (
            "block",
            Recipe(source="here", scale_arithmetic="reciprocal"),
            ("reciprocal", "0", "1.76085e-33", "nearest even", "does not occur"),
        ),
        (
            "nvfp4",
            Recipe(source="here", scale_floor=2.0**-9),
            ("divide, reciprocal", "0.00195312", "0.00195312", "nearest even", "does not occur"),
        ),
    ],
)
def test_quantisers_read_as_they_are(name: str, recipe: Recipe, expected: tuple[str, ...]) -> None:
    probe = quantizer(name)
    properties = ("scale policy", "scale of a zero block", "scale of a tiny block", "ties", "overflow")
    assert read(probe, *answers(probe, recipe)) == dict(zip(properties, expected, strict=True))


def at_last_bit(policy: str, change: Callable[[Tensor, Tensor], Tensor], element: str = "mxfp8") -> str:
    case = Case.parse(QUANTIZE[element].replace("bf16", "fp32"))
    case = case.replace(**{**QuantizeProbe.sizes(case), "scale": policy})
    probe = QuantizeProbe(case)
    scales, payload = answers(probe, Recipe(source="here"))
    amax = probe.inputs()["x"].abs().amax(1, keepdim=True).to(torch.float64)
    found = read(probe, change(amax, scales), payload)
    assert policy in found["scale policy"].split(", ")
    return found["scale at the last bit"]


def through_log2(amax: Tensor, scales: Tensor) -> Tensor:
    logarithm = torch.log2(amax.to(torch.float32) / 448.0).to(torch.float32)
    return torch.where(amax > 0, logarithm.ceil() + 127, 0.0).clamp(min=0).to(torch.uint8)


def test_a_logarithm_shows_at_the_last_bit_alone() -> None:
    assert at_last_bit("ceil", lambda amax, scales: scales) == "ceil, ceil_clamped"
    assert at_last_bit("ceil", through_log2).startswith("none of the known (")
    assert at_last_bit("floor", lambda amax, scales: scales) == "floor"
    assert at_last_bit("even", lambda amax, scales: scales, "mxfp4") == "even"


def test_edges_turn_the_scale_of_every_policy() -> None:
    case = Case.parse(QUANTIZE["mxfp8"].replace("bf16", "fp32"))
    edges = QuantizeProbe(case.replace(**QuantizeProbe.sizes(case))).edge_answers
    assert len({tuple(codes.tolist()) for codes in edges.values()}) >= 4  # ceil and ceil_clamped agree here
    for name, codes in edges.items():
        middle, below, above = codes.to(torch.int64).chunk(3)
        turns = (middle != below) | (above != middle)
        assert int(turns.sum()) >= 7, name


def encoded(probe: QuantizeProbe, step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Payload by plain search: step(lower index, share of the step, negative) -> index of the code taken."""
    scales, _ = answers(probe, Recipe(source="here"))
    x = probe.inputs()["x"].to(torch.float64)
    divisor = ue8m0.decode(scales).repeat_interleave(x.shape[1], 1) if probe.kind.scale == "ue8m0" else 1.0
    values = decode(torch.arange(probe.element.sign, dtype=torch.uint8), probe.element)
    values = values[torch.isfinite(values)]
    size = (x / divisor).abs().clamp(max=probe.element.max)
    lower = torch.searchsorted(values, size.contiguous(), right=True) - 1
    upper = (lower + 1).clamp(max=len(values) - 1)
    share = torch.where(
        upper > lower, (size - values[lower]) / (values[upper] - values[lower]).clamp(min=2.0**-20), 0.0
    )
    return (step(lower, share, x < 0) + (x < 0) * probe.element.sign).to(torch.uint8)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize(
    ("step", "ties"),
    [
        (lambda lower, share, negative: lower + (share >= 0.5), "ties away"),
        (lambda lower, share, negative: lower + (share > 0.5), "ties toward zero"),
        (lambda lower, share, negative: lower, "ties toward zero"),
        (lambda lower, share, negative: lower + torch.where(negative, share > 0.5, share >= 0.5), "ties up"),
        (lambda lower, share, negative: lower + (share > 0), "away from zero"),
        (lambda lower, share, negative: lower * 0, "no single rule (5% at a neighbour)"),
    ],
)
def test_ties(name: str, step: Callable[[Tensor, Tensor, Tensor], Tensor], ties: str) -> None:
    probe = quantizer(name)
    found = read(probe, answers(probe, Recipe(source="here"))[0], encoded(probe, step))["ties"]
    assert found.split("(")[0] == ties.split("(")[0]


@pytest.mark.parametrize("source", ["scale", "amax_e4m3", "amax_e2m1"])
def test_ue8m0_policies_are_told_apart(source: str) -> None:
    policy = "floor"
    case = Case.parse(f"ue8m0 {policy} v=1 from={source} n=53 values=boundary seed=0")
    probe = Ue8m0Probe(case)
    assert Ue8m0Probe.sizes(case) == {"n": 53}
    for name in ue8m0.SCALE_POLICIES if source == "scale" else ue8m0.AMAX_POLICIES:
        assert name in probe.read(probe.expected(name))["policy"].split(", ")
    assert probe.read(probe.expected("floor"))["policy"] == "floor"
    assert probe.read(probe.expected("floor") + 1)["policy"] == "none of the known"
