"""The Triton backends: interpreted in processes of their own, and compiled for three architectures without a GPU.

Run as a script it answers a request for the tests: ``python FILE judge MODULE`` or ``python FILE compile SM``, lines of
JSON on standard input and output.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORRECTED = "triton_interpreter_corrected"
SHIPPED = "triton_interpreter"


def ask(*arguments: str, lines: list[Any], interpret: bool) -> list[Any]:
    """The script's answers, one a line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        input="\n".join(json.dumps(line) for line in lines),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


POLICIES = ("ceil", "ceil_clamped", "floor", "ceil_amax", "even", "nearest")
ROUTERS = [
    (
        f"bias={bias} bias_dtype={bias_dtype} dtype={dtype} experts={experts} groups={groups} out={out} "
        f"padding={padding} renormalize={renormalize}",
        f"tokens={tokens} topk={topk} topk_group={kept} values={values}",
    )
    for bias, bias_dtype, dtype, experts, groups, out, padding, renormalize, tokens, topk, kept, values in (
        ("0.1", "fp32", "fp32", 256, 8, "fp32", "none", "on", 17, 8, 4, "normal"),
        ("0", "bf16", "fp16", 160, 8, "fp16", "some", "off", 9, 6, 3, "ties"),
        ("0", "fp32", "fp32", 64, 8, "packed", "none", "on", 5, 4, 2, "group_ties"),
        ("1e4", "bf16", "bf16", 9, 3, "packed", "some", "on", 5, 5, 2, "nonfinite"),
        ("12", "fp32", "bf16", 7, 1, "bf16", "none", "on", 3, 7, 1, "saturated"),
        ("0.1", "fp32", "fp32", 32, 4, "local", "some", "on", 9, 4, 2, "normal"),
    )
]
CASES = [
    *(
        f"ue8m0 {policy} v=1 from={source} n=2053 values={values} seed=5"
        for policy, source in (
            *((policy, "scale") for policy in ("ceil", "ceil_clamped", "floor", "nearest")),
            *((policy, f"amax_{name}") for policy in POLICIES[:5] for name in ("e4m3", "e2m1", "e5m2")),
        )
        for values in ("boundary", "special", "pow2_edges")
    ),
    *(
        f"quantize {variant} v=1 block={block} dtype={dtype} k=150 m=131 scale={scale} {rest} seed=5"
        for variant, block, scale in (
            ("deepseek_fp8", "1x128", "fp32"),
            ("deepseek_fp8", "128x128", "fp32"),
            ("deepseek_fp8", "1x128", "ceil"),
            ("deepseek_fp8", "128x128", "ceil"),
            ("mxfp8", "1x32", "floor"),
            ("mxfp4", "1x32", "even"),
            ("nvfp4", "1x16", "e4m3"),
            ("fp8_per_tensor", "tensor", "fp32"),
            ("fp8_per_tensor", "tensor", "static"),
        )
        for dtype, rest in (
            ("bf16", "stride=transposed values=normal"),
            ("fp32", "stride=offset values=subnormal"),
            ("fp16", "stride=padded values=pow2_edges"),
            ("fp32", "stride=contiguous values=zero_blocks"),
        )
    ),
    "quantize fp8_per_tensor v=1 block=tensor dtype=bf16 k=70 m=5 scale=static stride=padded values=nonfinite seed=5",
    *(
        f"dequantize {variant} v=1 block={block} k=150 m=131 out={out} scale={scale} values={values} seed=5"
        for variant, block, scale in (
            ("deepseek_fp8", "1x128", "fp32"),
            ("deepseek_fp8", "128x128", "ue8m0"),
            ("mxfp8", "1x32", "ue8m0"),
            ("mxfp4", "1x32", "ue8m0"),
            ("nvfp4", "1x16", "e4m3"),
            ("fp8_per_tensor", "tensor", "fp32"),
        )
        for out, values in (("fp32", "extreme_scales"), ("bf16", "codes"), ("fp16", "nonfinite"))
    ),
    "requantize deepseek_fp8 v=1 k=150 n=131 scale=ceil values=scale_ladder seed=5",
    *(f"routing DeepSeekV3 v=1 {words} scaling=2.5 shared=1 stride=padded {rest} seed=5" for words, rest in ROUTERS),
    *(
        f"routing GroupedTopK v=1 {words.split(' ', 2)[2]} scaling=2.5 shared=1 stride=padded {rest} seed=5"
        for words, rest in ROUTERS
    ),
    *(
        f"scale_layout {layout} v=1 cols={cols} direction={direction} rows={rows} values=nonfinite seed=5"
        for layout in ("interleave_128x4", "mn_major", "mn_major_packed", "k_major")
        for direction in ("pack", "unpack")
        for rows, cols in ((1, 1), (130, 9))
    ),
]


def test_corrected_interpreter_is_admissible_everywhere() -> None:
    answers = ask("judge", CORRECTED, lines=CASES, interpret=True)
    assert len(answers) == len(CASES)
    assert [answer for answer in answers if answer["failures"]] == []


WITNESSES = {
    "rounding": "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=70 m=5 scale=ceil stride=contiguous values=normal seed=5",
    "nan": "dequantize mxfp8 v=1 block=1x32 k=70 m=5 out=fp32 scale=ue8m0 values=nonfinite seed=5",
    "bf16": "dequantize deepseek_fp8 v=1 block=1x128 k=70 m=5 out=bf16 scale=fp32 values=random_codes seed=5",
}


def test_shipped_interpreter_fails_where_it_casts_and_only_there() -> None:
    integers = [case for case in CASES if case.startswith(("ue8m0", "scale_layout", "routing")) or " mxfp4 " in case]
    integers = [case for case in integers if "dtype=bf16" not in case and "out=bf16" not in case]
    answers = ask("judge", SHIPPED, lines=[*WITNESSES.values(), *integers], interpret=True)
    assert [bool(answer["failures"]) for answer in answers[:3]] == [True] * 3
    assert [answer for answer in answers[3:] if answer["failures"]] == []


def test_an_interpreter_must_be_asked_for_before_triton_is_imported() -> None:
    code = "import triton, conformance.backends.triton_interpreter"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "before TRITON_INTERPRET=1" in done.stderr


QUOTIENTS = ("quantize_e4m3_kernel", "quantize_e4m3_square_kernel", "quantize_e2m1_kernel", "quantize_by_scale_kernel")


@pytest.mark.slow
@pytest.mark.parametrize("sm", ["90", "100", "120"])
def test_kernels_compile_with_ieee_division_and_without_flushing(sm: str, tmp_path: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path)
    try:
        built = {answer["kernel"]: answer for answer in ask("compile", sm, lines=[], interpret=False)}
    finally:
        del os.environ["TRITON_CACHE_DIR"]
    assert set(QUOTIENTS) < set(built)
    assert all(answer["cubin"] > 0 and not answer["approximate"] for answer in built.values())
    assert all(built[name]["div_rn"] for name in (*QUOTIENTS, "route_kernel"))
    assert built["quantize_e4m3_kernel"]["e4m3"]


def _judge(module: str) -> None:
    from conformance.operations import OPERATIONS
    from fuzz.case import Case
    from fuzz.inputs import build

    backend = next(iter(importlib.import_module(f"conformance.backends.{module}").backends()))
    claims = list(backend.claims("cpu"))
    for line in sys.stdin:
        case = Case.parse(json.loads(line))
        claim = next(claim for claim in claims if claim.refusal(case) is None)
        inputs = build(case)
        parts = dict(backend.run(backend.prepare(case, inputs, {}), {}))
        verdicts = OPERATIONS[case.operation].judge(case, inputs, parts, backend.recipe(claim))
        failures = [f"{verdict.part}: {verdict.message}" for verdict in verdicts if verdict.verdict != "pass"]
        print(json.dumps({"case": case.text, "failures": failures}), flush=True)


def _compile(sm: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from conformance.backends import _triton_kernels as kernels
    from conformance.backends import _triton_layouts as layouts
    from conformance.backends import _triton_routing as routing

    types = {
        "x_ptr": "*bf16",
        "global_scale_ptr": "*fp32",
        "output_ptr": "*bf16",
        "partial_ptr": "*i32",
        "scale_ptr": "*fp32",
    }
    types |= {"amax_floor": "fp32", "scale_floor": "fp32", "stride_m": "i64", "stride_k": "i64"}
    constants: dict[str, dict[str, Any]] = {
        "ue8m0_kernel": {
            "POLICY": "ceil",
            "FROM_AMAX": True,
            "QMAX": 448.0,
            "EMAX": 8,
            "MANTISSA_BITS": 3,
            "BLOCK": 1024,
        },
        "quantize_e4m3_kernel": {"POLICY": "ceil", "TILE_M": 16, "GROUP": 32},
        "quantize_e4m3_square_kernel": {"POLICY": "ceil", "BLOCK_M": 128, "TILE_M": 16, "GROUP": 128},
        "quantize_e2m1_kernel": {"POLICY": "e4m3", "TILE_M": 16, "GROUP": 16},
        "tile_amax_kernel": {"TILE_M": 16, "TILE_K": 128},
        "tensor_scale_kernel": {"STEPS": 2, "BLOCK": 1024},
        "quantize_by_scale_kernel": {"TILE_M": 16, "TILE_K": 128},
        "dequantize_e4m3_kernel": {"SCALE": "ue8m0", "TILE_M": 16, "TILE_K": 128},
        "dequantize_e2m1_kernel": {"SCALE": "e4m3", "GROUP": 16, "TILE_M": 16, "TILE_PAIRS": 64},
        "interleave_128x4_kernel": {"UNPACK": False, "BLOCK": 1024},
        "transpose_kernel": {"TILE": 32},
        "pack_mn_major_kernel": {"TILE": 128},
        "unpack_mn_major_kernel": {"TILE": 128},
        "route_kernel": {
            **dict.fromkeys(("RENORMALIZE", "BF16_LOGITS", "BF16_BIAS"), True),
            **{"SOFTMAX": False, "OUT": "bf16", "EXPERTS": 256, "GROUPS": 8, "COLUMNS": 16, "TILE": 1},
        },
    }
    special = {"ue8m0_kernel": {"x_ptr": "*fp32"}}
    special["route_kernel"] = dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*i16") | {
        **dict.fromkeys(("ids_ptr", "map_ptr", "local_ptr"), "*i32"),
        "scaling": "fp32",
        "stride_token": "i64",
        "stride_expert": "i64",
    }
    words = {"transpose_kernel": "*i32", "pack_mn_major_kernel": "*i32", "unpack_mn_major_kernel": "*u8"}
    for name, values in constants.items():
        kernel = next(getattr(module, name) for module in (kernels, layouts, routing) if hasattr(module, name))
        signature = {}
        for argument in kernel.arg_names:
            default = "*u8" if argument.endswith("_ptr") else "i32"
            signature[argument] = "constexpr" if argument in values else types.get(argument, default)
        signature |= special.get(name, {})
        if name in words:
            signature["target_ptr"] = words[name]
        if name in ("transpose_kernel", "unpack_mn_major_kernel"):
            signature["source_ptr"] = "*i32"
        built = triton.compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", sm, 32))
        ptx = built.asm["ptx"]
        answer = {
            "kernel": name,
            "cubin": len(built.asm["cubin"]),
            "div_rn": "div.rn.f32" in ptx,
            "approximate": [word for word in ("div.full", "div.approx", "rcp.approx", ".ftz") if word in ptx],
            "e4m3": "cvt.rn.satfinite.e4m3x2" in ptx,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    request, argument = sys.argv[1:]
    _judge(argument) if request == "judge" else _compile(int(argument))
