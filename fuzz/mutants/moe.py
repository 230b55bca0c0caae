"""Faults in expert layers: gate and up, clamps, router weights, factors, ids, dispatch and combination."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuzz.mutants import correct
from fuzz.mutants.base import Inputs, Mutant
from fuzz.mutants.correct import F32, F64, PLAIN, Parts
from references.backend import CaseLike
from references.blocks import quantize
from references.gemm_formats import operand
from references.moe.config import MoeConfig, activation_scales, config_of, local_ids
from references.packing import pack_fp4
from references.rounding import round_to

Places = tuple[Tensor, Tensor]


def added(terms: Tensor) -> Tensor:
    """The sum over a token's experts, FP64 ``[tokens, topk, hidden]`` to ``[tokens, hidden]``."""
    return terms.sum(dim=1)


def outer_of(inputs: Inputs, name: str, expert: int) -> Tensor | None:
    """An expert's global scale of a weight, ``[1]``; None where the format has none."""
    outer = inputs.get(f"{name}_global_scale")
    return None if outer is None else outer[expert : expert + 1]


@dataclass(frozen=True)
class Steps:
    """The steps of an expert layer that a mutant may replace.

    gate_first, limit, factor: what is made of those of the case. mapped: ids as they are
    numbered here. ids: the experts that are computed. dispatched: which
    (token, place) pairs of an expert are. up_shard: the expert whose global
    scale W1's up rows are read with. on_input,
    on_output: whether router weights multiply FC1's input and FC2's output, from where the case wants them. activate:
    `swiglu`. combine: the sum over experts. x: the quantised activations, FP64.
    """

    gate_first: Callable[[bool], bool] = lambda first: first
    limit: Callable[[float | None], float | None] = lambda limit: limit
    factor: Callable[[float], float] = lambda factor: factor
    mapped: Callable[[Inputs], Tensor] = local_ids
    ids: Callable[[Tensor, int], Tensor] = lambda ids, experts: ids
    dispatched: Callable[[Places], Places] = lambda places: places
    up_shard: Callable[[int], int] = lambda expert: expert
    on_input: Callable[[bool], bool] = lambda wanted: wanted
    on_output: Callable[[bool], bool] = lambda on_input: not on_input
    activate: Callable[[Tensor, bool, float | None], Tensor] = field(default=lambda *given: swiglu(*given))
    combine: Callable[[Tensor], Tensor] = added
    x: Tensor | None = None


CORRECT = Steps()


def layer(case: CaseLike, inputs: Inputs, steps: Steps = CORRECT) -> Parts:
    """``output`` of a ``moe`` case: exact products, every stage's result rounded to FP32."""
    config = config_of(case)
    given = activation_scales(inputs)
    experts = case.integer("experts")
    ids, weights = steps.ids(steps.mapped(inputs), experts), inputs["weights"].to(F64)
    x = quantised(inputs["x"].to(F32), config, given[0]) if steps.x is None else steps.x
    terms = torch.zeros(*ids.shape, x.shape[1], dtype=F64)
    for expert in range(experts):
        rows, places = steps.dispatched((ids == expert).nonzero(as_tuple=True))  # type: ignore[arg-type]
        if not len(rows):
            continue
        factor = weights[rows, places][:, None]
        sums = _to_fp32(x[rows] @ first_weight(config, inputs, expert, steps).T)
        if steps.on_input(config.weight_on_input):
            sums = _to_fp32(sums * factor)
        h = steps.activate(sums, steps.gate_first(config.gate_first), steps.limit(config.limit))
        w2 = weight(config, inputs, "w2", expert, outer_of(inputs, "w2", expert))
        found = _to_fp32(quantised(h.to(F32), config, given[1]) @ w2.T)
        terms[rows, places] = found * factor if steps.on_output(config.weight_on_input) else found
    total = _to_fp32(steps.combine(terms) * steps.factor(config.scaling))
    return {"output": round_to(total, config.dtype).to(config.dtype)}


def swiglu(sums: Tensor, gate_first: bool, limit: float | None) -> Tensor:
    """silu(gate) * up of FP64 sums ``[rows, 2 * intermediate]``, rounded to FP32."""
    first, second = sums.chunk(2, dim=1)
    gate, up = (first, second) if gate_first else (second, first)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _to_fp32(gate * torch.sigmoid(gate) * up)


def quantised(x: Tensor, config: MoeConfig, given: Tensor | None) -> Tensor:
    """FP32 activations as the next GEMM reads them, FP64."""
    kind, side = config.scheme, config.sides[0]
    if kind is None:
        return round_to(x.to(F64), torch.bfloat16)
    outer = given if kind.two_level else None
    found = quantize(x, kind, PLAIN, global_scale=outer, scale=given if kind.scale == "static" else None)
    codes = pack_fp4(found.payload) if kind.element.bits == 4 else found.payload
    scales = found.scales
    if scales is None:
        assert given is not None
        scales = given.reshape(1, 1)
    return operand(codes, scales, side, outer).values


def weight(config: MoeConfig, inputs: Inputs, name: str, expert: int, outer: Tensor | None) -> Tensor:
    """An expert's weight under a global scale, FP64."""
    scales = inputs.get(f"{name}_scales")
    return operand(inputs[name][expert], None if scales is None else scales[expert], config.sides[1], outer).values


def first_weight(config: MoeConfig, inputs: Inputs, expert: int, steps: Steps) -> Tensor:
    """An expert's W1, its up rows under a global scale of their own."""
    found = weight(config, inputs, "w1", expert, outer_of(inputs, "w1", expert))
    other = weight(config, inputs, "w1", expert, outer_of(inputs, "w1", steps.up_shard(expert)))
    half = len(found) // 2
    return torch.cat([found[:half], other[half:]] if config.gate_first else [other[:half], found[half:]])


def _to_fp32(x: Tensor) -> Tensor:
    return round_to(x, F32)


def _with(steps: Steps) -> Callable[[CaseLike, Inputs], Parts]:
    return lambda case, inputs: layer(case, inputs, steps)


def _wrapped(ids: Tensor, experts: int) -> Tensor:
    return ids % experts


def _first_alone(places: Places) -> Places:
    return places[0][:1], places[1][:1]


def _bf16_sums(terms: Tensor) -> Tensor:
    total = torch.zeros_like(terms[:, 0])
    for place in range(terms.shape[1]):
        total = round_to(_to_fp32(total + round_to(terms[:, place], torch.bfloat16)), torch.bfloat16)
    return total


def _garbage_rows(case: CaseLike, inputs: Inputs) -> Parts:
    # As many rows again as were written follow in the buffer; an allocator had left 1000 in them.
    x = inputs["x"]
    stale = torch.cat([x, torch.full_like(x, 1000.0)])
    right = correct.quantize(case, {**inputs, "x": stale})
    return {**right, "payload": right["payload"][: len(x)]}


MUTANTS = (
    Mutant(
        family="gate-up-order",
        area="moe",
        source="sgl-project/sglang#32430",
        description="halves of W1 taken for up and gate",
        operation="moe",
        variants=("nvfp4", "deepseek_fp8"),
        answer=_with(Steps(gate_first=lambda first: not first)),
    ),
    Mutant(
        family="swiglu-clamp-missing",
        area="moe",
        source="sgl-project/sglang#39939",
        description="limit of the activation never reaches the kernel",
        operation="moe",
        variants=("deepseek_fp8", "mxfp8"),
        where={"limit": ("7",)},
        answer=_with(Steps(limit=lambda limit: None)),
    ),
    Mutant(
        family="moe-router-weight-twice",
        area="moe",
        source="vllm-project/vllm#43694",
        description="router weight on the input and again on the output",
        operation="moe",
        variants=("fp8_per_tensor", "bf16"),
        where={"weight": ("input",)},
        answer=_with(Steps(on_output=lambda on_input: True)),
    ),
    Mutant(
        family="weight-on-output",
        area="moe",
        source="sgl-project/sglang#6274",
        description="router weight on the output although it belongs on the input",
        operation="moe",
        variants=("fp8_per_tensor", "bf16"),
        where={"weight": ("input",)},
        answer=_with(Steps(on_input=lambda wanted: False, on_output=lambda on_input: True)),
    ),
    Mutant(
        family="moe-rsf-twice",
        area="moe",
        source="vllm-project/vllm#45037",
        description="routed scaling factor in the weights and again on the output",
        operation="moe",
        variants=("deepseek_fp8", "mxfp8"),
        answer=_with(Steps(factor=lambda factor: factor * factor)),
    ),
    Mutant(
        family="moe-w13-global-scale-mismatch",
        area="moe",
        source="vllm-project/vllm#54974",
        description="up rows of W1 under the global scale of another shard, block scales not rescaled",
        operation="moe",
        variants=("nvfp4",),
        answer=_with(Steps(up_shard=lambda expert: 0)),
    ),
    Mutant(
        family="moe-nongated-treated-as-gated",
        area="moe",
        source="vllm-project/vllm#51125",
        description="weight without a gate walked as two shards, amax over the half that was never written",
        operation="quantize",
        variants=("fp8_per_tensor",),
        where={"scale": ("fp32",)},
        answer=_garbage_rows,
    ),
    Mutant(
        family="moe-expert-map-minus-one-wraps",
        area="moe",
        source="vllm-project/vllm#46408",
        description="id -1 indexes the experts from their end",
        operation="moe",
        variants=("deepseek_fp8", "mxfp8", "w4a16"),
        answer=_with(Steps(ids=_wrapped)),
    ),
    Mutant(
        family="cuda-graph-pad-frozen",
        area="determinism",
        source="vllm-project/vllm#52383",
        description="padded copy of the hidden states made outside of what is replayed, ids and weights live",
        operation="moe",
        variants=("deepseek_fp8", "bf16"),
        frozen=("x",),
        answer=layer,
    ),
    Mutant(
        family="moe-align-drops-tokens",
        area="moe",
        source="vllm-project/vllm-xpu-kernels#453",
        description="an expert's sorted tokens hold the first one alone",
        operation="moe",
        variants=("bf16", "w4a16"),
        answer=_with(Steps(dispatched=_first_alone)),
    ),
    Mutant(
        family="moe-sum-bf16-accumulate",
        area="moe",
        source="vllm-project/vllm#15045",
        description="experts added up in BF16",
        operation="moe",
        variants=("deepseek_fp8", "bf16"),
        answer=_with(Steps(combine=_bf16_sums)),
    ),
)
