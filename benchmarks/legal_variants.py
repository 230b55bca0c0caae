"""No false alarm: correct implementations of every kind over many drawn cases, and how much of their bounds they use.

    python -m benchmarks.legal_variants [--cases 610] [--seed 0] [--jobs 2] [--out docs/results/legal-variants.md]

``--cases`` is for each variant of ``gemm``, ``grouped_gemm``, ``moe`` and ``routing``. Every case is judged once, under
the recipe of the implementation whose turn it is: another order of K, split K in FP32, one product after another,
the largest or all positive ones first, truncating additions, tensor-core instructions, scales on each block's sum, BF16
partial sums, intermediates in BF16, payloads by reciprocals, other forms of the sigmoid and of a division. The table
has two medians of headroom (1 is the edge of what is admissible) over the cases in which anything was rounded: of a
case's largest, and, in every second turn of each implementation, of its median element among those that were rounded.
Of a router they are those of its weights.

Exits 1 if anything correct was rejected.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import planted_moe_faults as layers
from benchmarks.summation import ANY, FP64, MATMULS, RN, SLOW, MatMul, by_blocks, by_instructions, in_bf16, in_fp64
from conformance.backends import _torch_moe as composite
from conformance.backends import _torch_routing as routers
from conformance.operations import OPERATIONS, gemm, grouped_gemm, moe
from fuzz import plan
from fuzz.case import Case
from fuzz.grammar import GRAMMAR
from references.gemm import admissible_gemm
from references.gemm_formats import Operand
from references.judging import judge_interval
from references.recipes import Recipe
from references.rounding import round_to
from references.routing import judge_weights
from references.routing.cases import config_of, routing_recipe

F32 = torch.float32
OPERATION_NAMES = ("gemm", "grouped_gemm", "moe", "routing")
MOST = 2**16
"""Elements of a case's largest matrix."""
Inputs = Mapping[str, Tensor]
Parts = dict[str, Tensor]


LONGEST = 1024
"""K up to which `SLOW` ways to multiply are taken."""


@dataclass(frozen=True)
class Legal:
    """A correct implementation: what it answers, what it declares, and the cases that it is for."""

    name: str
    answer: Callable[[Case, Inputs], Parts]
    recipe: Recipe
    covers: Callable[[Case], bool] = lambda case: True


Multiply = Callable[[Operand, Operand], Tensor]


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once; torch itself rounds FP64 to FP32 on the way to BF16."""
    return round_to(values.double(), dtype).to(dtype)


def _dense(multiply: Multiply) -> Callable[[Case, Inputs], Parts]:
    return lambda case, inputs: {"output": _stored(multiply(*gemm.operands(case, inputs)), gemm.DTYPES[case["out"]])}


def _grouped(multiply: Multiply) -> Callable[[Case, Inputs], Parts]:
    def answer(case: Case, inputs: Inputs) -> Parts:
        rows = grouped_gemm.row_groups(case, inputs)
        spec = grouped_gemm.outputs(case)["output"]
        output = torch.zeros(len(rows), case.integer("n"), dtype=spec.dtype)
        for where, a, b in grouped_gemm.group_operands(case, inputs, rows):
            output[where] = _stored(multiply(a, b), spec.dtype)
        return {"output": output.view(spec.shape)}

    return answer


def _on_values(matmul: MatMul) -> Multiply:
    return lambda a, b: matmul(a.values.float(), b.values.float())


def _matrix_products() -> dict[str, tuple[Multiply, Recipe, Callable[[Case], bool]]]:
    every: Callable[[Case], bool] = lambda case: True  # noqa: E731
    short: Callable[[Case], bool] = lambda case: case.integer("k") <= LONGEST  # noqa: E731
    found = {
        name: (_on_values(matmul), recipe, short if name in SLOW else every)
        for name, (matmul, recipe) in MATMULS.items()
    }
    split = Recipe(source="three parts of K in BF16", accumulator="bf16_split_k", split_k=3)
    return found | {
        "scales on each block's sum": (by_blocks, RN, every),
        "instructions of 16 products": (by_instructions, ANY, lambda case: case.variant == "bf16"),
        "BF16 partial sums": (in_bf16, split, lambda case: case.integer("k") >= 3),
        "FP64 sums": (in_fp64, FP64, every),
    }


def _layer(layer: layers.Layer) -> Callable[[Case, Inputs], Parts]:
    return lambda case, inputs: {"output": layer(case, inputs)}


def _layers() -> list[Legal]:
    every = dict(layers.LEGAL)
    every |= {f"{name}, both": (layers.Layer(matmul=matmul), recipe) for name, (matmul, recipe) in MATMULS.items()}
    found = []
    for name, (layer, recipe) in every.items():
        variants = ("deepseek_fp8", "mxfp8", "w4a8") if layer.reciprocal else tuple(GRAMMAR["moe"])
        # Under FP32 scales the composite keeps amax from 0.
        floored = replace(recipe, amax_floor=composite.AMAX_FLOOR)
        found += [
            Legal(name, _layer(layer), floored, _Where(variants, True, name.startswith(SLOW))),
            Legal(name, _layer(layer), recipe, _Where(variants, False, name.startswith(SLOW))),
        ]
    return found


@dataclass(frozen=True)
class _Where:
    """Cases of some formats, with FP32 scales or with others, of any size or of short sums."""

    variants: tuple[str, ...]
    continuous: bool
    short: bool

    def __call__(self, case: Case) -> bool:
        if self.short and max(case.integer("hidden"), case.integer("intermediate")) > LONGEST:
            return False
        return case.variant in self.variants and (case["scale"] == "fp32") == self.continuous


@dataclass(frozen=True)
class Form:
    """One way to write a router in FP32. tanh: sigmoids by tanh. wide: scores in FP64, rounded. reciprocal: quotients
    as products. descending: sums one term after another, the largest first. bias: its dtype."""

    tanh: bool = False
    wide: bool = False
    reciprocal: bool = False
    descending: bool = False
    bias: torch.dtype = F32

    def __call__(self, case: Case, inputs: Inputs) -> Parts:
        """The parts of a ``routing`` case."""
        method, k = case.variant, case.integer("topk")
        x = inputs["logits"].float()
        rank, weigh = (self._score(score) for score in routers.SCORES[method])
        choice = rank(x)
        if method in routers.BIASED:
            choice = choice + inputs["bias"].to(self.bias).float()
        if method in routers.GROUPED:
            pair = method == "DeepSeekV3"
            choice = routers._kept(choice, case.integer("groups"), case.integer("topk_group"), pair=pair)
        ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :k]
        weights = weigh(x).gather(1, ids)
        if method == "Renormalize":
            weights = self._softmax(weights)
        elif method in routers.RENORMALIZED or dict(case.params).get("renormalize") == "on":
            weights = self._over(weights, self._sum(weights) + 1e-20)
        if method in (*routers.BIASED, "GroupedTopK"):
            weights = weights * float(case["scaling"])
        return routers._parts(case, ids, weights, case.integer("experts"), inputs.get("expert_map"))

    def _score(self, score: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if score is torch.sigmoid and self.tanh:
            return lambda x: 0.5 * torch.tanh(0.5 * x) + 0.5
        if self.wide:
            return lambda x: score(x.double()).float()
        return self._softmax if score is routers._softmax else score

    def _softmax(self, x: Tensor) -> Tensor:
        if self.wide:
            return x.double().softmax(dim=1).float()
        e = torch.exp(x - x.amax(dim=1, keepdim=True))
        return self._over(e, self._sum(e))

    def _sum(self, terms: Tensor) -> Tensor:
        if not self.descending:
            return terms.sum(dim=1, keepdim=True)
        total = torch.zeros_like(terms[:, :1])
        for term in terms.sort(dim=1, descending=True).values.T:
            total = total + term[:, None]
        return total

    def _over(self, a: Tensor, b: Tensor) -> Tensor:
        return a * (1 / b) if self.reciprocal else a / b


def _plain_router(case: Case, inputs: Inputs) -> Parts:
    return routers.route(case, inputs)


def _routers() -> list[Legal]:
    lowest = Recipe(source="a stable sort", group_tie_rule="lowest_index")
    # Vectorised FP32 functions give equal logits unequal scores where a row does not fill the last vector.
    sorted_ = Recipe(source="a stable sort of torch's FP32 scores", tie_rule="any")
    always: Callable[[Case], bool] = lambda case: True  # noqa: E731
    sigmoid: Callable[[Case], bool] = lambda case: torch.sigmoid in routers.SCORES[case.variant]  # noqa: E731
    biased: Callable[[Case], bool] = lambda case: case.variant in routers.BIASED  # noqa: E731
    forms: list[tuple[str, Callable[[Case, Inputs], Parts], Recipe, Callable[[Case], bool]]] = [
        ("plain", Form(), sorted_, always),
        ("torch.topk", _plain_router, Recipe(source="torch.topk", tie_rule="any"), always),
        ("scores in FP64", Form(wide=True), lowest, always),
        ("sigmoid by tanh", Form(tanh=True), replace(sorted_, sigmoid="tanh"), sigmoid),
        ("the largest terms first", Form(descending=True), sorted_, always),
        # Two roundings: of the reciprocal and of the product.
        ("quotients by reciprocals", Form(reciprocal=True), replace(sorted_, division_error=2.0**-22), always),
        ("bias in BF16", Form(bias=torch.bfloat16), replace(sorted_, bias_dtype="bf16"), biased),
    ]
    return [Legal(name, answer, recipe, covers) for name, answer, recipe, covers in forms]


def legal() -> dict[str, list[Legal]]:
    """operation -> its correct implementations."""
    matrix = _matrix_products()
    return {
        "gemm": [Legal(name, _dense(multiply), recipe, covers) for name, (multiply, recipe, covers) in matrix.items()],
        "grouped_gemm": [
            Legal(name, _grouped(multiply), recipe, covers) for name, (multiply, recipe, covers) in matrix.items()
        ],
        "moe": _layers(),
        "routing": _routers(),
    }


def element_headrooms(case: Case, inputs: Inputs, parts: Parts, recipe: Recipe) -> Tensor:
    """Headrooms of the elements that are not exact, one-dimensional."""
    recipe = recipe.only(OPERATIONS[case.operation].open_choices(case.variant))
    if case.operation == "routing":
        if case["out"] == "packed":
            return torch.empty(0)
        router, choices = config_of(case), routing_recipe(recipe, case)
        found = judge_weights(
            parts["weights"], parts["selection"], inputs["logits"], inputs.get("bias"), router, choices
        )
        return found.headroom[(found.headroom > 0) & ~found.free]
    output = parts["output"]
    if case.operation == "grouped_gemm":
        rows = grouped_gemm.row_groups(case, inputs)
        wide, some = output.reshape(len(rows), -1).double(), []
        for where, a, b in grouped_gemm.group_operands(case, inputs, rows):
            interval = admissible_gemm(a, b, recipe, output.dtype).interval
            some.append(judge_interval(wide[where], interval).headroom.reshape(-1))
        every = torch.cat(some) if some else torch.empty(0)
        return every[every > 0]
    if case.operation == "gemm":
        interval = admissible_gemm(*gemm.operands(case, inputs), recipe, output.dtype).interval
    else:
        interval = moe.admissible(case, inputs, recipe).interval
    headroom = judge_interval(output.double(), interval).headroom
    return headroom[headroom > 0]


@dataclass
class Tally:
    """What came of one operation x format. exact: cases without any rounding."""

    cases: int = 0
    exact: int = 0
    rejected: list[str] = field(default_factory=list)
    largest: dict[str, list[float]] = field(default_factory=dict)
    typical: dict[str, list[float]] = field(default_factory=dict)

    def medians(self) -> str:
        """The cells of the table: medians over cases."""
        found = [some.get(name) for some in (self.largest, self.typical) for name in ("fp32", "bf16")]
        return " | ".join(f"{statistics.median(some):.2g}" if some else "" for some in found)


def examine(cases: Sequence[Case], tallies: dict[tuple[str, str], Tally]) -> None:
    """Judge each case with the implementation whose turn it is, and count."""
    implementations = legal()
    for case in cases:
        tally = tallies.setdefault((case.operation, case.variant), Tally())
        some = [item for item in implementations[case.operation] if item.covers(case)]
        chosen = some[tally.cases % len(some)]
        inputs: Any = OPERATIONS[case.operation].inputs(case)
        parts = chosen.answer(case, inputs)
        verdicts = OPERATIONS[case.operation].judge(case, inputs, parts, chosen.recipe)
        turn = tally.cases // len(some) + tally.cases % len(some)
        tally.cases += 1
        tally.rejected += [f"{case}, {chosen.name}: {v.part}: {v.message}" for v in verdicts if v.verdict != "pass"]
        judged = next(v for v in verdicts if v.part in ("output", "weights", "packed"))
        out = "fp32" if case["out"] == "local" else case["out"]
        if judged.headroom:
            tally.largest.setdefault(out, []).append(judged.headroom)
        tally.exact += judged.headroom == 0
        if turn % 2 == 0:  # every second turn of each implementation
            found = element_headrooms(case, inputs, parts, chosen.recipe)
            if found.numel():
                tally.typical.setdefault(out, []).append(float(found.median()))


def draw(operation: str, variant: str, count: int, seed: int) -> list[Case]:
    """``count`` drawn cases whose tensors are small; those of grouped products are cut, since few are small."""
    asked, found = count, list[Case]()
    while len(found) < count:
        asked *= 2
        drawn = plan.draw_plan([(operation, variant)], asked, seed)
        if operation == "grouped_gemm":
            drawn = list({case.text: case for case in map(cut, drawn)}.values())
        found = [case for case in drawn if size(case) <= MOST]
    return found[:count]


def cut(case: Case) -> Case:
    """A grouped product with its largest sizes halved until it is small."""
    while size(case) > MOST:
        key = max(("k", "m", "n", "groups"), key=case.integer)
        case = case.replace(**{key: -(-case.integer(key) // 4) * 2})  # even, as packed codes want K
    return case


def size(case: Case) -> int:
    """Elements of the largest matrix."""
    sizes = {key: int(value) for key, value in case.params if value.isdecimal()}
    match case.operation:
        case "routing":
            return sizes["tokens"] * sizes["experts"]
        case "moe":
            return max(sizes["tokens"] * sizes["topk"], 2 * sizes["experts"] * sizes["intermediate"]) * sizes["hidden"]
        case _:
            m, n, k = sizes["m"] * sizes.get("groups", 1), sizes["n"] * sizes.get("groups", 1), sizes["k"]
            return max(m * k, n * k, m * n)


def table(tallies: Mapping[tuple[str, str], Tally]) -> str:
    """Markdown: a row for each operation x format."""
    lines = [
        "| operation | format | cases | rejected | exact | FP32 largest | BF16 largest | FP32 median | BF16 median |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (operation, variant), tally in tallies.items():
        counts = f"{tally.cases} | {len(tally.rejected)} | {tally.exact}"
        lines.append(f"| {operation} | {variant} | {counts} | {tally.medians()} |")
    rows = [(tally.cases, len(tally.rejected), tally.exact) for tally in tallies.values()]
    lines.append(f"| **all** | | {' | '.join(str(sum(each)) for each in zip(*rows, strict=True))} | | | | |")
    return "\n".join(lines)


def head(command: str) -> str:
    """What stands above the table of a page."""
    return (
        f"# Correct implementations and their bounds\n\n"
        f"Made by `{command}`; torch {torch.__version__}, Python {platform.python_version()}.\n\n"
        "Every case is judged with one correct implementation, under what that one declares. `exact`: cases in\n"
        "which nothing was rounded. Over the others medians of headroom (1 is the edge of what is admissible), by\n"
        "the dtype of the output: of a case's largest, and, in every second turn of each implementation, of its\n"
        "median element among those that were rounded. Of a router, of its weights.\n\n"
        "A bound on an FP32 sum holds for the worst order and the worst signs, and a case tries one order: its\n"
        "largest headroom says how near a correct answer comes. A BF16 output comes to the edge by its own\n"
        "rounding, so there the median element tells more; it is a half where that rounding is all there is.\n\n"
    )


def _row(what: tuple[str, str, int, int]) -> dict[tuple[str, str], Tally]:
    """The tally of one operation x format."""
    tallies = dict[tuple[str, str], Tally]()
    examine(draw(*what), tallies)
    return tallies


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=610, help="for each operation x format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operation", choices=OPERATION_NAMES, action="append")
    parser.add_argument("--format", action="append", help="formats or routing methods; all by default")
    parser.add_argument(
        "--jobs", type=int, default=1, help="rows of the table at a time; two are quickest on two cores"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.cases < 1 or options.jobs < 1:
        parser.error("--cases and --jobs are at least 1")
    start, tallies = time.monotonic(), dict[tuple[str, str], Tally]()
    rows = [
        (operation, variant, options.cases, options.seed)
        for operation in options.operation or OPERATION_NAMES
        for variant in GRAMMAR[operation]
        if not options.format or variant in options.format
    ]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for found in pool.map(_row, rows) if options.jobs > 1 else map(_row, rows):
            tallies |= found
            print(f"{time.monotonic() - start:.0f} s: {table(found).splitlines()[2]}", file=sys.stderr, flush=True)
    if not tallies:
        parser.error(f"no operation has a format {', '.join(options.format)}")
    rejected = [line for tally in tallies.values() for line in tally.rejected]
    text = table(tallies)
    print(text, *rejected, sep="\n")
    if options.out is not None:
        command = f"python -m benchmarks.legal_variants --cases {options.cases} --seed {options.seed}"
        options.out.write_text(f"{head(command)}{text}\n")
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main())
