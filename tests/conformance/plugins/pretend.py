"""A plugin for pytest that puts made-up backends, without processes, in the place of all others.

They claim ``ue8m0 ceil`` and ``ue8m0 floor``; what they get wrong is in their names. The judge wants a case's own id.
"""

from __future__ import annotations

import _thread
import threading

import pytest

from conformance import plugin_bench, plugin_controller
from conformance.discover import UsageError
from conformance.launch import BackendSource
from conformance.messages import CallReply, Claimed, Description, JudgeReply, Wire
from conformance.targets import Found, Survey
from fuzz.case import Case
from references.backend import Claim


def reply(case, data=None):
    wire = Wire(name="scales", dtype="uint8", shape=(4,), data=data or case.id.encode()[:4])
    return CallReply(status="ok", input_sha256=case.id, outputs=(wire,))


class Pretender:
    """One process of a backend; started and closed for the tests to look at."""

    log = []  # noqa: RUF012

    def __init__(self, name):
        self.name, self.ended = name, threading.Event()
        self.log.append(f"start {name}")

    def call(self, case, backend, options, deadline):
        case = Case.parse(case)
        match self.name:
            case "odd" if case.variant == "floor" and case.seed % 2:
                return reply(case, b"!!!!")
            case "deadly" if case.seed % 2:
                return CallReply(status="crash", message="SIGSEGV")
            case "confused":
                return CallReply(status="ok", input_sha256="0", outputs=reply(case).outputs)
            case "interrupts" if case.seed == 1:
                _thread.interrupt_main()
                assert self.ended.wait(20)
                return CallReply(status="crash", message="closed")
        return reply(case)

    def judge(self, case, recipe, outputs, deadline):
        good = outputs[0].data == Case.parse(case).id.encode()[:4]
        part = {"part": "scales", "verdict": "pass" if good else "wrong", "message": "" if good else "off by one"}
        return JudgeReply(input_sha256=Case.parse(case).id, parts=[part])

    def close(self):
        self.log.append(f"close {self.name}")
        self.ended.set()


NAMES = ("confused", "deadly", "half", "interrupts", "narrow", "odd", "right")


def description(name):
    variants = ("ceil",) if name == "narrow" else ("ceil", "floor")
    claims = [Claim(operation="ue8m0", variant=variant, source="here") for variant in variants]
    return Description(
        backend=name,
        version="1.5",
        interpreter="none",
        device="cpu",
        device_name="",
        sm="",
        pace=0.5 if name == "half" else 1.0,
        claims=[Claimed(claim=c.to_json(), recipe={}, recipe_text="default", claim_text=c.text()) for c in claims],
    )


class PretendFleet:
    made = 0

    def __init__(self, plugins, log_dir, memory_limit):
        type(self).made += 1

    def worker(self, source, device="cpu"):
        return Pretender(source.name)

    def oracle(self):
        return Pretender("oracle")

    def survey(self, backends, devices, jobs):
        if unknown := set(backends) - set(NAMES):
            raise UsageError(f"unknown backend {min(unknown)!r}")
        found = []
        for name in sorted(backends):
            source = BackendSource(kind="builtin", location="x", name=name)
            start = lambda source=source: self.worker(source)  # noqa: E731
            found.append(Found(description=description(name), source=source, start=start))
        return Survey(found=found, absent=[], devices=["cpu"])

    def close(self):
        pass


_PATCH = pytest.MonkeyPatch()


def pytest_configure():
    Pretender.log.clear()
    PretendFleet.made = 0
    for module in (plugin_bench, plugin_controller):
        _PATCH.setattr(module, "Fleet", PretendFleet)


def pytest_unconfigure():
    _PATCH.undo()
