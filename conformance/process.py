"""Worker: an isolated process that serves one source of backends, or the oracle, as the parent sees it.

Whatever a backend does to its process, the parent gets a reply: an answer in time, or ``crash``, ``hang`` or ``oom``
with one line that says what happened. The next request starts a fresh process. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from conformance import process_watch as watch
from conformance.frames import EndOfStreamError, Frame, FrameError, read_frame, write_frame
from conformance.launch import BackendSource, spawn
from conformance.messages import CallReply, CallStatus, Description, JudgeReply, Wire, as_inputs
from conformance.process_replies import call_reply, descriptions, judge_reply, names
from fuzz.case import Case, CaseError
from fuzz.extent import is_large

TICK = 0.02
"""Seconds between looks at a busy worker's memory."""
SESSION_TICK = 0.25
"""Seconds between searches for children of a busy worker."""
MAX_ERROR = 1000
"""Longest line of a worker's own error that is passed on, in characters."""
START_DEADLINE = 300.0
"""Seconds for an interpreter to start, import torch and import the source (a cold file cache takes most of it)."""
DRAW_DEADLINE = 600.0
"""Seconds to draw the inputs of a large case and of its sister."""
_EXIT_GRACE = 2.0
_WORKERS = itertools.count(1)
_SPAWNER = ThreadPoolExecutor(1, "worker-spawner")
"""A worker gets SIGKILL when the thread that started it ends; this one ends with the parent."""


class WorkerFailed(Exception):  # noqa: N818 - named for what happened
    """A worker cannot be started or used at all; the message is one line."""


class StartFailed(WorkerFailed):
    """The interpreter or the source ended or raised before it could serve; the message is one line.

    status: ``crash``, ``hang`` or ``oom``.
    """

    def __init__(self, status: CallStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class JudgeFailed(WorkerFailed):
    """The oracle gave no judgement; the message is one line.

    status: ``error``, ``crash``, ``hang`` or ``oom``.
    """

    def __init__(self, status: CallStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def _is_large(text: str) -> bool:
    """Whether a case's inputs take long to draw; a text that is no case is the worker's to refuse."""
    try:
        return is_large(Case.parse(text))
    except CaseError:
        return False


class _Ended(Exception):  # noqa: N818
    """The process is gone: why, as a reply would say it."""

    def __init__(self, status: CallStatus, message: str) -> None:
        super().__init__(message)
        self.status: CallStatus = status


class _Refused(Exception):  # noqa: N818
    """The process lives and answered with an error of one line."""


class Worker:
    """One isolated process, started by the first request and again after each death.

    source: None for the oracle. device: ``cpu`` or ``cuda:N``. python: its interpreter. log_dir: where its stdout and
    stderr go; a temporary folder if None. memory_limit: resident bytes of the process and its children together (a
    forked child's shared pages count again); three quarters of the machine's if None. threads: of OpenMP and torch,
    None for their own default. One request at a time; `close` may be called from any thread.
    """

    def __init__(
        self,
        source: BackendSource | None,
        device: str = "cpu",
        *,
        python: str | None = None,
        log_dir: Path | None = None,
        memory_limit: int | None = None,
        threads: int | None = 1,
        start_deadline: float = START_DEADLINE,
    ) -> None:
        self.source, self.device = source, device
        self._python = python or sys.executable
        self._own_log_dir = log_dir is None
        self._log_dir = Path(log_dir or tempfile.mkdtemp(prefix="conformance-"))
        self._memory_limit = memory_limit or watch.default_memory_limit()
        self._threads, self._start_deadline = threads, start_deadline
        self._number, self._numbers = next(_WORKERS), itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False
        self._busy = threading.RLock()
        self._children: tuple[float, list[int]] = (0.0, [])
        self._next_look = 0.0
        self.interpreter = ""
        self.died_idle = ""

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.source.label if self.source else "oracle"

    @property
    def pid(self) -> int | None:
        """The process that serves now; None where the next request will start one."""
        return self._process.pid if self._process else None

    @property
    def log(self) -> Path:
        """The file that takes the process's stdout and stderr; emptied now and then, never read for answers."""
        return self._log_dir / f"{re.sub('[^A-Za-z0-9_.-]', '_', self.label)}-{os.getpid()}-{self._number}.log"

    def devices(self, deadline: float = 60.0) -> list[str]:
        """``cpu`` and the CUDA devices that torch sees in the worker. Raises `WorkerFailed`."""
        return names(self._ask({"do": "devices"}, deadline).message["value"])

    def describe(self, deadline: float = 60.0) -> list[Description]:
        """What the source's backends say of themselves on this device. Raises `WorkerFailed`."""
        return descriptions(self._ask({"do": "describe"}, deadline).message["value"])

    def call(
        self, case: str, backend: str, options: Mapping[str, str], deadline: float, inputs: Sequence[Wire] = ()
    ) -> CallReply:
        """Call a backend once. Every failure of the backend is a reply, that of a source to start again included.

        options: call options; ``poison`` is ``nan`` or ``finite``. deadline: seconds from an imported source, and from
        inputs that take long to draw, to the whole answer. inputs: explicit ones instead of the case's own. Raises
        `WorkerFailed` where no process can be made or the harness itself fails.
        """
        request = {"do": "call", "case": case, "backend": backend, "options": dict(options)}
        with self._busy:
            started = time.monotonic()
            try:
                self._ensure()
                if not inputs and _is_large(case):
                    self._exchange({**request, "do": "draw"}, (), DRAW_DEADLINE)
                started = time.monotonic()
                frame = self._exchange(request, as_inputs(inputs), deadline)
                reply = call_reply(frame)
            except StartFailed as failure:  # whoever calls a backend has had it described, so it did start before
                if self._closed:
                    raise
                return CallReply(status=failure.status, message=f"does not start again: {failure}")
            except _Ended as end:
                return CallReply(status=end.status, message=str(end), seconds=time.monotonic() - started)
            except _Refused as error:
                raise WorkerFailed(f"{self.label}: '{case}': {error}") from None
            except FrameError as error:
                self.stop()
                return CallReply(status="crash", message=f"protocol: {error}")
            if reply.suspect or frame.message["value"].get("lost"):
                self.stop()  # broken for every later call of this process
            return reply

    def judge(
        self,
        case: str,
        recipe: Mapping[str, Any],
        outputs: Sequence[Wire],
        deadline: float,
        inputs: Sequence[Wire] = (),
    ) -> JudgeReply:
        """Judge the outputs of a call; inputs: explicit ones instead of the case's own.

        Raises `JudgeFailed`, or `WorkerFailed` where no fresh worker starts.
        """
        with self._busy:
            try:
                self._ensure()
                request = {"do": "judge", "case": case, "recipe": dict(recipe), "inputs": len(inputs)}
                return judge_reply(self._exchange(request, (*as_inputs(inputs), *outputs), deadline))
            except _Ended as end:
                raise JudgeFailed(end.status, f"oracle: '{case}': {end}") from None
            except _Refused as error:
                raise JudgeFailed("error", f"oracle: '{case}': {error}") from None
            except FrameError as error:
                self.stop()
                raise JudgeFailed("error", f"oracle: '{case}': {error}") from None

    def stop(self) -> None:
        """End the process; the next request starts a fresh one."""
        with self._busy:
            self._reap()

    def close(self) -> None:
        """End the process for good; a request in flight in another thread ends as a crash."""
        self._closed = True
        while not self._busy.acquire(timeout=TICK):
            process = self._process
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        try:
            self._reap()
        finally:
            self._busy.release()
        if self._own_log_dir:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], deadline: float) -> Frame:
        with self._busy:
            try:
                self._ensure()
                return self._exchange(request, (), deadline)
            except _Ended as end:
                raise WorkerFailed(f"{self.label}: {request['do']}: {end}") from None
            except _Refused as error:
                raise WorkerFailed(self._blamed(str(error))) from None
            except FrameError as error:
                self.stop()
                raise WorkerFailed(f"{self.label}: {request['do']}: protocol: {error}") from None

    def _blamed(self, line: str) -> str:
        """An error of the worker under its source's name, which one of our own code there lacks."""
        return line if line.startswith(self.label) else f"{self.label}: {line}"

    def _ensure(self) -> None:
        """Have a process that has imported its source. Raises `StartFailed`, or `WorkerFailed` if none can be made."""
        if self._process is not None and self._exited():
            self.died_idle = str(self._obituary())
        if self._process is not None:
            return
        for attempt in (1, 2):  # a device that a dead worker held a moment ago may not be free at once
            try:
                self._start()
                return
            except (_Ended, OSError, FrameError) as error:
                self._reap()
                if attempt == 2 or self._closed or getattr(error, "status", "") == "hang":
                    line = f"{self.label}: cannot start: {watch.one_line(str(error))}"
                    raise (
                        StartFailed(error.status, line) if isinstance(error, _Ended) else WorkerFailed(line)
                    ) from None
            except _Refused as error:
                self._reap()
                raise StartFailed("crash", self._blamed(str(error))) from None

    def _start(self) -> None:
        if self._closed:
            raise _Ended("crash", "the worker was closed")
        self._log_dir.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            self._channel = ours
            ours.setblocking(False)
            os.truncate(self.log, 0)
            self._oom_kills = watch.kernel_oom_kills()
            self._process = _SPAWNER.submit(
                spawn,
                self._python,
                self.source,
                device=self.device,
                threads=self._threads,
                descriptor=theirs.fileno(),
                log=log,
            ).result()
        self.interpreter = str(self._receive(0, self._start_deadline).message.get("value"))
        if self.source is not None:
            self._exchange({"do": "load"}, (), self._start_deadline)

    def _exchange(self, request: Mapping[str, Any], tensors: Sequence[Wire], deadline: float) -> Frame:
        """Send a request and wait for its answer. Raises `_Ended`, `_Refused` or `FrameError`."""
        number = next(self._numbers)
        end = time.monotonic() + deadline
        try:
            assert self._channel is not None
            write_frame(self._channel.fileno(), {**request, "id": number}, tensors, self._waiting(end, deadline))
        except (EndOfStreamError, OSError):
            raise self._obituary() from None
        except FrameError:
            raise  # nothing was written
        except BaseException:
            self._reap()  # half a request is on its way: nothing else can be asked
            raise
        return self._receive(number, deadline, end)

    def _receive(self, number: int, deadline: float, end: float | None = None) -> Frame:
        wait = self._waiting(time.monotonic() + deadline if end is None else end, deadline)
        try:
            while True:
                assert self._channel is not None
                frame = read_frame(self._channel.fileno(), wait)
                got = frame.message.get("id")
                if got == number:
                    break
                if type(got) is not int or not 0 <= got < number:
                    raise FrameError(f"frame: an answer to request {got!r}, expected {number}")
        except (EndOfStreamError, OSError):
            raise self._obituary() from None
        except FrameError as error:
            self._reap()
            raise _Ended("crash", f"protocol: {error}") from None
        except BaseException:
            self._reap()
            raise
        if "value" in frame.message:
            return frame
        raise _Refused(watch.one_line(str(frame.message.get("error")))[:MAX_ERROR])

    def _waiting(self, end: float, deadline: float) -> Any:
        """A `frames.Wait` that watches the process while the channel is not ready."""
        assert self._channel is not None
        channel = self._channel
        poll = select.poll()
        poll.register(channel, 0)

        def wait(writing: bool) -> None:
            poll.modify(channel, select.POLLOUT if writing else select.POLLIN)
            while True:
                now = time.monotonic()
                if now >= self._next_look:
                    self._look(now)
                if now >= end:
                    raise self._hung(deadline)
                if poll.poll(1000 * min(TICK, end - now)):
                    return
                if self._exited() and not poll.poll(0):
                    raise EndOfStreamError("frame: the process ended")  # a child of it still holds the channel

        return wait

    def _look(self, now: float) -> None:
        """Kill the worker where its memory has passed the limit; keep its log within bounds."""
        assert self._process is not None
        pid = self._process.pid
        if now - self._children[0] >= SESSION_TICK:
            members = watch.recent_members(pid, SESSION_TICK)
            self._children = (now, [member for member in members if member != pid])
            with suppress(OSError):
                if self.log.stat().st_size > watch.LOG_LIMIT:
                    os.truncate(self.log, 0)
        used = sum(map(watch.resident_bytes, (pid, *self._children[1])))
        self._next_look = time.monotonic() + TICK
        if used > self._memory_limit:
            self._reap()
            raise _Ended("oom", f"used {used / 2**30:.2f} GiB, the limit is {self._memory_limit / 2**30:.2f} GiB")

    def _hung(self, deadline: float) -> _Ended:
        """Ask the process where it is, then end it."""
        assert self._process is not None
        place = ""
        with suppress(ProcessLookupError, PermissionError, OSError):
            size = self.log.stat().st_size
            os.kill(self._process.pid, signal.SIGUSR1)  # worker_boot has faulthandler answer it in the log
            for _ in range(10):
                time.sleep(TICK)
                place = watch.where(watch.log_tail(self.log, size))
                if place:
                    break
        self._reap()
        return _Ended("hang", f"no answer within {deadline:g} s" + (f", {place}" if place else ""))

    def _obituary(self) -> _Ended:
        """The channel has ended: what became of the process."""
        assert self._process is not None
        end = time.monotonic() + _EXIT_GRACE
        while not self._exited() and time.monotonic() < end:
            time.sleep(TICK / 4)
        alone = self._exited()
        status = self._reap()
        last = watch.summary(watch.log_tail(self.log))
        if self._closed:
            return _Ended("crash", "the worker was closed")
        if not alone or status == 3:
            return _Ended("crash", _join("closed the channel to its parent", last))
        if status == -signal.SIGKILL:
            if watch.kernel_oom_kills() > self._oom_kills:
                return _Ended("oom", "killed by the kernel, out of memory")
            return _Ended("crash", _join("killed by SIGKILL, not by the harness and not for memory", last))
        return _Ended("crash", _join(watch.exit_text(status), last))

    def _exited(self) -> bool:
        """Whether the process has ended; leaves it unreaped, so that its number stays its own until `_reap`."""
        if self._process is None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _reap(self) -> int:
        """Kill the process and its session if they live, collect its status, close the channel."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        status = 0
        if process is not None:
            watch.kill_session(process.pid)
            with suppress(subprocess.TimeoutExpired):  # stuck in a driver: the kernel will finish it
                status = process.wait(10)
        if channel is not None:
            channel.close()
        self._children, self._next_look = (0.0, []), 0.0
        return status


def _join(what: str, last: str) -> str:
    return f"{what}; log: {last}" if last else what
