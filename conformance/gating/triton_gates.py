"""Triton kernels compiled for each architecture, down to a cubin, without a GPU: this project's, SGLang's and vLLM's.

Which kernels, and with which constants, is what the backends' libraries launch for a case of each claim on the faked
device (``launches.py``). What a compiled kernel is made of is read from its PTX (``ptx.py``). A kernel that does not
compile is refused, with the compiler's own line. Claims are those of any architecture: what is compiled here need not
be claimed here; where it is, the accumulator that the recipe declares stands beside the one that follows.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from conformance.gating import fake_device, ptx
from conformance.gating.child import LibraryError, Probe, Row, SlowError, limited
from conformance.gating.model import ARCHITECTURES, SHAPE, Gate

COMPILE_S = 30.0
ASSEMBLERS = "TRITON_PTXAS"
"""Variables that libraries set while they are imported: assemblers that know fewer architectures than Triton's own."""
SOURCES: Mapping[str, str] = {"triton_cuda": "triton.", "sglang_triton": "sglang.", "vllm_triton": "vllm."}
"""Modules of `conformance.backends` whose backends launch Triton kernels; what stands before their kernels' names."""
CLAIMING = (90, 100)
"""Architectures on which one backend or another claims all that it can do anywhere."""
JIT = "sglang_jit"
"""A backend of these modules whose kernels are CUDA."""
TOLD_APART = ("block", "scale")
"""Parameters of a claim that are part of a variant's name where the claim has one value for them."""
WITH_ACCUMULATOR = ("gemm", "grouped_gemm", "moe")
_SAYS = tuple(re.compile(words, re.IGNORECASE) for words in (r"fatal|unsupported|not (supported|defined)", "error"))
"""What the telling line of a compiler's message has, best first."""
_NO_TOOL = re.compile(r"ptxas.*(not found|No such file)|cannot find ptxas", re.IGNORECASE)

_GIVEN = frozenset(name for name in os.environ if name.startswith(ASSEMBLERS))

Compiled = tuple[Gate, tuple[str, ...]]


def load() -> tuple[str, list[str], Probe]:
    """Import Triton. Raises LibraryError where it is missing or cannot compile for a named target."""
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError("triton is not installed") from None
    try:
        importlib.import_module("triton")
        importlib.import_module("triton.backends.compiler").GPUTarget  # noqa: B018
        importlib.import_module("triton.compiler").ASTSource  # noqa: B018
        fake_device.install(ARCHITECTURES[0])
        _without_msgspec()
        launches: Any = importlib.import_module("conformance.gating.launches")
        planning: Any = importlib.import_module("conformance.planning")
        for operation, variant in planning.groups((), ()):  # once, for every fork
            launches.cornerstones(operation, variant)
        importlib.import_module("torch._dynamo")
    except Exception as error:
        raise LibraryError(f"triton {version} cannot be asked: {type(error).__name__}: {error}") from error

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        done: dict[str, Compiled] = {}
        wanted = tuple(request["subjects"])
        for source, prefix in SOURCES.items():
            if not wanted or any(word.startswith(prefix) or not _prefixed(word) for word in wanted):
                yield from _source(source, prefix, sm, wanted, done)

    return version, ["what backends of this project launch, compiled by triton.compile"], probe


def _prefixed(word: str) -> bool:
    return word.startswith(tuple(SOURCES.values()))


def _without_msgspec() -> None:
    """SGLang's JIT kernels need it, its Triton kernels do not."""
    if importlib.util.find_spec("msgspec") is None:
        module = ModuleType("msgspec")
        module.__spec__ = importlib.machinery.ModuleSpec("msgspec", None)
        module.Struct = type("Struct", (), {"__init_subclass__": classmethod(lambda cls, **_: None)})  # type: ignore[attr-defined]
        sys.modules["msgspec"] = module


def _without_jit(module: Any) -> None:
    """SGLang's expert layers are asked for although nothing compiles CUDA here: its JIT sorts experts beforehand."""
    module.can_compile = lambda: True
    modules: Any = importlib.import_module("conformance.backends._sglang_modules")
    modules._align = lambda *_: None


def _source(source: str, prefix: str, sm: int, wanted: Sequence[str], done: dict[str, Compiled]) -> Iterator[Row]:
    """The kernels of one module's backends; a library that is not at hand is a row under its name."""
    from conformance.gating.launches import launches

    fake_device.choose(sm)
    try:
        module = importlib.import_module(f"conformance.backends.{source}")
        if prefix == "sglang.":
            _without_jit(module)
        backends = [backend for backend in module.backends() if backend.name != JIT]
    except Exception as error:
        if not wanted:
            yield prefix.rstrip("."), "", (Gate("import", "unknown", _reason(error)),), ()
        return
    for backend in backends:
        claims = {}
        for other in (*CLAIMING, sm):  # the last one leaves the backend on this architecture
            fake_device.choose(other)
            for claim in backend.claims("cuda:0"):
                claims[repr(claim)] = claim
        here = {repr(claim): backend.recipe(claim) for claim in backend.claims("cuda:0")}
        rows: dict[tuple[str, str], tuple[list[Gate], dict[str, None]]] = {}
        for name, claim in claims.items():
            for launch in launches(backend, claim):
                subject = prefix + launch.name
                if wanted and not any(word in subject for word in wanted):
                    continue
                if launch.kind not in done:
                    done[launch.kind] = _compile(launch, sm)
                gate, facts = done[launch.kind]
                declared = [here[name].accumulator] if name in here and claim.operation in WITH_ACCUMULATOR else []
                gates, found = rows.setdefault((subject, _variant(claim)), ([], {}))
                gates.append(gate)
                found |= dict.fromkeys(_with_accumulators(facts, sm, declared))
        for (subject, variant), (gates, found) in rows.items():
            yield subject, variant, tuple(_joined(gates)), tuple(sorted(found, key=_place))


def _variant(claim: Any) -> str:
    if claim.operation == "routing":
        return "routing"
    words = [claim.where[key][0] for key in TOLD_APART if len(claim.where.get(key, ())) == 1]
    return " ".join([claim.operation, claim.variant, *words])


def _joined(gates: Sequence[Gate]) -> Iterator[Gate]:
    """The worst of the launches, and whether others of the same kernel and variant do compile."""
    worst = min(gates, key=lambda gate: ("no", "unknown", "yes").index(gate.answer))
    yield worst
    if worst.answer == "no" and any(gate.answer == "yes" for gate in gates):
        yield Gate(SHAPE, "no", worst.detail)


def _place(fact: str) -> int:
    """Instructions first, accumulators last, each in its order."""
    if fact.startswith((ptx.FOLLOWS, ptx.DECLARED)):
        return 2
    return 1 if fact in ptx.FACTS else 0


def _with_accumulators(facts: Iterable[str], sm: int, declared: Sequence[str]) -> tuple[str, ...]:
    facts = tuple(facts)
    units = [fact for fact in facts if fact.split(" ")[0] in ptx.UNITS]
    follows = [ptx.FOLLOWS + ptx.accumulator(unit, sm, upcast=ptx.UPCAST in facts) for unit in units]
    return (*facts, *follows, *(ptx.DECLARED + name for name in declared if units))


def _compile(launch: Any, sm: int) -> Compiled:
    triton: Any = importlib.import_module("triton")
    for name in [name for name in os.environ if name.startswith(ASSEMBLERS) and name not in _GIVEN]:
        del os.environ[name]
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", sm, 32)
    source = importlib.import_module("triton.compiler").ASTSource(
        launch.kernel, dict(launch.signature), constexprs=dict(launch.constants), attrs=dict(launch.attributes)
    )
    try:
        with limited(COMPILE_S):
            built = triton.compile(source, target=target, options=dict(launch.options))
    except SlowError as slow:
        return Gate("compile", "unknown", str(slow)), ()
    except Exception as error:
        reason = _reason(error)
        return Gate("compile", "unknown" if _NO_TOOL.search(reason) else "no", reason), ()
    return Gate("compile", "yes" if built.asm.get("cubin") else "no"), ptx.facts(built.asm["ptx"])


def _reason(error: BaseException) -> str:
    """The compiler's own line: of the deepest cause, without the source that it points at."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if re.search("[a-z]{3}", line)]
    said = [line for says in _SAYS for line in lines if says.search(line)] or lines[-1:]
    return f"{type(error).__name__}: {said[0] if said else ''}"[:300]
