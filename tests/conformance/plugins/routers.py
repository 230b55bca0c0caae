"""Routers with one fault each, on top of the plain torch router, and one without."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _torch_routing as plain
from references.backend import Claim
from references.recipes import Recipe

Change = Callable[[Any, Mapping[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
WHERE = {"out": ("fp32",), "padding": ("none",), "shared": ("0",), "renormalize": ("on",)}


def _biased_weights(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weighs by s + b."""
    c = torch.sigmoid(inputs["logits"].float()) + inputs["bias"].float()
    picked = c.gather(1, parts["selection"].long())
    return {**parts, "weights": picked / (picked.sum(1, keepdim=True) + 1e-20) * float(case["scaling"])}


def _without_factor(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**parts, "weights": parts["weights"] / float(case["scaling"])}


def _no_groups(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ranks all experts; the weights fit the ids."""
    return plain.route(case.replace(groups=1, topk_group=1), inputs)


def _without_bias(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return plain.route(case, {**inputs, "bias": torch.zeros_like(inputs["bias"])})


def _bf16_bias(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return plain.route(case, {**inputs, "bias": inputs["bias"].to(torch.bfloat16)})


def _highest_index(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same router on the experts in reverse."""
    found = plain.route(case, {name: tensor.flip(-1) for name, tensor in inputs.items()})
    return {**found, "selection": case.integer("experts") - 1 - found["selection"]}


def _duplicate(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last place repeats the first."""
    parts["selection"][:, -1] = parts["selection"][:, 0]
    return parts


def _swapped(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights in ascending order, ids in descending."""
    return {**parts, "weights": parts["weights"].flip(1)}


def _short(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights 2^-12 too small."""
    return {**parts, "weights": parts["weights"] * (1 - 2.0**-12)}


def _contiguous_only(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reads the logits' storage as if it were row-major."""
    logits = inputs["logits"]
    raw = torch.empty(0, dtype=logits.dtype).set_(logits.untyped_storage())
    return plain.route(case, {**inputs, "logits": raw[: logits.numel()].view(logits.shape)})


def _right(case: Any, inputs: Mapping[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return parts


class Router:
    def __init__(self, name: str, change: Change) -> None:
        self.name = name
        self._change = change

    def version(self) -> str:
        return "1"

    def claims(self, device: str) -> Iterable[Claim]:
        return [Claim(operation="routing", variant="DeepSeekV3", source="tests", where=WHERE)]

    def recipe(self, claim: Claim) -> Recipe:
        return Recipe(source="tests", tie_rule="lowest_index", group_tie_rule="lowest_index")

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Any:
        return lambda: self._change(case, inputs, plain.route(case, inputs))

    def run(self, prepared: Any, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        parts: Mapping[str, Tensor] = prepared()
        return parts


class Unwritten(Router):
    """Leaves the last token to the buffer's previous contents."""

    def run(self, prepared: Any, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, part in prepared().items():
            out[name][:-1] = part[:-1]
        return out


FAULTS: Mapping[str, Change] = {
    "biased_weights": _biased_weights,
    "without_factor": _without_factor,
    "no_groups": _no_groups,
    "without_bias": _without_bias,
    "bf16_bias": _bf16_bias,
    "highest_index": _highest_index,
    "duplicate": _duplicate,
    "swapped": _swapped,
    "short": _short,
    "contiguous_only": _contiguous_only,
}


def backends() -> Iterable[Router]:
    found = [Router(name, change) for name, change in FAULTS.items()]
    return [*found, Unwritten("unwritten", _right), Router("right", _right)]
