"""Which backends there are, which interpreter runs each, and which devices are at hand.

Nothing of a backend is imported here: its worker does that. Only the standard library is used, so that the parent
stays free of torch and CUDA.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from conformance.launch import BackendSource, package_roots
from conformance.process import Worker

GROUP = "conformance.backends"
"""The entry-point group under which other distributions offer backends."""
CONFIG = "conformance.toml"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)
_OFFER = re.compile(r"^(?:async )?def backends\(|^backends\s*[=:]|^from .* import .*\bbackends\b", re.MULTILINE)
_NAMES = re.compile(r"^NAMES = (\(.*?\))$", re.MULTILINE | re.DOTALL)
_SITE = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


MOST_NAMES = 50
"""Names that an error message lists; of more it lists the likely ones."""


class UsageError(Exception):
    """What the user asked for cannot be: exit code 2. The message is one line."""


def builtin_sources() -> list[BackendSource]:
    """The modules of ``conformance.backends`` that offer ``backends()``, by name; they are read, not imported.

    Their ``NAMES = ("...",)`` are the names of the backends that they offer, where they run.
    """
    sources = []
    for path in sorted(Path(package_roots()["conformance"], "backends").glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if _OFFER.search(text):
            names = _NAMES.search(text)
            sources.append(
                BackendSource(
                    kind="builtin",
                    location=f"conformance.backends.{path.stem}",
                    name=path.stem,
                    names=ast.literal_eval(names[1]) if names else (),
                )
            )
    return sources


def check_names(names: Sequence[str], sources: Iterable[BackendSource]) -> None:
    """Raises `UsageError` for the name of a backend that no source offers, before any is imported.

    A source that does not say its names beforehand, as plugins do not, may offer any.
    """
    sources = list(sources)
    if all(source.names for source in sources):
        known = {name for source in sources for name in source.names}
        for name in names:
            if name not in known:
                raise UsageError(unknown("backend", name, sorted(known)))


def unknown(word: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that there is not: which one is meant, if that can be told, and all that there are."""
    known = list(known)
    if len(known) > MOST_NAMES:
        like = difflib.get_close_matches(name, known, 8, 0.4)
        return f"unknown {word} {name!r}" + (f"; like it: {', '.join(like)}" if like else f"; there are {len(known)}")
    meant = difflib.get_close_matches(name, known, 1, 0.75)
    hint = f" (do you mean {meant[0]!r}?)" if meant else ""
    return f"unknown {word} {name!r}{hint}; known: {', '.join(known) or 'none'}"


def entry_point_sources(group: str = GROUP) -> list[BackendSource]:
    """The backends that installed distributions offer, by name."""
    sources = []
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        roots = _roots(point.module, sys.path)
        location = point.value.partition("[")[0].strip()  # extras are not ours to install
        sources.append(BackendSource(kind="entry_point", location=location, name=point.name, roots=roots or ()))
    return sources


def sources(plugins: Sequence[str] = (), pythons: Mapping[str, str] | None = None) -> list[BackendSource]:
    """Every source: built in, installed, and the plugins named. Raises `UsageError` for a plugin that is not there.

    pythons: as `environments` gives, which is asked if None.
    """
    pythons = environments() if pythons is None else pythons
    found = [*builtin_sources(), *entry_point_sources(), *(plugin_source(text, pythons) for text in plugins)]
    return list(dict.fromkeys(found))


def plugin_source(text: str, pythons: Mapping[str, str] | None = None, folder: Path | None = None) -> BackendSource:
    """The source that ``--plugin FILE_OR_MODULE`` names. Raises `UsageError`.

    text: a path that ends in ``.py`` or holds a slash, else a dotted module name. pythons: as `environments` gives; a
    module with an interpreter of its own may be installed there alone. folder: where relative paths start and where
    modules are found before ``sys.path``; the working directory if None.
    """
    folder = (folder or Path.cwd()).absolute()
    if text.endswith(".py") or os.sep in text:
        path = folder / Path(text).expanduser()
        if not path.is_file():
            raise UsageError(f"--plugin {text}: not a file" if path.exists() else f"--plugin {text}: no such file")
        return BackendSource(kind="plugin_file", location=str(path), name=path.stem)
    if not _MODULE.match(text):
        raise UsageError(f"--plugin {text}: neither a .py file nor a module's name")
    source = BackendSource(kind="plugin_module", location=text, name=text.rpartition(".")[2])
    roots = _roots(text, [str(folder), *sys.path])
    if roots is None and python_for(source, pythons or {}) is None:
        raise UsageError(f"--plugin {text}: no such module")
    return dataclasses.replace(source, roots=roots or ())


def _roots(module: str, path: Sequence[str]) -> tuple[tuple[str, str], ...] | None:
    """The top-level package of a module and its place, found without importing anything; None if there is no module.

    Nothing for a module in this interpreter's site-packages: a worker looks into its own, which may be another's.
    """
    search = list(path)
    first = module.partition(".")[0]
    place = None
    for word in module.split("."):
        spec = PathFinder.find_spec(word, search)  # the bare word: a dotted name would need its parent imported
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or ())
        place = place or _place(spec)
    if place is None or {str(parent) for parent in Path(place).parents} & set(_SITE):
        return ()
    return ((first, place),)


def _place(spec: ModuleSpec | None) -> str | None:
    if spec is None:
        return None
    locations = list(spec.submodule_search_locations or ())
    return locations[0] if locations else spec.origin


def environments(config: Path | None = None, folder: Path | None = None) -> dict[str, str]:
    """Backend -> Python executable (see `python_for`), from the configuration. Raises `UsageError`.

    The table is ``[environments]`` in ``conformance.toml``, or ``[tool.conformance.environments]`` in
    ``pyproject.toml``, of the folder (the working directory if None); ``config`` names either file outright. A value
    is an executable or the folder of a virtual environment, relative to the file.
    """
    folder = (folder or Path.cwd()).absolute()
    if config is not None and not config.is_file():
        raise UsageError(f"{config}: no such file")
    for path in [config] if config else [folder / CONFIG, folder / "pyproject.toml"]:
        if path.is_file():
            table = _table(path)
            if table is not None:
                return {name: _executable(path, name, value) for name, value in table.items()}
    return {}


def _table(path: Path) -> dict[str, Any] | None:
    try:
        data: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    for key in ("tool", "conformance") if path.name == "pyproject.toml" else ():
        data = data.get(key, {}) if isinstance(data, dict) else {}
    table = data.get("environments") if isinstance(data, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{path}: environments is not a table")
    return table


def _executable(config: Path, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{config}: environments.{name} is not a path")
    found = config.absolute().parent / Path(value).expanduser()
    if found.is_dir():
        found = found / "bin" / "python"
    elif not found.exists() and os.sep not in value:
        found = Path(shutil.which(value) or found)
    if not found.is_file() or not os.access(found, os.X_OK):
        raise UsageError(f"{config}: environments.{name}: {value} is no Python executable and no virtual environment")
    return str(found)  # not resolved: a virtual environment is known by the link's own place


def python_for(source: BackendSource, pythons: Mapping[str, str]) -> str | None:
    """The interpreter for a source, None for this one.

    A key is a source's name or the words that it starts with: ``flashinfer`` serves ``flashinfer_quant`` unless that
    has a key of its own. ``-`` and ``_`` are the same.
    """
    words = source.name.replace("-", "_").split("_")
    keys = {tuple(key.replace("-", "_").split("_")): python for key, python in pythons.items()}
    return next((keys[tuple(words[:n])] for n in range(len(words), 0, -1) if tuple(words[:n]) in keys), None)


def devices(python: str | None = None) -> list[str]:
    """``cpu`` and the CUDA devices at hand, ``cuda:0`` and up. Raises ``WorkerFailed``.

    A worker is asked, since CUDA must not be initialised here; where no driver is loaded that is not needed.
    """
    if not any(Path(path).exists() for path in _DRIVERS):
        return ["cpu"]
    with Worker(None, python=python) as worker:
        return worker.devices()
