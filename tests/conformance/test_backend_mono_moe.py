"""FlashInfer's one-kernel expert layer through a stand-in: how it is asked for one expert a token, and with what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.backends import _flashinfer_modules as modules
from conformance.backends import flashinfer_mono
from conformance.operations import moe as operation
from fuzz.case import Case
from references.backend import Backend, Unsupported
from references.recipes import Recipe

LINE = (
    "moe deepseek_fp8 v=1 experts=6 gate=first hidden=256 ids=%s intermediate=128 limit=none out=bf16 scale=fp32 "
    "scaling=2.5 tokens=5 topk=3 values=normal weight=output seed=%d"
)
LOOSE = Recipe(source="test", fc2_dtype="bf16", payload_arithmetic="approximate", payload_error=2.0**-21)


class StandIn:
    """``mono_moe`` in FP32, with its own routing. off: what it takes of the second expert scales."""

    def __init__(self, off: float = 1.0) -> None:
        self.off = off
        self.scratchpads: list[int] = []

    def allocate(self, device: torch.device) -> Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def mono_moe(
        self, x: Tensor, logits: Tensor, w1: Tensor, s1: Tensor, w2: Tensor, s2: Tensor, top_k: int, scoring: str,
        renormalize: bool, *, scratchpad: Tensor,
    ) -> Tensor:  # fmt: skip
        assert (top_k, scoring, renormalize) == (1, "sigmoid", False)
        assert logits.dtype == torch.bfloat16
        self.scratchpads.append(scratchpad.data_ptr())
        chosen = logits.argmax(1)
        assert torch.equal(torch.sigmoid(logits.float()).sum(1), torch.ones(len(x)))
        rows = []
        for token, expert in enumerate(chosen.tolist()):
            first = w1[expert].float() * spread(s1[expert])
            second = w2[expert].float() * spread(s2[expert]) * self.off
            gate, up = (first @ quantised(x[token].float())).chunk(2)
            rows.append(second @ quantised(torch.nn.functional.silu(gate) * up))
        return torch.stack(rows).bfloat16()


def spread(scales: Tensor) -> Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def quantised(row: Tensor) -> Tensor:
    groups = row.view(-1, 128)
    amax = groups.abs().amax(1, keepdim=True).clamp(min=1e-10)
    return ((groups * (448 / amax)).to(torch.float8_e4m3fn).float() * (amax / 448)).view(-1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    names = {"mono_moe": found.mono_moe, "alloc_scratchpad": found.allocate}
    monkeypatch.setattr(modules, "attribute", lambda module, name: names.get(name))
    return found


def verdict(text: str, backend: Any, options: dict[str, str] | None = None) -> str:
    case = Case.parse(text)
    inputs = operation.inputs(case)
    outputs = backend.run(backend.prepare(case, inputs, options or {}), {})
    return operation.judge(case, inputs, outputs, LOOSE)[0].verdict


@pytest.mark.parametrize("ids", ["spread", "skewed", "elsewhere"])
def test_a_layer_is_put_together_from_single_experts(library: StandIn, ids: str) -> None:
    backend = flashinfer_mono.MonoMoe()
    assert isinstance(backend, Backend)
    assert [verdict(LINE % (ids, seed), backend) for seed in (0, 1)] == ["pass", "pass"]
    assert len(library.scratchpads) == 6
    assert len(set(library.scratchpads)) == 1
    assert verdict(LINE % (ids, 2), backend, {"scratchpad": "fresh"}) == "pass"
    assert len(set(library.scratchpads)) == 2


def test_wrong_scales_are_found(library: StandIn) -> None:
    library.off = 1.25
    assert verdict(LINE % ("spread", 0), flashinfer_mono.MonoMoe()) == "wrong"


def test_logits_name_one_expert() -> None:
    logits = flashinfer_mono.logits_of(torch.tensor([2, 0, -1], dtype=torch.int32), 4)
    assert torch.equal(torch.sigmoid(logits.float()), torch.eye(4)[[2, 0, 0]])


def test_it_is_claimed_for_one_shape_on_sm90_where_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    capability, compiled = (9, 0), True
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(modules, "ready", lambda name: compiled)
    backend = flashinfer_mono.MonoMoe()
    (claim,) = backend.claims("cuda:0")
    assert (claim.where["experts"], claim.where["hidden"], claim.maxima) == (("256",), ("2048",), {"tokens": 8})
    assert backend.recipe(claim).accumulator == "hopper_fp8"
    assert list(backend.claims("cpu")) == []
    compiled = False
    assert list(backend.claims("cuda:0")) == []
    compiled, capability = True, (10, 0)
    assert list(backend.claims("cuda:0")) == []


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "attribute", lambda module, name: None)
    case = Case.parse(LINE % ("spread", 0))
    with pytest.raises(Unsupported, match="no mono_moe"):
        flashinfer_mono.MonoMoe().prepare(case, {}, {})
    with pytest.raises(Unsupported, match="no moe bf16"):
        flashinfer_mono.MonoMoe().prepare(
            Case.parse((LINE % ("spread", 0)).replace("deepseek_fp8", "bf16").replace("scale=fp32", "scale=none")),
            {},
            {},
        )
