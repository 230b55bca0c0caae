"""Loading a source of backends inside a worker, and describing what it offers.

Everything that a plugin's author can get wrong is said here in one line that starts with the plugin's name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from conformance.claim_checks import claim_problem, is_line
from conformance.messages import Claimed, Description
from conformance.operations import OPERATIONS
from conformance.worker_errors import ReportedError, one_line
from references.backend import Backend, Claim
from references.recipes import INVARIANCES, Recipe

NAME = re.compile(r"[A-Za-z0-9_.+-]{1,64}\Z")
MEMBERS = ("name", "version", "claims", "recipe", "prepare", "run")
MAX_VERSION = 200
"""Longest version, in characters."""
LIBRARIES = (
    "torch",
    "triton",
    "numpy",
    "flashinfer-python",
    "sglang",
    "vllm",
    "deep-gemm",
    "sgl-deep-gemm",
    "torchao",
    "transformer-engine",
    "jax",
    "ml-dtypes",
)
"""Distributions whose versions a description lists where they are installed."""


@contextmanager
def _blame(label: str, doing: str = "") -> Iterator[None]:
    try:
        yield
    except ReportedError:
        raise
    except BaseException as error:
        raise ReportedError(f"{label}: {doing}{one_line(error)}") from None


def load(source: Mapping[str, Any]) -> dict[str, Backend]:
    """The backends of a source by name. Raises `ReportedError`."""
    label = source["label"]
    location, _, attribute = (
        source["location"].partition(":")
        if source["kind"] == "entry_point"
        else (
            source["location"],
            "",
            "",
        )
    )
    with _blame(label):
        found: Any = _import_file(location) if source["kind"] == "plugin_file" else importlib.import_module(location)
        for word in filter(None, attribute.split(".")):
            found = getattr(found, word)
    offer = getattr(found, "backends", None) if isinstance(found, ModuleType) else found
    if not callable(offer):
        raise ReportedError(f"{label}: offers no function backends()")
    with _blame(label, "backends(): "):
        offered = list(offer())
    backends: dict[str, Backend] = {}
    for backend in offered:
        name = _checked_name(label, backend)
        if name in backends:
            raise ReportedError(f"{label}: two backends are named {name!r}")
        backends[name] = backend
    return backends


def _import_file(location: str) -> ModuleType:
    path = Path(location)
    spec = importlib.util.spec_from_file_location(
        f"conformance_plugin_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}", path
    )
    if spec is None or spec.loader is None:
        raise ReportedError(f"plugin {path.name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _checked_name(label: str, backend: Any) -> str:
    missing = [member for member in MEMBERS if not hasattr(backend, member)]
    if missing:
        raise ReportedError(f"{label}: {type(backend).__name__} is no Backend: it lacks {', '.join(missing)}")
    if inspect.isclass(backend):
        raise ReportedError(f"{label}: {backend.__name__} is a class; backends() yields instances")
    if not isinstance(backend.name, str) or not NAME.match(backend.name):
        raise ReportedError(f"{label}: {backend.name!r} is no name of a backend (letters, digits and _ . + -)")
    return backend.name


def describe(label: str, backend: Backend, device: str) -> dict[str, Any]:
    """A ``Description`` as plain data. Raises `ReportedError`."""
    from conformance.worker import interpreter

    label = f"{label}: {backend.name}" if not label.endswith(f" {backend.name}") else label
    with _blame(label, "version(): "):
        version = backend.version()
    if not isinstance(version, str):
        raise ReportedError(f"{label}: version() is {type(version).__name__}, not a string")
    if not is_line(version) or len(version) > MAX_VERSION:
        raise ReportedError(f"{label}: version() is {ascii(version)[:80]}, not one line of text")
    with _blame(label, "claims(): "):
        claims = list(backend.claims(device))
    pace = getattr(backend, "pace", 1.0)
    if not isinstance(pace, int | float) or not 0 < pace <= 1:
        raise ReportedError(f"{label}: pace {pace!r} is not within (0, 1]")
    name, sm = device_name(device)
    return asdict(
        Description(
            backend=backend.name,
            version=version,
            interpreter=interpreter(),
            device=device,
            device_name=name,
            sm=sm,
            pace=float(pace),
            claims=[_claimed(label, backend, claim) for claim in claims],
            libraries=libraries(),
        )
    )


def _claimed(label: str, backend: Backend, claim: Any) -> Claimed:
    if not isinstance(claim, Claim):
        raise ReportedError(f"{label}: claims() yields a {type(claim).__name__}, not a Claim")
    problem = claim_problem(claim)
    if problem:
        raise ReportedError(f"{label}: claim {claim.operation} {claim.variant}: {problem}")
    with _blame(f"{label}: claim {claim.operation} {claim.variant}", "recipe(): "):
        recipe = backend.recipe(claim)
    if not isinstance(recipe, Recipe):
        raise ReportedError(f"{label}: recipe() is a {type(recipe).__name__}, not a Recipe")
    if not is_line(recipe.source):
        raise ReportedError(f"{label}: the source of recipe() is not one line of text")
    return Claimed(
        claim=claim.to_json(),
        recipe=recipe.to_json(),
        recipe_text=recipe.text(OPERATIONS[claim.operation].open_choices(claim.variant) | INVARIANCES),
        claim_text=claim.text(),
    )


def device_name(device: str) -> tuple[str, str]:
    """The device's model, and its compute capability such as ``90`` (empty on a CPU)."""
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        return torch.cuda.get_device_name(device), f"{major}{minor}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "", ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""), ""


def libraries() -> dict[str, str]:
    """Versions of what this interpreter and machine hold."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    with suppress(OSError):
        found["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    return found
