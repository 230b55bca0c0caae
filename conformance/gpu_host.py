"""One run on a host without a package index: ``python3 -m conformance.gpu_host FOLDER [-- ARGUMENTS]``.

FOLDER holds wheels and ``.tar.xz`` archives of packages, brought along (docs/gpu-host.md). They go into an environment
that lies over this interpreter, which is not changed; ``python -m conformance run ARGUMENTS`` is then executed in it.
The environment is kept for the next piece of a run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from conformance import environments
from conformance.discover import UsageError

USAGE = "usage: python3 -m conformance.gpu_host FOLDER [-- ARGUMENTS of conformance run]"
ARCHIVE = "*.tar.xz"
COMPLETE = "complete"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment and run; the run's exit code, or 2 and one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    words, rest = given[:end], given[end + 1 :]
    try:
        if len(words) != 1:
            raise UsageError(USAGE)
        python = environment(Path(words[0]), environments.FOLDER)
    except UsageError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    return subprocess.run([python, "-m", "conformance", "run", *rest], check=False).returncode


def environment(brought: Path, folder: Path) -> str:
    """The interpreter of an environment that holds what was brought, made where it is not there yet.

    folder: of all environments. Raises `UsageError`.
    """
    if not brought.is_dir():
        raise UsageError(f"{brought}: no such folder")
    files = sorted([*brought.glob("*.whl"), *brought.glob(ARCHIVE)])
    if not files:
        raise UsageError(f"{brought}: holds no wheel and no {ARCHIVE}")
    sizes = "\n".join(f"{file.name} {file.stat().st_size}" for file in files)
    place = folder.absolute() / f"brought-{hashlib.sha256(f'{sys.executable} {sizes}'.encode()).hexdigest()[:8]}"
    python = place / "bin" / "python"
    if (place / COMPLETE).exists():
        return str(python)
    shutil.rmtree(place, ignore_errors=True)
    try:
        environments.lay_over(place, sys.executable, str(python))
        site = next((place / "lib").glob("python*/site-packages"))
        for file in files:
            _install(file, site)
        (place / COMPLETE).touch()
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}") from None
    return str(python)


def _install(file: Path, site: Path) -> None:
    if file.suffix == ".whl":
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
        kept = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_REQUIRE_VIRTUALENV": "0"}
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, env=kept, check=False)
        if done.returncode:
            raise UsageError(f"{file}: {' '.join(done.stderr.split())[-300:]}")
        return
    try:
        with tarfile.open(file) as archive:
            archive.extractall(site, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(f"{file}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
