"""vLLM's expert layer without vLLM: operators around it by plain loops, its call through a stand-in of the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.backends import _vllm_moe as moe
from conformance.backends import _vllm_ops as ops
from conformance.backends._vllm_modules import FUSED_MOE, MOE_UTILS
from conformance.operations import moe as operation
from fuzz.case import Case
from references.backend import Unsupported

LINE = (
    "moe %s v=1 experts=4 gate=first hidden=%d ids=%s intermediate=%d limit=%s out=bf16 scale=%s scaling=1 tokens=9 "
    "topk=2 values=normal weight=%s seed=%d"
)


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_aligned_as_by_a_loop(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    experts, block = 1 + seed, (1, 4, 16)[seed % 3]
    ids = torch.randint(-1, experts + 1, (7, 3), generator=source)
    expert_map = torch.randperm(experts, generator=source) - 1 if seed % 2 else None
    found = torch.full((200,), -9, dtype=torch.int32), torch.full((60,), -9, dtype=torch.int32)
    padded = torch.zeros(1, dtype=torch.int32)
    ops.moe_align_block_size(ids, experts, block, *found, padded, expert_map)
    rows: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        mine = [
            number
            for number, chosen in enumerate(ids.flatten().tolist())
            if 0 <= chosen < experts and (chosen if expert_map is None else int(expert_map[chosen])) == expert
        ]
        mine += [ids.numel()] * (-len(mine) % block)
        rows += mine
        owners += [expert] * (len(mine) // block)
    assert padded.tolist() == [len(rows)]
    assert found[0].tolist() == rows + [ids.numel()] * (200 - len(rows))
    assert found[1][: len(owners)].tolist() == owners


def test_sums_and_static_scales_by_hand() -> None:
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    ops.moe_sum(torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16), out)
    assert out.item() == 258.0  # in BF16, 256 + 1 is 256
    payload, scale = ops.scaled_fp8_quant(torch.tensor([3.0, -1e6]), torch.tensor([2.0]))
    assert payload.float().tolist() == [1.5, -448.0]
    assert scale.tolist() == [2.0]
    with pytest.raises(NotImplementedError, match="static"):
        ops.scaled_fp8_quant(torch.ones(2), None)


@pytest.mark.parametrize(
    ("ids", "given", "expected", "expected_map"),
    [
        ("spread", None, [0, 2], None),
        ("elsewhere", None, [0, 4], [0, 1, 2, 3, -1]),
        ("map_any", [-1, 0, -1, 1], [0, 4], [-1, 0, -1, 1, -1]),
    ],
)
def test_an_expert_of_no_rank_is_one_more_expert(
    ids: str, given: list[int] | None, expected: list[int], expected_map: list[int] | None
) -> None:
    case = Case.parse(LINE % ("bf16", 16, ids, 16, "none", "none", "output", 0))
    inputs = {"ids": torch.tensor([[0, expected[1] if expected[1] != 4 else -1]], dtype=torch.int32)}
    if given is not None:
        inputs["expert_map"] = torch.tensor(given, dtype=torch.int32)
    found, expert_map = moe.routed(case, inputs)
    assert found.tolist() == [expected]
    assert (None if expert_map is None else expert_map.tolist()) == expected_map


class StandIn:
    """vLLM as the adapter sees it: a layer in FP32 that asks for everything where vLLM's does."""

    def __init__(self) -> None:
        self.layer = SimpleNamespace(apply_moe_activation=None, try_get_optimal_moe_config=lambda *_, **__: {})
        self.quant = SimpleNamespace(is_deep_gemm_e8m0_used=lambda: None)
        self.configs: list[dict[str, int]] = []

    def load(self, name: str) -> Any:
        return self.layer if name == FUSED_MOE else self.quant

    def function(self, name: str, module: str) -> Callable[..., Any]:
        if module == MOE_UTILS:
            return self.activate
        assert name == "fused_experts_impl"
        return self.run

    @staticmethod
    def activate(output: Tensor, gate_up: Tensor, ids: Tensor, limit: float, expert_map: Tensor | None) -> None:
        assert len(ids) == len(gate_up)
        gate, up = gate_up.float().chunk(2, dim=1)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        output.copy_(torch.nn.functional.silu(gate) * up)

    def quantised(self, x: Tensor, given: Tensor | None, block: list[int] | None) -> Tensor:
        """Dequantised FP32 values."""
        if given is not None:
            return (x.float() / given).clamp(-448, 448).to(torch.float8_e4m3fn).float() * given
        if block is None:
            return x.float()
        groups = x.float().unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) * torch.tensor(1 / 448)
        if self.quant.is_deep_gemm_e8m0_used():
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    def run(self, x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, **options: Any) -> Tensor:
        assert int(ids.min()) >= 0
        self.configs.append(self.layer.try_get_optimal_moe_config(w1.shape))
        expert_map, on_input = options.get("expert_map"), options["apply_router_weight_on_input"]
        block = options.get("block_shape")
        local = ids if expert_map is None else expert_map[ids.long()]
        matrices = []
        for name, stored in (("w1", w1), ("w2", w2)):
            values = stored.float()
            scales = options.get(f"{name}_scale")
            if block is not None:
                scales = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
                values = values * scales[:, : values.shape[1], : values.shape[2]]
            elif scales is not None:
                values = values * scales[:, None, None]
            matrices.append(values)
        first = self.quantised(x, options.get("a1_scale"), block)
        tokens, topk = ids.shape
        gate_up = x.new_zeros(tokens, topk, w1.shape[1])
        for token, slot in (local >= 0).nonzero().tolist():
            row = matrices[0][local[token, slot]] @ first[token]
            gate_up[token, slot] = row * (weights[token, slot] if on_input else 1.0)
        hidden = x.new_empty(tokens * topk, w1.shape[1] // 2)
        self.layer.apply_moe_activation("silu", hidden, gate_up.flatten(0, 1))
        second = self.quantised(hidden, options.get("a2_scale"), block).view(tokens, topk, -1)
        parts = x.new_zeros(tokens, topk, w2.shape[1])
        for token, slot in (local >= 0).nonzero().tolist():
            row = matrices[1][local[token, slot]] @ second[token, slot]
            parts[token, slot] = row * (1.0 if on_input else weights[token, slot])
        return parts.float().sum(1).bfloat16()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(moe, "library", lambda: found)
    return found


def verdict(text: str, options: dict[str, str] | None = None, **choices: Any) -> str:
    """choices: of the recipe, in place of those that the adapter declares."""
    case = Case.parse(text)
    inputs = operation.inputs(case)
    (claim,) = (claim for claim in moe.claims(9) if claim.variant == case.variant)
    assert claim.refusal(case) is None
    outputs = moe.prepare(case, inputs, options or {})({})
    return operation.judge(case, inputs, outputs, replace(moe.recipe(claim), **choices))[0].verdict


@pytest.mark.parametrize(
    ("variant", "hidden", "inner", "scale"),
    [
        ("deepseek_fp8", 256, 128, "fp32"),
        ("deepseek_fp8", 256, 128, "ceil"),
        ("fp8_per_tensor", 160, 48, "fp32"),
        ("bf16", 64, 72, "none"),
    ],
)
@pytest.mark.parametrize(("ids", "limit", "weight"), [("spread", "7", "output"), ("elsewhere", "none", "input")])
def test_the_layer_is_called_as_it_is_documented(
    library: StandIn, variant: str, hidden: int, inner: int, scale: str, ids: str, limit: str, weight: str
) -> None:
    assert verdict(LINE % (variant, hidden, ids, inner, limit, scale, weight, 1)) == "pass"
    assert library.layer.apply_moe_activation is None
    assert library.quant.is_deep_gemm_e8m0_used() is None


def test_a_policy_that_is_not_kept_is_found(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in asked for continuous scales where the case asks for powers of two; it adds in FP32."""
    text = LINE % ("deepseek_fp8", 256, "spread", 128, "none", "ceil", "output", 2)
    assert verdict(text, accumulator="fp32_any") == "pass"
    configured = moe.configured
    monkeypatch.setattr(
        moe, "configured", lambda *given, powers_of_two, **rest: configured(*given, powers_of_two=False, **rest)
    )
    assert verdict(text, accumulator="hopper_fp8") == "wrong"


def test_tactics_are_tiles(library: StandIn) -> None:
    text = LINE % ("bf16", 64, "spread", 64, "none", "none", "output", 3)
    for tactic in (None, *moe.TACTICS):
        assert verdict(text, {} if tactic is None else {"tactic": tactic}) == "pass"
    assert [config.get("BLOCK_SIZE_M") for config in library.configs] == [None, 16, 64, 128]
    assert all(config.get("BLOCK_SIZE_K", 128) == 128 for config in library.configs)


def test_other_layers_are_refused() -> None:
    text = LINE % ("bf16", 16, "spread", 16, "none", "none", "output", 0)
    with pytest.raises(Unsupported, match="gate first"):
        moe.prepare(Case.parse(text.replace("first", "second")), {}, {})
    assert list(moe.claims(8)) == []
