"""FlashInfer's compiled modules: which of them are ready, so that no call waits for a compiler.

FlashInfer compiles its kernels at first use, for minutes. A claim is made only where a module lies ready: prebuilt as
``flashinfer/data/aot/NAME/NAME.so``, in an installed jit-cache package, or in FlashInfer's own cache from earlier use.
``python -m conformance.flashinfer_modules build`` makes them. Nothing of FlashInfer is imported until it is asked for.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

DISTRIBUTION = "flashinfer-python"
GENERATORS: Mapping[str, tuple[str, str]] = {
    "dsv3_fused_routing": ("flashinfer.jit.dsv3_optimizations", "gen_dsv3_fused_routing_module"),
    "fp8_blockscale_gemm_90": ("flashinfer.jit.gemm", "gen_fp8_blockscale_gemm_sm90_module"),
    "mxfp8_quantization_sm100": ("flashinfer.jit.fp8_quantization", "gen_mxfp8_quantization_sm100_module"),
    "fp4_quantization_90": ("flashinfer.quantization.fp4_quantization", "gen_fp4_quantization_sm90_module"),
    "fp4_quantization_100": ("flashinfer.quantization.fp4_quantization", "gen_fp4_quantization_sm100_module"),
    "monomoe": ("flashinfer.jit.monomoe", "gen_monomoe_module"),
    "quantization": ("flashinfer.jit.quantization", "gen_quantization_module"),
    "fused_moe_90": ("flashinfer.jit.fused_moe", "gen_cutlass_fused_moe_sm90_module"),
}
"""Module -> where its specification is made. Both differ between releases; what is missing is not offered."""
FORMATS = "formats"
"""The file beside a module that names the formats it was compiled for; without it, all."""
LEFT_OUT = "left out of this build"
"""What a tactic says that `conformance.flashinfer_moe_module` did not compile."""


def version() -> str:
    """The installed version. Raises ImportError."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{DISTRIBUTION} is not installed") from None


def absent(cuda: bool) -> str | None:
    """Why nothing of FlashInfer can be called without a compiler, found without importing it; None if something may be.

    cuda: whether there is a CUDA device; then FlashInfer's own cache counts as well.
    """
    about = f"{DISTRIBUTION} {version()}"
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return f"{about} has no package flashinfer"
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    places = [(Path(spec.origin).parent / "data" / "aot", "*/*.so")]
    if cuda:
        places.append((base / ".cache" / "flashinfer" / version(), "*/cached_ops/*/*.so"))
    if any(next(folder.glob(pattern), None) is not None for folder, pattern in places):
        return None
    return f"{about} has no compiled module yet: python -m conformance.flashinfer_modules build"


def prepare() -> None:
    """What has to be done before FlashInfer is imported: no downloads, no chatter, an architecture without a device.

    Every process comes through here, those that only call as well.
    """
    os.environ.setdefault("FLASHINFER_NO_DOWNLOAD", "1")
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "error")
    if not torch.cuda.is_available():
        # FlashInfer asks for an architecture before it looks for a module; host functions need none.
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    # A module that was linked without libcuda finds its symbols here; a machine without a driver has neither.
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)


def attribute(module: str, name: str) -> Any | None:
    """An attribute of a module of FlashInfer; None where this release has no such thing or it does not load."""
    prepare()
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # an optional dependency that is missing, in whatever way it says so
        return None


def specification(name: str) -> Any | None:
    """FlashInfer's JitSpec of a module; None where this release has none."""
    make: Callable[[], Any] | None = attribute(*GENERATORS[name])
    if make is None:
        return None
    with suppress(Exception):  # a specification may look for sources, which a packed FlashInfer lacks
        return make()
    return None


def ready(name: str) -> bool:
    """Whether a module of `GENERATORS` can be loaded without a compiler."""
    folder = attribute("flashinfer.jit.env", "FLASHINFER_AOT_DIR")
    if folder is None:
        return False
    if not (folder / name / f"{name}.so").exists():
        spec = specification(name)
        if spec is None or not spec.is_compiled:
            return False
    return True


def formats(name: str) -> frozenset[str] | None:
    """The formats that a prebuilt module was compiled for, None where nothing is said of them."""
    folder = attribute("flashinfer.jit.env", "FLASHINFER_AOT_DIR")
    if folder is None or not (folder / name / FORMATS).exists():
        return None
    return frozenset((folder / name / FORMATS).read_text().split())
