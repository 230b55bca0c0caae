"""FlashInfer's modules, compiled once and taken along: ``python -m conformance.flashinfer_modules build | pack``.

``build`` compiles the modules that the backends ``flashinfer`` and ``flashinfer_mono`` call, ``fused_moe_90`` of
``flashinfer_moe`` where it is named, and puts them where FlashInfer looks for prebuilt ones,
``flashinfer/data/aot/NAME/NAME.so`` of the installed package. No GPU is needed, nvcc is. ``pack FILE.tar.xz`` writes
the part of the installed FlashInfer that these backends need, prebuilt modules included: a few megabytes instead of a
hundred, for a GPU host without a package index (docs/gpu-host.md).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path

ARCHITECTURES = "9.0a"
MODULES = (
    "dsv3_fused_routing",
    "fp8_blockscale_gemm_90",
    "mxfp8_quantization_sm100",
    "fp4_quantization_90",
    "quantization",
    "monomoe",
)
EXTRA = ("fused_moe_90",)
"""Built when they are named: hundreds of sources (`conformance.flashinfer_moe_module` takes fewer)."""
HEADERS = {"cublasLt.h": "nvidia-cublas", "curand_kernel.h": "nvidia-curand", "nvrtc.h": "nvidia-cuda-nvrtc"}
"""Headers that small CUDA toolkits lack, and the wheels that hold them."""
USED = (
    "flashinfer",
    "flashinfer.fused_moe.fused_routing_dsv3",
    "flashinfer.fused_moe.layer",
    "flashinfer.fused_moe.monomoe",
    "flashinfer.fused_moe.prepare",
    "flashinfer.gemm",
    "flashinfer.jit.quantization",
    "flashinfer.quantization.fp4_quantization",
    "flashinfer.quantization.fp8_quantization",
)
"""What the backend imports, directly or when it calls."""
RUN_TIME_DATA = ("csrc/nv_internal/tensorrt_llm/deep_gemm", "csrc/fused_moe/monomoe")
"""Sources that a kernel compiles when it runs, or whose presence FlashInfer asks for before it loads a module."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 and one line where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m conformance.flashinfer_modules", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build_options = commands.add_parser("build", help="compile modules")
    build_options.add_argument("module", nargs="*", default=list(MODULES), help=f"of {', '.join((*MODULES, *EXTRA))}")
    build_options.add_argument("--arch", default=ARCHITECTURES, help="as FLASHINFER_CUDA_ARCH_LIST wants it")
    pack_options = commands.add_parser("pack", help="write what a GPU host needs")
    pack_options.add_argument("file", type=Path, help="such as flashinfer.tar.xz")
    options = parser.parse_args(arguments)
    try:
        if options.command == "pack":
            print(f"{pack(options.file)} files, {options.file.stat().st_size / 1e6:.1f} MB in {options.file}")
            return 0
        unknown = sorted(set(options.module) - {*MODULES, *EXTRA})
        if unknown:
            raise LookupError(f"unknown module {unknown[0]!r}; known: {', '.join((*MODULES, *EXTRA))}")
        return build(options.module, options.arch)
    except (ImportError, LookupError, OSError) as error:
        print(f"conformance: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build(names: Iterable[str], architectures: str) -> int:
    """Compile modules and put them into the installed package; 1 if one of them fails, with FlashInfer's own words."""
    toolkit = cuda_home()
    os.environ["CUDA_HOME"] = str(toolkit)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = architectures
    with tempfile.TemporaryDirectory() as scratch:
        add_missing_parts(toolkit, Path(scratch))
        from conformance.backends import _flashinfer_modules as modules

        modules.version()
        failed = 0
        for name in names:
            started = time.monotonic()
            spec = modules.specification(name)
            if spec is None:
                print(f"{name}: this release has no such module")
                continue
            try:
                spec.build(False)
            except Exception as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed = 1
                continue
            place = Path(str(modules.attribute("flashinfer.jit.env", "FLASHINFER_AOT_DIR")), name, f"{name}.so")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(spec.jit_library_path, place)
            print(f"{name}: {time.monotonic() - started:.0f} s, {place.stat().st_size / 1e6:.1f} MB, {place}")
    return failed


def cuda_home() -> Path:
    """The CUDA toolkit. Raises LookupError where there is none."""
    nvcc = shutil.which("nvcc")
    places = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    places += [Path(nvcc).resolve().parent.parent] if nvcc else []
    places += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for place in places:
        if (place / "bin" / "nvcc").exists() and (place / "include" / "cuda_runtime.h").exists():
            return place
    raise LookupError("no CUDA toolkit with nvcc; CUDA_HOME may name one")


def add_missing_parts(toolkit: Path, scratch: Path) -> None:
    """Headers that the toolkit lacks from NVIDIA's wheels, and a libcuda to link with where there is no driver.

    Changes ``CPATH`` and ``LIBRARY_PATH``. The stand-in has the driver's soname, so that the real one is used later.
    """
    (scratch / "include").mkdir()
    (scratch / "lib").mkdir()
    wheels = [path for entry in sys.path for path in Path(entry, "nvidia").glob("*") if (path / "include").is_dir()]
    for wheel in wheels:
        for header in (wheel / "include").iterdir():
            own = scratch / "include" / header.name
            if not (toolkit / "include" / header.name).exists() and not own.exists():
                own.symlink_to(header)
        for library in (wheel / "lib").glob("libnvrtc.so.*"):
            with suppress(FileExistsError):
                (scratch / "lib" / "libnvrtc.so").symlink_to(library)
    given = [Path(entry) for entry in os.environ.get("CPATH", "").split(os.pathsep) if entry]
    places = [toolkit / "include", scratch / "include", *given]
    lacking = [wheel for header, wheel in HEADERS.items() if not any((place / header).exists() for place in places)]
    if lacking:
        raise LookupError(f"{toolkit} lacks headers that FlashInfer includes: pip install {' '.join(lacking)}")
    compiler = shutil.which("c++")
    if compiler is None:
        raise LookupError("no C++ compiler (c++)")
    empty = scratch / "empty.cpp"
    empty.write_text("")
    stub = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(scratch / "lib" / "libcuda.so"))
    subprocess.run([compiler, *stub, str(empty)], check=True)
    for variable, folder in (("CPATH", "include"), ("LIBRARY_PATH", "lib")):
        os.environ[variable] = os.pathsep.join(filter(None, (os.environ.get(variable), str(scratch / folder))))


def pack(file: Path) -> int:
    """Write the archive and return how many files it holds. Raises ImportError without FlashInfer."""
    from conformance.backends import _flashinfer_modules as modules

    modules.version()
    modules.prepare()
    for name in USED:
        importlib.import_module(name)
    package = Path(str(sys.modules["flashinfer"].__file__)).parent
    sources = {Path(origin) for module in list(sys.modules.values()) if (origin := getattr(module, "__file__", None))}
    chosen = {path for path in sources if path.is_relative_to(package)}
    # What a function imports when it is called: FlashInfer's autotuner does, whatever is asked of a layer.
    chosen |= {path for source in chosen for path in imported(source, package)}
    chosen |= {path for path in package.rglob("*.json") if path.parent in {source.parent for source in chosen}}
    data = package / "data"
    chosen |= {path for folder in RUN_TIME_DATA for path in (data / folder).rglob("*") if path.is_file()}
    chosen |= {*(data / "aot").glob("*/*.so"), *(data / "aot").glob(f"*/{modules.FORMATS}")}
    info = f"{modules.DISTRIBUTION.replace('-', '_')}-{modules.version()}.dist-info"
    about = Path(str(distribution(modules.DISTRIBUTION).locate_file(f"{info}/METADATA")))
    with tarfile.open(file, "w:xz") as archive:
        for path in sorted(chosen | {about}):
            archive.add(path, arcname=str(path.relative_to(package.parent)), filter=_anonymous)
    return len(chosen) + 1


def imported(source: Path, package: Path) -> set[Path]:
    """The files of a package that a source of it names in any import, those within functions included."""
    folder = list(source.relative_to(package.parent).parent.parts)
    names: list[list[str]] = []
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names += [[*base, alias.name] for alias in node.names]
    steps = {tuple(name[: end + 1]) for name in names if name[:1] == [package.name] for end in range(len(name))}
    places = {package.parent.joinpath(*step) for step in steps}
    files = {file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__init__.py")}
    return {file for file in files if file.is_file()}


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    sys.exit(main())
