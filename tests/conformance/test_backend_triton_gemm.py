"""The Triton GEMM kernels: interpreted against the judge, and compiled for Hopper to what their recipe says.

Run as a script it answers a request for the tests, one line of JSON an answer: ``judge`` reads cases, ``compile`` takes
none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GEMM = "gemm deepseek_fp8 v=1 k=%d layout=%s m=%d n=%d out=%s scale=%s values=%s seed=%d"
GROUPED = "grouped_gemm %s v=1 grouping=%s groups=3 k=%d layout=%s m=70 n=66 out=%s scale=%s values=%s seed=%d"
CASES = [
    GEMM % (128, "plain", 1, 64, "fp32", "fp32", "normal", 0),
    GEMM % (300, "mn_major", 70, 130, "bf16", "fp32", "scale_ladder", 1),
    GEMM % (509, "mn_major", 5, 129, "fp32", "ue8m0", "wide", 2),
    GEMM % (1, "plain", 65, 1, "bf16", "ue8m0", "codes", 3),
    GEMM % (384, "plain", 9, 70, "fp32", "fp32", "integer", 4),
    "gemm bf16 v=1 k=70 layout=plain m=66 n=70 out=bf16 scale=none values=cancellation seed=5",
    GROUPED % ("deepseek_fp8", "contiguous", 130, "plain", "bf16", "fp32", "normal", 6),
    GROUPED % ("deepseek_fp8", "contiguous_128", 260, "mn_major", "fp32", "ue8m0", "outliers", 7),
    GROUPED % ("deepseek_fp8", "masked", 200, "mn_major", "fp32", "fp32", "single", 8),
    GROUPED % ("deepseek_fp8", "masked", 130, "mn_major", "bf16", "ue8m0", "scale_ladder", 9),
    GROUPED % ("bf16", "masked", 100, "plain", "fp32", "none", "normal", 10),
]


def ask(*arguments: str, lines: list[str], interpret: bool) -> list[Any]:
    """The script's answers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        input="\n".join(lines),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_interpreted_kernels_pass() -> None:
    answers = ask("judge", lines=CASES, interpret=True)
    assert [answer["case"] for answer in answers] == CASES
    assert [answer["failures"] for answer in answers] == [[]] * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["0", "1"])
def test_on_hopper_a_product_and_an_fma_follow_each_tensor_core_dot(fusion: str, tmp_path: Path) -> None:
    """fma(RN(dot * sA), sB, acc) for each of a thread's 32 outputs, and nothing is flushed."""
    os.environ["TRITON_CACHE_DIR"], os.environ["TRITON_DEFAULT_FP_FUSION"] = str(tmp_path), fusion
    try:
        built = ask("compile", lines=[], interpret=False)
    finally:
        del os.environ["TRITON_CACHE_DIR"], os.environ["TRITON_DEFAULT_FP_FUSION"]
    fp8 = [answer for answer in built if answer["kernel"] == "fp8_gemm_kernel"]
    assert len(fp8) == 3
    for answer in fp8:
        assert answer["core"] == ["wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"]
        assert (answer["mul"], answer["fma"], answer["add"], answer["ftz"]) == (32, 32, 0, False)
    (bf16,) = (answer for answer in built if answer["kernel"] == "bf16_gemm_kernel")
    assert bf16["core"] == ["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"]
    assert (bf16["mul"], bf16["fma"], bf16["add"]) == (0, 0, 0)


def test_the_interpreter_claims_few_groups() -> None:
    from conformance.backends import _triton_gemm_adapter as adapter
    from fuzz.case import Case

    many = "grouped_gemm fp16 v=1 grouping=contiguous_128 groups={} k=10 layout=plain m=1 n=38 out=bf16 scale=none"
    interpreted, compiled = adapter.claims(512, None), adapter.claims(None, (9, 0))
    for groups, few in ((64, True), (65, False), (4096, False)):
        case = Case.parse(f"{many.format(groups)} values=subnormal seed=271452")
        assert any(claim.refusal(case) is None for claim in interpreted) == few
        assert any(claim.refusal(case) is None for claim in compiled)


def _judge() -> None:
    from conformance.backends.triton_interpreter_corrected import backends
    from conformance.operations import OPERATIONS
    from fuzz.case import Case
    from fuzz.inputs import build

    backend = next(iter(backends()))
    claims = list(backend.claims("cpu"))
    for line in sys.stdin:
        case = Case.parse(line.strip())
        claim = next(claim for claim in claims if claim.refusal(case) is None)
        inputs, operation = build(case), OPERATIONS[case.operation]
        parts = dict(backend.run(backend.prepare(case, inputs, {}), {}))
        verdicts = operation.judge(case, inputs, parts, backend.recipe(claim))
        failures = [f"{verdict.part}: {verdict.message}" for verdict in verdicts if verdict.verdict != "pass"]
        print(json.dumps({"case": case.text, "failures": failures}), flush=True)


def _compile() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from conformance.backends import _triton_gemm as kernels

    tile = {"TILE_M": 64, "TILE_N": 64}
    fp32 = dict.fromkeys(("a_scales_ptr", "b_scales_ptr"), "*fp32")
    bf16 = dict.fromkeys(("a_ptr", "b_ptr"), "*bf16")
    wanted: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
        (kernels.fp8_gemm_kernel, {**tile, "SCALE": "fp32", "PACKED": False, "GROUP": 128}, fp32),
        (kernels.fp8_gemm_kernel, {**tile, "SCALE": "ue8m0", "PACKED": False, "GROUP": 128}, {}),
        (kernels.fp8_gemm_kernel, {**tile, "SCALE": "ue8m0", "PACKED": True, "GROUP": 128}, {"a_scales_ptr": "*i32"}),
        (kernels.bf16_gemm_kernel, {**tile, "TILE_K": 64}, bf16),
    ]
    rows = dict.fromkeys(("starts_ptr", "scale_starts_ptr", "counts_ptr"), "*i32")
    for kernel, constants, types in wanted:
        types = {"output_ptr": "*fp32", **rows, **types}
        signature = {
            name: "constexpr" if name in constants else types.get(name, "*u8" if name.endswith("_ptr") else "i32")
            for name in kernel.arg_names
        }
        built = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
        ptx = built.asm["ptx"]
        answer = {
            "kernel": kernel.__name__,
            "core": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.:]*", ptx))),
            **{word: len(re.findall(rf"\b{word}\.(?:rn\.)?f32\b", ptx)) for word in ("mul", "fma", "add")},
            "ftz": ".ftz" in ptx,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _judge() if sys.argv[1] == "judge" else _compile()
