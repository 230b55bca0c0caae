"""One file of an installed library, executed on its own.

SGLang and vLLM import a server's worth of libraries; their routers in plain torch need none of them. So the one file
is executed under its own name while its imports from its own package, and no others, are answered by stand-ins: false
when asked, None when called. A function that really used one of them would fail.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class _Nothing:
    """Stands for a name of a module that is not there: a base class, a call and an attribute of nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return None

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _StandIn(ModuleType):
    """A module that has every name; capitalised ones are classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {}) if name[0].isupper() else _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of a package, and of all below it, with stand-ins."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def version(distribution: str) -> str:
    """The installed distribution's version. Raises ImportError where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{distribution} is not installed") from None


def folder(distribution: str) -> Path:
    """Where the installed distribution's packages lie."""
    return Path(str(importlib.metadata.distribution(distribution).locate_file("")))


def load(distribution: str, file: str) -> ModuleType:
    """The module of ``file``, a path such as ``package/module.py``. Raises ImportError with the reason."""
    about = f"{distribution} {version(distribution)}"
    path = folder(distribution) / file
    if not path.is_file():
        raise ImportError(f"{about} has no {file}")
    package, name = file.split("/")[0], file.removesuffix(".py").replace("/", ".")
    known = set(sys.modules)
    finder = _Finder(package)
    sys.meta_path.insert(0, finder)
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise ImportError(f"{about}: {file} does not run alone: {error!r}") from error
    finally:
        sys.meta_path.remove(finder)
        for added in set(sys.modules) - known:
            if added.split(".")[0] == package:
                del sys.modules[added]
    return module


def function(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of the module as it is written, without ``torch.compile``. Raises ImportError where it is missing."""
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, _Nothing):
        raise ImportError(f"{module.__name__} has no {name}")
    plain: Callable[..., Any] = getattr(found, "_torchdynamo_orig_callable", found)
    return plain
