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
from conformance.gating import flashinfer_functions as functions
from conformance.gating.child import LibraryError, Probe, Row, SlowError, limited
from conformance.gating.model import ARCHITECTURES, ENVIRONMENT, SHAPE, Gate, classify

OLDEST = (0, 7)
"""`QuantConfig(weight, activation)` and the registry came with 0.7."""
REGISTRY = "_BACKEND_RUNNERS"
CAUGHT = (NotImplementedError, ValueError, RuntimeError)
EXPERTS, TOP_K = 256, 8
Situation = tuple[str, bool | None, int]
SITUATIONS: tuple[Situation, ...] = (("Default", None, 2048), ("Renormalize", None, 2048), ("Renormalize", True, 512))
"""Routing method, programmatic dependent launch, intermediate size: some runners take few geometries."""
OF_SHAPES = re.compile(r"size|shape|divisible|multiple|experts|top_?k|hidden|align", re.IGNORECASE)
"""Refusals that speak of a geometry, whatever else they name."""
SIZES = (192, 256, 1536)
"""Further intermediate sizes: what refuses one of them because of the architecture must refuse all."""


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
    functions.load()
    notes = ["asked through flashinfer.fused_moe.layer._BACKEND_RUNNERS and the functions' own lists on a faked device"]

    def probe(sm: int, request: Mapping[str, Any]) -> Iterator[Row]:
        fake_device.choose(sm)
        fake_device.forget("flashinfer")
        for config_class, runner_class in registry.items():
            name = config_class.__name__
            if not request["subjects"] or any(word in name for word in request["subjects"]):
                yield from _runner(api, config_class, runner_class, sm, float(request["probe_s"]))
        for name, variant, gates in functions.rows(sm):
            if not request["subjects"] or any(word in name for word in request["subjects"]):
                yield name, variant, gates, ()

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
        answer, situation, runner = _ask(api, config, runner_class, quant, limit)
        pair = f"{quant.weight.name}x{quant.activation.name}"
        yield name, pair, (gate, answer, *_shapes(api, config, runner_class, quant, answer, situation, limit)), ()
        if answer.answer == "yes" and gate.answer == "yes":
            for variant, routing in _routing(api, config, runner_class, quant, situation, runner, limit):
                yield name, f"{pair} {variant}", (gate, routing), ()


def _shapes(
    api: Any, config: Any, runner_class: Any, quant: Any, answer: Gate, situation: Situation, limit: float
) -> Iterator[Gate]:
    """A gate where some intermediate sizes are admitted, and others refused for the architecture, which is the same."""
    if answer.answer not in ("yes", "no") or OF_SHAPES.search(answer.detail):
        return
    said: dict[str, str] = {answer.answer: answer.detail}
    for size in SIZES:
        try:
            with limited(limit):
                made = _config(api, config, runner_class, quant, *situation[:2], size)
                runner_class(made, device=_device()).check_support()
            said.setdefault("yes", "")
        except (Exception, SlowError) as error:
            found = classify(error, CAUGHT)
            if found.answer == "no" and not OF_SHAPES.search(found.detail):
                said.setdefault("no", f"intermediate size {size}: {found.detail}")
    if {"yes", "no"} <= set(said):
        yield Gate(SHAPE, "no", said["no"])


def _routing(
    api: Any, config: Any, runner_class: Any, quant: Any, situation: Situation, runner: Any, limit: float
) -> Iterator[tuple[str, Gate]]:
    """How routing reaches an admitted runner, as `MoELayer` asks; then, of one that routes itself, the methods."""
    modes = getattr(runner, "supported_routing_modes", ())
    for mode in getattr(api, "RoutingInputMode", ()):
        yield f"routing {mode.name}", Gate("routing", "yes" if mode in modes else "no")
    if not any(mode.name == "FromLogits" for mode in modes):
        return
    for method in api.RoutingMethodType:
        try:
            with limited(limit):
                made = _config(api, config, runner_class, quant, method.name, *situation[1:])
                runner_class(made, device=_device()).check_support()
            yield f"routing {method.name}", Gate("routing", "yes")
        except SlowError as slow:
            yield f"routing {method.name}", Gate("routing", "unknown", str(slow))
        except Exception as error:
            answer = classify(error, CAUGHT)
            # A refusal that speaks of no architecture is of the method: all else is as it was admitted.
            said = "no" if isinstance(error, CAUGHT) and not ENVIRONMENT.search(answer.detail) else answer.answer
            yield f"routing {method.name}", Gate("routing", said, answer.detail)


def _quants(api: Any, runner_class: Any) -> Iterator[Any]:
    """Every pair of formats that the runner admits, with the first output format that it admits with it."""
    for weight, activation in itertools.product(api.QuantFormat, repeat=2):
        for output in api.QuantFormat:
            quant = api.QuantConfig(weight=weight, activation=activation, output=output)
            if runner_class.supports_quant(quant):
                yield quant
                break


def _ask(api: Any, config: Any, runner_class: Any, quant: Any, limit: float) -> tuple[Gate, Situation, Any]:
    """The runner's gate: yes if it admits in one situation, which is told; else its first word, refusals preferred."""
    said = []
    for situation in SITUATIONS:
        try:
            with limited(limit):
                runner = runner_class(_config(api, config, runner_class, quant, *situation), device=_device())
                runner.check_support()
                return Gate("runner", "yes"), situation, runner
        except SlowError as slow:
            return Gate("runner", "unknown", str(slow)), situation, None
        except Exception as error:
            answer = classify(error, CAUGHT)
            said.append(Gate("runner", answer.answer, answer.detail))
        if said[-1].answer == "error" or ENVIRONMENT.search(said[-1].detail):
            return said[-1], situation, None
    return next((gate for gate in said if gate.answer == "no"), said[0]), SITUATIONS[0], None


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
