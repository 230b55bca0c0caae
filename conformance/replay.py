"""Routing replay: the selection that one backend records, judged first, then fed to every backend's expert layer.

A router answers a ``routing`` case; its ids and weights are judged by themselves. Then an expert layer of as many
tokens and experts takes those ids and weights instead of its case's own, and its output is judged on that selection.
So a legal tie neither hides nor fakes a fault of the layer, and a wrong selection is reported once. Both are called as
in a run, with poisoned buffers, so that a recording buffer that is not written is found.

What an expert layer cannot take is an expert that is elsewhere, -1: padded tokens, ids out of range or twice in a
token, weights that are NaN or huge, shared experts; and in every second pair the experts with odd numbers, as on one of
two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from conformance.examine import Examination
from conformance.messages import Wire
from conformance.operations import moe
from conformance.worker_tensors import from_wire, to_wire
from fuzz import plan
from fuzz.case import Case
from fuzz.grammar import MOE_SCALES
from references.routing.forms import unpack
from reports.record import Record

HIDDEN, INTERMEDIATE = 64, 34
MOST = {"tokens": 130, "experts": 64}
"""Sizes of a router's case up to which it is followed by an expert layer."""
LARGEST = 2.0**20
"""Largest weight that an expert layer is given: raw logits may be of any size."""


class Caller(Protocol):
    """The part of ``examine.Examiner`` that is needed."""

    def covers(self, case: Case) -> bool:
        """Whether the backend claims a case."""

    def examine(self, case: Case, inputs: Sequence[Wire] = (), *, patient: bool = False) -> Examination:
        """Call, judge and decide."""


@dataclass(frozen=True)
class Pair:
    """A router's case and an expert layer's; whether only experts with even numbers are here."""

    router: Case
    layer: Case
    halved: bool


def pairs(methods: Sequence[str], formats: Sequence[str], count: int, seed: int) -> Iterator[Pair]:
    """``count`` pairs for each routing method, the formats in turn."""
    for number, method in enumerate(methods):
        drawn = plan.draw_plan([("routing", method)], 4 * count + 40, seed)
        fit = [case for case in drawn if all(case.integer(key) <= most for key, most in MOST.items())]
        for index, router in enumerate(fit[:count]):
            variant = formats[(number + index) % len(formats)]
            halved = index % 2 == 1
            yield Pair(router, _layer(router, variant, index, halved), halved)


def _layer(router: Case, variant: str, index: int, halved: bool) -> Case:
    scales = MOE_SCALES[variant]
    return Case.make(
        "moe",
        variant,
        seed=router.seed,
        experts=router["experts"],
        gate=("first", "second")[index % 2],
        hidden=HIDDEN,
        # The words say what a claim may ask for: whether any expert is elsewhere.
        ids="elsewhere" if halved or router["padding"] == "some" or router["values"] == "nonfinite" else "spread",
        intermediate=INTERMEDIATE,
        limit="none",
        out=("fp32", "bf16")[index // 2 % 2],
        scale=scales[index % len(scales)],
        scaling="1",
        tokens=router["tokens"],
        topk=router["topk"],
        values="normal",
        weight="input" if router.variant == "Llama4" else "output",
    )


def recorded(pair: Pair, outputs: Sequence[Wire]) -> tuple[Tensor, Tensor] | None:
    """The ids int32 and weights FP32 ``[tokens, topk]`` of a router's answer, fit for an expert layer; None without."""
    parts = {wire.name: from_wire(wire) for wire in outputs}
    shape = pair.router.integer("tokens"), pair.router.integer("topk") + pair.router.integer("shared")
    if any(tuple(part.shape) != shape for part in parts.values()):
        return None
    if "packed" in parts and parts["packed"].dtype == torch.int32:
        ids, weights = unpack(parts["packed"])
    elif "selection" in parts and "weights" in parts and not parts["selection"].is_floating_point():
        ids, weights = parts["selection"], parts["weights"]
    else:
        return None
    chosen = slice(0, pair.router.integer("topk"))
    ids, weights = ids[:, chosen].to(torch.int64), weights[:, chosen].float()
    usable = weights.abs() <= LARGEST
    there = (ids >= 0) & (ids < pair.router.integer("experts")) & usable
    if pair.halved:
        there &= ids % 2 == 0
    there &= ~(ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)
    return torch.where(there, ids, -1).to(torch.int32), torch.where(usable, weights, 0.0)


def inputs_of(pair: Pair, ids: Tensor, weights: Tensor) -> list[Wire]:
    """The expert layer's inputs with a recorded selection in place of its own."""
    inputs = {**moe.inputs(pair.layer), "ids": ids, "weights": weights}
    return [to_wire(name, tensor) for name, tensor in inputs.items()]


@dataclass
class Outcome:
    """What came of one router and one expert layer's backend. A record counts by its verdict."""

    selections: Counter[str] = field(default_factory=Counter)
    outputs: Counter[str] = field(default_factory=Counter)
    failing: list[str] = field(default_factory=list)


Kept = Callable[[Pair, Sequence[Wire], Examination, Record], Path | None]


def replay(
    routers: dict[str, Caller], layers: dict[str, Caller], every: Sequence[Pair], keep: Kept | None = None
) -> dict[tuple[str, str], Outcome]:
    """(router, layer) -> what came of it. keep: writes a capsule of a layer's failing record.

    A selection that fails is counted for the router alone; the layers are judged on what it recorded all the same.
    """
    found: dict[tuple[str, str], Outcome] = {}
    for name, router in routers.items():
        for pair in every:
            if not router.covers(pair.router):
                continue
            answer = router.examine(pair.router)
            own = found.setdefault((name, ""), Outcome())
            _count(own.selections, own, answer.records, f"{name}: '{pair.router}'")
            taken = answer.replies[-1]
            selection = recorded(pair, taken.outputs) if taken.status == "ok" else None
            if selection is None:
                continue
            wires = inputs_of(pair, *selection)
            for other, layer in layers.items():
                if not layer.covers(pair.layer):
                    continue
                result = layer.examine(pair.layer, wires)
                outcome = found.setdefault((name, other), Outcome())
                where = f"{other} on the selection of {name} for '{pair.router}': '{pair.layer}'"
                for record in _count(outcome.outputs, outcome, result.records, where):
                    path = keep(pair, wires, result, record) if keep else None
                    if path is not None:
                        outcome.failing[-1] += f"; nox -s repro -- {path}"
    return found


def _count(counter: Counter[str], outcome: Outcome, records: Sequence[Record], where: str) -> list[Record]:
    """Count a call by its first failing record; the records that fail and that the ledger does not know."""
    failing = [record for record in records if record.failing]
    unknown = [record for record in failing if not record.ledger_id]
    counter["known" if failing and not unknown else unknown[0].verdict if unknown else "pass"] += 1
    outcome.failing += [f"{where}: {record.part} {record.verdict}: {record.message}" for record in unknown[:1]]
    return unknown[:1]


def markdown(found: dict[tuple[str, str], Outcome]) -> str:
    """A row for each router and each expert layer that took its selections."""
    lines = [
        "| selection by | judged | expert layer by | on that selection |",
        "|---|---|---|---|",
    ]
    for (router, layer), outcome in found.items():
        words = [", ".join(f"{count} {verdict}" for verdict, count in sorted(some.items())) for some in _both(outcome)]
        lines.append(f"| {router if not layer else ''} | {words[0]} | {layer} | {words[1]} |")
    return "\n".join(lines)


def _both(outcome: Outcome) -> tuple[Counter[str], Counter[str]]:
    return outcome.selections, outcome.outputs
