"""Which checks notice which faults of a block-scaled GEMM: common tolerances beside this project's judge.

    python -m benchmarks.planted_faults [--out docs/results/planted_faults.md] [--seeds 3]

Every fault is planted into the FP32 answer of an ordinary GEMM and rounded to the output dtype; a check that passes the
faulty output misses the fault. The legal rows are correct answers: a check that rejects one is of no use. A share such
as 2/3 counts seeds. All checks see FP64 copies of the outputs and the exact sum rounded once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from conformance.operations import gemm
from fuzz.case import Case
from references.gemm import admissible_gemm
from references.gemm_formats import Operand
from references.gemm_models import exact_rows
from references.judging import judge_interval
from references.recipes import Recipe
from references.rounding import round_to
from references.tensor_level import examine

SIZES = {"m": 64, "n": 512, "k": 1024}
FP32 = Recipe(source="FP32 accumulation in any order, to nearest", accumulator="fp32_rn")
HOPPER = Recipe(source="H200", accumulator="hopper_fp8", scale_combination="fma_dot_sasb")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Checks = Mapping[str, Callable[[Tensor, Tensor], bool]]


def calc_diff(actual: Tensor, expected: Tensor) -> float:
    """1 - 2 <x, y> / (<x, x> + <y, y>): DeepGEMM's measure (deepseek-ai/DeepGEMM, deep_gemm/testing/numeric.py)."""
    return float(1 - 2 * (actual * expected).sum() / (actual * actual + expected * expected).sum())


CHECKS: Checks = {
    "allclose(1e-2, 1e-2)": lambda x, y: torch.allclose(x, y, rtol=1e-2, atol=1e-2),
    "calc_diff < 1e-3": lambda x, y: calc_diff(x, y) < 1e-3,
    "cosine > 0.99": lambda x, y: float(torch.cosine_similarity(x.flatten(), y.flatten(), dim=0)) > 0.99,
    "FlashInfer fuzz": lambda x, y: bool(((x - y).abs() <= 0.15 * y.abs().max() + 1e-3 + 0.85 * y.abs()).all()),
}
"""The FlashInfer fuzz tolerance is |error| <= 0.15 max|reference| + 1e-3 + 0.85 |reference|."""


def scaled(side: Operand, scales: Tensor) -> Tensor:
    """The operand under other scales."""
    spread = scales.repeat_interleave(side.width, 1)[:, : side.codes.shape[1]]
    return side.codes * spread


def legal(a: Operand, b: Operand) -> dict[str, Tensor]:
    """Correct answers."""
    half = SIZES["k"] // 2
    left, right = a.values.float(), b.values.float()
    split = left[:, :half] @ right[:, :half].T + left[:, half:] @ right[:, half:].T
    return {
        "exact, rounded once": a.values @ b.values.T,
        "FP32 matmul": (left @ right.T).double(),
        "FP32, split K": split.double(),
    }


def faults(a: Operand, b: Operand) -> dict[str, Tensor]:
    """Wrong answers, as accumulators before the output's rounding."""
    exact = a.values @ b.values.T
    one_off, column = a.scales.clone(), exact.clone()
    one_off[3, 2] *= 2.0
    column[:, 128:256] = exact[:, 127:255]
    row, tail = exact.clone(), slice(0, SIZES["k"] - 32)
    row[5] = 0.0
    half = SIZES["k"] // 2
    parts = [a.values[:, part] @ b.values[:, part].T for part in (slice(0, half), slice(half, None))]
    grid = b.scales[::128]
    transposed = grid.flatten().view(grid.shape[1], grid.shape[0]).T.contiguous().repeat_interleave(128, 0)
    thousandth = b.scales.clone()
    thousandth[128:256] *= 1.001
    return {
        "all zero": exact * 0.0,
        "times 2": exact * 2.0,
        "times 0.5": exact * 0.5,
        "one row zero": row,
        "one scale exponent off by one": scaled(a, one_off) @ b.values.T,
        "activation scales of the row above": scaled(a, a.scales.roll(1, 0)) @ b.values.T,
        "weight scales of the next K block": a.values @ scaled(b, b.scales.roll(1, 1)).T,
        "weight scale grid transposed": a.values @ scaled(b, transposed).T,
        "last 32 of K lost": a.values[:, tail] @ b.values[:, tail].T,
        "last element of K lost": a.values[:, :-1] @ b.values[:, :-1].T,
        "tile one column off": column,
        "BF16 partial sums, split K": sum((round_to(part, torch.bfloat16) for part in parts), torch.zeros_like(exact)),
        "one block of scales 0.1 % off": a.values @ scaled(b, thousandth).T,
        "13-bit sums instead of FP32": exact_rows(a, b, HOPPER),
    }


def verdicts(values: str, out: str, seed: int) -> dict[tuple[str, str], dict[str, bool]]:
    """(kind, name) -> check -> whether the output passes it."""
    case = Case.make("gemm", "deepseek_fp8", seed=seed, layout="plain", out=out, scale="fp32", values=values, **SIZES)
    a, b = gemm.operands(case, gemm.inputs(case))
    dtype = DTYPES[out]
    found = admissible_gemm(a, b, FP32, dtype)
    reference = found.interval.nominal
    table = {}
    for kind, answers in (("legal", legal(a, b)), ("fault", faults(a, b))):
        for name, accumulator in answers.items():
            actual = round_to(accumulator, dtype)
            passes = {check: passed(actual, reference) for check, passed in CHECKS.items()}
            inside = bool(judge_interval(actual, found.interval).inside.all())
            finding = examine(actual, found.expectation, dtype) if found.expectation else None
            passes["every element (ours)"] = inside
            passes["with the tensor level (ours)"] = inside and (finding is None or finding.headroom <= 1)
            table[kind, name] = passes
    return table


def render(values: str, out: str, seeds: int) -> str:
    """A Markdown table for one profile and output dtype."""
    runs = [verdicts(values, out, seed) for seed in range(seeds)]
    checks = list(runs[0]["legal", "FP32 matmul"])
    lines = [f"| {values}, {out} output | {' | '.join(checks)} |", "|---" * (len(checks) + 1) + "|"]
    caught = dict.fromkeys(checks, 0)
    for kind, name in runs[0]:
        cells = []
        for check in checks:
            passed = sum(run[kind, name][check] for run in runs)
            good = passed if kind == "legal" else seeds - passed
            caught[check] += good if kind == "fault" else 0
            word = {"legal": "passed", "fault": "caught"}[kind] if good == seeds else f"**{good}/{seeds}**"
            cells.append(word if good else f"**{'rejected' if kind == 'legal' else 'missed'}**")
        lines.append(f"| {'*legal:* ' if kind == 'legal' else ''}{name} | {' | '.join(cells)} |")
    total = seeds * sum(kind == "fault" for kind, _ in runs[0])
    return "\n".join([*lines, f"| faults caught | {' | '.join(f'{caught[check]}/{total}' for check in checks)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the tables to this file as well")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    size = " x ".join(f"{key}={value}" for key, value in SIZES.items())
    head = (
        "# Planted faults of a block-scaled GEMM\n\n"
        f"`deepseek_fp8`, {size}, {options.seeds} seeds. Made by `python -m benchmarks.planted_faults --out FILE`.\n"
        "The recipe is FP32 accumulation to nearest in any order; `every element` is membership in each output's own\n"
        "interval, `with the tensor level` adds the test over the whole output (docs/gemm.md).\n"
    )
    tables = [render(values, out, options.seeds) for values in ("normal", "scale_ladder") for out in DTYPES]
    text = "\n".join([head, *(f"{table}\n" for table in tables)])
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
