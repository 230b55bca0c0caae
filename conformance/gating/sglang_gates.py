"""SGLang's decision to convert block-FP8 weights to UE8M0 scales at load time, and its choice of a dense kernel.

SGLang imports a server's worth of libraries, so the places that decide are run alone: the module that computes the
DeepGEMM flags, whole, with stand-ins for its imports from SGLang; and the functions, cut out of their files
(``sglang_dispatch.py`` for the dense kernel). DeepGEMM itself is a stand-in with the names that the flags look for; or
absent (``DeepGEMM off``); or switched off by SGLANG_ENABLE_JIT_DEEPGEMM (``flag off``).
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from conformance.gating import sglang_dispatch
from conformance.gating.child import LibraryError, Probe, Row
from conformance.gating.model import Gate

FLAGS = "sglang/srt/layers/deep_gemm_wrapper/configurer.py"
DECISION = "sglang/srt/model_loader/utils.py"
FUNCTION = "should_deepgemm_weight_requant_ue8m0"
DEEP_GEMM_NAMES = ("fp8_einsum", "m_grouped_fp8_fp4_gemm_nt_contiguous", "transform_sf_into_required_layout")
BLOCK, SHAPE = [128, 128], (7168, 2048)
SITUATIONS = (("", True, True), (" (DeepGEMM off)", False, True), (" (flag off)", True, False))
"""What ends the variant's name; whether DeepGEMM can be imported; SGLANG_ENABLE_JIT_DEEPGEMM."""


def load() -> tuple[str, list[str], Probe]:
    """Find the two files. Raises LibraryError where SGLang is missing or has moved them."""
    try:
        distribution = importlib.metadata.distribution("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError("sglang is not installed") from None
    about = f"sglang {distribution.version}"
    flags, decision = (Path(str(distribution.locate_file(name))) for name in (FLAGS, DECISION))
    dispatch = Path(str(distribution.locate_file(sglang_dispatch.FILE)))
    for path, name in ((flags, FLAGS), (decision, DECISION), (dispatch, sglang_dispatch.FILE)):
        if not path.is_file():
            raise LibraryError(f"{about} has no {name}")
    function = next(
        (node for node in ast.parse(decision.read_text()).body if getattr(node, "name", "") == FUNCTION), None
    )
    if function is None:
        raise LibraryError(f"{about}: {DECISION} has no {FUNCTION}")
    code = compile(ast.Module([function], []), str(decision), "exec")
    try:
        dispatching, used = sglang_dispatch.cut_out(dispatch)
    except (ValueError, SyntaxError) as error:
        raise LibraryError(f"{about}: {error}") from None

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        wanted = request["subjects"]
        if not wanted or any(word in FUNCTION for word in wanted):
            for ending, importable, enabled in SITUATIONS:
                for kind, grouped in (("dense", False), ("grouped", True)):
                    gate = _ask(flags, code, sm, importable, enabled, grouped)
                    yield FUNCTION, kind + ending, (gate,), ()
        if not wanted or any(word in sglang_dispatch.DISPATCH for word in wanted):
            situations = {
                ending: _run_flags(flags, sm, importable, enabled) for ending, importable, enabled in SITUATIONS
            }
            for variant, gate in sglang_dispatch.rows(dispatching, used, platform(sm), situations):
                yield sglang_dispatch.DISPATCH, variant, (gate,), ()

    notes = [f"{FLAGS}, {FUNCTION} and {sglang_dispatch.DISPATCH} run alone, on a stand-in for DeepGEMM"]
    return distribution.version, notes, probe


def platform(sm: int) -> SimpleNamespace:
    """What SGLang's ``get_platform`` says of an architecture: families by major number (``srt/utils/common.py``)."""
    major = sm // 10
    families = {"is_sm90": (9,), "is_sm100": (10,), "is_sm110": (11,), "is_sm120": (12,), "is_blackwell": (10, 11, 12)}
    return SimpleNamespace(**{name: major in majors for name, majors in families.items()})


def _ask(flags: Path, code: Any, sm: int, importable: bool, enabled: bool, grouped: bool) -> Gate:
    try:
        space = _run_flags(flags, sm, importable, enabled)
        names = {"deep_gemm_wrapper": SimpleNamespace(**space), "get_device_sm": lambda: sm, "torch": _torch()}
        exec(code, names)
        answer = names[FUNCTION](BLOCK, names["torch"].bfloat16, SHAPE, grouped_moe=grouped)
    except Exception as error:
        return Gate("requantise", "error", f"{type(error).__name__}: {error}")
    shown = ", ".join(
        f"{name}={space[name]}" for name in ("ENABLE_JIT_DEEPGEMM", "DEEPGEMM_SCALE_UE8M0") if name in space
    )
    return Gate("requantise", "yes" if answer else "no", shown)


def _run_flags(path: Path, sm: int, importable: bool, enabled: bool) -> dict[str, Any]:
    """Execute the flags' module on a device of this architecture; its names."""
    stand_ins: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.environ": {"envs": _Environment(enabled)},
        "sglang.srt.runtime_context": {"get_platform": lambda: platform(sm)},
        "sglang.srt.utils": {"get_device_sm": lambda: sm, "is_cuda": lambda: True, "is_musa": lambda: False},
    }
    modules: dict[str, Any] = {name: _module(name, names) for name, names in stand_ins.items()}
    modules["deep_gemm"] = _module("deep_gemm", dict.fromkeys(DEEP_GEMM_NAMES, _nothing)) if importable else None
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        space: dict[str, Any] = {"__name__": "configurer"}
        exec(compile(path.read_text(), str(path), "exec"), space)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return {name: value for name, value in space.items() if name.isupper()}


class _Environment:
    """``envs``: every variable is set to the same truth."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(get=lambda: self._value)


def _module(name: str, names: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []
    return module


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _torch() -> Any:
    """The function compares dtypes with ``torch.bfloat16`` and uses nothing else of torch."""
    return SimpleNamespace(bfloat16="bfloat16")
