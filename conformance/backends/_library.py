"""Some modules of a library, loaded without the rest of it.

SGLang and vLLM import a server's worth of libraries, of which their kernels need few. A `Library` loads the modules
that it is told to, from the installed distribution or from a folder that an environment variable names, and answers
every other import from the same package by a stand-in: false when asked, None when called while a module is imported,
an error when called after that. What the modules really use of the rest is given to it by name, so that it can be read
in one place.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

Given = Mapping[str, Mapping[str, Any]]


class Library:
    """Modules of one package.

    distribution: its name on a package index. package: its top-level package. variable: the environment variable that
    may name a folder to use instead of the installed distribution, such as the ``python`` folder of a checkout.
    real: the dotted names of modules and packages that are loaded; a name that ends in ``.`` stands for all below it.
    given: attributes of stand-ins and of loaded modules, by the module's name; they are set before a module runs. A
    name outside the package stands for a package that is not installed.

    Raises ImportError where there is no such library.
    """

    def __init__(self, distribution: str, package: str, variable: str, real: tuple[str, ...], given: Given) -> None:
        self.distribution = distribution
        self.package = package
        self.folder, self.version = _place(distribution, package, variable)
        self._finder = _Finder(package, self.folder, real, given)
        self._modules: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        """One module, by its dotted name, without ``torch.compile``. Raises ImportError with the reason."""
        with self.active(), patch("torch.compile", _eager):
            try:
                return importlib.import_module(name)
            except Exception as error:
                reason = f"{self.distribution} {self.version}: {name} does not run alone: {error!r}"
                raise ImportError(reason) from error

    def function(self, name: str, module: str) -> Callable[..., Any]:
        """A function of a module, which runs with this library's modules in place. Raises ImportError."""
        found = getattr(self.load(module), name, None)
        if not callable(found):
            raise ImportError(f"{self.distribution} {self.version}: {module} has no {name}")

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.active():
                return found(*args, **kwargs)

        return call

    @contextmanager
    def active(self) -> Iterator[None]:
        """This library's modules stand in ``sys.modules``, and its imports are answered; everything is undone after."""
        before = self._present()
        for name in before:
            del sys.modules[name]
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._finder)
        try:
            yield
        finally:
            sys.meta_path.remove(self._finder)
            self._modules = self._present()
            for name in self._modules:
                del sys.modules[name]
            sys.modules.update(before)

    def _present(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] in self._finder.packages}


class _Absent:
    """Stands for a name of a module that is not loaded. running: whether a module is being imported, one level each."""

    running = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._absent = ""

    def __call__(self, *_: Any, **__: Any) -> Any:
        if not _Absent.running:
            raise RuntimeError(f"{self._absent or 'something'} is called, which is not loaded")
        return None

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(f"{self._absent}.{name}")


def _named(name: str) -> _Absent:
    found = _Absent()
    found._absent = name
    return found


class _StandIn(ModuleType):
    """A module that has every name: its loaded submodules, capitalised ones as classes, the rest as nothing."""

    def __init__(self, name: str, is_real: Callable[[str], bool]) -> None:
        super().__init__(name)
        self.__dict__["_is_real"] = is_real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__dict__["_is_real"](f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        return type(name, (_Absent,), {}) if name[0].isupper() else _named(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, folder: Path, real: tuple[str, ...], given: Given) -> None:
        self.packages = frozenset({package, *(name.split(".")[0] for name in given)})
        self._folder = folder
        self._real = frozenset(name for name in real if not name.endswith("."))
        self._trees = tuple(name for name in real if name.endswith("."))
        self._given = given

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.packages:
            return None
        if self._is_real(name):
            place = self._folder.joinpath(*name.split("."))
            if (place / "__init__.py").is_file():
                return importlib.util.spec_from_file_location(
                    name, place / "__init__.py", loader=_Giver(name, place / "__init__.py", self._given),
                    submodule_search_locations=[str(place)],
                )  # fmt: skip
            file = place.with_suffix(".py")
            if not file.is_file():
                raise ModuleNotFoundError(f"no {file.relative_to(self._folder)}", name=name)
            return importlib.util.spec_from_file_location(name, file, loader=_Giver(name, file, self._given))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _is_real(self, name: str) -> bool:
        return name in self._real or name.startswith(self._trees)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self._is_real)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        module.__dict__.update(self._given.get(module.__name__, {}))


class _Giver(importlib.machinery.SourceFileLoader):
    """Runs a file with some names set before."""

    def __init__(self, name: str, file: Path, given: Given) -> None:
        super().__init__(name, str(file))
        self._attributes = given.get(name, {})

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._attributes)
        _Absent.running += 1
        try:
            super().exec_module(module)
        finally:
            _Absent.running -= 1


def _eager(function: Any = None, **_: Any) -> Any:
    """Stands for ``torch.compile``, with arguments or without."""
    return function if callable(function) else lambda decorated: decorated


def _place(distribution: str, package: str, variable: str) -> tuple[Path, str]:
    """The folder that holds the package, and the version."""
    named = os.environ.get(variable)
    if named:
        folder = Path(named).expanduser().absolute()
        if not (folder / package).is_dir():
            raise ImportError(f"{variable}={named}: holds no {package}")
        return folder, _version_in(folder, distribution, package)
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{distribution} is not installed; {variable} may name a folder that holds it") from None
    return Path(str(found.locate_file(""))), found.version


def _version_in(folder: Path, distribution: str, package: str) -> str:
    """Of an unpacked wheel as its metadata say; of a checkout the number in its version file, marked as local."""
    for found in importlib.metadata.distributions(path=[str(folder)]):
        if found.metadata["Name"] == distribution:
            return found.version
    for name in ("_version.py", "version.py"):
        file = folder / package / name
        match = file.is_file() and re.search(r"""version\s*=\s*['"](\d[\w.]*)""", file.read_text(encoding="utf-8"))
        if match:
            return f"{match[1]}+checkout"
    return "0+checkout"
