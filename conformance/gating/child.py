"""The process in which a library is asked: a request in JSON as its one argument, lines of JSON as its answers.

Request: ``library``; ``sms``; ``patches``, Python files, one of which is run after the library's import and before it
is asked; ``subjects``, parts of names, all if empty; ``probe_s`` and ``sm_s``, seconds for a probe and an architecture;
``real``, whether the real device answers instead of the faked one; ``twins``, architectures on which a second device of
the architecture is asked as well, of whose answers those that differ are told.
Every architecture, with every patch, has a fork of its own, so that no cache and no crash reaches another one.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from conformance.gating import fake_device
from conformance.gating.model import Gate


class SlowError(BaseException):
    """A probe took longer than it may; no library's ``except Exception`` stops it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise SlowError in the block after so long."""

    def ring(*_: object) -> None:
        raise SlowError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Row = tuple[str, str, tuple[Gate, ...], tuple[str, ...]]
"""Subject, variant, gates, facts."""
Probe = Callable[[int, Mapping[str, Any]], Iterator[Row]]
"""All that a library says of one architecture, given the request."""


class LibraryError(Exception):
    """A library that cannot be asked; the message says why."""


def load(library: str) -> tuple[str, list[str], Probe]:
    """Import a library and return its version, notes and probe. Raises LibraryError."""
    from importlib import import_module

    module = import_module(f"conformance.gating.{library}_gates")
    version, notes, probe = module.load()
    return version, notes, probe


def serve(request: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Answer one request."""
    if request.get("real"):
        fake_device.stand_aside()
    try:
        version, notes, probe = load(request["library"])
    except LibraryError as error:
        tell({"kind": "gap", "reason": str(error)})
        return
    tell({"kind": "library", "version": version, "notes": notes})
    for number, patch in enumerate(["", *request["patches"]]):
        for sm in request["sms"]:
            if request.get("real"):
                _ask(request, probe, sm, number, patch, tell)  # CUDA may have started, which a fork does not survive
                continue
            reason = _forked(partial(_ask, request, probe, sm, number, patch, tell), request)
            if reason:
                tell({"kind": "gap", "sm": sm, "patch": number, "reason": reason})


def _ask(
    request: Mapping[str, Any],
    probe: Probe,
    sm: int,
    number: int,
    patch: str,
    tell: Callable[[Mapping[str, Any]], None],
) -> None:
    if patch:
        runpy.run_path(patch)
    answers: dict[tuple[str, str], list[str]] = {}
    for subject, variant, gates, facts in probe(sm, request):
        row = {"subject": subject, "variant": variant, "sm": sm, "patch": number, "facts": facts}
        tell({"kind": "row", **row, "gates": [[gate.name, gate.answer, gate.detail] for gate in gates]})
        answers[subject, variant] = [gate.answer for gate in gates]
    if sm not in request.get("twins", ()) or request.get("real"):
        return
    fake_device.twin()
    for subject, variant, gates, _ in probe(sm, request):
        before = answers.get((subject, variant))
        if before is not None and before != [gate.answer for gate in gates]:
            row = {"subject": subject, "variant": variant, "sm": sm, "patch": number, "facts": ()}
            tell({"kind": "twin", **row, "gates": [[gate.name, gate.answer, gate.detail] for gate in gates]})


def _forked(work: Callable[[], None], request: Mapping[str, Any]) -> str:
    """Run in a fork; return why it did not end well, or nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            code = 1
        os._exit(code)
    deadline = time.monotonic() + float(request["sm_s"])
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"stopped after {float(request['sm_s']):g} s"
        time.sleep(0.01)
    if os.WIFSIGNALED(status):
        return f"the process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return "" if status == 0 else "the probe itself failed (its message is on stderr)"


def main() -> None:
    """Serve the request; what libraries print goes to stderr."""
    channel = os.dup(1)
    os.dup2(2, 1)

    def tell(message: Mapping[str, Any]) -> None:
        os.write(channel, (json.dumps(message) + "\n").encode())

    serve(json.loads(sys.argv[1]), tell)


if __name__ == "__main__":
    from conformance.gating import child

    child.main()  # this file under the name by which the libraries' modules know its exceptions
