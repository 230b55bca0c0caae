"""A backend may keep what it learns of its device when asked for its claims: every process asks before it calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.worker_backend import Callee

CASE = "ue8m0 nearest v=1 from=scale n=4 values=wide seed=4"


class Recording:
    name = "recording"

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.error = error

    def version(self) -> str:
        return "1"

    def claims(self, device: str) -> list[Any]:
        self.asked.append(f"claims {device}")
        if self.error is not None:
            raise self.error
        return []

    def recipe(self, claim: Any) -> Any:
        raise NotImplementedError

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Any:
        self.asked.append("prepare")
        return inputs["x"]

    def run(self, prepared: Tensor, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"scales": torch.zeros(len(prepared), dtype=torch.uint8)}


def test_a_process_that_only_calls_asks_for_claims_once_and_first() -> None:
    backend = Recording()
    callee = Callee("a test", {"recording": backend}, "cpu")
    for _ in range(2):
        assert callee.call(CASE, "recording", {})[0]["status"] == "ok"
    assert backend.asked == ["claims cpu", "prepare", "prepare"]


def test_claims_that_raise_are_the_surveys_to_tell() -> None:
    backend = Recording(ValueError("odd"))
    assert Callee("a test", {"recording": backend}, "cpu").call(CASE, "recording", {})[0]["status"] == "ok"
    assert backend.asked[:2] == ["claims cpu", "prepare"]


def test_jax_computes_where_its_inputs_are() -> None:
    """In a process of its own: JAX and its threads stay out of this one."""
    pytest.importorskip("jax", reason="JAX is not installed")
    code = (
        "import torch; from types import SimpleNamespace as S; from conformance.backends.jax_casts import platform; "
        "gpu = S(device=torch.device('cuda:0')); cpu = torch.zeros(1); "
        "print(platform({'a': cpu}), platform({'a': gpu, 'b': gpu}))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["cpu", "gpu"]
