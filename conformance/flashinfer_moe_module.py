"""FlashInfer's ``fused_moe_90`` with a few of its tactics: ``python -m conformance.flashinfer_moe_module``.

The module of FlashInfer's CUTLASS expert layers is made of 248 sources, most of them tactics for FP16, INT4 and other
formats than the backend ``flashinfer_moe`` claims. Here its runners are compiled for the claimed formats, each with the
tile that is FlashInfer's default and a few others (`TILES`). What is left out becomes a function that throws
FlashInfer's own exception, which it takes for a tactic that does not fit: tactics keep their numbers. No GPU is needed;
nvcc 12.8 or later and FlashInfer's sources are.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conformance import flashinfer_modules
from conformance.backends import _flashinfer_modules as modules

MODULE = "fused_moe_90"
RUNNERS: Mapping[str, tuple[str, str]] = {
    "bf16": ("__nv_bfloat16, __nv_bfloat16", "__nv_bfloat16, __nv_bfloat16, __nv_bfloat16"),
    "deepseek_fp8": ("__nv_bfloat16, __nv_fp8_e4m3", "__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16"),
    "fp8_per_tensor": (
        "__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16",
        "__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16",
    ),
    "w4a16": ("__nv_bfloat16, Fp4Type", "__nv_bfloat16, Fp4Type, __nv_bfloat16"),
}
"""Format -> template arguments of its ``CutlassMoeFCRunner`` and its ``MoeGemmRunner``."""
TILES = ((128, 16, 1, 1), (128, 128, 1, 1), (128, 128, 2, 2), (256, 128, 1, 1))
"""Rows, columns and cluster of the tiles that dense formats keep; the first is FlashInfer's default."""
MIXED_TILES = (
    (64, 16, 128, 1, 1, "Pingpong"),
    (128, 64, 256, 1, 1, "Cooperative"),
    (128, 128, 128, 1, 1, "Cooperative"),
    (128, 128, 128, 2, 2, "Cooperative"),
)
"""Those of BF16 times MXFP4: the default, the one by which the workspace is measured, two more."""
DENSE = {"bf16": ("__nv_bfloat16", 64), "fp8_per_tensor": ("__nv_fp8_e4m3", 128)}
MACRO = "INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM"
DENSE_LAUNCHER = "moe_gemm_tma_ws_launcher.inl"
MIXED_LAUNCHER = "moe_gemm_tma_ws_mixed_input_launcher.inl"
LAUNCHERS = "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers"
KEPT = (
    "flashinfer_cutlass_fused_moe_binding.cu",
    "fp8_blockscale_gemm.cu",
    "moe_gemm_tma_warp_specialized_input.cu",
    "moe_gemm_mixed_utils.cu",
    "preQuantScaleKernel.cu",
    "memoryUtils.cu",
    "deepgemm_jit_setup.cu",
)
"""Of FlashInfer's own CUDA sources; its C++ sources are all kept."""
LIBRARIES = ("-lcudart", "-Wl,--no-as-needed", "-lcuda", "-Wl,--as-needed", "-lnvrtc")
"""What is linked; libcuda is needed even where a stand-in without symbols takes its place."""
STUB = """\
#include "tensorrt_llm/common/tllmException.h"
extern "C" [[noreturn]] void conformance_left_out() {
  throw tensorrt_llm::common::TllmException(__FILE__, __LINE__, "%s");
}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 and one line where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m conformance.flashinfer_moe_module", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then link what there is")
    parser.add_argument("--format", action="append", choices=sorted(RUNNERS), help="all unless given")
    options = parser.parse_args(arguments)
    try:
        place = build(options.format or list(RUNNERS), options.jobs, time.monotonic() + options.seconds)
    except (ImportError, LookupError, OSError) as error:
        print(f"conformance: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{place}: {place.stat().st_size / 1e6:.1f} MB")
    return 0


def build(chosen: Sequence[str], jobs: int, deadline: float) -> Path:
    """Compile, link and put the module where FlashInfer looks for it, its formats beside it. Raises LookupError."""
    toolkit = flashinfer_modules.cuda_home()
    os.environ["CUDA_HOME"] = str(toolkit)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = flashinfer_modules.ARCHITECTURES
    with tempfile.TemporaryDirectory() as scratch:
        flashinfer_modules.add_missing_parts(toolkit, Path(scratch))
        modules.version()
        spec = modules.specification(MODULE)
        if spec is None:
            raise LookupError(f"this FlashInfer has no module {MODULE}, or its sources are not there")
        folder = Path(spec.build_dir) / "few"
        folder.mkdir(parents=True, exist_ok=True)
        kept = (path for path in map(Path, spec.sources) if is_kept(path))
        sources = sorted([*runners(folder, chosen), *tactics(folder, chosen), *kept], key=urgency)
        commands = dataclasses.replace(spec, sources=sources).get_compile_commands()
        objects = compiled(commands, folder, jobs, deadline)
        built = [name for name in chosen if needed(name) <= set(objects)]
        if not built:
            raise LookupError("no format was compiled in time")
        module = linked(list(objects.values()), folder, commands, toolkit)
        place = Path(str(modules.attribute("flashinfer.jit.env", "FLASHINFER_AOT_DIR")), MODULE, f"{MODULE}.so")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(module, place)
    place.with_name(modules.FORMATS).write_text("\n".join(built) + "\n")
    return place


def urgency(source: Path) -> int:
    """Runners, which take the longest; tactics that are defaults; FlashInfer's own sources; other tactics."""
    for rank, start in enumerate(("layer_", "gemm_", "tactic_0")):
        if source.name.startswith(start):
            return rank
    return 4 if source.name.startswith("tactic_") else 3


def needed(name: str) -> set[str]:
    """The stems of the sources without which a format does not run at all."""
    return {f"layer_{name}", f"gemm_{name}"} | (set() if name == "deepseek_fp8" else {f"tactic_0_{name}"})


def is_kept(source: Path) -> bool:
    """Whether a source of FlashInfer's is compiled as it is."""
    return source.name in KEPT or source.suffix == ".cpp"


def runners(folder: Path, formats: Iterable[str]) -> Iterator[Path]:
    """Sources of the formats' runners; they take the longest."""
    for name in formats:
        layer, product = RUNNERS[name]
        for kind, header, line in (
            ("gemm", "moe_gemm/moe_gemm_template_dispatch.h", f"template class MoeGemmRunner<{product}>;"),
            ("layer", "cutlass_fused_moe_kernels.cuh", f"template class CutlassMoeFCRunner<{layer}>;"),
        ):
            path = folder / f"{kind}_{name}.cu"
            includes = f'#include "{header}"\n' + ('#include "moe_kernels.h"\n' if kind == "layer" else "")
            path.write_text(f"{includes}namespace tensorrt_llm::kernels::cutlass_kernels {{\n{line}\n}}\n")
            yield path


def tactics(folder: Path, formats: Sequence[str]) -> Iterator[Path]:
    """Sources of a format's tactics with one tile (two for `MIXED_TILES`), FlashInfer's defaults first."""
    for rank, tile in enumerate(TILES):
        for name in formats:
            if name in DENSE:
                launcher, lines = DENSE_LAUNCHER, [dense(name, *tile, way) for way in range(4)]
            else:
                launcher, lines = MIXED_LAUNCHER, [mixed(*other) for other in MIXED_TILES[2 * rank : 2 * rank + 2]]
            if name == "deepseek_fp8" or not lines:
                continue
            path = folder / f"tactic_{rank}_{name}.cu"
            body = "\n".join(lines)
            path.write_text(
                f'#include "{LAUNCHERS}/{launcher}"\n'
                f"namespace tensorrt_llm {{ namespace kernels {{ namespace cutlass_kernels_oss {{\n{body}\n}} }} }}\n"
            )
            yield path


def dense(name: str, rows: int, columns: int, across: int, along: int, way: int) -> str:
    """One of four ways: the experts' sum apart or in the epilogue, operands swapped or not."""
    element, depth = DENSE[name]
    fusion, swapped = ("NONE", "FINALIZE")[way % 2], ("false", "true")[way // 2]
    return (
        f"{MACRO}(Sm90, {element}, {element}, __nv_bfloat16, void, EpilogueOpDefault, {fusion}, "
        f"{rows}, {columns}, {depth}, {across}, {along}, 1, false, false, false, {swapped});"
    )


def mixed(rows: int, columns: int, depth: int, across: int, along: int, schedule: str) -> str:
    """One tactic of BF16 times MXFP4."""
    shapes = [", ".join(f"cute::Int<{n}>" for n in numbers) for numbers in ((rows, columns, depth), (across, along, 1))]
    return (
        "template void sm90_generic_mixed_moe_gemm_kernelLauncher<__nv_bfloat16, SafeFP4, __nv_bfloat16, "
        f"tensorrt_llm::cutlass_extensions::EpilogueOpDefault, cute::Shape<{shapes[0]}>, cute::Shape<{shapes[1]}>, "
        f"cutlass::gemm::KernelTmaWarpSpecialized{schedule}, cutlass::epilogue::TmaWarpSpecializedCooperative, "
        "cutlass::WeightOnlyQuantOp::FINEGRAINED_SCALE_ONLY>(GroupedGemmInput<__nv_bfloat16, SafeFP4, __nv_bfloat16, "
        "__nv_bfloat16> inputs, TmaWarpSpecializedGroupedGemmInput hopper_inputs, int sm_count_, "
        "size_t* workspace_size);"
    )


def compiled(commands: Sequence[Mapping[str, Any]], folder: Path, jobs: int, deadline: float) -> dict[str, Path]:
    """Source's stem -> object, of runners and tactics as many as there is time for.

    Raises LookupError where another one is lacking.
    """
    include = f"-I{binding_folder(commands)}"

    def one(command: Mapping[str, Any]) -> Path | None:
        source = Path(command["file"])
        target = folder / f"{source.parent.name}_{source.stem}.o"
        if target.exists():  # of an earlier call
            return target
        part, started = target.with_suffix(".part"), time.monotonic()
        words = re.sub(r" -o \S+$", "", command["command"]) + f" -o {part} {include}"
        if command["file"].endswith(".cu"):
            words += " --split-compile=4"
        done = until(deadline, words)
        if done is None:
            return None
        print(f"{source.name}: {time.monotonic() - started:.0f} s, exit code {done[0]}", flush=True)
        if done[0]:
            print(done[1][-3000:], file=sys.stderr, flush=True)
            return None
        return part.rename(target)

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, commands))
    stems = [Path(command["file"]).stem for command in commands]
    objects = {stem: path for stem, path in zip(stems, found, strict=True) if path is not None}
    lacking = [stem for stem in stems if stem not in objects]
    missing = [stem for stem in lacking if not stem.startswith(("tactic_", "layer_", "gemm_"))]
    if missing:
        raise LookupError(f"not compiled: {', '.join(missing)}")
    if lacking:
        print(f"left out: {', '.join(lacking)}")
    return objects


def until(deadline: float, words: str) -> tuple[int, str] | None:
    """Exit code and errors of a command; None where time runs out, when all that it started is ended."""
    left = deadline - time.monotonic()
    if left <= 0:
        return None
    with subprocess.Popen(
        ["/bin/sh", "-c", words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=None if left == float("inf") else left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return process.returncode, errors


def binding_folder(commands: Sequence[Mapping[str, Any]]) -> Path:
    """Where ``cutlass_fused_moe_kernels.cuh`` lies."""
    return next(Path(item["file"]).parent for item in commands if item["file"].endswith(KEPT[0]))


def linked(objects: Sequence[Path], folder: Path, commands: Sequence[Mapping[str, Any]], toolkit: Path) -> Path:
    """The module, with a stub for every function of FlashInfer's that is asked for and not there."""
    missing = sorted(symbols(objects, "--undefined-only") - symbols(objects, "--defined-only"))
    stubs = [name for name in missing if "tensorrt_llm" in name]
    data = [name for name in stubs if re.match(r"_ZT[VISC]|_ZGV", name)]
    if data:
        raise LookupError(f"not functions, and not there: {', '.join(data[:3])}")
    (folder / "stub.cpp").write_text(STUB % modules.LEFT_OUT)
    lines = "".join(f".globl {name}\n.type {name},@function\n{name}: jmp conformance_left_out@PLT\n" for name in stubs)
    (folder / "stubs.s").write_text(f'.text\n{lines}.section .note.GNU-stack,"",@progbits\n')
    like = next(item["command"] for item in commands if item["file"].endswith("tllmException.cpp"))
    words = re.sub(r" -o \S+$", "", re.sub(r" -c \S+", f" -c {folder / 'stub.cpp'}", like, count=1))
    run(["/bin/sh", "-c", f"exec {words} -o {folder / 'stub.o'}"])
    compiler = like.split()[0]
    run([compiler, "-c", str(folder / "stubs.s"), "-o", str(folder / "stubs.o")])
    module = folder / f"{MODULE}.so"
    places = [f"-L{toolkit / part}" for part in ("lib64", "lib64/stubs") if (toolkit / part).is_dir()]
    # Functions that are no templates are in every layer's object; they are all the same.
    flags = ["-shared", "-Wl,--allow-multiple-definition", *places, *LIBRARIES]
    run([compiler, *map(str, objects), str(folder / "stub.o"), str(folder / "stubs.o"), *flags, "-o", str(module)])
    run(["strip", "--strip-unneeded", str(module)])
    print(f"{len(objects)} objects, {len(stubs)} functions left out")
    return module


def symbols(objects: Sequence[Path], which: str) -> set[str]:
    """The names that `nm` prints."""
    return set(run(["nm", "-j", which, *map(str, objects)]).split())


def run(words: Sequence[str]) -> str:
    """Output of a command. Raises LookupError with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LookupError(f"{words[0]}: {done.stderr[-1000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
