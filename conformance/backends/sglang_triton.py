"""SGLang's kernels: ``sglang`` those in Triton, ``sglang_jit`` those in CUDA, compiled when they are first called."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _sglang_dispatcher as dispatcher
from conformance.backends import _sglang_gemm as gemm
from conformance.backends import _sglang_moe as moe
from conformance.backends import _sglang_quant as quant
from conformance.backends import _sglang_routing as routing
from conformance.backends._sglang_modules import library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("sglang", "sglang_jit")

Call = quant.Call


class SGLang:
    """One kind of SGLang's kernels. name: of the backend. kind: ``triton`` or ``jit``."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self._kind = kind
        self._device = "cpu"
        self._capability = (0, 0)

    def version(self) -> str:
        """SGLang's version."""
        return library().version

    def claims(self, device: str) -> Iterable[Claim]:
        """Everything on CUDA devices with FP8 conversions (SM89 and later); requantisation of weights on a CPU too."""
        self._device = device
        if not device.startswith("cuda"):
            return [] if self._kind == quant.JIT else quant.weight_claims()
        self._capability = torch.cuda.get_device_capability(torch.device(device))
        if self._capability < (8, 9) or (self._kind == quant.JIT and not can_compile()):
            return []
        found = list(quant.claims(self._kind))
        if self._kind == quant.TRITON:
            mapped = dispatcher.to_local(library().folder) is not None
            found += [*quant.weight_claims(), *gemm.claims(self._capability[0]), *routing.claims(mapped=mapped)]
            # The layers' activations are quantised and their experts sorted by JIT kernels.
            found += moe.claims(mapped=mapped) if self._capability[0] == 9 and can_compile() else []
        return found

    def recipe(self, claim: Claim) -> Recipe:
        """As read in the source of each kernel."""
        match claim.operation:
            case "gemm":
                return gemm.recipe(claim, self._capability[0])
            case "routing":
                return routing.recipe(claim)
            case "moe" | "grouped_gemm":
                return moe.recipe(claim)
            case "requantize":
                return quant.weight_recipe(claim, self._device)
        return quant.recipe(claim, self._kind)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The library's call, bound to its inputs."""
        match case.operation, self._kind:
            case "quantize", _:
                return quant.prepare(case, inputs, self._kind)
            case "requantize", quant.TRITON if case.variant == "deepseek_fp8":
                return quant.requantise(inputs)
            case "gemm", quant.TRITON:
                return gemm.prepare(case, inputs, options)
            case "routing", quant.TRITON:
                return routing.prepare(case, inputs)
            case "moe" | "grouped_gemm", quant.TRITON:
                return moe.prepare(case, inputs, options)
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call it."""
        return prepared(out)


def can_compile() -> bool:
    """Whether SGLang's JIT has what it needs: ``tvm_ffi``, ``msgspec``, ninja and nvcc."""
    modules = all(importlib.util.find_spec(name) for name in ("tvm_ffi", "msgspec"))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return bool(modules and shutil.which("ninja") and (shutil.which("nvcc") or Path(home, "bin", "nvcc").exists()))


def backends() -> Iterable[SGLang]:
    """``sglang`` and ``sglang_jit``. Raises ImportError where SGLang is not at hand."""
    library()
    return [SGLang("sglang", quant.TRITON), SGLang("sglang_jit", quant.JIT)]
