"""This project's Triton kernels compiled for each architecture, down to a cubin, without a GPU.

What a compiled kernel is made of is read from its PTX: the tensor-core instruction, the conversions, and whether a
division is exact. A kernel that does not compile is refused, with the compiler's own line.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.gating.child import LibraryError, Probe, Row, SlowError, limited
from conformance.gating.model import Gate

COMPILE_S = 30.0
FACTS: Mapping[str, str] = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05.mma": r"tcgen05\.mma",
    "mma.sync": r"\bmma\.sync",
    "e4m3 MMA": r"(mma\S*e4m3)|(kind::(f8f6f4|mxf8f6f4))",
    "cvt.rn.satfinite.e4m3x2": r"cvt\.rn\.satfinite\.e4m3x2\.f32",
    "cvt.rn.satfinite.e2m1x2": r"cvt\.rn\.satfinite\.e2m1x2",
    "cvt.rn.f16x2.e4m3x2": r"cvt\.rn\.f16x2\.e4m3x2",
    "cvt.rn.bf16": r"cvt\.rn\.bf16",
    "div.rn": r"div\.rn\.f32",
    "div.full": r"div\.full\.f32",
    "approx": r"\b(div|rcp|sqrt|ex2|lg2|tanh)\.approx",
}
"""What is looked for in PTX: what it is called, and a regular expression."""
KERNELS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "ue8m0_kernel": (
        "_triton_kernels",
        {"POLICY": "ceil", "FROM_AMAX": True, "QMAX": 448.0, "EMAX": 8, "MANTISSA_BITS": 3, "BLOCK": 1024},
        {"x_ptr": "*fp32"},
    ),
    "quantize_e4m3_kernel": ("_triton_kernels", {"POLICY": "ceil", "TILE_M": 16, "GROUP": 32}, {}),
    "quantize_e2m1_kernel": ("_triton_kernels", {"POLICY": "e4m3", "TILE_M": 16, "GROUP": 16}, {}),
    "dequantize_e4m3_kernel": ("_triton_kernels", {"SCALE": "ue8m0", "TILE_M": 16, "TILE_K": 128}, {}),
    "bf16_gemm_kernel": (
        "_triton_gemm",
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64},
        {"a_ptr": "*bf16", "b_ptr": "*bf16"},
    ),
    "fp8_gemm_kernel": (
        "_triton_gemm",
        {"SCALE": "fp32", "PACKED": False, "TILE_M": 64, "TILE_N": 64, "GROUP": 128},
        {"a_scales_ptr": "*fp32", "b_scales_ptr": "*fp32"},
    ),
}
"""Kernel: its module under `conformance.backends`, its constants, and the types that differ from `_type`."""
_SAYS = tuple(re.compile(words, re.IGNORECASE) for words in (r"fatal|unsupported|not (supported|defined)", "error"))
"""What the telling line of a compiler's message has, best first."""
_NO_TOOL = re.compile(r"ptxas.*(not found|No such file)|cannot find ptxas", re.IGNORECASE)
_INDEX = re.compile(r"(starts|counts)_ptr\Z")


def load() -> tuple[str, list[str], Probe]:
    """Import Triton. Raises LibraryError where it is missing or cannot compile for a named target."""
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError("triton is not installed") from None
    try:
        triton = importlib.import_module("triton")
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        source = importlib.import_module("triton.compiler").ASTSource
    except Exception as error:
        raise LibraryError(f"triton {version} cannot be asked: {type(error).__name__}: {error}") from error

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        for name, (module, constants, types) in KERNELS.items():
            if not request["subjects"] or any(word in name for word in request["subjects"]):
                kernel = getattr(importlib.import_module(f"conformance.backends.{module}"), name)
                signature = {
                    argument: "constexpr" if argument in constants else types.get(argument, _type(argument))
                    for argument in kernel.arg_names
                }
                yield (
                    name,
                    "compiled",
                    *_compile(triton, source(kernel, signature, constexprs=constants), target("cuda", sm, 32)),
                )

    return version, ["this project's kernels, compiled by triton.compile"], probe


def _type(argument: str) -> str:
    if argument in ("x_ptr", "output_ptr"):
        return "*bf16"
    if argument in ("amax_floor", "scale_floor"):
        return "fp32"
    if argument == "global_scale_ptr":
        return "*fp32"
    if _INDEX.search(argument):
        return "*i32"
    if argument.endswith("_ptr"):
        return "*u8"
    return "i64" if argument.startswith("stride_") else "i32"


def _compile(triton: Any, source: Any, target: Any) -> tuple[tuple[Gate, ...], tuple[str, ...]]:
    try:
        with limited(COMPILE_S):
            built = triton.compile(source, target=target)
    except SlowError as slow:
        return (Gate("compile", "unknown", str(slow)),), ()
    except Exception as error:
        reason = _reason(error)
        return (Gate("compile", "unknown" if _NO_TOOL.search(reason) else "no", reason),), ()
    ptx = built.asm["ptx"]
    found = tuple(name for name, pattern in FACTS.items() if re.search(pattern, ptx))
    return (Gate("compile", "yes" if built.asm.get("cubin") else "no"),), found


def _reason(error: BaseException) -> str:
    """The compiler's own line: of the deepest cause, without the source that it points at."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if re.search("[a-z]{3}", line)]
    said = [line for says in _SAYS for line in lines if says.search(line)] or lines[-1:]
    return f"{type(error).__name__}: {said[0] if said else ''}"[:300]
