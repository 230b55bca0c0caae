"""How many calls may be in flight at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock


class Slots:
    """So many calls at a time. Whoever has a slot may ask to be alone."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = BoundedSemaphore(count)
        self._turn = Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """A slot, once there is one."""
        with self._free:
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """All slots instead of the one that the caller has: nothing else is in flight within."""
        self._free.release()
        try:
            with self._turn:
                for _ in range(self._count):
                    self._free.acquire()
                try:
                    yield
                finally:
                    for _ in range(self._count):
                        self._free.release()
        finally:
            self._free.acquire()
