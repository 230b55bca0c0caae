"""FlashInfer's fused-MoE runners: the configuration's gate and the runner's, asked as ``MoELayer`` asks them.

``MoELayer`` takes a backend if ``Config.supported(arch)``, ``Runner.supports_quant(quant)``, the runner's construction
and ``runner.check_support()`` all agree; it takes NotImplementedError, ValueError and RuntimeError of the last two as
a refusal and lets everything else through. The registry ``_BACKEND_RUNNERS`` is private and may move.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.gating import fake_device
from conformance.gating.child import LibraryError, Probe, Row, SlowError, limited
from conformance.gating.model import ARCHITECTURES, ENVIRONMENT, Gate, classify

OLDEST = (0, 7)
"""`QuantConfig(weight, activation)` and the registry came with 0.7."""
REGISTRY = "_BACKEND_RUNNERS"
CAUGHT = (NotImplementedError, ValueError, RuntimeError)
EXPERTS, TOP_K = 256, 8
SITUATIONS = (("Default", None, 2048), ("Renormalize", None, 2048), ("Renormalize", True, 512))
"""Routing method, programmatic dependent launch, intermediate size: some runners take few geometries."""


def load() -> tuple[str, list[str], Probe]:
    """Import FlashInfer under a faked device. Raises LibraryError where it is missing, too old or has moved."""
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError("flashinfer-python is not installed") from None
    numbers = tuple(int(word) for word in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise LibraryError(f"flashinfer {version} is too old: its runners have no common gates before 0.7")
    try:
        fake_device.install(ARCHITECTURES[0])
        layer = importlib.import_module("flashinfer.fused_moe.layer")
        api = importlib.import_module("flashinfer.fused_moe.api")
        registry = getattr(layer, REGISTRY)
        names = ("QuantFormat", "QuantConfig", "MoEConfig", "RoutingConfig", "ExpertConfig", "ExecutionConfig")
        for name in (*names, "BackendOptions", "RoutingMethodType"):
            getattr(api, name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise LibraryError(f"flashinfer {version} has no fused-MoE registry where it was ({reason})") from error
    notes = ["asked through flashinfer.fused_moe.layer._BACKEND_RUNNERS on a faked device"]

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        fake_device.choose(sm)
        fake_device.forget("flashinfer")
        for config_class, runner_class in registry.items():
            name = config_class.__name__
            if not request["subjects"] or any(word in name for word in request["subjects"]):
                yield from _runner(api, config_class, runner_class, sm, float(request["probe_s"]))

    return version, notes, probe


def _runner(api: Any, config_class: Any, runner_class: Any, sm: int, limit: float) -> Iterator[Row]:
    name = config_class.__name__
    config = None
    try:
        config = config_class()
        gate = Gate("config", "yes" if config.supported(sm) else "no")
    except Exception as error:
        gate = Gate("config", "error", f"{type(error).__name__}: {error}")
    try:
        quants = list(_quants(api, runner_class))
    except Exception as error:
        yield name, "", (gate, Gate("quant", "error", f"{type(error).__name__}: {error}")), ()
        return
    if config is None or not quants:
        yield name, "", (gate, Gate("quant", "no", "admits no format at all")) if config is not None else (gate,), ()
        return
    for quant in quants:
        answer = _ask(api, config, runner_class, quant, limit)
        yield name, f"{quant.weight.name}x{quant.activation.name}", (gate, answer), ()


def _quants(api: Any, runner_class: Any) -> Iterator[Any]:
    """Every pair of formats that the runner admits, with the first output format that it admits with it."""
    for weight, activation in itertools.product(api.QuantFormat, repeat=2):
        for output in api.QuantFormat:
            quant = api.QuantConfig(weight=weight, activation=activation, output=output)
            if runner_class.supports_quant(quant):
                yield quant
                break


def _ask(api: Any, config: Any, runner_class: Any, quant: Any, limit: float) -> Gate:
    """The runner's gate: yes if it admits in one situation; else what it says first, refusals preferred."""
    said = []
    for situation in SITUATIONS:
        try:
            with limited(limit):
                runner = runner_class(_config(api, config, runner_class, quant, *situation), device=_device())
                runner.check_support()
                return Gate("runner", "yes")
        except SlowError as slow:
            return Gate("runner", "unknown", str(slow))
        except Exception as error:
            answer = classify(error, CAUGHT)
            said.append(Gate("runner", answer.answer, answer.detail))
        if said[-1].answer == "error" or ENVIRONMENT.search(said[-1].detail):
            return said[-1]
    return next((gate for gate in said if gate.answer == "no"), said[0])


def _config(
    api: Any, config: Any, runner_class: Any, quant: Any, method: str, pdl: bool | None, intermediate: int
) -> Any:
    by_quant = getattr(runner_class, "supported_activation_classes_by_quant", {})
    activations = by_quant.get(quant.pair) or getattr(runner_class, "supported_activation_classes", ())
    activation = api.SwiGLU if not activations or api.SwiGLU in activations else activations[0]
    return api.MoEConfig(
        routing=api.RoutingConfig(num_experts=EXPERTS, top_k=TOP_K, method=getattr(api.RoutingMethodType, method)),
        quant=quant,
        experts=api.ExpertConfig(intermediate_size=intermediate),
        activation=activation(),
        backend=api.BackendOptions(candidates=(config,)),
        execution=api.ExecutionConfig(enable_pdl=pdl),
    )


def _device() -> Any:
    import torch

    return torch.device("cuda", 0)
