"""SGLang's ``srt/layers/moe/topk.py`` from the installed distribution, on its own.

The package imports a server's worth of libraries; its routers in plain torch need none of them. So that one file is
executed under its own name while its imports from SGLang itself, and no others, are answered by stand-ins: false when
asked, None when called. A router that really used one of them would fail.
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

DISTRIBUTION = "sglang"
FILE = "sglang/srt/layers/moe/topk.py"
MODULE = "sglang.srt.layers.moe.topk"


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
    """Answers imports below the package, its own package included, with stand-ins."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != DISTRIBUTION:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def version() -> str:
    """The installed distribution's version. Raises ImportError where there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("sglang is not installed") from None


def load() -> ModuleType:
    """The module. Raises ImportError with the reason."""
    version()
    found = importlib.metadata.distribution(DISTRIBUTION).locate_file(FILE)
    path = Path(str(found))
    if not path.is_file():
        raise ImportError(f"sglang {version()} has no {FILE}")
    known = set(sys.modules)
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        spec = importlib.util.spec_from_file_location(MODULE, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise ImportError(f"sglang {version()}: {FILE} does not run alone: {error!r}") from error
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - known:
            if name.split(".")[0] == DISTRIBUTION:
                del sys.modules[name]
    return module


def function(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of the module as it is written, without ``torch.compile``. Raises ImportError where it is missing."""
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, _Nothing):
        raise ImportError(f"sglang {version()} has no {name}")
    plain: Callable[..., Any] = getattr(found, "_torchdynamo_orig_callable", found)
    return plain
