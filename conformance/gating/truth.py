"""Truth on the device at hand: calls on both sides of the gates.

A library's own functions are called in a process of its own (`called`), which is started again after the call that
ended it. This project's backends are called through the engine, as in every other run, inside of their claims and,
for what they claim on other architectures only, outside of them (`backends_called`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance.gating.model import OUTCOMES, Outcome, Truth
from conformance.gating.observed import ROOT
from reports.record import Record, repro_line

CALLED = ("torch",)
"""Libraries with a module of calls, ``LIBRARY_calls.py``."""
START_S, CALL_S = 120.0, 60.0
"""Seconds for torch and the library to be imported, and for one call."""
BY_VERDICT: Mapping[str, Outcome] = {
    "pass": "right",
    "wrong": "wrong",
    "ungated": "wrong",
    "flaky": "wrong",
    "error": "raised",
    "crash": "crashed",
    "oom": "crashed",
    "hang": "hung",
}


def called(library: str, device: str, *, subjects: Sequence[str] = (), python: str = sys.executable) -> list[Truth]:
    """Every call of a library's module of calls on a device; what dies is a row, and the next call a new process."""
    rows: list[Truth] = []
    skip, done = 0, False
    while not done:
        request = {"library": library, "device": device, "skip": skip, "subjects": list(subjects)}
        found, done, reached = _process(library, request, python)
        rows += found
        if not done and reached < skip:
            break  # the process itself does not start; it has said so in a row, or says nothing
        skip = reached + 1
    return rows


def device_architecture(device: str, python: str = sys.executable) -> list[int]:
    """The architecture of a device, asked of torch in another process; nothing where it does not answer."""
    code = f"import torch; major, minor = torch.cuda.get_device_capability({device!r}); print(10 * major + minor)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(done.stdout)] if done.returncode == 0 and done.stdout.strip().isdecimal() else []


def _process(library: str, request: Mapping[str, Any], python: str) -> tuple[list[Truth], bool, int]:
    """One process: its rows, whether it got to the end, and the last call that it began (-1: none)."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [python, "-P", "-m", "conformance.gating.call_child", json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,
    )
    rows: list[Truth] = []
    begun: dict[str, Any] | None = None
    sm, reached, done, hung = 0, -1, False, False
    try:
        for said in _lines(process):
            if said is None:
                hung = True
                break
            if said["kind"] == "device":
                sm = int(said["sm"])
            elif said["kind"] == "begin":
                begun, reached = said, int(said["number"])
            elif said["kind"] == "end" and begun is not None:
                rows.append(_row(library, begun, sm, said["outcome"], said["detail"], request))
                begun = None
            elif said["kind"] == "done":
                done = True
    finally:
        if process.poll() is None and not done:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if begun is not None:
        outcome: Outcome = "hung" if hung else "crashed"
        why = f"no answer within {CALL_S:g} s" if hung else f"the process ended with {code}"
        rows.append(_row(library, begun, sm, outcome, why, request))
    return rows, done, reached


def _lines(process: subprocess.Popen[bytes]) -> Iterable[dict[str, Any] | None]:
    """What the child says, line by line; None once it has been silent for too long."""
    assert process.stdout is not None
    rest, ends = b"", time.monotonic() + START_S
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            yield None
            return
        data = os.read(process.stdout.fileno(), 65536)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield json.loads(line)
        ends = time.monotonic() + CALL_S


def _row(
    library: str, begun: Mapping[str, Any], sm: int, outcome: Outcome, detail: str, request: Mapping[str, Any]
) -> Truth:
    line = f"python -m conformance gating --library {library} --subject {begun['subject']} --device {request['device']}"
    return Truth(
        library=library,
        subject=begun["subject"],
        variant=begun["variant"],
        sm=sm,
        outcome=outcome,
        detail=detail,
        repro=line,
    )


def from_records(records: Iterable[Record], library: str = "backends") -> list[Truth]:
    """One row for each backend, operation and variant that was called on a GPU: the worst of its records.

    A refusal of what no claim covers is as it should be, and left out.
    """
    groups: dict[tuple[str, str, int], list[tuple[Outcome, Record]]] = {}
    for record in records:
        outcome = BY_VERDICT.get(record.verdict)
        if outcome == "raised" and record.message.startswith("refused a claimed call"):
            outcome = "refused"
        if outcome is not None and record.sm.isdecimal():
            key = (record.backend, f"{record.operation} {record.variant}", int(record.sm))
            groups.setdefault(key, []).append((outcome, record))
    rows = []
    for (backend, variant, sm), found in groups.items():
        outcome, worst = min(found, key=lambda item: OUTCOMES.index(item[0]))
        known = f"known as {worst.ledger_id}: " if worst.ledger_id else ""
        rows.append(
            Truth(
                library=library,
                subject=backend,
                variant=variant,
                sm=sm,
                outcome=outcome,
                detail="" if outcome == "right" else f"{known}{worst.message}",
                calls=len({record.case for _, record in found}),
                repro=repro_line(worst.case, backend, device=worst.device, options=worst.options),
            )
        )
    return rows
