"""A library in a child process: FlashInfer's shape in small, that has moved, is old, crashes or errs."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from conformance.gating import flashinfer_gates, sglang_gates, triton_gates, vllm_gates
from conformance.gating.child import LibraryError, SlowError, limited
from conformance.gating.expected import Expected
from conformance.gating.observed import observe
from conformance.gating.rules import findings
from tests.conformance.gating_stand_ins import answers, ask, site

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and libraries for Linux")


API = """
import enum, functools, os, time
from dataclasses import dataclass
import torch

class QuantFormat(enum.Enum):
    A = 0
    B = 1

class RoutingMethodType(enum.Enum):
    Default = 0
    Renormalize = 1

class SwiGLU: pass

def record(*names):
    class Record:
        def __init__(self, **values):
            self.__dict__.update(dict.fromkeys(names), **values)
    return Record

class QuantConfig(record("weight", "activation", "output")):
    @property
    def pair(self):
        return self.weight, self.activation

RoutingConfig = ExpertConfig = ExecutionConfig = BackendOptions = MoEConfig = record()

@functools.cache
def arch():
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor

class Config:
    archs = (90,)
    @classmethod
    def supported(cls, sm):
        return sm in cls.archs

class Runner:
    archs = (90,)
    supported_activation_classes = (SwiGLU,)
    @classmethod
    def supports_quant(cls, quant):
        return quant.pair == (QuantFormat.A, QuantFormat.B) and quant.output is QuantFormat.A
    def __init__(self, config, device):
        assert device.type == "cuda"
    def check_support(self):
        if arch() not in self.archs:
            raise NotImplementedError(f"supports only SM90, got SM{arch()}.")
"""
LAYER = """
from flashinfer.fused_moe.api import *
def pair(name, archs=(90,), **methods):
    config = type(name + "Config", (Config,), {"archs": archs})
    return config, type(name + "Runner", (Runner,), methods)
def crash(self): os.abort()
def slow(self): time.sleep(60)
def odd(self): raise TypeError("unhashable")
def hungry(self): torch.empty(1, device="cuda")
def built(self, config, device): raise ValueError("no SM90 today")
def asks(self): torch.cuda.get_device_properties(0).clock_rate
_BACKEND_RUNNERS = dict([pair("Good"), REST])
"""


def stand_in(folder: Path, rest: str, version: str = "0.7.9", layer: str = LAYER) -> Path:
    files = {
        "flashinfer/__init__.py": "",
        "flashinfer/fused_moe/__init__.py": "",
        "flashinfer/fused_moe/api.py": API,
        "flashinfer/fused_moe/layer.py": layer.replace("REST", rest),
    }
    return site(folder, "flashinfer-python", version, files)


def test_gates_are_asked_on_the_faked_device_whatever_was_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ask(stand_in(tmp_path, "pair('Wide', (90, 100))"), monkeypatch)
    assert seen.version == "0.7.9"
    assert answers(seen) == {
        ("GoodConfig", 90): ("yes", "yes"),
        ("GoodConfig", 100): ("no", "no"),
        ("WideConfig", 90): ("yes", "yes"),
        ("WideConfig", 100): ("yes", "no"),
    }
    assert {row.variant for row in seen.observations} == {"AxB"}
    assert [(item.rule, item.subject, item.sms) for item in findings(seen, Expected())] == [
        ("config-against-runner", "WideConfig", (100,))
    ]


def test_a_runner_that_raises_is_a_row_and_the_others_still_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = ", ".join(
        f"pair({name!r}, {method}={name.lower()})"
        for name, method in {
            "Odd": "check_support",
            "Hungry": "check_support",
            "Asks": "check_support",
            "Built": "__init__",
            "Slow": "check_support",
        }.items()
    )
    seen = ask(stand_in(tmp_path, f"{rest}, pair('Last')"), monkeypatch, sms=(90,))
    assert {subject: gates[1] for (subject, _), gates in answers(seen).items()} == {
        "GoodConfig": "yes",
        "OddConfig": "error",  # MoELayer would not catch it
        "HungryConfig": "unknown",  # wants a device that is there
        "AsksConfig": "unknown",
        "BuiltConfig": "no",
        "SlowConfig": "unknown",
        "LastConfig": "yes",
    }
    assert seen.gaps == ()
    assert [item.rule for item in findings(seen, Expected()) if item.subject == "OddConfig"] == ["gate-raises"]


def test_a_crash_costs_one_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "pair('Crash', (90,), check_support=lambda self: os.abort() if arch() == 100 else None)"
    seen = ask(stand_in(tmp_path, crash), monkeypatch, sms=(90, 100, 103))
    assert [(gap.sm, gap.reason) for gap in seen.gaps] == [(100, "the process was killed by SIGABRT")]
    assert {row.sm for row in seen.observations if row.subject == "CrashConfig"} == {90, 103}


@pytest.mark.parametrize(
    ("version", "layer", "reason"),
    [
        ("0.6.12", LAYER, "flashinfer 0.6.12 is too old"),
        (
            "0.9.0",
            LAYER.replace("_BACKEND_RUNNERS", "_RUNNERS"),
            "has no fused-MoE registry where it was (AttributeError",
        ),
        ("0.9.1", "import nothing_like_it", "has no fused-MoE registry where it was (ModuleNotFoundError"),
    ],
)
def test_a_library_that_is_old_or_has_moved_is_a_gap(
    version: str, layer: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ask(stand_in(tmp_path, "pair('Last')", version, layer), monkeypatch)
    assert seen.observations == ()
    (gap,) = seen.gaps
    assert gap.sm is None
    assert reason in gap.reason


@pytest.mark.parametrize("module", [flashinfer_gates, sglang_gates, triton_gates, vllm_gates])
def test_a_library_that_is_not_there_says_so(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(LibraryError, match="is not installed"):
        module.load()  # type: ignore[attr-defined]


def test_an_interpreter_that_cannot_serve_is_a_gap() -> None:
    seen = observe("flashinfer", (90,), python="/bin/false")
    assert [gap.reason for gap in seen.gaps] == ["the child ended with 1: "]


def test_a_library_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = "import time; time.sleep(600)"
    monkeypatch.setenv("PYTHONPATH", str(stand_in(tmp_path, "", layer=layer)))
    seen = observe("flashinfer", (90,), limit=3)
    assert [gap.reason for gap in seen.gaps] == ["stopped after 3 s"]


def test_a_limit_ends_what_catches_every_exception() -> None:
    def stubborn() -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    with pytest.raises(SlowError), limited(0.05):
        stubborn()
