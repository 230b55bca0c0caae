"""Backends and oracles without processes, for the tests of runs and of the command line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from conformance import repro, runs
from conformance.discover import UsageError
from conformance.launch import BackendSource
from conformance.messages import CallReply, Claimed, Description, JudgeReply, Wire
from conformance.targets import Absent, Found, Survey
from fuzz.case import Case
from references.backend import Claim

Behaviour = Callable[[Case], CallReply]


def right(case: Case) -> CallReply:
    data = case.id.encode()[:4]
    wire = Wire(name="scales", dtype="uint8", shape=(4,), data=data)
    return CallReply(status="ok", input_sha256=case.id, outputs=(wire,), seconds=0.25)


def wrong(case: Case) -> CallReply:
    return CallReply(
        status="ok", input_sha256=case.id, outputs=(Wire(name="scales", dtype="uint8", shape=(1,), data=b"!"),)
    )


def flaky_seed(case: Case) -> CallReply:
    return wrong(case) if case.seed % 2 else right(case)


class FakeWorker:
    closed = threading.Event()

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    def call(self, case: str, backend: str, options: Mapping[str, str], deadline: float) -> CallReply:
        assert options["poison"] in ("nan", "finite")
        return self.behaviour(Case.parse(case))

    def judge(self, case: str, recipe: Mapping[str, Any], outputs: Sequence[Wire], deadline: float) -> JudgeReply:
        good = bool(outputs) and outputs[0].data == Case.parse(case).id.encode()[:4]
        examples = [{"index": [2], "actual": "0x21", "admissible": "0x7f", "input": "1.5 (0x3fc00000)"}]
        part = {
            "part": "scales",
            "verdict": "pass" if good else "wrong",
            "message": "" if good else "off by one",
            "headroom": 0.5 if good else float("inf"),
            "examples": [] if good else examples,
        }
        return JudgeReply(input_sha256=Case.parse(case).id, parts=[part])

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


class FakeFleet:
    """Offers `offers`: name -> (behaviour, claims); has no GPU; lacks one library."""

    offers: Mapping[str, tuple[Behaviour, Sequence[Claim]]] = {}
    version = "1.5"

    def __init__(
        self, plugins: Sequence[str], log_dir: object, memory_limit: int | None, *, judge_device: str = "cpu"
    ) -> None:
        self.plugins = plugins

    def oracle(self) -> Any:
        return FakeWorker(right)

    def survey(self, backends: Sequence[str], devices: Sequence[str], jobs: int) -> Survey:
        for device in devices:
            if device != "cpu":
                raise UsageError(f"unknown device {device!r}; known: cpu")
        for name in backends:
            if name not in self.offers:
                raise UsageError(f"unknown backend {name!r}; known: {', '.join(sorted(self.offers))}")
        found = [self._found(name, *offer) for name, offer in self.offers.items() if not backends or name in backends]
        absent = [Absent(backend="gpulib", device="cpu", reason="ModuleNotFoundError: No module named 'gpulib'")]
        return Survey(found=found, absent=[] if backends else absent, devices=["cpu"])

    def _found(self, name: str, behaviour: Behaviour, claims: Sequence[Claim]) -> Found:
        description = Description(
            backend=name,
            version=self.version,
            interpreter="CPython 3.11.7, torch 2.13.0",
            device="cpu",
            device_name="",
            sm="",
            pace=1.0,
            claims=[
                Claimed(claim=c.to_json(), recipe={"source": "file.py"}, recipe_text="default", claim_text=c.text())
                for c in claims
            ],
            libraries={"torch": "2.13.0"},
        )
        source = BackendSource(kind="builtin", location="x", name=name)
        return Found(description=description, source=source, start=lambda: FakeWorker(behaviour))  # type: ignore[arg-type, return-value]

    def close(self) -> None:
        pass


CLAIMS = [Claim(operation="ue8m0", variant=variant, source="file.py") for variant in ("ceil", "floor")]


class Fakes:
    """Behaviours of a backend, and `offer`, which lets runs and repro see backends that behave so."""

    closed = FakeWorker.closed
    right, wrong, flaky_seed = staticmethod(right), staticmethod(wrong), staticmethod(flaky_seed)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def offer(self, *, version: str = "1.5", **behaviours: Behaviour) -> None:
        """Each backend claims ue8m0 ceil and floor."""
        FakeWorker.closed.clear()
        self._monkeypatch.setattr(FakeFleet, "version", version)
        self._monkeypatch.setattr(FakeFleet, "offers", {name: (item, CLAIMS) for name, item in behaviours.items()})
        for module in (runs, repro):
            self._monkeypatch.setattr(module, "Fleet", FakeFleet)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)
