"""What the commands share: options, defaults, and how words become numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from conformance.discover import UsageError

SEED = 20261130
"""The seed of a plan unless another is given: the same on every machine and day."""
MEMORY_LIMIT = "8GiB"
DEADLINE = "30s"
SHRINK = "60s"
"""For making the failures of a run smaller."""
WIDTH = 160
"""Columns of a table where the output is no terminal."""


def many(name: str, metavar: str, text: str) -> Any:
    """An option that may be given several times."""
    return typer.Option(name, metavar=metavar, help=f"{text} Repeatable.")


Devices = Annotated[list[str] | None, many("--device", "NAME", "Use this device only, such as cuda:1.")]
Plugins = Annotated[list[str] | None, many("--plugin", "FILE|MODULE", "Load further backends.")]
Memory = Annotated[str, typer.Option("--memory-limit", metavar="SIZE", help="Resident memory of a worker.")]
Deadline = Annotated[str, typer.Option(metavar="DURATION", help="Longest time for one call.")]
LedgerFile = Annotated[Path, typer.Option("--ledger", metavar="FILE", help="Known failures.")]
Environments = Annotated[Path, typer.Option(metavar="DIR", help="Where releases are installed.")]
NoDeps = Annotated[bool, typer.Option("--no-deps", help="Install releases without what they ask for.")]
NoLedger = Annotated[bool, typer.Option("--no-ledger", help="Take no failure as known.")]


def plain_console() -> Console:
    """Standard output, in tables too without markup: what a backend says of itself may hold brackets."""
    return Console(markup=False)


def wide_console() -> Console:
    """For tables: a terminal's own width, else room for every column."""
    console = plain_console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH, markup=False)


def parsed(option: str, parse: Callable[[str], Any], text: str) -> Any:
    """The value of an option. Raises `UsageError` that names it."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
