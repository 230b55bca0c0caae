"""The output directory of a run and its journal, ``records.jsonl``: the file that every other one is derived from.

Records are appended and flushed as they come, those of one case together, so that killing the process loses at most
the case being written. ``run.json`` says which plan and versions the records belong to, and whether they are all there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from reports.files import replace_text
from reports.record import Record, RecordError

TOOL = "blockscale-conformance"
RECORDS, RUN, LOGS, PLAN, LAUNCHED = "records.jsonl", "run.json", "logs", "plan.txt", "launched.jsonl"
DERIVED = ("results.parquet", "results.csv", "report.md", "report.html", "junit.xml")
SELECTIONS = "selections"
FOLDERS = ("capsules", "gating", "sanitizer", SELECTIONS)
"""Folders that a run fills and the next one removes."""
OWN = (RECORDS, RUN, LOGS, PLAN, LAUNCHED, *DERIVED, *FOLDERS)
_TEMPORARY = re.compile(r"\.(.+)\.[0-9]+\.tmp\Z")  # see reports.files
_LOG = re.compile(r".+-([0-9]+)-[0-9]+\.log\Z")  # see process.Worker.log

Key = tuple[str, str, str, str]
"""What is complete or not: (case, backend, device, options)."""


class JournalError(ValueError):
    """An output directory or journal that cannot be used; the message is one line."""


def key_of(record: Record) -> Key:
    """The case, backend, device and options that a record belongs to."""
    return (record.case, record.backend, record.device, record.options)


def write_run(out: Path, run: Mapping[str, Any]) -> None:
    """Write run.json, whole or not at all."""
    replace_text(out / RUN, json.dumps(run, indent=2, sort_keys=True) + "\n")


def read_run(out: Path) -> dict[str, Any]:
    """The contents of run.json. Raises `JournalError`."""
    try:
        run = json.loads((out / RUN).read_text(encoding="utf-8"))
    except OSError as error:
        raise JournalError(f"{out / RUN}: {error.strerror}") from None
    except ValueError as error:
        raise JournalError(f"{out / RUN}: {error}") from None
    if not isinstance(run, dict) or run.get("tool") != TOOL:
        raise JournalError(f"{out / RUN}: not written by {TOOL}")
    return run


def read_records(path: Path) -> list[Record]:
    """The records of a journal. Only a last line without its newline is tolerated, and dropped."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}") from None
    lines = text.split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or truncated
        try:
            records.append(Record.from_line(line))
        except (RecordError, TypeError) as error:
            raise JournalError(f"{path}:{number}: {error}") from None
    return records


def whole_cases(records: Sequence[Record]) -> list[Record]:
    """The records without those of the last case, which may lack some where the writer was killed."""
    if not records:
        return []
    last = key_of(records[-1])
    end = len(records)
    while end and key_of(records[end - 1]) == last:
        end -= 1
    return list(records[:end])


def make_writable(path: Path, check: Callable[[], None] = lambda: None) -> None:
    """Make a directory and see that it can be written, before any work is put into what goes there.

    check: what else is asked of the directory before anything is written. Raises `JournalError`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        check()
        probe = path / f".{RUN}.{os.getpid()}.tmp"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise JournalError(f"--out {path}: nothing can be written there ({error.strerror or error})") from None


class OutDirectory:
    """A directory that belongs to one run while it lasts: made, checked and locked. `clear` starts the run.

    Raises `JournalError` if it cannot be written, holds files that no run wrote, or is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_writable(path, self._check_owned)
        self._lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalError(f"--out {path}: another run is writing there") from None

    def _check_owned(self) -> None:
        names = sorted(entry.name for entry in self.path.iterdir() if not _left_over(entry.name))
        foreign = [name for name in names if name not in OWN]
        if foreign:
            raise JournalError(f"--out {self.path}: holds {foreign[0]}, which no run wrote; choose another directory")
        if set(names) - {LOGS} and RUN not in names:
            raise JournalError(f"--out {self.path}: holds {names[0]} but no {RUN}; choose another directory")
        if RUN in names:
            read_run(self.path)

    def clear(self, run: Mapping[str, Any], *, resume: bool = False) -> None:
        """Write run.json and remove what an earlier run left, so that nothing looks like a finished report.

        run: the description of the new run, not complete. resume: keep the journal.
        """
        write_run(self.path, run)
        kept = (RUN, LOGS, RECORDS, PLAN) if resume else (RUN, LOGS)
        for entry in list(self.path.iterdir()):
            if entry.name in FOLDERS and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif _left_over(entry.name) or entry.name in set(OWN) - set(kept):
                entry.unlink()
        for log in (self.path / LOGS).glob("*.log"):
            match = _LOG.match(log.name)
            if match and int(match[1]) != os.getpid():
                log.unlink()

    def close(self) -> None:
        """Let another run have the directory."""
        os.close(self._lock)


def _left_over(name: str) -> bool:
    match = _TEMPORARY.match(name)
    return match is not None and match[1] in OWN


class Journal:
    """Appends records to ``records.jsonl``; safe to share between threads.

    kept: records of an earlier run that stay (`--resume`); the file is rewritten with them first.
    """

    def __init__(self, out: Path, kept: Iterable[Record] = ()) -> None:
        self._mutex = Lock()
        self.records = list(kept)
        replace_text(out / RECORDS, _lines(self.records))
        self._file = (out / RECORDS).open("a", encoding="utf-8")
        self._launched = (out / LAUNCHED).open("w", encoding="utf-8")

    def launching(self, key: Key) -> None:
        """Note, before anything is executed, which case a worker is about to run."""
        with self._mutex:
            self._launched.write(json.dumps(key) + "\n")
            self._launched.flush()

    def write(self, records: Sequence[Record]) -> None:
        """Append the records of one case, together, and flush."""
        with self._mutex:
            self.records.extend(records)
            self._file.write(_lines(records))
            self._file.flush()

    def close(self) -> None:
        """Close the files; with nothing in flight, the list of what was launched has no more use."""
        with contextlib.suppress(OSError):
            self._file.close()
            self._launched.close()
        Path(self._launched.name).unlink(missing_ok=True)


def _lines(records: Iterable[Record]) -> str:
    return "".join(record.to_line() + "\n" for record in records)
