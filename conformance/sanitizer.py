"""After a crash on a GPU: the case once more under NVIDIA's compute-sanitizer, where that is installed.

A kernel that reads or writes beyond its memory is often noticed calls later, and says nothing of its place. The case is
run again as its repro line says, in processes of its own, and the tool's log goes beside the run's other files.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from reports.record import Record

TOOL = "compute-sanitizer"
FOLDER = "sanitizer"
DEADLINE = 120.0
"""Seconds for one case; instrumented kernels are ten to a hundred times slower."""
MOST = 3
"""Crashes that are looked at in one run: each of another backend and operation."""
_ERROR = re.compile(r"^=+ +(?!COMPUTE-SANITIZER)(?P<what>\S.*)$")
_NOISE = ("ERROR SUMMARY", "Target application returned", "Process didn't terminate", "Error: process", "LEAK SUMMARY")


def after_crashes(records: Iterable[Record], folder: Path, plugins: tuple[str, ...]) -> Iterator[str]:
    """A line for each unexplained crash on a CUDA device that is looked at; nothing where the tool is not installed.

    folder: of the run. plugins: those of the run.
    """
    tool = shutil.which(TOOL)
    if tool is None:
        return
    chosen: dict[tuple[str, str, str], Record] = {}
    for record in records:
        if record.verdict == "crash" and not record.ledger_id and record.device.startswith("cuda"):
            chosen.setdefault((record.backend, record.operation, record.variant), record)
    for record in list(chosen.values())[:MOST]:
        log = folder / FOLDER / f"{record.backend}-{record.id}.log"
        said = check(tool, record, log, plugins)
        yield f"{TOOL}: {record.backend} on {record.device}, '{record.case}': {said} ({log})"


def check(tool: str, record: Record, log: Path, plugins: tuple[str, ...]) -> str:
    """Run a record's case under the tool and say in a few words what it found. log: takes all that it says."""
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "conformance", "repro", record.case, "--backend", record.backend]
    words += ["--device", record.device, "--deadline", f"{DEADLINE:g}s"]
    words += [word for option in record.options.split() for word in ("--option", option)]
    words += [word for plugin in plugins for word in ("--plugin", plugin)]
    command = [tool, "--tool", "memcheck", "--target-processes", "all", "--log-file", str(log), *words]
    try:
        subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=DEADLINE + 60, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {DEADLINE + 60:g} s"
    except OSError as error:
        return f"does not start: {error.strerror or error}"
    try:
        return found(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return "wrote no log"


def found(text: str) -> str:
    """The first error in a log, with the kernel that it names."""
    lines = [match["what"].strip() for line in text.splitlines() if (match := _ERROR.match(line))]
    lines = [line for line in lines if not line.startswith(_NOISE)]
    if not lines:
        return "no error found"
    where = next((line for line in lines[1:4] if line.startswith("at ")), "")
    return f"{lines[0]} {where}".strip()[:400]
