"""vLLM's Triton kernels (and the torch that surrounds them), without its compiled operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _vllm_gemm as gemm
from conformance.backends import _vllm_moe as moe
from conformance.backends import _vllm_quant as quant
from conformance.backends import _vllm_routing as routing
from conformance.backends._vllm_modules import library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("vllm",)

Call = quant.Call


class VLLM:
    """vLLM's functions, looked up by name."""

    name = "vllm"

    def __init__(self) -> None:
        self._device = "cpu"
        self._major = 0

    def version(self) -> str:
        """vLLM's version."""
        return library().version

    def claims(self, device: str) -> Iterable[Claim]:
        """Kernels on CUDA devices with FP8 conversions (SM89 and later); requantisation everywhere."""
        self._device = device
        if not device.startswith("cuda"):
            return quant.claims(device)
        capability = torch.cuda.get_device_capability(torch.device(device))
        self._major = capability[0]
        if capability < (8, 9):
            return []
        return [*quant.claims(device), *gemm.claims(self._major), *moe.claims(self._major), *routing.claims()]

    def recipe(self, claim: Claim) -> Recipe:
        """As read in the source of each kernel."""
        match claim.operation:
            case "gemm" | "grouped_gemm":
                return gemm.recipe(claim, self._major)
            case "moe":
                return moe.recipe(claim)
            case "routing":
                return routing.recipe(claim)
        return quant.recipe(claim, self._device)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The library's call, bound to its inputs."""
        match case.operation:
            case "gemm" | "grouped_gemm":
                return gemm.prepare(case, inputs, options)
            case "moe":
                return moe.prepare(case, inputs, options)
            case "routing":
                return routing.prepare(case, inputs)
            case "quantize" | "requantize":
                return quant.prepare(case, inputs)
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call it."""
        return prepared(out)


def backends() -> Iterable[VLLM]:
    """``vllm``. Raises ImportError where vLLM is not at hand."""
    library()
    return [VLLM()]
