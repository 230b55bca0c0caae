"""torch's scaled matrix products: what its own platform conditions say of each architecture and scaling recipe.

The gates that decide are in compiled code (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) and read the real device. What
can be asked without one are the conditions by which torch chooses and tests its kernels:
``torch.testing._internal.common_cuda`` (private, lazily evaluated). What the compiled gates do on a real device is
seen by the calls of ``torch_calls.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import unittest
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from conformance.gating import fake_device
from conformance.gating.child import LibraryError, Probe, Row
from conformance.gating.model import ARCHITECTURES, Gate

CONDITIONS = "torch.testing._internal.common_cuda"
RECIPES: Mapping[tuple[str, str], str] = {
    ("scaled_mm", "TensorWise"): "fp8",
    ("scaled_mm", "RowWise"): "fp8",
    ("scaled_mm", "BlockWise1x128"): "",
    ("scaled_mm", "BlockWise1x128 x BlockWise128x128"): "",
    ("scaled_mm", "BlockWise1x32"): "mx_gemm",
    ("scaled_mm", "BlockWise1x16"): "mx_gemm",
    ("scaled_grouped_mm", "RowWise"): "fp8_grouped_gemm",
    ("scaled_grouped_mm", "BlockWise1x32"): "mxfp8_grouped_gemm",
}
"""(Function of torch.nn.functional, its scaling recipe) and the condition ``evaluate_platform_supports_...``; empty
where only the compiled gate decides."""
HELPER = "expecttest"
"""A test library that the module of the conditions imports, and that they do not use."""
MSLK = "USE_MSLK"
"""A build option that the grouped MX product depends on."""


def load() -> tuple[str, list[str], Probe]:
    """Import torch's conditions under a faked device. Raises LibraryError where they have moved."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        raise LibraryError(f"torch cannot be asked: {type(error).__name__}: {error}") from error
    version = str(torch.__version__)
    fake_device.install(ARCHITECTURES[0])
    try:
        if importlib.util.find_spec(HELPER) is None:
            sys.modules[HELPER] = _helper()
        conditions = importlib.import_module(CONDITIONS)
        # The grouped MX product depends on a build option too; here the architecture is the question.
        torch.__config__.show = lambda: MSLK
        for name in filter(None, RECIPES.values()):
            getattr(conditions, f"evaluate_platform_supports_{name}")
    except Exception as error:
        raise LibraryError(
            f"torch {version} has no platform conditions where they were ({type(error).__name__}: {error})"
        ) from error

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        fake_device.choose(sm)
        for (function, recipe), name in RECIPES.items():
            if not request["subjects"] or any(word in function for word in request["subjects"]):
                yield function, recipe, (_ask(conditions, name),), ()

    return (
        version,
        [f"{CONDITIONS} on a faked device, as of a build with MSLK; the compiled gates answer on a real one only"],
        probe,
    )


def _ask(conditions: Any, name: str) -> Gate:
    if not name:
        return Gate("platform", "unknown", "requires the NVIDIA driver: only the compiled gate decides")
    try:
        answer = bool(getattr(conditions, f"evaluate_platform_supports_{name}")())
    except Exception as error:
        return Gate("platform", "error", f"{type(error).__name__}: {error}")
    return Gate("platform", "yes" if answer else "no", f"evaluate_platform_supports_{name}")


def _helper() -> ModuleType:
    module = ModuleType(HELPER)
    module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    return module
