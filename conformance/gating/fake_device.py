"""A CUDA device that is not there: torch answers for one architecture, and nothing reaches a driver.

For a process of its own. Whatever of ``torch.cuda`` is not faked raises as it does without CUDA, so that a gate that
asks for more than the device's identity is seen to do so.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

CUDA = "13.0"
_CAPABILITY = [9, 0]
_REAL = [False]
_TWIN = [False]
TWIN = "another faked device"
"""The name of the twin: of the same architecture, and a small device of it."""


class NotFakedError(RuntimeError):
    """A property was asked for that the fake does not know."""


class Properties:
    """What ``torch.cuda.get_device_properties`` says; sizes are those of an H200."""

    name = "faked device"
    multi_processor_count = 132
    total_memory = 141 * 2**30
    shared_memory_per_block = 48 * 2**10
    shared_memory_per_block_optin = 227 * 2**10
    shared_memory_per_multiprocessor = 228 * 2**10
    regs_per_multiprocessor = 2**16
    max_threads_per_multi_processor = 2048
    warp_size = 32
    L2_cache_size = 60 * 2**20

    def __init__(self) -> None:
        self.major, self.minor = _CAPABILITY
        if _TWIN[0]:
            self.name = TWIN
            self.multi_processor_count = 20
            self.total_memory = 12 * 2**30
            self.L2_cache_size = 24 * 2**20

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotFakedError(f"the faked device has no {name}")


class _Device:
    """``torch.cuda.device``: selects nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def stand_aside() -> None:
    """Leave the real device in its place: for the question whether the fake answers as it does."""
    _REAL[0] = True


def install(sm: int) -> None:
    """Make torch say that its only device is of this architecture."""
    import torch

    choose(sm)
    if _REAL[0]:
        return
    fakes: dict[str, Any] = {
        "current_device": lambda: 0,
        "device": _Device,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: tuple(_CAPABILITY),
        "get_device_name": lambda device=None: Properties().name,
        "get_device_properties": lambda device=None: Properties(),
        "is_available": lambda: True,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    if torch.version.cuda is None:
        torch.version.cuda = CUDA


def twin(on: bool = True) -> None:
    """Make the faked device another one of its architecture: fewer multiprocessors, less memory, another name."""
    _TWIN[0] = on


def choose(sm: int) -> None:
    """Turn the faked device into one of another architecture."""
    _CAPABILITY[:] = divmod(sm, 10)


def forget(package: str) -> None:
    """Empty every ``functools`` cache of a package's functions, which may remember another architecture."""
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper:  # isinstance() would wake up lazy stand-ins
            module = getattr(found, "__module__", None) or ""
            if module.split(".")[0] == package:
                found.cache_clear()
