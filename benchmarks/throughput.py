"""Throughput of the references beside a memory copy and other libraries' references, on one machine in one run.

    python -m benchmarks.throughput --mib 64

Prints Markdown. Every implementation of a task gets the same tensors; the median of the repeats counts. GB/s is what
goes in and comes out (inputs read once, outputs written once), so a plain copy is the ceiling. Outputs are allocated
inside the timed call, as a caller would. Libraries differ in what they compute: the column *output* says so. On a
machine that is busy with other things, ``--threads 1 --processor-time`` still compares.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import importlib.util
import platform
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from references import blocks, compiled, packing, schemes
from references.recipes import Recipe

RECIPE = Recipe(source="docs/operations.md")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Candidate:
    """One implementation of one task; ``missing`` says why it cannot run here."""

    task: str
    name: str
    output: str
    call: Callable[[], Any] | None = None
    inputs: tuple[Tensor, ...] = ()
    missing: str = ""


def ours_quantize(x: Tensor, format_: str, block: str, scale: str) -> Callable[[], Any]:
    scheme = schemes.scheme(format_, block, scale)
    global_scale = torch.ones(1, device=x.device) if scheme.two_level else None

    def call() -> tuple[Tensor, Tensor | None]:
        result = blocks.quantize(x, scheme, RECIPE, global_scale=global_scale)
        packed = packing.pack_fp4(result.payload) if scheme.element.bits == 4 else result.payload
        return packed, result.scales

    return call


def ours_dequantize(
    payload: Tensor, scales: Tensor, format_: str, block: str, scale: str, dtype: torch.dtype, *, reuse: bool = False
) -> Callable[[], Tensor]:
    scheme = schemes.scheme(format_, block, scale)
    columns = payload.shape[1] * (2 if scheme.element.bits == 4 else 1)
    out = torch.empty(payload.shape[0], columns, dtype=dtype, device=payload.device) if reuse else None
    global_scale = torch.ones(1, device=payload.device) if scheme.two_level else None

    def call() -> Tensor:
        codes = packing.unpack_fp4(payload) if scheme.element.bits == 4 else payload
        return blocks.dequantize(codes, scales, scheme, global_scale=global_scale, dtype=dtype, out=out)

    return call


def candidates(x: Tensor) -> Iterator[Candidate]:
    """Every implementation, grouped by task; ours first in each, for the others' ratio."""
    yield from copies(x)
    libraries = SimpleNamespace(deep_gemm=load_deep_gemm(), sglang=load_sglang(), torchao=load_torchao())
    yield from deepseek(x, libraries)
    yield from mxfp8(x, libraries)
    yield from fp4(x, libraries)


def copies(x: Tensor) -> Iterator[Candidate]:
    wide = x.to(torch.float64)
    target = torch.empty_like(wide)
    yield Candidate("copy", "copy FP64, buffer reused", "FP64", lambda: target.copy_(wide), (wide,))
    yield Candidate("copy", "clone FP64", "FP64", wide.clone, (wide,))


def deepseek(x: Tensor, libraries: SimpleNamespace) -> Iterator[Candidate]:
    gemm, sglang = libraries.deep_gemm, libraries.sglang
    for block in ("1x128", "128x128"):
        cast = "per_token_cast_to_fp8" if block == "1x128" else "per_block_cast_to_fp8"
        for scale, ue8m0 in (("fp32", False), ("ceil", True)):
            task = f"quantise deepseek_fp8 {block} {scale}"
            stored = "E4M3, UE8M0 codes" if ue8m0 else "E4M3, FP32 scales"
            yield Candidate(task, "ours", stored, ours_quantize(x, "deepseek_fp8", block, scale), (x,))
            stored = "E4M3, FP32 scales"
            call = lambda c=cast, u=ue8m0: gemm.module[c](x, u)  # noqa: E731
            yield of_library(task, f"{gemm.name} {cast}", stored, gemm, call, (x,))
            if (block, ue8m0) in (("1x128", False), ("128x128", True)):  # the only ones that it has
                call = lambda c=cast: sglang.module[c](x)  # noqa: E731
                yield of_library(task, f"{sglang.name} {cast}", stored, sglang, call, (x,))
        task = f"dequantise deepseek_fp8 {block}"
        payload, scales = ours_quantize(x, "deepseek_fp8", block, "fp32")()
        inputs = (payload, scales)
        for dtype, name in ((torch.float64, "FP64"), (torch.float32, "FP32")):
            call = ours_dequantize(payload, scales, "deepseek_fp8", block, "fp32", dtype)
            yield Candidate(task, "ours" if dtype == torch.float64 else "ours, rounded", name, call, inputs)
        call = ours_dequantize(payload, scales, "deepseek_fp8", block, "fp32", torch.float64, reuse=True)
        yield Candidate(task, "ours, buffer reused", "FP64", call, inputs)
        yield Candidate(task, "torch .to(FP64) * scale", "FP64", torch_dequantize(payload, scales, block), inputs)
        name, call = sglang_dequantize(sglang, payload, scales, block)
        yield of_library(task, f"{sglang.name} {name}", "BF16", sglang, call, inputs)


def sglang_dequantize(
    sglang: SimpleNamespace, payload: Tensor, scales: Tensor, block: str
) -> tuple[str, Callable[[], Tensor]]:
    codes = payload.view(torch.float8_e4m3fn)
    if block == "1x128":
        return "per_token_cast_back", lambda: sglang.module["per_token_cast_back"](codes, scales)
    function = "block_quant_dequant"
    return function, lambda: sglang.module[function](codes, scales, [128, 128], torch.bfloat16)


def torch_dequantize(payload: Tensor, scales: Tensor, block: str) -> Callable[[], Tensor]:
    codes, wide = payload.view(torch.float8_e4m3fn), scales.to(torch.float64)
    height, width = (int(size) for size in block.split("x"))

    def call() -> Tensor:
        tiles = codes.to(torch.float64).view(-1, height, codes.shape[1] // width, width)
        return tiles.mul_(wide[:, None, :, None])

    return call


def mxfp8(x: Tensor, libraries: SimpleNamespace) -> Iterator[Candidate]:
    ao = libraries.torchao
    for scale, mode in (("ceil", "RCEIL"), ("floor", "FLOOR")):
        task = f"quantise mxfp8 1x32 {scale}"
        yield Candidate(task, "ours", "E4M3, UE8M0 codes", ours_quantize(x, "mxfp8", "1x32", scale), (x,))
        call = lambda m=mode: ao.module.to_mx(x, torch.float8_e4m3fn, 32, ao.module.ScaleCalculationMode[m])  # noqa: E731
        yield of_library(task, f"{ao.name} to_mx {mode}", "E4M3, UE8M0 codes", ao, call, (x,))
    payload, scales = ours_quantize(x, "mxfp8", "1x32", "ceil")()
    task, inputs = "dequantise mxfp8 1x32", (payload, scales)
    for dtype, name in ((torch.float64, "FP64"), (torch.float32, "FP32")):
        call = ours_dequantize(payload, scales, "mxfp8", "1x32", "ue8m0", dtype)
        yield Candidate(task, "ours" if dtype == torch.float64 else "ours, rounded", name, call, inputs)
    call = ours_dequantize(payload, scales, "mxfp8", "1x32", "ue8m0", torch.float64, reuse=True)
    yield Candidate(task, "ours, buffer reused", "FP64", call, inputs)
    codes, powers = payload.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)

    def through_torch() -> Tensor:
        tiles = codes.to(torch.float64).view(*scales.shape, 32)
        return tiles.mul_(powers.to(torch.float64).unsqueeze(2))

    yield Candidate(task, "torch .to(FP64) * scale", "FP64", through_torch, inputs)
    call = lambda: ao.module.to_dtype(codes, powers, torch.float8_e4m3fn, 32, torch.float32)  # noqa: E731
    yield of_library(task, f"{ao.name} to_dtype", "FP32", ao, call, inputs)


def fp4(x: Tensor, libraries: SimpleNamespace) -> Iterator[Candidate]:
    ao, gemm = libraries.torchao, libraries.deep_gemm
    task, stored = "quantise mxfp4 1x32 ceil", "E2M1 packed, UE8M0 codes"
    e2m1 = torch.float4_e2m1fn_x2
    yield Candidate(task, "ours", stored, ours_quantize(x, "mxfp4", "1x32", "ceil"), (x,))
    call = lambda: ao.module.to_mx(x, e2m1, 32, ao.module.ScaleCalculationMode.RCEIL)  # noqa: E731
    yield of_library(task, f"{ao.name} to_mx RCEIL", stored, ao, call, (x,))
    call = lambda: gemm.module["per_token_cast_to_fp4"](x, True, 32)  # noqa: E731
    yield of_library(task, f"{gemm.name} per_token_cast_to_fp4", "E2M1 packed, FP32 scales", gemm, call, (x,))

    payload, scales = ours_quantize(x, "mxfp4", "1x32", "ceil")()
    task, inputs = "dequantise mxfp4 1x32", (payload, scales)
    for dtype, name in ((torch.float64, "FP64"), (torch.float32, "FP32")):
        call = ours_dequantize(payload, scales, "mxfp4", "1x32", "ue8m0", dtype)
        yield Candidate(task, "ours" if dtype == torch.float64 else "ours, rounded", name, call, inputs)
    call = ours_dequantize(payload, scales, "mxfp4", "1x32", "ue8m0", torch.float64, reuse=True)
    yield Candidate(task, "ours, buffer reused", "FP64", call, inputs)
    powers = scales.view(torch.float8_e8m0fnu)
    call = lambda: ao.module.to_dtype(payload, powers, e2m1, 32, torch.float32)  # noqa: E731
    yield of_library(task, f"{ao.name} to_dtype", "FP32", ao, call, inputs)
    real = powers.to(torch.float32)
    call = lambda: gemm.module["cast_back_from_fp4"](payload.view(torch.int8), real, 32)  # noqa: E731
    yield of_library(task, f"{gemm.name} cast_back_from_fp4", "FP32", gemm, call, inputs)

    task, stored = "quantise nvfp4 1x16", "E2M1 packed, E4M3 scales"
    yield Candidate(task, "ours", stored, ours_quantize(x, "nvfp4", "1x16", "e4m3"), (x,))
    call = lambda: ao.nvfp4.nvfp4_quantize(x, 16, torch.ones((), device=x.device))  # noqa: E731
    yield of_library(task, f"{ao.name} nvfp4_quantize", stored, ao, call, (x,))
    payload, scales = ours_quantize(x, "nvfp4", "1x16", "e4m3")()
    for dtype, name in ((torch.float64, "FP64"), (torch.float32, "FP32")):
        call = ours_dequantize(payload, scales, "nvfp4", "1x16", "e4m3", dtype)
        label = "ours" if dtype == torch.float64 else "ours, rounded"
        yield Candidate("dequantise nvfp4 1x16", label, name, call, (payload, scales))


def of_library(
    task: str, name: str, output: str, library: SimpleNamespace, call: Callable[[], Any], inputs: tuple[Tensor, ...]
) -> Candidate:
    if library.missing:
        return Candidate(task, name, output, missing=library.missing)
    return Candidate(task, name, output, call, inputs)


# Other libraries' torch code. Packages that need a GPU to import are read from their installed files, and labelled so.


def load_torchao() -> SimpleNamespace:
    name, missing = versioned("torchao")
    if missing:
        return SimpleNamespace(name=name, missing=missing)
    try:
        module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        nvfp4 = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    except (ImportError, AttributeError) as error:
        return SimpleNamespace(name=name, missing=f"does not import: {error}")
    return SimpleNamespace(name=name, module=module, nvfp4=nvfp4, missing="")


def load_deep_gemm() -> SimpleNamespace:
    """DeepGEMM's ``utils/math.py``, run from the installed file: the package itself imports on a GPU host only."""
    name, missing = versioned("deep_gemm")
    if missing:
        return SimpleNamespace(name=name, missing=missing)
    return SimpleNamespace(name=name, module=vars(from_file(package_file("deep_gemm", "utils/math.py"))), missing="")


def load_sglang() -> SimpleNamespace:
    """SGLang's torch-native casts: imported, or where the package does not import, these functions' source alone."""
    name, missing = versioned("sglang")
    if missing:
        return SimpleNamespace(name=name, missing=missing)
    wanted = {
        "test/test_deepep_utils.py": ("per_token_cast_to_fp8", "per_token_cast_back"),
        "srt/utils/common.py": ("ceil_align", "ceil_div"),
        "srt/layers/quantization/fp8_utils.py": ("per_block_cast_to_fp8", "ceil_to_ue8m0", "block_quant_dequant"),
    }
    try:
        members: dict[str, Any] = {}
        for file, names in wanted.items():
            module = importlib.import_module(f"sglang.{file.removesuffix('.py').replace('/', '.')}")
            members |= {function: getattr(module, function) for function in names}
    except Exception:  # whatever a package does when it misses its GPU or its dependencies
        members = dict(vars(typing), torch=torch)
        for file, names in wanted.items():
            lift(package_file("sglang", file), names, members)
        lacking = [function for names in wanted.values() for function in names if function not in members]
        if lacking:
            return SimpleNamespace(name=name, missing=f"has no {', '.join(lacking)}")
    return SimpleNamespace(name=name, module=members, missing="")


def versioned(package: str) -> tuple[str, str]:
    """A package's name with its version, and why it cannot be used."""
    if importlib.util.find_spec(package) is None:
        return package, "not installed"
    names = importlib.metadata.packages_distributions().get(package, [package])
    return f"{package} {importlib.metadata.version(names[0])}", ""


def package_file(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / file


def from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarked_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lift(path: Path, names: tuple[str, ...], into: dict[str, Any]) -> None:
    """Run only the named top-level functions of a file, its imports left out."""
    if not path.exists():
        return
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    exec(compile(tree, str(path), "exec"), into)


# Measuring


def seconds(candidate: Candidate, repeats: int, device: torch.device, processor: bool) -> tuple[float, int]:
    """The median time of a call, and the bytes that it reads and writes; the first call is not counted.

    processor: the least processor time instead, of all threads together.
    """
    clock = time.process_time if processor else time.perf_counter
    assert candidate.call is not None
    result = candidate.call()
    outputs = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, Tensor)]
    moved = sum(part.numel() * part.element_size() for part in (*candidate.inputs, *outputs))
    del result, outputs
    times = []
    for _ in range(repeats):
        synchronise(device)
        start = clock()
        candidate.call()
        synchronise(device)
        times.append(clock() - start)
    return min(times) if processor else statistics.median(times), moved


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return (
        f"{model or platform.processor()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )


def numba(x: Tensor) -> str:
    """Whether the references take their compiled passes on such a matrix."""
    used = compiled.pays(compiled.row_maxima, x)
    return f"Numba {importlib.metadata.version('numba')}" if used else "no Numba"


def table(x: Tensor, repeats: int, tasks: str, processor: bool) -> Iterator[str]:
    """The Markdown table, a line at a time, as the measurements come."""
    yield "| task | implementation | output | M elements/s | GB/s | time / FP64 copy | time / ours |"
    yield "|---|---|---|--:|--:|--:|--:|"
    base: dict[str, float] = {}
    for item in candidates(x):
        if tasks not in item.task and item.task != "copy":
            continue
        if item.missing:
            yield f"| {item.task} | {item.name} | {item.output} | {item.missing} | | | |"
            continue
        try:
            spent, moved = seconds(item, repeats, x.device, processor)
        except Exception as error:  # another library's failure is a row, not the end
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:120].replace("|", "/")
            yield f"| {item.task} | {item.name} | {item.output} | {reason} | | | |"
            continue
        copy, ours = base.setdefault("copy", spent), base.setdefault(item.task, spent)
        rates = f"{x.numel() / spent / 1e6:.0f} | {moved / spent / 1e9:.2f} | {spent / copy:.1f}"
        relative = "" if item.task == "copy" else f"{spent / ours:.2f}"
        yield f"| {item.task} | {item.name} | {item.output} | {rates} | {relative} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=64, help="size of the input matrix")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="its dtype")
    parser.add_argument("--columns", type=int, default=4096, help="its columns, a multiple of 128")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls; the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; torch's default if 0")
    parser.add_argument("--task", default="", help="only tasks whose name contains this")
    parser.add_argument("--processor-time", action="store_true", help="the least processor time, not the median time")
    parser.add_argument("--no-numba", action="store_true", help="the references without their compiled passes")
    options = parser.parse_args(arguments)
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    rows = options.mib * 2**20 // (dtype.itemsize * options.columns) // 128 * 128
    if options.columns % 128 or rows < 128 or options.repeats < 1:
        parser.error("needs columns in multiples of 128, at least 128 rows of them within --mib, and a repeat")
    if options.processor_time and device.type != "cpu":
        parser.error("--processor-time is for a CPU")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.no_numba:
        compiled.LEAST_ELEMENTS = sys.maxsize
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, options.columns, generator=generator).to(dtype).to(device)
    measure = "least processor time" if options.processor_time else "median"
    print(f"{rows} x {options.columns} {options.dtype} ({options.mib} MiB), {measure} of {options.repeats};")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {numba(x)}"
    print(f"{machine(device)}; {versions}\n")
    for line in table(x, options.repeats, options.task, options.processor_time):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
