"""What the parent sees of a worker from outside: its memory, its session, its log, the way it ended."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
TAIL = 16384
"""Bytes at the end of a log that are looked at."""
LOG_LIMIT = 2**26
"""Bytes at which a log is emptied, so that a worker cannot fill the disk."""
MAX_LINE = 400
_looking = threading.Lock()
_seen: tuple[float, dict[int, list[int]]] = (-1e9, {})
_LOCATION = re.compile(r'\s*File "([^"]*)", line (\d+) in (\S+)')


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def session_members(session: int) -> list[int]:
    """The processes of a session, in whatever process group they are."""
    return _sessions().get(session, [])


def recent_members(session: int, age: float) -> list[int]:
    """The same, as seen at most ``age`` seconds ago: a look at all processes takes long, and serves every worker."""
    global _seen
    with _looking:
        now = time.monotonic()
        if now - _seen[0] >= age:
            _seen = (now, _sessions())
        return _seen[1].get(session, [])


def _sessions() -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, IndexError, ValueError):
            # state ppid pgrp session ... follow the command, which may itself hold spaces and brackets
            session = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[3])
            members.setdefault(session, []).append(int(entry.name))
    return members


def kill_session(session: int) -> None:
    """SIGKILL for a worker's process group and for whatever else belongs to its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in session_members(session):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kernel_oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck, in this control group or, failing that, on this host."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        with suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith(f"{key} "):
                    return int(line.split()[1])
    return 0


def default_memory_limit() -> int:
    """Three quarters of the memory that this machine or control group has, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * _PAGE]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits) * 3 // 4


def exit_text(status: int) -> str:
    """How a process ended, from its return code in the manner of ``subprocess``."""
    if status >= 0:
        return f"exited with status {status} and no answer"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def log_tail(path: Path, start: int = 0) -> str:
    """The end of a log, not before ``start``; empty where there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - TAIL, start if start <= size else 0))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def where(text: str) -> str:
    """The innermost Python frame of the last stack that ``faulthandler`` wrote, as ``in run (mine.py:12)``."""
    stack = text.rpartition("(most recent call first):")[2] if "(most recent call first):" in text else ""
    found = _LOCATION.search(stack)
    return f"in {found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""


def one_line(text: str) -> str:
    """Text on one line of printable characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def flat(text: str) -> str:
    """Text on one line of printable characters, of which the last `MAX_LINE` are kept."""
    line = one_line(text)
    return line if len(line) <= MAX_LINE else "..." + line[3 - MAX_LINE :]


def summary(text: str) -> str:
    """What a log's tail says about a death, in one line: the fatal error and its place, else the last lines."""
    lines = [flat(line) for line in text.splitlines()]
    fatal = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error:")), None)
    if fatal is None:
        return flat(" | ".join([line for line in lines if line][-3:]))
    before = next((f"{line} |" for line in reversed(lines[:fatal]) if line), "")
    return " ".join(filter(None, (before, lines[fatal], where(text))))
