"""Functions with lists of their own, joined answers of several children, and the tables of routing and accumulators."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from conformance.gating import flashinfer_functions, ptx
from conformance.gating.expected import Expected
from conformance.gating.model import Gap, Gate, Observation, Observed
from conformance.gating.observed import joined
from conformance.gating.result import Result
from conformance.gating.rules import findings
from conformance.gating.section import section


def decorated(name: str, lists: dict[str, set[int]], common: set[int] | None = None) -> Any:
    """A function as FlashInfer's decorator leaves it."""
    backend_checks = dict(lists)

    def is_backend_supported(backend: str, cc: int | None = None) -> bool:
        return cc in backend_checks[backend]

    def is_compute_capability_supported(cc: int) -> bool:
        if common is None:
            raise ValueError("no list at all")
        return cc in common

    def function() -> None: ...

    function.__name__ = name
    function.is_backend_supported = is_backend_supported  # type: ignore[attr-defined]
    function.is_compute_capability_supported = is_compute_capability_supported  # type: ignore[attr-defined]
    return function


def test_every_backend_of_a_decorated_function_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    module, elsewhere = ModuleType("flashinfer.gemm.made_up"), ModuleType("flashinfer.mamba.made_up")
    module.mm = decorated("mm", {"b12x": {120, 121}, "cublas": {90, 120}})  # type: ignore[attr-defined]
    module.route = decorated("route", {}, {90})  # type: ignore[attr-defined]
    module.free = decorated("free", {})  # type: ignore[attr-defined]
    module.plain = len  # type: ignore[attr-defined]
    elsewhere.conv = decorated("conv", {}, {100})  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.startswith("flashinfer.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, elsewhere.__name__, elsewhere)
    found = {(name, backend): gate.answer for name, backend, (gate,) in flashinfer_functions.rows(120)}
    assert found == {
        ("mm", "b12x"): "yes",
        ("mm", "cublas"): "yes",
        ("route", "any backend"): "no",
        ("free", "any backend"): "unknown",
    }
    assert {gate.answer for name, _, (gate,) in flashinfer_functions.rows(80) if name == "mm"} == {"no"}


def row(subject: str, variant: str, sm: int, *gates: Gate, facts: tuple[str, ...] = ()) -> Observation:
    gates = gates or (Gate("config", "yes"),)
    return Observation(library="flashinfer", subject=subject, variant=variant, sm=sm, gates=gates, facts=facts)


def test_what_several_children_say_is_joined() -> None:
    first = Observed(library="triton", version="", gaps=(Gap(library="triton", reason="stopped"),))
    second = Observed(library="triton", version="3.9.0", observations=(row("b", "", 100), row("a", "", 90)))
    whole = joined([first, second])
    assert whole.version == "3.9.0"
    assert [item.sm for item in whole.observations] == [90, 100]
    assert whole.gaps == first.gaps


def test_routing_has_a_table_of_its_own() -> None:
    rows = [row("R", "AxB", 90), row("R", "AxB routing FromLogits", 90, Gate("routing", "no"))]
    rows += [row("R", "AxB routing Packed", sm) for sm in (90, 100)]
    part = Observed(library="flashinfer", version="1", observations=tuple(rows))
    tables = {table.title: table for table in section(Result((part,), Expected(), ())).tables}
    assert tables["flashinfer: routing"].rows == (
        ("R", "AxB", "SM90", "Packed", "FromLogits"),
        ("R", "AxB", "SM100", "Packed", ""),
    )
    assert [cells[1] for cells in tables["flashinfer 1"].rows] == ["AxB"]


def test_accumulators_stand_beside_what_is_declared() -> None:
    facts = ("wgmma e4m3", "div.rn", ptx.FOLLOWS + "hopper_fp8", ptx.DECLARED + "fp32_any")
    part = Observed(library="triton", version="3", observations=(row("k", "gemm x", 90, facts=facts),))
    found = findings(part, Expected())
    tables = {table.title: table for table in section(Result((part,), Expected(), tuple(found))).tables}
    assert tables["triton: accumulators"].rows == (("k", "gemm x", "SM90", "wgmma e4m3", "hopper_fp8", "fp32_any"),)
    assert tables["triton: compiled code"].rows == (("k", "SM90", "wgmma e4m3, div.rn"),)
    assert [item.rule for item in found] == ["accumulator"]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [("yes", "no", ["depends-on-the-device"]), ("no", "yes", ["depends-on-the-device"]), ("unknown", "no", [])],
)
def test_two_devices_of_an_architecture_must_be_answered_alike(first: Any, second: Any, found: list[str]) -> None:
    part = Observed(
        library="flashinfer",
        version="1",
        observations=(row("R", "AxB", 100, Gate("runner", first)),),
        twins=(row("R", "AxB", 100, Gate("runner", second, "too small")),),
    )
    assert [item.rule for item in findings(part, Expected())] == found
