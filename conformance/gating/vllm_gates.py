"""vLLM's gates: experts of fused MoE by format and routing method, linear kernels, and the DeepGEMM oracle.

vLLM is imported as it is, on a faked device. Its compiled extensions need a driver: where they do not load, empty
modules stand in, and what a gate of its own CUTLASS kernels refuses is then not known. Modules that decide while they
are imported are imported anew for each architecture.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from conformance.gating import fake_device, vllm_paths
from conformance.gating.child import LibraryError, Probe, Row, SlowError, limited
from conformance.gating.model import ARCHITECTURES, ENVIRONMENT, Gate, classify

EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
MODULAR = "vllm.model_executor.layers.fused_moe.modular_kernel"
LINEAR = "vllm.model_executor.kernels.linear"
KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
DEEP_GEMM = "vllm.utils.deep_gemm"
EXTENSIONS = ("_C_stable_libtorch", "_C", "_moe_C_stable_libtorch", "_moe_C")
COMPILED = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
    "mxfp4_experts_quant_supported",
)
"""Predicates in compiled code, which take a compute capability."""
NOT_COMPILED = "requires vLLM's compiled CUDA package, which does not load here"
OTHER_DEVICES = ("aiter", "xpu", "cpu", "rocm", "zentorch", "rdna", "gfx")
SCHEMES: Mapping[str, tuple[str, str]] = {
    "BF16xBF16": ("", ""),
    "FP8PerTensorxFP8PerTensor": ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "FP8PerChannelxFP8PerToken": ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
    "DeepSeekFp8xDeepSeekFp8": ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    "MXFP8xMXFP8": ("kMxfp8Static", "kMxfp8Dynamic"),
    "NVFP4xNVFP4": ("kNvfp4Static", "kNvfp4Dynamic"),
    "NVFP4xBF16": ("kNvfp4Static", ""),
    "MXFP4xMXFP8": ("kMxfp4Static", "kMxfp8Dynamic"),
    "MXFP4xBF16": ("kMxfp4Static", ""),
}
"""Format pair: vLLM's keys of weight and activation; empty for unquantised."""
CAUGHT = (NotImplementedError, ValueError, RuntimeError)
SITUATIONS = (("", True, "1"), (" (DeepGEMM off)", False, "1"), (" (flag off)", True, "0"))
"""What ends the variant's name; whether DeepGEMM can be imported; VLLM_USE_DEEP_GEMM."""


def load() -> tuple[str, list[str], Probe]:
    """Import vLLM under a faked device. Raises LibraryError where it is missing, lacks packages or has moved."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError("vllm is not installed") from None
    fake_device.install(ARCHITECTURES[0])
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    logging.disable(logging.WARNING)
    with contextlib.suppress(Exception):  # once, for every fork
        importlib.import_module("triton")
        importlib.import_module("conformance.gating.launches")
    try:
        package = importlib.import_module("vllm")
        stood_in = _extensions(package)
        _platform()
    except Exception as error:
        raise LibraryError(f"vllm {version} cannot be asked: {type(error).__name__}: {error}") from error

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        fake_device.choose(sm)
        fake_device.forget("vllm")
        for name in (LINEAR, MODULAR, DEEP_GEMM, *_experts_modules()):
            with contextlib.suppress(Exception):  # told as a row where it is asked
                importlib.import_module(name)
        _have_everything()
        wanted, limit = tuple(request["subjects"]), float(request["probe_s"])
        for source in (_experts, _linear, _deep_gemm):
            for subject, variant, gates in _guarded(source, sm, limit, stood_in):
                if not wanted or any(word in subject for word in wanted):
                    yield subject, variant, gates, ()

    return (
        version,
        [
            "imported whole on a faked device, as with every optional package"
            + "; compiled extensions stood in for" * bool(stood_in)
        ],
        probe,
    )


Rows = Iterator[tuple[str, str, tuple[Gate, ...]]]


def _extensions(package: Any) -> bool:
    """Put empty modules where compiled extensions do not load; whether that was needed."""
    import torch

    stood_in = False
    for name in EXTENSIONS:
        try:
            importlib.import_module(f"{package.__name__}.{name}")
        except Exception:
            sys.modules[f"{package.__name__}.{name}"] = ModuleType(name)
            stood_in = stood_in or name == EXTENSIONS[0]
    if stood_in:
        for name in COMPILED:
            setattr(torch.ops._C, name, _compiled)
        name = f"{package.__name__}.vllm_flash_attn"
        sys.modules[name] = _Anything(name)
    return stood_in


_ASKED = [False]
"""Whether a compiled predicate that was stood in for has been asked."""


def _compiled(*_: Any) -> bool:
    _ASKED[0] = True
    return False


def _platform() -> None:
    """Have vLLM take the faked device for its platform; the class without NVML asks torch."""
    platforms = importlib.import_module("vllm.platforms")
    cuda = importlib.import_module("vllm.platforms.cuda")
    platforms._current_platform = cuda.NonNvmlCudaPlatform()  # type: ignore[attr-defined]


def _have_everything() -> None:
    """Let every ``has_PACKAGE`` be true in every module that has imported it: the architecture is the question."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vllm" and type(module) is ModuleType:
            for feature, found in list(vars(module).items()):
                if feature.startswith("has_") and callable(found):
                    setattr(module, feature, _true)


def _true(*_: Any, **__: Any) -> bool:
    return True


def _gate(name: str, ask: Any, limit: float) -> Gate:
    """A predicate's answer: a truth, or a truth and a reason."""
    _ASKED[0] = False
    try:
        with limited(limit):
            said = ask()
    except SlowError as slow:
        return Gate(name, "unknown", str(slow))
    except Exception as error:
        answer = classify(error, CAUGHT)
        return Gate(name, answer.answer, answer.detail)
    admitted, reason = said if isinstance(said, tuple) else (said, "")
    why = " ".join(str(reason or "").split())
    if admitted:
        return Gate(name, "yes")
    if _ASKED[0] or ENVIRONMENT.search(why):
        return Gate(name, "unknown", NOT_COMPILED if _ASKED[0] else why)
    return Gate(name, "no", why)


def _guarded(source: Any, sm: int, limit: float, stood_in: bool) -> Rows:
    """A source that cannot be imported, or has moved, is a row; the others still answer."""
    try:
        yield from source(sm, limit, stood_in)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        yield source.__name__.strip("_"), "", (Gate("import", "unknown", said),)


def _experts(sm: int, limit: float, stood_in: bool) -> Rows:
    """`_supports_current_device` and, for kernels that route themselves, `_supports_routing_method`, by format."""
    base = importlib.import_module(MODULAR).FusedMoEExperts
    keys = importlib.import_module(KEYS)
    methods = importlib.import_module("vllm.model_executor.layers.fused_moe.config").RoutingMethodType
    for path in _experts_modules():
        try:
            module = importlib.import_module(path)
        except Exception as error:
            yield path.rpartition(".")[2], "", (Gate("import", "unknown", f"{type(error).__name__}: {error}"),)
            continue
        for name, found in vars(module).items():
            mine = isinstance(found, type) and issubclass(found, base) and found.__module__ == module.__name__
            if mine and not getattr(found, "__abstractmethods__", ()):
                yield from _expert(name, found, keys, methods, limit, stood_in)


def _experts_modules() -> list[str]:
    """The modules of experts for CUDA devices."""
    package = importlib.import_module(EXPERTS)
    return [
        f"{EXPERTS}.{info.name}"
        for info in pkgutil.iter_modules(package.__path__)
        if not any(word in info.name for word in OTHER_DEVICES)
    ]


def _expert(name: str, found: Any, keys: Any, methods: Any, limit: float, stood_in: bool) -> Rows:
    device = _known(name, _gate("device", found._supports_current_device, limit), stood_in)
    try:
        routes = bool(found.is_monolithic())
    except Exception:
        routes = False
    for variant, (weight, activation) in SCHEMES.items():
        pair = [getattr(keys, key) if key else None for key in (weight, activation)]
        quant = _gate("quant", lambda pair=pair: found._supports_quant_scheme(*pair), limit)
        if quant.answer == "error":
            yield name, variant, (device, quant)
        if quant.answer != "yes":
            continue
        yield name, variant, (device,)
        for method in methods if routes else ():
            gate = _gate(
                "routing", lambda pair=pair, method=method: found._supports_routing_method(method, *pair), limit
            )
            yield name, f"{variant} {method.name}", (device, gate)


def _linear(sm: int, limit: float, stood_in: bool) -> Rows:
    """`is_supported` of every linear kernel that is offered on CUDA."""
    module = importlib.import_module(LINEAR)
    cuda = importlib.import_module("vllm.platforms.interface").PlatformEnum.CUDA
    for table, kernels in vars(module).items():
        if not (table.startswith("_POSSIBLE_") and isinstance(kernels, dict)):
            continue
        kind = table.removeprefix("_POSSIBLE_").removesuffix("KERNELS").strip("_") or "mixed"
        for kernel in kernels.get(cuda, ()):
            gate = _gate("is_supported", lambda kernel=kernel: _supported(kernel, sm), limit)
            yield kernel.__name__, f"linear {kind}", (_known(kernel.__name__, gate, stood_in),)


def _supported(kernel: Any, sm: int) -> Any:
    """Kernels of mixed precision name the least capability instead."""
    if hasattr(kernel, "is_supported"):
        return kernel.is_supported(sm)
    least = int(kernel.get_min_capability())
    return sm >= least, f"needs compute capability {least}"


def _known(name: str, gate: Gate, stood_in: bool) -> Gate:
    """A refusal by vLLM's own CUTLASS kernels means nothing where their compiled predicates were stood in for."""
    if stood_in and gate.answer == "no" and "cutlass" in name.lower() and "flashinfer" not in name.lower():
        return Gate(gate.name, "unknown", NOT_COMPILED)
    return gate


def _deep_gemm(sm: int, limit: float, stood_in: bool) -> Rows:
    """Whether DeepGEMM is used, and which format of scales the oracle names; on stand-ins for DeepGEMM."""
    module = importlib.import_module(DEEP_GEMM)
    for ending, importable, flag in SITUATIONS:
        os.environ["VLLM_USE_DEEP_GEMM"] = flag
        sys.modules["deep_gemm"] = _Anything("deep_gemm") if importable else None  # type: ignore[assignment]
        fake_device.forget("vllm")
        module.has_deep_gemm = lambda importable=importable: importable  # type: ignore[attr-defined]
        for name in vars(module):
            if name.startswith("_") and name.endswith("_impl"):
                setattr(module, name, None)
        oracle = module.DeepGemmQuantScaleFMT
        if hasattr(oracle, "_oracle_cache"):
            del oracle._oracle_cache
        yield "is_deep_gemm_supported", f"dense{ending}", (_gate("oracle", module.is_deep_gemm_supported, limit),)
        for kind in ("UE8M0", "FLOAT32_CEIL_UE8M0"):
            gate = _gate("oracle", lambda kind=kind, oracle=oracle: oracle.from_oracle().name == kind, limit)
            yield "DeepGemmQuantScaleFMT", f"{kind}{ending}", (gate,)
        try:
            ways = vllm_paths.gates(limit)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            ways = (Gate("import", "unknown", said),)
        yield vllm_paths.CLASS, vllm_paths.VARIANT + ending, ways


class _Anything(ModuleType):
    """A module with every function, none of which does anything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
