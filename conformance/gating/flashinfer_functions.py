"""FlashInfer's functions that declare what they run on: ``backend_requirement`` and ``supported_compute_capability``.

A decorated function refuses a call whose device no check of the chosen backend lists. The lists are asked for as a
caller would, by ``is_backend_supported`` and ``is_compute_capability_supported``; which backends there are is read from
the decorator's closure, because nothing offers their names.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from conformance.gating.model import Gate

PACKAGES = ("deep_gemm", "fused_moe", "gemm", "grouped_mm", "prims_ts.gemm", "quantization")
"""Below ``flashinfer``: products, quantisation, routing and expert layers."""
ONE = "any backend"
"""The variant of a function without a choice of backends."""


def load() -> None:
    """Import the packages, once for every fork; one that cannot be imported has no functions."""
    for name in PACKAGES:
        with contextlib.suppress(Exception):
            importlib.import_module(f"flashinfer.{name}")


def rows(sm: int) -> Iterator[tuple[str, str, tuple[Gate, ...]]]:
    """Function, backend and gate, for every decorated function that is loaded."""
    for name, function in sorted(_decorated().items()):
        for backend in _backends(function) or [""]:
            yield name, backend or ONE, (_ask(function, backend, sm),)


def _decorated() -> dict[str, Any]:
    prefixes = tuple(f"flashinfer.{name}" for name in PACKAGES)
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefixes) or module is None:
            continue
        for value in list(vars(module).values()):
            if inspect.isfunction(value) and hasattr(value, "is_backend_supported"):
                found[value.__name__] = value
    return found


def _backends(function: Any) -> list[str]:
    checks = inspect.getclosurevars(function.is_backend_supported).nonlocals.get("backend_checks")
    return list(checks) if isinstance(checks, dict) else []


def _ask(function: Any, backend: str, sm: int) -> Gate:
    ask: Callable[[], Any] = (
        (lambda: function.is_backend_supported(backend, sm))
        if backend
        else (lambda: function.is_compute_capability_supported(sm))
    )
    try:
        return Gate("requirement", "yes" if ask() else "no")
    except ValueError as error:  # no list at all: nothing is refused by it
        return Gate("requirement", "unknown", " ".join(str(error).split()))
    except Exception as error:
        return Gate("requirement", "error", f"{type(error).__name__}: {error}")
