"""The pool of oracle workers that judge a run's answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from conformance.messages import JudgeReply, Wire


class HarnessError(Exception):
    """The harness itself failed, so that no verdict can be given; the message is one line."""


class OracleWorker(Protocol):
    """The part of ``process.Worker`` that judges."""

    def judge(self, case: str, recipe: Mapping[str, Any], outputs: Sequence[Wire], deadline: float) -> JudgeReply:
        """Judge the outputs of a call."""

    def close(self) -> None:
        """End the process."""


class Oracles:
    """A pool of oracle workers, with the judgements of identical answers kept for the run."""

    def __init__(self, start: Callable[[], OracleWorker], count: int, deadline: float) -> None:
        self._start, self._deadline = start, deadline
        self._idle: SimpleQueue[OracleWorker | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(None)
        self._count = count
        self._known: dict[bytes, JudgeReply] = {}

    def judge(self, case: str, recipe: Mapping[str, Any], outputs: Sequence[Wire]) -> JudgeReply:
        """Judge outputs with the next idle worker; a worker that fails is replaced once. Raises `HarnessError`."""
        key = _fingerprint(case, recipe, outputs)
        if key in self._known:
            return self._known[key]
        worker = self._idle.get()
        try:
            for last in (False, True):
                try:
                    worker = worker or self._start()
                    reply = worker.judge(case, recipe, outputs, self._deadline)
                    break
                except Exception as error:
                    if worker is not None:
                        worker.close()
                        worker = None
                    if last:
                        raise HarnessError(f"the oracle failed on '{case}': {one_line(error)}") from error
        finally:
            self._idle.put(worker)
        self._known[key] = reply
        return reply

    def close(self) -> None:
        """End the idle workers; all of them, once nothing is being judged."""
        for _ in range(self._count):
            worker = self._idle.get()
            if worker is not None:
                worker.close()


def _fingerprint(case: str, recipe: Mapping[str, Any], outputs: Sequence[Wire]) -> bytes:
    digest = hashlib.sha256(case.encode())
    choices = {key: value for key, value in recipe.items() if key != "source"}
    digest.update(json.dumps(choices, sort_keys=True).encode())
    for wire in outputs:
        digest.update(f"\n{wire.name} {wire.dtype} {wire.shape}\n".encode())
        digest.update(wire.data)
    return digest.digest()


def one_line(error: BaseException) -> str:
    """An exception's type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
