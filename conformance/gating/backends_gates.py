"""This project's own backends: which operation and variant each claims on each architecture, on a faked device.

The claims of a backend are the harness's gate in front of a library: what is claimed on the architecture at hand is
called there (``truth.py``), and what is claimed on other architectures only is called too, from outside of its gate.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.gating import fake_device
from conformance.gating.child import LibraryError, Probe, Row, SlowError, limited
from conformance.gating.model import ARCHITECTURES, Gate
from conformance.launch import BackendSource

DEVICE = "cuda:0"


def load() -> tuple[str, list[str], Probe]:
    """Find the backends' modules. Raises LibraryError without torch."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        raise LibraryError(f"torch cannot be imported: {type(error).__name__}: {error}") from error
    fake_device.install(ARCHITECTURES[0])
    for source in _sources():  # once, for every fork
        with contextlib.suppress(Exception):
            importlib.import_module(source.location)
    try:
        version = importlib.metadata.version("blockscale-conformance")
    except importlib.metadata.PackageNotFoundError:
        version = "0"

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        for name, found in described(sm, float(request["probe_s"]), tuple(request["subjects"])):
            if isinstance(found, Gate):
                yield name, "", (found,), ()
                continue
            variants = dict.fromkeys(
                f"{claimed['claim']['operation']} {claimed['claim']['variant']}" for claimed in found
            )
            for variant in variants:
                yield name, variant, (Gate("claims", "yes"),), ()

    return version, ["the claims of conformance/backends on a faked device"], probe


def described(sm: int, limit: float, subjects: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each built-in backend with its claims on this architecture, as plain data; or the gate that kept it from telling.

    A source that cannot be imported, where a library is missing, is one gate under the source's name.
    """
    from conformance import worker_source

    fake_device.choose(sm)
    for source in _sources():
        label = f"backend {source.name}"
        if subjects and not any(word in source.name or source.name in word for word in subjects):
            continue
        try:
            with limited(10 * limit):
                backends = worker_source.load({"kind": source.kind, "location": source.location, "label": label})
        except (Exception, SlowError) as error:
            yield source.name, Gate("import", "unknown", _said(error))
            continue
        for name, backend in backends.items():
            try:
                with limited(limit):
                    yield name, worker_source.describe(label, backend, DEVICE)["claims"]
            except (Exception, SlowError) as error:
                yield name, Gate("claims", "unknown", _said(error))


def _sources() -> list[BackendSource]:
    """The built-in sources that can run on a GPU; the interpreter cannot, and wants to be imported before Triton."""
    from conformance.discover import builtin_sources

    return [source for source in builtin_sources() if "interpreter" not in source.name]


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
