"""One expert layer of DeepSeek-V3's size through the references: time beside that of its FP64 matrix products, memory.

    python -m benchmarks.moe_layer                                  # 64 tokens on a CPU
    python -m benchmarks.moe_layer --tokens 4096 --device cuda      # on a GPU

Prints Markdown. Weights are slices of one pool of random codes, each expert's at another place, so that a layer of any
size streams past. A ratio compares with the matrix products alone: one FP64 product of the same shape for FC1 and FC2
of every expert, operands decoded beforehand. SGLang's and vLLM's own references in plain torch get the same experts,
dequantised to BF16 when they ask for them; they compute without quantisation and without bounds.
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.throughput import machine, synchronise
from conformance.backends._library import Library
from references.elements import E4M3FN, encode
from references.gemm_formats import Stored
from references.moe import MoeConfig, admissible_moe, nominal_moe
from references.recipes import Recipe

SGLANG = "sglang.srt.layers.moe.fused_moe_native"
VLLM = "vllm.model_executor.layers.fused_moe.experts.fused_batched_moe"
LONG = 5.0
"""Seconds after which a call is not timed again."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes, inputs on a device, and a pool of E4M3 codes of N(0, 112^2) that the experts' weights are cut from."""

    experts: int
    hidden: int
    intermediate: int
    config: MoeConfig
    x: Tensor
    ids: Tensor
    weights: Tensor
    pool: Tensor

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of W1 and W2."""
        return (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)

    @cached_property
    def scales(self) -> list[Tensor]:
        """Those of W1 and W2, the same for every expert."""
        found = []
        for rows, columns in self.shapes:
            level = -7 - (columns.bit_length() - 1) // 2
            grid = -(-rows // 128), -(-columns // 128)
            exponents = level + torch.arange(grid[0] * grid[1], device=self.pool.device).view(grid) % 3
            if self.config.sides[1].scale == "ue8m0":
                found.append((exponents + 127).to(torch.uint8))
            else:
                found.append(torch.ldexp(torch.full_like(exponents, 1.3, dtype=torch.float32), exponents))
        return found

    def stored(self, expert: int) -> tuple[Stored, Stored]:
        """An expert's weights, without a copy."""
        found = []
        for number, (rows, columns) in enumerate(self.shapes):
            room = self.pool.numel() - rows * columns
            start = (expert * 2 + number) * 1_000_004 % room
            codes = self.pool[start : start + rows * columns].view(rows, columns)
            found.append(Stored(codes, self.scales[number], self.config.sides[1]))
        return found[0], found[1]


def draw(options: argparse.Namespace) -> Layer:
    """The layer that the options describe."""
    device = torch.device(options.device)
    noise = torch.Generator(device).manual_seed(0)
    tokens, experts = options.tokens, options.experts
    codes = 2 * max(2 * options.intermediate * options.hidden, 2**20)
    if device.type == "cuda":
        codes = max(codes, 2**30)
    pool = torch.empty(codes, dtype=torch.uint8, device=device)
    for start in range(0, codes, 2**24):
        part = pool[start : start + 2**24]
        part.copy_(encode(torch.randn(len(part), generator=noise, device=device) * 112.0, E4M3FN))
    scores = torch.rand(tokens, experts, generator=noise, device=device)
    weights = torch.rand(tokens, options.topk, generator=noise, device=device) / options.topk
    config = MoeConfig(
        format="deepseek_fp8",
        scale=options.scale,
        gate_first=True,
        limit=None,
        scaling=2.5,
        weight_on_input=False,
        dtype=torch.bfloat16,
    )
    return Layer(
        experts=experts,
        hidden=options.hidden,
        intermediate=options.intermediate,
        config=config,
        x=torch.randn(tokens, options.hidden, generator=noise, device=device).to(torch.bfloat16),
        ids=scores.topk(options.topk, dim=1).indices.to(torch.int32),
        weights=weights,
        pool=pool,
    )


class Dequantised:
    """The experts' W1 or W2 in BF16 as an indexable, each decoded when it is asked for."""

    def __init__(self, layer: Layer, number: int) -> None:
        self._layer, self._number = layer, number
        self.shape = torch.Size((layer.experts, *layer.shapes[number]))

    def size(self, dimension: int) -> int:
        """Of the stack of matrices."""
        return self.shape[dimension]

    def __getitem__(self, expert: int) -> Tensor:
        return self._layer.stored(expert)[self._number].values(torch.float32).to(torch.bfloat16)


def products(layer: Layer, rows: list[int]) -> Callable[[], None]:
    """FC1 and FC2 of experts with so many tokens each, in FP64."""
    w1, w2 = (stored.values() for stored in layer.stored(0))
    x, h = (torch.randn(max(rows), width, dtype=w1.dtype, device=w1.device) for width in (w1.shape[1], w2.shape[1]))

    def call() -> None:
        for count in rows:
            torch.mm(x[:count], w1.T)
            torch.mm(h[:count], w2.T)

    return call


def sglang(layer: Layer) -> Callable[[], Any]:
    """SGLang's ``moe_forward_native``; its activation is an operator of the server, so it is given here."""
    half = layer.intermediate
    activation = lambda: lambda y: torch.nn.functional.silu(y[..., :half]) * y[..., half:]  # noqa: E731
    given = {"sglang.srt.layers.activation": {"SiluAndMul": activation}}
    call = Library("sglang", "sglang", "CONFORMANCE_SGLANG", (SGLANG,), given).function("moe_forward_native", SGLANG)
    weights = SimpleNamespace(
        num_experts=layer.experts, w13_weight=Dequantised(layer, 0), w2_weight=Dequantised(layer, 1)
    )
    about = SimpleNamespace(
        apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None, gemm1_clamp_limit=None
    )
    return lambda: call(weights, layer.x, (layer.weights, layer.ids.to(torch.int64), None), about)


def vllm(layer: Layer) -> Callable[[], Any]:
    """vLLM's ``NaiveBatchedExperts``: the experts alone, on tokens that are already sorted by them.

    The helpers that it imports from the rest of vLLM are given here.
    """
    module = Library("vllm", "vllm", "CONFORMANCE_VLLM", (VLLM,), {}).load(VLLM)
    vars(module)["_is_capturing_or_compiling"] = lambda: False
    vars(module)["_resize_cache"] = lambda space, shape: space.new_empty(shape)
    half = layer.intermediate

    def activation(_: Any, out: Tensor, sums: Tensor) -> None:
        torch.mul(torch.nn.functional.silu(sums[:, :half]), sums[:, half:], out=out)

    itself = SimpleNamespace(quant_config=SimpleNamespace(is_quantized=False), activation=activation)
    counts = torch.bincount(layer.ids.reshape(-1).to(torch.int64), minlength=layer.experts)
    order = torch.argsort(layer.ids.reshape(-1), stable=True)
    places = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    batch = layer.x.new_zeros(layer.experts, int(counts.max()), layer.hidden)
    batch[layer.ids.reshape(-1)[order].to(torch.int64), places] = layer.x[order // layer.ids.shape[1]]
    tokens, output = SimpleNamespace(expert_num_tokens=counts), torch.empty_like(batch)
    w1, w2 = Dequantised(layer, 0), Dequantised(layer, 1)
    return lambda: module.NaiveBatchedExperts.apply(
        itself, output, batch, w1, w2, None, None, "silu", layer.experts, None, None, None, None, batch, tokens, False
    )


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The best of some calls; of fewer where they take long."""
    found: list[float] = []
    while len(found) < repeats and sum(found) < LONG:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        found.append(time.perf_counter() - start)
    return min(found)


def table(layer: Layer, repeats: int, bounds: bool, others: bool) -> Iterator[str]:
    """The Markdown table, a line at a time."""
    device = layer.x.device
    recipe = Recipe(source="a benchmark", accumulator="fp32_any")
    counts = torch.bincount(layer.ids.reshape(-1).to(torch.int64), minlength=layer.experts)
    rows = [count for count in counts.tolist() if count]
    given = (layer.x, layer.ids, layer.weights, layer.stored, layer.config, recipe)
    calls: dict[str, Callable[[], Any]] = {
        "FP64 matrix products alone": products(layer, rows),
        "reference, FP64": lambda: nominal_moe(*given),
        "reference, FP32": lambda: nominal_moe(*given, precision=torch.float32),
    }
    if bounds:
        calls["reference with bounds"] = lambda: admissible_moe(*given)
    missing = {}
    for name, make in (("SGLang moe_forward_native, BF16", sglang), ("vLLM NaiveBatchedExperts, BF16", vllm)):
        try:
            if others:
                calls[name] = make(layer)
        except ImportError as error:
            missing[name] = str(error)
    yield "| evaluation | seconds | of the matrix products | ms an expert | peak memory, GiB |"
    yield "|---|--:|--:|--:|--:|"
    base = 0.0
    for name, call in calls.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            spent = seconds(call, device, repeats)
        except Exception as error:  # another library's failure is a row, not the end
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:120].replace("|", "/")
            yield f"| {name} | {reason} | | | |"
            continue
        base = base or spent
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated() / 2**30
        yield f"| {name} | {spent:.3g} | {spent / base:.2f} | {spent / len(rows) * 1e3:.3g} | {memory:.2f} |"
    for name, reason in missing.items():
        yield f"| {name} | {reason} | | | |"


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--scale", choices=("fp32", "ceil"), default="fp32", help="of weights and activations")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=1, help="timed calls, fewer of long ones; the best counts")
    parser.add_argument("--no-bounds", action="store_true", help="leave the reference with bounds out")
    parser.add_argument("--no-others", action="store_true", help="leave other libraries' references out")
    options = parser.parse_args(arguments)
    sizes = (options.tokens, options.topk, options.hidden, options.intermediate, options.repeats)
    if min(sizes) < 1 or options.experts < options.topk:
        parser.error("sizes are at least 1, and top-k is at most the number of experts")
    layer = draw(options)
    busy = len(torch.unique(layer.ids))
    print(
        f"deepseek_fp8, scale={options.scale}, hidden {options.hidden}, intermediate {options.intermediate}, ", end=""
    )
    print(f"{options.experts} experts ({busy} in use), top-{options.topk}, {options.tokens} tokens;")
    print(f"{machine(layer.x.device)}; Python {platform.python_version()}, torch {torch.__version__}\n")
    for line in table(layer, options.repeats, not options.no_bounds, not options.no_others):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
