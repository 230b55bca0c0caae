"""Which checks notice which faults of an expert layer: common tolerances beside this project's judge.

    python -m benchmarks.planted_moe_faults [--out docs/results/planted_moe_faults.md] [--seeds 3]

Faults are planted into an FP32 composite of a DeepSeek FP8 layer (UE8M0 scales at FC1 and FC2) whose router weights are
normalised sigmoid scores. The legal rows are correct answers under the recipe that each declares. A share such as 2/3
counts seeds. All checks see FP64 copies of the BF16 outputs and the nominal layer rounded once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.planted_faults import CHECKS
from conformance.backends import _torch_moe as composite
from conformance.operations import moe
from fuzz.case import Case
from references.judging import judge_interval
from references.moe.config import local_ids
from references.recipes import Recipe

SIZES = {"tokens": 17, "experts": 6, "topk": 3, "hidden": 320, "intermediate": 192}
"""Ragged against blocks of 128 at both GEMMs."""
FP32 = Recipe(source="FP32 throughout, to nearest", accumulator="fp32_rn")
MatMul = Callable[[Tensor, Tensor], Tensor]
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """An FP32 composite with everything that a legal implementation may choose, and the policies that it may not.

    matmul: ``a @ b.T``. silu: in FP32. fc1, activation, fc2, weighted: dtypes in which results are stored on the way.
    reciprocal: payloads by x * (1 / s). backwards: experts from the last to the first. folded: the routed scaling
    factor multiplies the weights. x_policy, h_policy: scale policies at FC1 and FC2 in place of the case's.
    """

    matmul: MatMul = composite.matmul
    silu: Callable[[Tensor], Tensor] = lambda x: x / (1 + torch.exp(-x))
    fc1: torch.dtype = torch.float32
    activation: torch.dtype = torch.float32
    fc2: torch.dtype = torch.float32
    weighted: torch.dtype = torch.float32
    reciprocal: bool = False
    backwards: bool = False
    folded: bool = False
    x_policy: str | None = None
    h_policy: str | None = None

    def __call__(self, case: Case, inputs: Inputs) -> Tensor:
        """The layer's output."""
        ids, weights, factor = local_ids(inputs), inputs["weights"], float(case["scaling"])
        on_input = case["weight"] == "input"
        x = self._quantised(case, inputs["x"].float(), inputs, "x", self.x_policy)
        output = torch.zeros_like(x)
        experts = range(case.integer("experts"))
        for expert in reversed(experts) if self.backwards else experts:
            rows, places = torch.where(ids == expert)
            if not len(rows):
                continue
            weight = weights[rows, places][:, None]
            sums = self.matmul(x[rows], composite.dequantised(case, inputs, "w1", expert))
            sums = (sums * weight if on_input else sums).to(self.fc1).float()
            first, second = sums.chunk(2, dim=1)
            gate, up = (first, second) if case["gate"] == "first" else (second, first)
            if case["limit"] != "none":
                gate, up = gate.clamp(max=float(case["limit"])), up.clamp(-float(case["limit"]), float(case["limit"]))
            h = (self.silu(gate) * up).to(self.activation).float()
            h = self._quantised(case, h, inputs, "h", self.h_policy)
            y = self.matmul(h, composite.dequantised(case, inputs, "w2", expert)).to(self.fc2).float()
            last = torch.ones_like(weight) if on_input else weight
            last = last * factor if self.folded else last
            output.index_add_(0, rows, (y * last).to(self.weighted).float())
        return (output if self.folded else output * factor).to(composite.OUTPUTS[case["out"]])

    def _quantised(self, case: Case, x: Tensor, inputs: Inputs, name: str, policy: str | None) -> Tensor:
        block = composite.ACTIVATION_BLOCK.get(case.variant)
        if block is None or case.variant == "nvfp4" or not (policy or self.reciprocal):
            return composite.quantised(case, x, inputs, name)
        blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % block)).view(x.shape[0], -1, block)
        scale = composite.activation_scale(blocks.abs().amax(2, keepdim=True), policy or case["scale"])
        scaled = blocks * (1 / scale) if self.reciprocal else blocks / scale
        return (composite.to_e4m3(scaled) * scale).view(x.shape[0], -1)[:, : x.shape[1]]


def split_k(a: Tensor, b: Tensor) -> Tensor:
    """Four parts of K, added in FP32."""
    return sum((composite.matmul(x, y) for x, y in zip(a.chunk(4, 1), b.chunk(4, 1), strict=True)), torch.zeros(()))


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """One product after another, by addition without FMA."""
    total = a.new_zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[None, :, k]
    return total


BF16 = torch.bfloat16
LEGAL: dict[str, tuple[Layer, Recipe]] = {
    "composite": (Layer(), FP32),
    "split-K in FP32": (Layer(matmul=split_k), FP32),
    "K backwards": (Layer(matmul=lambda a, b: composite.matmul(a.flip(1), b.flip(1))), FP32),
    "one product at a time": (Layer(matmul=one_by_one), FP32),
    "FP64 sums": (Layer(matmul=lambda a, b: (a.double() @ b.double().T).float()), FP32),
    "experts backwards": (Layer(backwards=True), FP32),
    "payload by reciprocal": (Layer(reciprocal=True), replace(FP32, payload_arithmetic="reciprocal")),
    "factor in the weights": (Layer(folded=True), FP32),
    "x * sigmoid(x)": (Layer(silu=lambda x: x * torch.sigmoid(x)), FP32),
    "sigmoid by tanh": (Layer(silu=lambda x: x * (0.5 * torch.tanh(0.5 * x) + 0.5)), replace(FP32, sigmoid="tanh")),
    "FC1 in BF16": (Layer(fc1=BF16), replace(FP32, fc1_dtype="bf16")),
    "activation in BF16": (Layer(activation=BF16), replace(FP32, activation_dtype="bf16")),
    "FC2 in BF16": (Layer(fc2=BF16), replace(FP32, fc2_dtype="bf16")),
    "weighted in BF16": (Layer(weighted=BF16), replace(FP32, weighted_dtype="bf16")),
    "all in BF16": (
        Layer(fc1=BF16, activation=BF16, fc2=BF16, weighted=BF16),
        replace(FP32, fc1_dtype="bf16", activation_dtype="bf16", fc2_dtype="bf16", weighted_dtype="bf16"),
    ),
}
"""Correct implementations and what they declare."""


def draw(seed: int, **words: str | int) -> tuple[Case, dict[str, Tensor]]:
    """A case, and its inputs with weights of a router: sigmoid scores s and biases b, weights s / sum(s)."""
    given: dict[str, str | int] = {
        "gate": "first",
        "ids": "spread",
        "limit": "none",
        "out": "bf16",
        "scale": "ceil",
        "scaling": "2.5",
        "values": "normal",
        "weight": "output",
        **SIZES,
    }
    case = Case.make("moe", "deepseek_fp8", seed=seed, **(given | words))
    inputs = moe.inputs(case)
    noise = torch.Generator().manual_seed(seed)
    scores = torch.randn(inputs["weights"].shape, generator=noise).sigmoid()
    inputs["scores"], inputs["bias"] = scores, 0.1 * torch.randn(scores.shape, generator=noise)
    inputs["weights"] = scores / scores.sum(1, keepdim=True)
    return case, inputs


def _changed(inputs: Inputs, name: str, change: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    changed = inputs[name].clone()
    change(changed)
    return {**inputs, name: changed}


def _set(where: Any, value: float) -> Callable[[Tensor], Any]:
    return lambda tensor: tensor.__setitem__(where, value)


def faults(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Wrong answers, by name."""
    layer = Layer()
    good = layer(case, inputs)
    busy = int(inputs["ids"][0, 0])
    tail = case.integer("intermediate") % 128 or 128
    zeroed, shifted = good.clone(), good.clone()
    zeroed[3] = 0
    shifted[:, 64:128] = good[:, 65:129]
    summed = inputs["scores"].sum(1, keepdim=True)
    return {
        "all-zero output": torch.zeros_like(good),
        "one zeroed row": zeroed,
        "times 0.5": good * 0.5,
        "times 2": good * 2,
        "a dropped expert": layer(case, _changed(inputs, "ids", lambda ids: ids.masked_fill_(ids == busy, -1))),
        "gate and up swapped": layer(case.replace(gate="second"), inputs),
        "one scale exponent off by one": layer(
            case, _changed(inputs, "w2_scales", lambda s: s[busy, 0].add_(1) if s.dtype == torch.uint8 else s)
        ),
        "K tail lost at FC2": layer(case, _changed(inputs, "w2", _set((..., slice(-tail, None)), 0))),
        "one shifted tile": shifted,
        "floor instead of ceil scales": Layer(x_policy="floor", h_policy="floor")(case, inputs),
        "continuous scales at FC2 only": Layer(h_policy="fp32")(case, inputs),
        "weights not normalised": layer(case, {**inputs, "weights": inputs["scores"]}),
        "bias in the weights": layer(case, {**inputs, "weights": (inputs["scores"] + inputs["bias"]) / summed}),
    }


def judged(case: Case, inputs: Inputs, output: Tensor, recipe: Recipe = FP32) -> bool:
    """Whether the judge accepts an output."""
    found = moe.admissible(case, inputs, recipe)
    return bool(judge_interval(output.double(), found.interval).inside.all())


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to noise, in dB."""
    noise = float((actual - expected).square().sum())
    return float("inf") if noise == 0 else float(10 * torch.log10(expected.square().sum() / noise))


TOLERANCES: Mapping[str, Callable[[Tensor, Tensor], bool]] = {**CHECKS, "SQNR >= 18 dB": lambda x, y: sqnr(x, y) >= 18}


def table(seeds: int, **words: str | int) -> str:
    """Markdown: a row for each fault and legal variant, a column for each check, with the shares that it rejects."""
    columns = ["this project", *TOLERANCES]
    caught: dict[str, dict[str, int]] = {}
    for seed in range(seeds):
        case, inputs = draw(seed, **words)
        nominal = moe.admissible(case, inputs, FP32).interval
        rows = {f"fault: {name}": (output, FP32) for name, output in faults(case, inputs).items()}
        rows |= {f"legal: {name}": (layer(case, inputs), recipe) for name, (layer, recipe) in LEGAL.items()}
        for name, (output, recipe) in rows.items():
            counts = caught.setdefault(name, dict.fromkeys(columns, 0))
            counts["this project"] += not judged(case, inputs, output, recipe)
            for check, accepts in TOLERANCES.items():
                counts[check] += not accepts(output.double(), nominal.nominal)
    lines = [f"| rejected, of {seeds} seeds | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(str(counts[c]) for c in columns)} |" for name, counts in caught.items()]
    found = [name for name in caught if name.startswith("fault")]
    totals = [f"{sum(caught[name][c] == seeds for name in found)} of {len(found)}" for c in columns]
    lines.append(f"| **faults always rejected** | {' | '.join(totals)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    text = table(arguments.seeds)
    if arguments.out is None:
        print(text)
        return
    head = "# Planted faults of an expert layer\n\nMade by `python -m benchmarks.planted_moe_faults`, "
    words = ", ".join(f"{key} {value}" for key, value in SIZES.items())
    arguments.out.write_text(f"{head}deepseek_fp8 with UE8M0 scales, {words}.\n\n{text}\n")


if __name__ == "__main__":
    main()
