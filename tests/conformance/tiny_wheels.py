"""Wheels of a few bytes and a pip that knows nothing else: package tests without a network."""

import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """A pure wheel that holds these files."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {item}" for item in requires]
    every = {
        **files,
        f"{info}/METADATA": "".join(f"{line}\n" for line in lines),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    every[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in every) + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name_, text in every.items():
            archive.writestr(name_, text)
    return path


def only(folder: Path, monkeypatch) -> None:
    """Have pip look into a folder alone, whatever the machine's configuration says."""
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
