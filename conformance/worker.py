"""The loop that a worker runs: read a request, do it, answer; it ends when the parent closes the channel.

Requests are ``{"id", "do", ...}`` with ``do`` one of `REQUESTS`; answers are ``{"id", "value"}`` or ``{"id",
"error"}`` with one line. It runs in the interpreter of the backend, so it needs torch, numpy and our packages only.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from conformance.frames import EndOfStreamError, Frame, FrameError, read_frame, write_frame
from conformance.messages import Wire
from conformance.worker_backend import Callee
from conformance.worker_errors import ReportedError, one_line
from conformance.worker_inputs import plain_names
from conformance.worker_memory import release
from conformance.worker_oracle import Oracle
from conformance.worker_source import describe, load

Answer = tuple[Any, Sequence[Wire]]


class Server:
    """What a worker keeps between requests.

    config: as ``conformance.launch.spawn`` wrote it: source (None for the oracle), device, threads, descriptor.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._source: Mapping[str, Any] | None = config["source"]
        self._device: str = config["device"]
        self._callee: Callee | None = None
        self._oracle = Oracle(self._device)

    def devices(self, request: Mapping[str, Any], tensors: Sequence[Wire]) -> Answer:
        """The devices that torch sees here."""
        return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))], ()

    def load(self, request: Mapping[str, Any], tensors: Sequence[Wire]) -> Answer:
        """Import the source; its backends' names."""
        return sorted(self._loaded().backends), ()

    def describe(self, request: Mapping[str, Any], tensors: Sequence[Wire]) -> Answer:
        """One ``Description`` a backend."""
        callee = self._loaded()
        return [describe(callee.label, backend, self._device) for backend in callee.backends.values()], ()

    def draw(self, request: Mapping[str, Any], tensors: Sequence[Wire]) -> Answer:
        """Make a case's inputs before it is called."""
        self._loaded().draw(request["case"], request["options"])
        return True, ()

    def call(self, request: Mapping[str, Any], tensors: Sequence[Wire]) -> Answer:
        """One ``CallReply``, its outputs beside it; tensors are explicit inputs."""
        reply = self._loaded().call(request["case"], request["backend"], request["options"], plain_names(tensors))
        release(self._device)
        return reply

    def judge(self, request: Mapping[str, Any], tensors: Sequence[Wire]) -> Answer:
        """One ``JudgeReply``; the first ``inputs`` tensors are explicit inputs."""
        count = request.get("inputs", 0)
        given, outputs = plain_names(tensors[:count]), tensors[count:]
        reply = self._oracle.judge(request["case"], request["recipe"], outputs, given)
        release(self._device)
        return reply, ()

    def _loaded(self) -> Callee:
        if self._callee is None:
            if self._source is None:
                raise ReportedError("the oracle serves no backend")
            self._callee = Callee(self._source["label"], load(self._source), self._device)
        return self._callee


REQUESTS: Mapping[str, Callable[[Server, Mapping[str, Any], Sequence[Wire]], Answer]] = {
    "devices": Server.devices,
    "load": Server.load,
    "describe": Server.describe,
    "draw": Server.draw,
    "call": Server.call,
    "judge": Server.judge,
}


def serve(config: Mapping[str, Any]) -> None:
    """Say hello, then answer until the channel ends."""
    descriptor, owner = config["descriptor"], os.getpid()
    identity = _identity(descriptor)
    if config["threads"] is not None:
        torch.set_num_threads(config["threads"])
    server = Server(config)
    write_frame(descriptor, {"id": 0, "value": interpreter()})
    while True:
        try:
            frame = read_frame(descriptor)
        except EndOfStreamError:
            return
        message, tensors = answer(server, frame)
        if os.getpid() != owner:
            os._exit(0)  # a backend forked and its child came back here: only the worker itself answers
        if _identity(descriptor) != identity:
            os._exit(3)  # a backend closed the channel; the number may be another file by now
        try:
            write_frame(descriptor, message, tensors)
        except (FrameError, TypeError, ValueError) as error:
            write_frame(descriptor, {"id": message["id"], "error": f"the answer does not fit a frame: {error}"})


def answer(server: Server, frame: Frame) -> tuple[dict[str, Any], Sequence[Wire]]:
    """The message that answers a request, and its tensors. Whatever is raised becomes an error of one line."""
    request = frame.message
    number = request.get("id")
    try:
        do = REQUESTS.get(request.get("do", ""))
        if do is None:
            raise ReportedError(f"unknown request {request.get('do')!r}")
        value, tensors = do(server, request, frame.tensors)
    except ReportedError as error:
        return {"id": number, "error": str(error)}, ()
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: only the parent ends a worker
        return {"id": number, "error": one_line(error)}, ()
    return {"id": number, "value": value}, tensors


def interpreter() -> str:
    """Such as ``CPython 3.11.7, torch 2.13.0+cpu, numpy 2.4.6``."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{python}, torch {torch.__version__}, numpy {numpy.__version__}"


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
