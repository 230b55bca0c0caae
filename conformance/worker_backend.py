"""One call of a backend inside its worker: inputs, poisoned buffers, prepare, run, and what came of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from conformance.messages import CallReply, Wire
from conformance.operations import OPERATIONS
from conformance.worker_errors import ReportedError, flat, is_out_of_memory, one_line
from conformance.worker_tensors import POISONS, Buffers, move, storage_bytes, to_wire, unsendable
from fuzz.case import Case
from fuzz.hashing import sha256_of
from references.backend import Backend, Unsupported

Reply = tuple[dict[str, Any], tuple[Wire, ...]]


class Callee:
    """The backends of a worker.

    label: how messages call their source. backends: by name. device: ``cpu`` or ``cuda:N``.
    """

    def __init__(self, label: str, backends: Mapping[str, Backend], device: str) -> None:
        self.label = label
        self.backends = backends
        self._device = device
        self._kept: tuple[str, str, dict[str, Tensor]] | None = None

    def call(self, text: str, name: str, options: Mapping[str, str]) -> Reply:
        """A ``CallReply`` as plain data and its outputs.

        options: ``poison`` is ours (``nan`` or ``finite``, ``nan`` if absent), the others reach the backend. A reply
        with ``lost`` says that the device's context is beyond repair and this process useless.
        Raises `ReportedError` where not the backend but the harness failed.
        """
        backend = self.backends.get(name)
        if backend is None:
            raise ReportedError(f"{self.label}: offers no backend {name!r}, only {', '.join(sorted(self.backends))}")
        poison = options.get("poison", "nan")
        if poison not in POISONS:
            raise ReportedError(f"poison={poison} is none of {', '.join(POISONS)}")
        case = Case.parse(text)
        torch.set_default_dtype(torch.float32)  # a backend may have left another behind
        try:
            digest, inputs = self._inputs(case)
            on_device = {key: move(tensor, self._device) for key, tensor in inputs.items()}
            buffers = Buffers(OPERATIONS[case.operation].outputs(case), self._device, poison)
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            return _reply(CallReply(status="oom", message=f"before the call: {one_line(error)}"))
        own = {key: value for key, value in options.items() if key != "poison"}
        reply, outputs = self._guarded(backend, case, on_device, own, buffers)
        lost = self._lost()
        if lost is not None:
            message = reply.message or lost
            return {**asdict(CallReply(status="crash", message=f"device context lost: {message}")), "lost": True}, ()
        changed = self._changed(inputs, on_device)
        overrun = buffers.overrun()
        if overrun is not None and reply.status == "ok":
            reply, outputs = CallReply(status="error", message=overrun, seconds=reply.seconds), ()
        return _reply(reply, outputs, input_sha256=digest, inputs_changed=changed)

    def _inputs(self, case: Case) -> tuple[str, dict[str, Tensor]]:
        """The inputs on the CPU and their hash; those of the last case are kept, and `_changed` watches over them."""
        if self._kept is not None and self._kept[0] == case.text:
            return self._kept[1], self._kept[2]
        self._kept = None
        inputs = OPERATIONS[case.operation].inputs(case)
        self._kept = (case.text, sha256_of(inputs), inputs)
        return self._kept[1], inputs

    def _changed(self, inputs: Mapping[str, Tensor], on_device: Mapping[str, Tensor]) -> bool:
        """Whether a call wrote to its inputs, beside them where they are views, or to the copies that are kept."""
        if self._kept is None or sha256_of(inputs) != self._kept[1]:
            self._kept = None
            return True
        return not all(
            torch.equal(storage_bytes(tensor).to(self._device), storage_bytes(on_device[key]))
            for key, tensor in inputs.items()
        )

    def _guarded(
        self, backend: Backend, case: Case, inputs: Mapping[str, Tensor], options: Mapping[str, str], buffers: Buffers
    ) -> tuple[CallReply, tuple[Wire, ...]]:
        started = time.perf_counter()
        try:
            self._synchronise()
            started = time.perf_counter()
            with torch.no_grad():
                parts = backend.run(backend.prepare(case, inputs, options), dict(buffers.out))
            self._synchronise()
            seconds = time.perf_counter() - started
            problem = _problem(parts)
            if problem:
                return CallReply(status="error", message=problem, seconds=seconds), ()
            settle = getattr(OPERATIONS[case.operation], "settle", None)
            settled = parts if settle is None else settle(case, inputs, parts)
            outputs = tuple(to_wire(name, part) for name, part in settled.items())
            return CallReply(status="ok", seconds=seconds), outputs
        except Unsupported as refusal:
            return CallReply(status="refused", message=flat(str(refusal)) or "no reason given"), ()
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a backend never ends the worker
            line = one_line(error)
            if not is_out_of_memory(error):
                return CallReply(status="error", message=line), ()
        gc.collect()  # outside the handler, where the exception's frames no longer hold tensors
        if self._device.startswith("cuda"):
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
        return CallReply(status="oom", message=line), ()

    def _synchronise(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)

    def _lost(self) -> str | None:
        """What the device says to a harmless request once its context is broken; None while it works."""
        if not self._device.startswith("cuda"):
            return None
        try:
            self._synchronise()
            torch.zeros(1, device=self._device).cpu()
        except BaseException as error:
            return None if is_out_of_memory(error) else one_line(error)
        return None


def _reply(reply: CallReply, outputs: tuple[Wire, ...] = (), **changes: Any) -> Reply:
    return {**asdict(reply), **changes, "outputs": []}, outputs


def _problem(parts: Any) -> str | None:
    if not isinstance(parts, Mapping):
        return f"run() returned a {type(parts).__name__}, not a mapping of parts to tensors"
    for name, part in parts.items():
        if not isinstance(name, str) or not name.isprintable() or len(name) > 80:
            return f"run() returned a part with the name {flat(repr(name))[:80]}"
        reason = unsendable(part)
        if reason:
            return f"run() returned {name}, which {reason}"
    return None
