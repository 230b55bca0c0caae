"""One call of a backend inside its worker: inputs, poisoned buffers, prepare, run, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from conformance import call_options, relations, shared_inputs
from conformance.messages import POISONS, CallReply, Wire
from conformance.operations import OPERATIONS
from conformance.worker_errors import ReportedError, flat, is_out_of_memory, one_line
from conformance.worker_inputs import explicit
from conformance.worker_memory import release
from conformance.worker_tensors import Buffers, move, storage_bytes, to_wire, unsendable
from fuzz.case import Case
from fuzz.hashing import sha256_of
from references.backend import Backend, Claim, Unsupported

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
        self._earlier: tuple[str, dict[str, Tensor]] | None = None
        self._drawn: tuple[str, dict[str, Tensor]] | None = None
        self._claims: dict[str, list[Claim]] = {}
        self._home = _leave_default_device()

    def draw(self, text: str, options: Mapping[str, str]) -> None:
        """Make what a call of this case will ask for, so that drawing it is no part of the call's time.

        What is raised here is raised again by the call, which knows what to make of it.
        """
        case = Case.parse(text)
        with suppress(Exception):
            self._inputs(case, ())
            if call_options.is_refilled(case) or {"stream", "graph"} & set(options):
                self._drawn = (case.text, shared_inputs.inputs(call_options.sister(case), "backend"))

    def call(self, text: str, name: str, options: Mapping[str, str], given: Sequence[Wire] = ()) -> Reply:
        """A ``CallReply`` as plain data and its outputs.

        given: explicit inputs instead of the case's own. options: ``poison`` is ours (``nan`` or ``finite``, ``nan`` if
        absent), so are those of ``call_options``; the others reach the backend. A reply with ``lost`` says that the
        device's context is beyond repair and this process useless; one that is ``suspect``, that the harness's own
        work failed in it.
        Raises `ReportedError` for what cannot be asked.
        """
        backend = self.backends.get(name)
        if backend is None:
            raise ReportedError(f"{self.label}: offers no backend {name!r}, only {', '.join(sorted(self.backends))}")
        with suppress(Exception):  # the survey has told what is wrong with claims
            self._claimed(backend)
        poison = options.get("poison", "nan")
        if poison not in POISONS:
            raise ReportedError(f"poison={poison} is none of {', '.join(POISONS)}")
        case = Case.parse(text)
        try:
            own, carried = call_options.own_and_carried({k: word for k, word in options.items() if k != "poison"})
        except ValueError as error:
            raise ReportedError(str(error)) from None
        torch.set_default_dtype(torch.float32)  # a backend may have left another behind
        try:
            digest, inputs = self._inputs(case, given)
            laid = call_options.strided if "inputs" in carried else _as_it_is
            on_device = {key: laid(move(tensor, self._device)) for key, tensor in inputs.items()}
            before = {key: storage_bytes(tensor).clone() for key, tensor in on_device.items()} if carried else {}
            others = self._others(case, carried, laid)
            earlier = self._sister(case) if not carried and call_options.is_refilled(case) else None
            buffers = Buffers(OPERATIONS[case.operation].outputs(case), self._device, poison)
        except ReportedError:
            raise
        except BaseException as error:
            return _own_failure("before the call", error)

        def call(arguments: Mapping[str, Tensor]) -> Any:
            return self._answered(backend, case, arguments, own, buffers)

        def made() -> Any:
            if earlier is not None:
                return call_options.refilled(call, on_device, earlier, buffers)
            if others is None:
                return call(on_device)
            return call_options.called(call, carried, on_device, others, buffers)

        def again() -> tuple[Wire, ...]:
            return self._twin(backend, case, inputs, poison)

        plain = not own and not carried and earlier is None
        reply, outputs = self._guarded(case, on_device, made, again if plain else None)
        lost = self._lost()
        if lost is not None:
            message = reply.message or lost
            return {**asdict(CallReply(status="crash", message=f"device context lost: {message}")), "lost": True}, ()
        try:
            changed = self._changed(inputs, on_device, before)
            overrun = buffers.overrun()
        except BaseException as error:
            return _own_failure("after the call", error)
        if overrun is not None and reply.status == "ok":
            reply, outputs = CallReply(status="error", message=overrun, seconds=reply.seconds), ()
        return _reply(reply, outputs, input_sha256=digest, inputs_changed=changed)

    def _answered(
        self,
        backend: Backend,
        case: Case,
        arguments: Mapping[str, Tensor],
        options: Mapping[str, str],
        buffers: Buffers,
    ) -> Any:
        """What the backend returns; the default device that its source was imported with is in force meanwhile."""
        if self._home is not None:
            torch.set_default_device(self._home)
        try:
            return backend.run(backend.prepare(case, arguments, options), dict(buffers.out))
        finally:
            _leave_default_device()

    def _inputs(self, case: Case, given: Sequence[Wire]) -> tuple[str, dict[str, Tensor]]:
        """The inputs on the CPU and their hash; those of the last case are kept, and `_changed` watches over them."""
        if not given and self._kept is not None and self._kept[0] == case.text:
            return self._kept[1], self._kept[2]
        self._kept = None
        inputs = explicit(case, given) if given else shared_inputs.inputs(case, "backend")
        self._kept = ("" if given else case.text, sha256_of(inputs), inputs)
        return self._kept[1], inputs

    def _sister(self, case: Case) -> dict[str, Tensor]:
        """The sister case's inputs on the device, kept for the calls of one case."""
        if self._earlier is None or self._earlier[0] != case.text:
            inputs = self._sisters_inputs(case)
            self._earlier = (case.text, {key: move(tensor, self._device) for key, tensor in inputs.items()})
        return self._earlier[1]

    def _sisters_inputs(self, case: Case) -> dict[str, Tensor]:
        """The sister case's inputs on the CPU, those that were drawn before where they were."""
        if self._drawn is not None and self._drawn[0] == case.text:
            return self._drawn[1]
        self._drawn = None
        return shared_inputs.inputs(call_options.sister(case), "backend")

    def _others(
        self, case: Case, carried: Mapping[str, str], laid: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor] | None:
        """The sister case's inputs on the device where an option asks for them, else None. Raises `ReportedError`."""
        if not {"stream", "graph"} & set(carried):
            return None
        if not self._device.startswith("cuda"):
            raise ReportedError(f"{', '.join(sorted(carried))}: {self._device} has no streams")
        inputs = self._sisters_inputs(case)
        return {key: laid(move(tensor, self._device)) for key, tensor in inputs.items()}

    def _changed(
        self, inputs: Mapping[str, Tensor], on_device: Mapping[str, Tensor], before: Mapping[str, Tensor]
    ) -> bool:
        """Whether a call wrote to its inputs, beside them where they are views, or to the copies that are kept.

        before: the storages of inputs on the device that are laid out otherwise than those that are kept.
        """
        if self._kept is None or sha256_of(inputs) != self._kept[1]:
            self._kept = None
            return True
        return not all(
            torch.equal(before.get(key, storage_bytes(tensor)).to(self._device), storage_bytes(on_device[key]))
            for key, tensor in inputs.items()
        )

    def _twin(self, backend: Backend, case: Case, inputs: Mapping[str, Tensor], poison: str) -> tuple[Wire, ...]:
        """The answer to the twin of a case (``conformance.relations``); empty where there is none that is claimed.

        Raises what the backend raises, with the property's name.
        """
        known = relations.twin_of(case, inputs)
        if known is None or not self._same_claim(backend, case, known[1].case):
            return ()
        relation, twin = known
        on_device = {key: move(tensor, self._device) for key, tensor in twin.inputs.items()}
        buffers = Buffers(OPERATIONS[case.operation].outputs(twin.case), self._device, poison)
        try:
            parts = self._answered(backend, twin.case, on_device, {}, buffers)
            self._synchronise()
        except Unsupported:
            return ()
        except Exception as error:
            if is_out_of_memory(error):
                return ()
            raise RuntimeError(f"property:{relation.name}, {relation.text}: {one_line(error)}") from error
        problem = _problem(parts) or buffers.overrun()
        if problem:
            raise RuntimeError(f"property:{relation.name}, {relation.text}: {problem}")
        settle = getattr(OPERATIONS[case.operation], "settle", None)
        settled = parts if settle is None else settle(twin.case, on_device, parts)
        return tuple(to_wire(relations.TWIN + name, part) for name, part in settled.items())

    def _claimed(self, backend: Backend) -> list[Claim]:
        """What a backend claims here. Asked before its first call, so that it may keep what it learns of its device."""
        if backend.name not in self._claims:
            self._claims[backend.name] = list(backend.claims(self._device))
        return self._claims[backend.name]

    def _same_claim(self, backend: Backend, case: Case, other: Case) -> bool:
        """Whether one claim, and so one recipe, covers both cases."""
        claims = self._claimed(backend)
        first = [
            next((number for number, claim in enumerate(claims) if claim.refusal(asked) is None), -1)
            for asked in (case, other)
        ]
        return first[0] == first[1] >= 0

    def _guarded(
        self,
        case: Case,
        inputs: Mapping[str, Tensor],
        made: Callable[[], Any],
        again: Callable[[], tuple[Wire, ...]] | None = None,
    ) -> tuple[CallReply, tuple[Wire, ...]]:
        started = time.perf_counter()
        try:
            self._synchronise()
            started = time.perf_counter()
            with torch.no_grad():
                parts = made()
            self._synchronise()
            seconds = time.perf_counter() - started
            problem = _problem(parts)
            if problem:
                return CallReply(status="error", message=problem, seconds=seconds), ()
            settle = getattr(OPERATIONS[case.operation], "settle", None)
            settled = parts if settle is None else settle(case, inputs, parts)
            outputs = tuple(to_wire(name, part) for name, part in settled.items())
            with torch.no_grad():
                outputs += again() if again is not None else ()
            return CallReply(status="ok", seconds=seconds), outputs
        except Unsupported as refusal:
            return CallReply(status="refused", message=flat(str(refusal)) or "no reason given"), ()
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a backend never ends the worker
            line = one_line(error)
            if not is_out_of_memory(error):
                return CallReply(status="error", message=line), ()
        release(self._device, kept=0)  # outside the handler, where the exception's frames no longer hold tensors
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


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _leave_default_device() -> torch.device | None:
    """Have new tensors on the CPU again, whatever a backend has left behind; the device that it had set, if any."""
    try:
        device = torch.get_default_device()
    except (RuntimeError, AssertionError):  # one that is not here: torch asks for a tensor there
        device = None
    if device is not None and device.type == "cpu":
        return None
    torch.set_default_device(None)
    return device


def _own_failure(when: str, error: BaseException) -> Reply:
    """The reply where the harness's own work failed in the backend's process."""
    line = one_line(error)
    if is_out_of_memory(error):
        return _reply(CallReply(status="oom", message=f"{when}: {line}"))
    message = f"its process is spoiled: {when} the harness's own work failed there: {line}"
    return _reply(CallReply(status="crash", message=message, suspect=True))


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
