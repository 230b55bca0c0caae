"""The sides of a comparison: a finished run, or backends in some interpreter at some revision."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance import discover, environments, journal
from conformance.discover import UsageError
from conformance.environments import Release
from conformance.launch import BackendSource
from conformance.targets import Fleet
from reports.record import Record

_BACKEND = re.compile(r"([A-Za-z0-9_.+-]{1,64})(?:@(cpu|cuda:[0-9]+))?\Z")
_REVISION = re.compile(r"(.+\.py)@([^@\s-][^@\s]*)\Z")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished run. label: what the user called it. run: its run.json."""

    label: str
    records: tuple[Record, ...]
    run: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Live:
    """Backends to be run. python: their interpreter, the configured one if None. alone: their only source.

    backends, devices: those named, all if empty. package: the distribution that the side is about, if it is one.
    """

    label: str
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    python: str | None = None
    alone: BackendSource | None = None
    package: str = ""

    def fleet(self, log_dir: Path | None, memory_limit: int | None, *, judges: bool = True) -> Fleet:
        """The workers of this side."""
        return Fleet(self.plugins, log_dir, memory_limit, python=self.python, alone=self.alone, judges=judges)


Side = Finished | Live


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both sides have in common; see the options of ``compare``."""

    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    environments: Path = environments.FOLDER
    dependencies: bool = True


def both(base: str, head: str, options: Options) -> list[Side]:
    """The two sides; what has to be installed comes last, when the other is known to be one. Raises `UsageError`."""
    order = sorted({base, head}, key=lambda text: (_is_release(text), text != base))
    found = {text: parse(text, options) for text in order}
    return [found[base], found[head]]


def _is_release(text: str) -> bool:
    try:
        return not Path(text).expanduser().is_dir() and Release.parse(text) is not None
    except UsageError:
        return False


def parse(text: str, options: Options) -> Side:
    """The side that a text names; a package is installed and a revision is checked out for it. Raises `UsageError`.

    text: a run's directory; ``NAME==VERSION``; a virtual environment or an interpreter; ``PLUGIN.py``, with ``@REV`` at
    a git revision; the name of a backend, with ``@DEVICE`` on a device.
    """
    named = Live(label=text, backends=options.backends, devices=options.devices, plugins=options.plugins)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / journal.RUN).exists():
            return _finished(text, path, options.backends)
        if not (path / "bin" / "python").exists():
            raise UsageError(f"{text}: neither a run (no {journal.RUN}) nor a virtual environment (no bin/python)")
        return replace(named, python=str(path.absolute() / "bin" / "python"))
    release = Release.parse(text)
    if release is not None:
        python = environments.create(release, options.environments, dependencies=options.dependencies)
        return replace(named, python=python, package=release.name)
    revision = _REVISION.match(text)
    if revision is not None:
        file = checkout(Path(revision[1]), revision[2], options.environments)
        return replace(named, alone=discover.plugin_source(str(file)))
    if path.is_file():
        if path.suffix == ".py":
            return replace(named, alone=discover.plugin_source(str(path.absolute())))
        if os.access(path, os.X_OK):
            return replace(named, python=str(path.absolute()))
        raise UsageError(f"{text}: neither a plugin (.py) nor an interpreter")
    backend = _BACKEND.match(text)
    if backend is None or text.endswith(".py"):
        raise UsageError(f"{text}: no such file or directory, and no backend, NAME==VERSION or PLUGIN.py@REV either")
    device = (backend[2],) if backend[2] else options.devices
    return Live(label=text, backends=(backend[1],), devices=device, plugins=options.plugins)


def _finished(label: str, path: Path, backends: Sequence[str]) -> Finished:
    run = journal.read_run(path)
    if not run.get("complete"):
        raise UsageError(f"{label}: the run is not complete; finish it with --resume")
    records = journal.read_records(path / journal.RECORDS)
    chosen = [record for record in records if not backends or record.backend in backends]
    if not chosen:
        known = ", ".join(sorted({record.backend for record in records})) or "nothing"
        raise UsageError(f"{label}: the run has no backend {', '.join(backends)}; it has {known}")
    return Finished(label=label, records=tuple(chosen), run=run)


def checkout(plugin: Path, revision: str, folder: Path) -> Path:
    """A plugin as it was at a git revision, with its whole repository beside it. Raises `UsageError`.

    The repository is only read: its files are written under ``folder`` by way of an index of their own.
    """
    place = plugin.expanduser().absolute()
    label = f"{plugin}@{revision}"
    if not place.parent.is_dir():
        raise UsageError(f"{label}: no directory {plugin.parent}")
    top = Path(_git(place.parent, label, "rev-parse", "--show-toplevel"))
    commit = _git(place.parent, label, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    inside = place.resolve().relative_to(top.resolve()) if place.exists() else place.relative_to(top)
    tag = hashlib.sha256(str(top).encode()).hexdigest()[:8]
    target = folder.absolute() / f"{top.name}-{commit[:12]}-{tag}"
    if not (target / inside).is_file():
        target.mkdir(parents=True, exist_ok=True)
        index = {"GIT_INDEX_FILE": str(target.with_name(f".{target.name}.{os.getpid()}.index"))}
        try:
            _git(top, label, "read-tree", commit, environment=index)
            _git(top, label, "checkout-index", "--all", "--force", f"--prefix={target}/", environment=index)
        finally:
            Path(index["GIT_INDEX_FILE"]).unlink(missing_ok=True)
    if not (target / inside).is_file():
        raise UsageError(f"{label}: there is no {inside} at {commit[:12]}")
    return target / inside


def _git(folder: Path, label: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{label}: git: {error}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UsageError(f"{label}: git {words[0]}: {last[0].removeprefix('fatal: ')}")
    return done.stdout.strip()
