"""Inputs that take long to draw are drawn before the clock of a call runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance import process, shared_inputs
from conformance.worker_backend import Callee
from fuzz.case import Case

CASE = "ue8m0 nearest v=1 from=scale n=64 values=wide seed=%d"


class Zeros:
    name = "zeros"

    def version(self) -> str:
        return "1"

    def claims(self, device: str) -> list[Any]:
        return []

    def recipe(self, claim: Any) -> Any:
        raise NotImplementedError

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Any:
        return inputs["x"]

    def run(self, prepared: Tensor, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"scales": torch.zeros(len(prepared), dtype=torch.uint8)}


@pytest.mark.parametrize("seed", [3, 4])
def test_a_call_takes_what_was_drawn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 3 is called on memory that has held its sister's inputs, which are drawn before as well."""
    callee, text = Callee("a test", {"zeros": Zeros()}, "cpu"), CASE % seed
    drawn: list[str] = []
    original = shared_inputs.inputs

    def inputs(case: Case, side: str) -> dict[str, Tensor]:
        assert side == "backend"
        drawn.append(case.text)
        return original(case, side)

    monkeypatch.setattr(shared_inputs, "inputs", inputs)
    callee.draw(text, {})
    before = list(drawn)
    assert before == [text] + [CASE % 4] * (seed == 3)
    reply, outputs = callee.call(text, "zeros", {})
    assert (reply["status"], len(outputs)) == ("ok", 1)
    assert drawn == before


def test_large_cases_are_drawn_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    worker = process.Worker(None)
    monkeypatch.setattr(worker, "_ensure", lambda: None)

    def exchange(request: Mapping[str, Any], tensors: Any, deadline: float) -> Any:
        asked.append(f"{request['do']} {deadline:g}")
        return SimpleNamespace(message={"value": {"status": "ok", "outputs": []}}, tensors=())

    monkeypatch.setattr(worker, "_exchange", exchange)
    text = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=1 m=%d scale=ceil stride=contiguous values=normal seed=0"
    for size in (2**26, 2**26 + 1):
        worker.call(text % size, "b", {}, 5.0)
    assert asked == ["call 5", f"draw {process.DRAW_DEADLINE:g}", "call 5"]


def test_memory_that_runs_out_behind_a_call_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    callee = Callee("a test", {"zeros": Zeros()}, "cpu")

    def full(*_: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(callee, "_changed", full)
    reply, outputs = callee.call(CASE % 0, "zeros", {})
    assert (reply["status"], outputs) == ("oom", ())
    assert reply["message"].startswith("after the call: OutOfMemoryError: CUDA out of memory")
