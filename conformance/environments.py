"""Interpreters with one package at one version, made from the package index that pip is configured for.

Such an environment lies over the interpreter that makes it: what is installed there can be imported here too, and only
the package, and what it needs in another version, is installed anew. So a release of a library costs its own size, and
two releases differ in nothing else. Only the standard library and ``packaging`` are imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from conformance.discover import UsageError

FOLDER = Path("out/environments")
STAMP = "environment.json"
"""Written last: an environment without it was not finished."""
INSTALL_DEADLINE = 3600.0
LIST_DEADLINE = 120.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9.!+_-]+)\Z")
_SITES = """
import json, sys
print(json.dumps([path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages"))]))
"""
_VERSION = "import importlib.metadata as metadata, sys; print(metadata.version(sys.argv[1]))"


@dataclass(frozen=True)
class Release:
    """One version of a distribution: its name in canonical form, its version."""

    name: str
    version: Version

    @classmethod
    def parse(cls, text: str) -> Release | None:
        """The release that ``NAME==VERSION`` names; None for a text of another form. Raises `UsageError`."""
        match = _REQUIREMENT.match(text)
        if match is None:
            return None
        try:
            return cls(canonicalize_name(match[1]), Version(match[2]))
        except InvalidVersion:
            raise UsageError(f"{text}: {match[2]!r} is no version") from None

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def create(
    release: Release,
    folder: Path = FOLDER,
    *,
    python: str = sys.executable,
    dependencies: bool = True,
    beside: Sequence[str] = (),
) -> str:
    """The interpreter of an environment with this release, made if it is not there yet. Raises `UsageError`.

    folder: of all environments. python: the interpreter that it lies over. dependencies: install what the release asks
    for and ``python`` lacks. beside: distributions to install as well, with what they ask for.
    """
    place = folder.absolute() / f"{release.name}-{release.version}-{_tag(python, dependencies, beside)}"
    own = str(place / "bin" / "python")
    if (place / STAMP).is_file():
        return own
    try:
        lay_over(place, python, own)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}") from None
    install = ["--python", own, "install", "--quiet", "--no-input"]
    _pip(
        python,
        [*install, *["--no-deps"] * (not dependencies), str(release)],
        f"cannot install {release}",
        INSTALL_DEADLINE,
    )
    if beside:
        _pip(python, [*install, *beside], f"cannot install {' '.join(beside)}", INSTALL_DEADLINE)
    found = _run([own, "-I", "-c", _VERSION, release.name], f"{release} is not in {place} after its installation")
    if Version(found.strip()) != release.version:
        raise UsageError(f"pip installed {release.name} {found.strip()}, not {release.version}")
    stamp = {"release": str(release), "python": python, "dependencies": dependencies, "beside": list(beside)}
    (place / STAMP).write_text(json.dumps(stamp, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return own


def releases(name: str, *, python: str = sys.executable, prereleases: bool = False) -> list[Version]:
    """The versions that pip can install for an interpreter, oldest first. Raises `UsageError`."""
    command = ["index", "versions", *["--pre"] * prereleases, name]
    said = _pip(python, command, f"cannot list the releases of {name}", LIST_DEADLINE)
    line = next((line for line in said.splitlines() if line.startswith("Available versions:")), "")
    versions = []
    for word in line.partition(":")[2].split(","):
        try:
            versions.append(Version(word.strip()))
        except InvalidVersion:
            continue
    return sorted(versions)


def between(name: str, first: Version, last: Version, *, python: str = sys.executable) -> list[Version]:
    """The releases from ``first`` to ``last``, both included, oldest first. Raises `UsageError`.

    Pre-releases count where either end is one.
    """
    if first >= last:
        raise UsageError(f"{name} {first} is not older than {last}")
    found = releases(name, python=python, prereleases=first.is_prerelease or last.is_prerelease)
    for version in (first, last):
        if version not in found:
            raise UsageError(f"there is no release {name} {version}; the newest are {_newest(found)}")
    return [version for version in found if first <= version <= last]


def _newest(versions: Sequence[Version]) -> str:
    return ", ".join(map(str, versions[:-6:-1])) or "none"


def _tag(python: str, dependencies: bool, beside: Sequence[str]) -> str:
    """Tells environments of one release apart: by the interpreter below, and by what was installed."""
    text = "\n".join((str(Path(python).absolute()), str(Path(python).resolve()), str(dependencies), *beside))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def lay_over(place: Path, python: str, own: str) -> None:
    """Make an empty environment at ``place``, with ``own`` as its interpreter, over another. Raises `UsageError`."""
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    sites = json.loads(_run([python, "-I", "-c", _SITES], f"{python} does not run"))
    _run([python, "-m", "venv", "--without-pip", str(place)], f"cannot make {place}")
    [mine] = json.loads(_run([own, "-I", "-c", _SITES], f"{own} does not run"))
    # addsitedir, and not the path alone, so that the .pth files below are read as well.
    lines = [f"import site; site.addsitedir({path!r})" for path in sites]
    Path(mine, "zz_below.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _pip(python: str, arguments: Sequence[str], failing: str, deadline: float) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return _run(command, failing, deadline=deadline, environment={"PIP_REQUIRE_VIRTUALENV": "0"})


def _run(
    command: Sequence[str], failing: str, *, deadline: float = 300.0, environment: dict[str, str] | None = None
) -> str:
    """What a command prints. Raises `UsageError`: what failed, and the last line that says why."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "PIP_PREFIX")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline, env=kept | (environment or {}), check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{failing}: no end within {deadline:g} s") from None
    except OSError as error:
        raise UsageError(f"{failing}: {error.strerror or error}") from None
    if done.returncode:
        raise UsageError(f"{failing}: {_reason(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def _reason(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("ERROR:")] or lines
    return " ".join(said[-1].removeprefix("ERROR:").split())[:400] if said else ""
