"""Which kernel SGLang takes for a dense linear layer in block-FP8, by itself and where the user names one.

The functions that decide are cut out of their file and run alone. What they choose among are functions of the same
file: each is stood in for by its name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.gating.model import Gate

FILE = "sglang/srt/layers/quantization/fp8_utils.py"
DISPATCH = "dispatch_w8a8_block_fp8_linear"
FUNCTIONS = (
    DISPATCH,
    "_dispatch_explicit_backend",
    "_dispatch_auto_backend",
    "initialize_fp8_gemm_config",
    "get_fp8_gemm_runner_backend",
)
BACKENDS = "Fp8GemmRunnerBackend"
AUTO = "auto"
KERNELS = ("deepgemm", "flashinfer_gemm", "cutlass", "triton")
"""What ``auto`` may come to on CUDA, as the functions' names begin."""
OTHER_DEVICES = ("aiter",)


def cut_out(path: Path) -> tuple[Any, frozenset[str]]:
    """The functions' code, and the names that they use and do not have. Raises ValueError where one is missing."""
    found = {getattr(node, "name", ""): node for node in ast.parse(path.read_text(encoding="utf-8")).body}
    if missing := [name for name in (*FUNCTIONS, BACKENDS) if name not in found]:
        raise ValueError(f"{FILE} has no {missing[0]}")
    body: Any = [found[name] for name in (BACKENDS, *FUNCTIONS)]
    for node in body[1:]:  # annotations name more of the file
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    used = {node.id for item in body for node in ast.walk(item) if isinstance(node, ast.Name)}
    return compile(ast.Module(body, []), str(path), "exec"), frozenset(used - set(FUNCTIONS) - {BACKENDS})


def rows(
    code: Any, used: frozenset[str], platform: SimpleNamespace, situations: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Gate]]:
    """Variant and gate: what ``auto`` takes in each situation, then every backend that can be named.

    situations: what ends a variant's name -> the flags of DeepGEMM.
    """
    for ending, flags in situations.items():
        taken = _taken(code, used, platform, flags, AUTO)
        for kernel in KERNELS:
            gate = taken if isinstance(taken, Gate) else Gate("dispatch", "yes" if taken == kernel else "no")
            yield f"{AUTO} {kernel}{ending}", gate
    names = _space(code, used, platform, next(iter(situations.values())), AUTO)
    for backend in (item.value for item in names[BACKENDS]):
        if backend not in (AUTO, *OTHER_DEVICES):
            taken = _taken(code, used, platform, next(iter(situations.values())), backend)
            yield backend, taken if isinstance(taken, Gate) else Gate("dispatch", "yes")


def _taken(code: Any, used: frozenset[str], platform: SimpleNamespace, flags: dict[str, Any], backend: str) -> Any:
    """The beginning of the name of the function that is taken, or the gate that refuses."""
    try:
        names = _space(code, used, platform, flags, backend)
        names["initialize_fp8_gemm_config"]()
        found = names[DISPATCH](weight_block_size=[128, 128])
        chosen: Callable[..., Any] = found.func if isinstance(found, partial) else found
        return chosen.__name__.split("_w8a8_")[0]
    except (RuntimeError, ValueError) as error:
        return Gate("dispatch", "no", " ".join(str(error).split()))
    except Exception as error:
        return Gate("dispatch", "error", f"{type(error).__name__}: {error}")


def _space(
    code: Any, used: frozenset[str], platform: SimpleNamespace, flags: dict[str, Any], backend: str
) -> dict[str, Any]:
    from enum import Enum

    chosen = SimpleNamespace(kernel=SimpleNamespace(fp8_gemm_runner_backend=backend))
    names: dict[str, Any] = {name: _named(name) for name in used if "_w8a8_" in name}
    names |= {
        "Enum": Enum,
        "partial": partial,
        "get_platform": lambda: platform,
        "get_exec": lambda: chosen,
        "deep_gemm_wrapper": SimpleNamespace(**flags),
        "is_flashinfer_available": lambda: True,
        "is_npu_arch35": lambda: False,
        "print_warning_once": lambda *_: None,
        "_use_aiter": False,
        "_is_xpu": False,
        "FP8_GEMM_RUNNER_BACKEND": None,
    }
    exec(code, names)
    return names


def _named(name: str) -> Any:
    def stand_in() -> None: ...

    stand_in.__name__ = name
    return stand_in
