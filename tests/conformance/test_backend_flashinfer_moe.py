"""FlashInfer's CUTLASS expert layers through a stand-in: what they are handed, and which of their tactics are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.backends import _flashinfer_modules as modules
from conformance.backends import flashinfer_moe
from conformance.operations import moe as operation
from fuzz.case import Case
from references.backend import Backend, Unsupported
from references.elements import E2M1, decode
from references.packing import unpack_fp4

LINE = (
    "moe %s v=1 experts=5 gate=second hidden=%d ids=spread intermediate=%d limit=%s out=bf16 scale=%s scaling=1 "
    "tokens=6 topk=3 values=normal weight=output seed=%d"
)
SCALES = {"bf16": "none", "deepseek_fp8": "fp32", "fp8_per_tensor": "fp32", "w4a16": "none"}


class Formats(Enum):
    BF16 = auto()
    FP8PerTensor = auto()
    DeepSeekFp8 = auto()
    MXFP4 = auto()


@dataclass
class Inner:
    """A runner of FlashInfer's module. Tactics: four of the first product, then two ways twice and two old ones."""

    gemm_idx_for_tuning: int | None = None
    fused_moe_runner: Any = None

    def __post_init__(self) -> None:
        self.fused_moe_runner = SimpleNamespace(get_gemm1_tactic_count=lambda: 6, get_gemm2_tactic_count=lambda: 10)

    def get_valid_tactics(self, inputs: list[Any], profile: Any) -> list[int]:
        assert len(inputs) == 5
        return {1: list(range(6)), 2: list(range(6, 16))}[self.gemm_idx_for_tuning or 0]


@dataclass
class StandIn:
    """FlashInfer in FP32. swapped: takes gate for up. left_out: tactics of its build that are not there."""

    swapped: bool = False
    left_out: tuple[Any, ...] = ()
    taken: list[Any] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    backend_key: str = "cutlass"
    _inner: Inner = field(default_factory=Inner)

    def attribute(self, module: str, name: str) -> Any:
        plain = {
            "MoEActivationPack": lambda x, scale, ids, weights: (x, ids, weights),
            "MoELayer": self.layer,
            "MoEWeightPack": lambda: SimpleNamespace(prepare_for=self.prepare_for, view=self),
            "QuantFormat": Formats,
            "SwiGLU": lambda limit=float("inf"): limit,
            "cutlass_fused_moe": self.flat,
            "interleave_moe_scales_for_sm90_mixed_gemm": lambda scales: scales.unsqueeze(-1).repeat(1, 1, 1, 4),
            "interleave_moe_weights_for_sm90_mixed_gemm": lambda weights, kind: weights.flip(-1),
        }
        return plain.get(name, lambda **words: SimpleNamespace(**words))

    def prepare_for(self, key: str, view: dict[str, Tensor]) -> None:
        assert key == self.backend_key
        self.view = view

    def layer(self, config: Any, device: torch.device) -> Any:
        self.config = config
        found = SimpleNamespace(runners=[self])
        return _Callable(found, lambda given, packed: self.forward([torch.empty(0), *given, *self.view.values()]))

    def pack_inputs(self, given: Any, packed: Any) -> list[Tensor]:
        return [torch.empty_like(given[0]), *given, *self.view.values()]

    def forward(self, bound: list[Tensor], tactic: Any = -1) -> Tensor:
        self.taken.append(tactic)
        if tactic != -1 and set(tactic) & set(self.left_out):
            raise RuntimeError(f"[TensorRT-LLM][ERROR] {modules.LEFT_OUT} (stub.cpp:3)")
        return self.answer(bound[1:], self.config.activation)

    def flat(self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, dtype: Any, **words: Any) -> Tensor:
        self.flags = words
        scales = [s.view(torch.uint8) if s.dtype == torch.int32 else s for s in words["quant_scales"]]
        limit = float(words["swiglu_limit"][0]) if "swiglu_limit" in words else float("inf")
        found: Tensor = self.answer([x, ids, weights, w1, w2, *scales], limit)
        words["output"].copy_(found)
        return found

    def answer(self, given: list[Tensor], limit: float) -> Tensor:
        x, ids, weights, w1, w2, *scales = given
        rows = x.float()
        output = torch.zeros(rows.shape)
        for token, place in ((t, p) for t in range(len(ids)) for p in range(ids.shape[1])):
            expert = int(ids[token, place])
            first, second = w1[expert], w2[expert]
            row = rows[token]
            if first.dtype == torch.bfloat16:
                up_gate, back = first.float() @ row, second.float()
            elif first.dtype == torch.uint8:
                first, second = (decoded(w, s[expert]) for w, s in ((first, scales[0]), (second, scales[1])))
                up_gate, back = first @ row, second
            elif len(scales) == 2:
                up_gate, back = (first.float() * spread(scales[0][expert])) @ grouped(row), second.float()
                back = back * spread(scales[1][expert])
            else:
                up_gate, back = first.float() @ row * scales[0][expert], second.float() * scales[2][expert]
            up, gate = up_gate.bfloat16().float().chunk(2)[:: -1 if self.swapped else 1]
            h = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            if len(scales) == 4:
                h = (h * scales[1]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            else:
                h = h.bfloat16().float()
                h = grouped(h) if len(scales) == 2 and first.dtype != torch.float32 else h
            output[token] += weights[token, place] * (back @ h).bfloat16().float()
        return output.bfloat16()


class _Callable(SimpleNamespace):
    def __init__(self, found: Any, call: Any) -> None:
        super().__init__(runners=found.runners)
        self.call = call

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)


def spread(scales: Tensor) -> Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def grouped(row: Tensor) -> Tensor:
    groups = row.view(-1, 128)
    amax = groups.abs().amax(1, keepdim=True)
    up = torch.where(amax == 0, 1.0, 448 / amax)
    return ((groups * up).to(torch.float8_e4m3fn).float() * (1 / up)).view(-1)


def decoded(weights: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 weights as the stand-in's layout has them."""
    numbers = decode(unpack_fp4(weights.flip(-1)), E2M1).float()
    return numbers * torch.exp2(scales.view(torch.uint8)[..., 0].float() - 127).repeat_interleave(32, 1)


def whole(library: StandIn) -> list[Any]:
    """The pairs of tactics that were taken, trials of one apart."""
    return list(dict.fromkeys(tactic for tactic in library.taken if tactic != -1 and -1 not in tactic))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(modules, "attribute", found.attribute)
    return found


def drawn(variant: str, seed: int = 0, limit: str = "none") -> Case:
    size = 128 if variant in ("deepseek_fp8", "w4a16") else 32
    return Case.parse(LINE % (variant, 2 * size, size, limit, SCALES[variant], seed))


def verdict(case: Case, name: str = "flashinfer_moe", options: dict[str, str] | None = None) -> str:
    backend: Any = flashinfer_moe.FlashInferMoe(name)
    inputs = operation.inputs(case)
    out = {"output": torch.full(inputs["x"].shape, float("nan"), dtype=torch.bfloat16)}
    outputs = backend.run(backend.prepare(case, inputs, options or {}), out)
    claim: Any = SimpleNamespace(variant=case.variant, source="test")
    return operation.judge(case, inputs, outputs, backend.recipe(claim))[0].verdict


@pytest.mark.parametrize("variant", flashinfer_moe.FORMATS)
def test_every_format_is_handed_over_as_it_is_read(library: StandIn, variant: str) -> None:
    assert isinstance(flashinfer_moe.FlashInferMoe("flashinfer_moe"), Backend)
    for options in ({}, {"front": "layer"}, {"front": "flat"}):
        assert verdict(drawn(variant), options=options) == "pass"
        assert verdict(drawn(variant, 1, limit="7"), options=options) == "pass"
    assert library.taken == [-1] * 4
    assert library.flags["use_fused_finalize"] is False
    assert library.flags.get("use_w4_group_scaling", False) == (variant == "w4a16")
    assert library.flags.get("use_deepseek_fp8_block_scale", False) == (variant == "deepseek_fp8")
    assert (library.config.routing.num_experts, library.config.routing.top_k) == (5, 3)


@pytest.mark.parametrize("variant", flashinfer_moe.FORMATS)
def test_halves_in_the_other_order_are_found(library: StandIn, variant: str) -> None:
    library.swapped = True
    assert verdict(drawn(variant)) == "wrong"


def test_tactics_are_taken_from_both_ends_and_between(library: StandIn) -> None:
    for word in flashinfer_moe.TACTICS:
        assert verdict(drawn("bf16"), options={"tactic": word}) == "pass"
    # The second product has numbers 6 to 15: 8, 9, 12 and 13 add experts in the epilogue, 14 and 15 are old ones.
    assert whole(library) == [(0, 6), (1, 7), (3, 11), (5, 15)]


def test_the_fused_backend_takes_the_others_and_declares_it(library: StandIn) -> None:
    backend = flashinfer_moe.FlashInferMoe("flashinfer_moe_fused")
    assert verdict(drawn("bf16"), "flashinfer_moe_fused") == "pass"
    assert verdict(drawn("bf16"), "flashinfer_moe_fused", {"tactic": "4of4"}) == "pass"
    assert whole(library) == [(0, 8), (5, 13)]
    claim: Any = SimpleNamespace(variant="bf16", source="test")
    recipe = backend.recipe(claim)
    assert (recipe.weighted_dtype, recipe.combine_dtype, recipe.fc2_dtype) == ("bf16", "bf16", "fp32")
    assert not recipe.run_to_run
    with pytest.raises(Unsupported, match="no moe w4a16"):
        backend.prepare(drawn("w4a16"), {}, {})


def test_tactics_that_were_left_out_are_passed_over(library: StandIn) -> None:
    library.left_out = (0, 1, 6, 7, 15, *range(8, 10), *range(12, 14))
    assert verdict(drawn("bf16"), options={"tactic": "1of4"}) == "pass"
    assert verdict(drawn("bf16"), options={"tactic": "4of4"}) == "pass"
    assert whole(library) == [(2, 10), (5, 10)]
    with pytest.raises(Unsupported, match="no tactic that adds experts in the epilogue"):
        verdict(drawn("bf16"), "flashinfer_moe_fused")


def test_claims_follow_the_gates_and_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    capability, compiled, gates = (9, 0), None, dict.fromkeys((f.config for f in flashinfer_moe.FORMATS.values()), 90)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(modules, "ready", lambda name: name == "fused_moe_90")
    monkeypatch.setattr(modules, "formats", lambda name: compiled)
    monkeypatch.setattr(
        modules, "attribute", lambda module, name: SimpleNamespace(supported=lambda sm: gates.get(name) == sm)
    )
    plain, fused = (flashinfer_moe.FlashInferMoe(name) for name in flashinfer_moe.NAMES)

    def variants(backend: Any) -> list[str]:
        return [claim.variant for claim in backend.claims("cuda:0")]

    assert variants(plain) == ["bf16", "deepseek_fp8", "fp8_per_tensor", "w4a16"]
    assert variants(fused) == ["bf16", "fp8_per_tensor"]
    (block,) = (claim for claim in plain.claims("cuda:0") if claim.variant == "deepseek_fp8")
    assert "tactic" not in block.options
    assert block.refusal(drawn("deepseek_fp8")) is None
    gates["CutlassBf16Config"] = 100
    compiled = frozenset({"bf16", "w4a16"})
    assert variants(plain) == ["w4a16"]
    capability = (10, 0)
    assert variants(plain) == []
    assert list(plain.claims("cpu")) == []


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = flashinfer_moe.FlashInferMoe("flashinfer_moe")
    with pytest.raises(Unsupported, match="up first"):
        backend.prepare(Case.parse(drawn("bf16").text.replace("gate=second", "gate=first")), {}, {})
    monkeypatch.setattr(modules, "attribute", lambda module, name: None)
    inputs = operation.inputs(drawn("bf16"))
    with pytest.raises(Unsupported, match="this release has no BackendOptions"):
        backend.prepare(drawn("bf16"), inputs, {})
    with pytest.raises(Unsupported, match="no cutlass_fused_moe"):
        backend.prepare(drawn("bf16"), inputs, {"front": "flat"})


def test_they_run_where_a_module_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "absent", lambda cuda: None)
    assert tuple(backend.name for backend in flashinfer_moe.backends()) == flashinfer_moe.NAMES
    monkeypatch.setattr(modules, "absent", lambda cuda: "no module")
    with pytest.raises(ImportError, match="no module"):
        flashinfer_moe.backends()
