"""``python -m conformance environments NAME...``: interpreters for libraries with conflicting pins, and their table.

Each NAME is a backend's library, or ``NAME==VERSION``; an environment with it is made over this interpreter from the
package index that pip is configured for, and its line goes into ``[environments]`` of ``conformance.toml``, so that all
of them meet in one run. A library whose kernels run without its dependencies is installed without them, but for the few
that they import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance import environments
from conformance.discover import CONFIG, UsageError
from conformance.environments import Release

_HEADER = re.compile(r"^\s*\[environments\]\s*(#.*)?$", re.MULTILINE)
_NEXT = re.compile(r"^\s*\[", re.MULTILINE)


@dataclass(frozen=True)
class Library:
    """What to install for a backend.

    dependencies: also what the distribution asks for. beside: what the kernels import of it where it is not.
    """

    distribution: str
    dependencies: bool
    beside: tuple[str, ...] = ()


LIBRARIES: Mapping[str, Library] = {
    "deep_gemm": Library("sgl-deep-gemm", True),
    "flashinfer": Library("flashinfer-python", True),
    "jax": Library("jax", True),
    "sglang": Library("sglang", False, ("msgspec", "apache-tvm-ffi")),
    "torchao": Library("torchao", False),
    "vllm": Library("vllm", False),
}
"""Backend, as ``[environments]`` calls it -> its library."""


def make(words: Sequence[str], config: Path = Path(CONFIG), folder: Path = environments.FOLDER) -> dict[str, str]:
    """Make the environments and enter them; backend -> interpreter. Raises `UsageError`."""
    wanted = [_wanted(word) for word in words]
    if not wanted:
        raise UsageError(f"no library named; known: {', '.join(LIBRARIES)}")
    made = {}
    for name, release in wanted:
        library = LIBRARIES[name]
        if release is None:
            known = environments.releases(library.distribution)
            if not known:
                raise UsageError(f"there is no release of {library.distribution}")
            release = Release(library.distribution, known[-1])
        made[name] = environments.create(release, folder, dependencies=library.dependencies, beside=library.beside)
    try:
        config.write_text(
            entered(config.read_text(encoding="utf-8") if config.exists() else "", made), encoding="utf-8"
        )
    except OSError as error:
        raise UsageError(f"{config}: {error.strerror or error}") from None
    return made


def _wanted(word: str) -> tuple[str, Release | None]:
    name, equals, version = word.partition("==")
    name = name.replace("-", "_")
    name = next((key for key, library in LIBRARIES.items() if library.distribution.replace("-", "_") == name), name)
    if name not in LIBRARIES:
        raise UsageError(f"unknown library {word!r}; known: {', '.join(LIBRARIES)}")
    release = Release.parse(f"{LIBRARIES[name].distribution}=={version}") if equals else None
    if equals and release is None:
        raise UsageError(f"{word}: {version!r} is no version")
    return name, release


def entered(text: str, made: Mapping[str, str]) -> str:
    """A ``conformance.toml`` with these interpreters in ``[environments]``; everything else stays as it is."""
    header = _HEADER.search(text)
    lines = "".join(f'{name} = "{python}"\n' for name, python in made.items())
    if header is None:
        return f"{text.rstrip()}\n\n[environments]\n{lines}".lstrip()
    after = _NEXT.search(text, header.end())
    end = after.start() if after else len(text)
    body = text[header.end() : end].strip("\n")
    kept = [line for line in body.splitlines() if line.split("=")[0].strip() not in made]
    kept_text = "".join(f"{line}\n" for line in kept if line.strip())
    return f"{text[: header.end()]}\n{kept_text}{lines}" + (f"\n{text[end:]}" if after else "")
