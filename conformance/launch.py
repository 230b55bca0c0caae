"""How a worker is started: its interpreter, its environment, its import path, its descriptors.

A worker sees its interpreter's own standard library and site-packages, our four packages, the source that it serves
and nothing else: no working directory, no user site, no ``PYTHON*`` variable. Only the standard library is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

PACKAGES = ("references", "fuzz", "conformance", "reports")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

Kind = Literal["builtin", "plugin_file", "plugin_module", "entry_point"]


@dataclass(frozen=True, kw_only=True)
class BackendSource:
    """Where backends come from.

    kind: what ``location`` is. location: an absolute path for ``plugin_file``, else a module's dotted name, for
    ``entry_point`` as ``MODULE`` or ``MODULE:FUNCTION``. name: a short name, its key in ``[environments]``: the file's
    stem, the module's last part or the entry point's name. roots: (top-level name, file or folder) of what must be made
    importable in the worker beside its own site-packages. names: of its backends, if known without importing it.
    """

    kind: Kind
    location: str
    name: str
    roots: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How messages call it, such as ``plugin mine.py`` or ``backend torch_cast``."""
        match self.kind:
            case "builtin":
                return f"backend {self.name}"
            case "plugin_file":
                return f"plugin {Path(self.location).name}"
            case "plugin_module":
                return f"plugin {self.location}"
            case "entry_point":
                return f"entry point {self.name}"


def package_roots() -> dict[str, str]:
    """Our packages and the folders in which this process would find them; none is imported for it."""
    roots = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"package {name} is not importable")
        roots[name] = str(Path(next(iter(spec.submodule_search_locations))).absolute())
    return roots


def command(python: str, config: Mapping[str, Any]) -> list[str]:
    """The command line of a worker: isolated (-I), unbuffered (-u), its configuration as one JSON argument."""
    boot = Path(__file__).with_name("worker_boot.py").absolute()
    return [python, "-I", "-u", str(boot), json.dumps(config, separators=(",", ":"))]


def environment(base: Mapping[str, str], python: str, threads: int | None) -> dict[str, str]:
    """A worker's environment variables.

    base: usually ``os.environ``; loses its ``PYTHON*`` variables, keeps all else (``CUDA_VISIBLE_DEVICES`` included).
    python: its folder comes first on ``PATH``, for the tools that live beside an interpreter (a JIT's ninja, say).
    threads: limit for OpenMP, MKL and OpenBLAS; None leaves them alone.
    """
    kept = {key: value for key, value in base.items() if not key.startswith("PYTHON")}
    kept["PATH"] = os.pathsep.join(filter(None, (str(Path(python).parent), base.get("PATH", os.defpath))))
    if threads is not None:
        kept |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    return kept


def spawn(
    python: str,
    source: BackendSource | None,
    *,
    device: str,
    threads: int | None,
    descriptor: int,
    log: IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start a worker in a session of its own. Raises OSError where the interpreter does not start.

    source: None for the oracle. descriptor: the worker's end of the channel. log: takes its stdout and stderr.
    """
    config = {
        "packages": package_roots(),
        "roots": dict(source.roots) if source else {},
        "source": source and {"kind": source.kind, "location": source.location, "label": source.label},
        "device": device,
        "threads": threads,
        "descriptor": descriptor,
        "parent": os.getpid(),
    }
    return subprocess.Popen(
        command(python, config),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment(os.environ, python, threads),
        pass_fds=(descriptor,),
        start_new_session=True,
    )
