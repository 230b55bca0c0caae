"""What the command line asks a run for, and the exit codes that a run ends with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from conformance import sweeps
from conformance.engine import Limits

OK, FAILED, USAGE, HARNESS, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes: conformant; non-conformant; usage error, nothing executed included; harness failure; Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for; see ``conformance.cli`` for the meaning of each option.

    corpus: a folder of kept cases beside those that ship; no case is replayed if None. shrink: seconds for making
    failures smaller. gates: libraries whose architecture gates are asked first, and are a section of the reports.
    """

    backends: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    cases: int | None = None
    least: int | None = None
    most: int | None = None
    texts: tuple[str, ...] = ()
    plan: Path | None = None
    seed: int = 0
    out: Path = Path("out/conformance")
    plugins: tuple[str, ...] = ()
    memory_limit: int | None = None
    resume: bool = False
    reverse: bool = False
    corpus: Path | None = None
    shrink: float = 0.0
    sweep: str = sweeps.ALL
    gates: tuple[str, ...] = ()
    shapes: str = "drawn"
    judge: str = "cpu"
    keep_selections: bool = False
    limits: Limits = field(default_factory=Limits)
    command: str = ""
