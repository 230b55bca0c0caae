"""The first file that a worker runs: protects the machine, opens the import path, then enters the loop.

It runs as a script under ``python -I`` with its configuration as one JSON argument (see ``conformance.launch``), in
any interpreter from Python 3.10 on; until the import path is open it uses the standard library only.
"""

import contextlib
import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Finder:
    """Finds a few top-level names at fixed places, before anything of the same name in site-packages."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of one of our top-level names; a submodule follows from its package's ``__path__``."""
        place = self._places.get(name)
        if place is None:
            return None
        if not Path(place).is_dir():
            return importlib.util.spec_from_file_location(name, place)
        initial = Path(place) / "__init__.py"
        if initial.is_file():
            return importlib.util.spec_from_file_location(name, initial, submodule_search_locations=[place])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [place]
        return spec


def narrowed(path: list[str], packages: dict[str, str]) -> list[str]:
    """The import path without the folder that our packages lie in, which an editable installation puts there.

    Where that folder is the interpreter's own site-packages, it stays.
    """
    roots = {os.path.realpath(Path(place).parent) for place in packages.values()}
    kept = ("site-packages", "dist-packages")
    return [entry for entry in path if os.path.realpath(entry) not in roots or Path(entry).name in kept]


def protect(parent: int) -> None:
    """Die with the parent, be the kernel's first choice when memory ends, leave traces but no core files."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent was gone before the signal was asked for
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)


def main() -> None:
    """Read the configuration and enter the loop."""
    config = json.loads(sys.argv[1])
    sys.argv = sys.argv[:1]
    protect(config["parent"])
    os.set_inheritable(config["descriptor"], False)
    sys.path[:] = narrowed(sys.path, config["packages"])
    sys.meta_path.insert(0, Finder({**config["roots"], **config["packages"]}))
    from conformance.worker import serve

    serve(config)


if __name__ == "__main__":
    main()
