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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from conformance.discover import UsageError
from conformance.examine import Examination
from conformance.messages import Wire
from conformance.operations import moe
from conformance.selection_file import Recording
from conformance.worker_tensors import from_wire, to_wire
from fuzz import plan
from fuzz.case import Case
from fuzz.grammar import MAX_EXPERTS, MOE_SCALES
from references.routing.forms import unpack
from reports.record import Record

HIDDEN, INTERMEDIATE = 64, 34
MOST = {"tokens": 130, "experts": 64}
"""Sizes of a router's case up to which it is followed by an expert layer."""
MOST_RECORDED = 4096
"""Tokens of a recorded selection up to which it is followed by one."""
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
            yield pair_of(router, variant, index, halved)


def pair_of(router: Case, variant: str, index: int, halved: bool) -> Pair:
    """A router's case with the expert layer that its selection is fed to. index: which words the layer takes."""
    absent = halved or router["padding"] == "some" or router["values"] == "nonfinite"
    sizes = {key: router.integer(key) for key in ("tokens", "experts", "topk")}
    on_input = router.variant == "Llama4"
    return Pair(router, layer_of(variant, index, sizes, router.seed, absent=absent, on_input=on_input), halved)


def layer_of(
    variant: str, index: int, sizes: Mapping[str, int], seed: int, *, absent: bool, on_input: bool = False
) -> Case:
    """An expert layer for a selection. sizes: tokens, experts, topk. absent: whether some experts are elsewhere."""
    scales = MOE_SCALES[variant]
    return Case.make(
        "moe",
        variant,
        seed=seed,
        gate=("first", "second")[index % 2],
        hidden=HIDDEN,
        # The words say what a claim may ask for: whether any expert is elsewhere.
        ids="elsewhere" if absent else "spread",
        intermediate=INTERMEDIATE,
        limit="none",
        out=("fp32", "bf16")[index // 2 % 2],
        scale=scales[index % len(scales)],
        scaling="1",
        values="normal",
        weight="input" if on_input else "output",
        **sizes,
    )


def recorded(pair: Pair, outputs: Sequence[Wire]) -> tuple[Tensor, Tensor] | None:
    """The ids int32 and weights FP32 ``[tokens, topk]`` of a router's answer, fit for an expert layer; None without."""
    given = answer_of(outputs)
    if given is None or tuple(given[0].shape) != (
        pair.router.integer("tokens"),
        pair.router.integer("topk") + pair.router.integer("shared"),
    ):
        return None
    chosen = slice(0, pair.router.integer("topk"))
    return fitted(given[0][:, chosen], given[1][:, chosen], pair.router.integer("experts"), halved=pair.halved)


def answer_of(outputs: Sequence[Wire]) -> tuple[Tensor, Tensor] | None:
    """Ids int64 and weights FP32 ``[tokens, columns]`` of an answer in either form; None where it has neither."""
    parts = {wire.name: from_wire(wire) for wire in outputs}
    if "packed" in parts and parts["packed"].dtype == torch.int32:
        ids, weights = unpack(parts["packed"])
    elif "selection" in parts and "weights" in parts and not parts["selection"].is_floating_point():
        ids, weights = parts["selection"], parts["weights"]
    else:
        return None
    if ids.dim() != 2 or ids.shape != weights.shape:
        return None
    return ids.to(torch.int64), weights.float()


def fitted(ids: Tensor, weights: Tensor, experts: int, *, halved: bool = False) -> tuple[Tensor, Tensor]:
    """Ids int32 and weights FP32 that an expert layer takes: what it cannot take is elsewhere, -1."""
    usable = weights.abs() <= LARGEST
    there = (ids >= 0) & (ids < experts) & usable
    if halved:
        there &= ids % 2 == 0
    there &= ~(ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)
    return torch.where(there, ids, -1).to(torch.int32), torch.where(usable, weights, 0.0)


def inputs_of(layer: Case, ids: Tensor, weights: Tensor) -> list[Wire]:
    """The expert layer's inputs with a recorded selection in place of its own."""
    inputs = {**moe.inputs(layer), "ids": ids, "weights": weights}
    return [to_wire(name, tensor) for name, tensor in inputs.items()]


@dataclass
class Outcome:
    """What came of one router and one expert layer's backend. A record counts by its verdict."""

    selections: Counter[str] = field(default_factory=Counter)
    outputs: Counter[str] = field(default_factory=Counter)
    failing: list[str] = field(default_factory=list)


Kept = Callable[[Case, Sequence[Wire], Examination, Record], str | None]
Found = dict[tuple[str, str], Outcome]
Judge = Callable[[Recording], list[tuple[str, str]]]
"""A recording -> (verdict, message) of what is wrong with it; the verdict ``known`` where the ledger knows it."""


def replay(
    routers: dict[str, Caller], layers: dict[str, Caller], every: Sequence[Pair], keep: Kept | None = None
) -> Found:
    """(router, layer) -> what came of it. keep: writes a capsule of a layer's failing record.

    A selection that fails is counted for the router alone; the layers are judged on what it recorded all the same.
    """
    found: Found = {}
    for name, router in routers.items():
        for pair in every:
            if not router.covers(pair.router):
                continue
            answer = router.examine(pair.router)
            own = found.setdefault((name, ""), Outcome())
            _count(own.selections, own, answer.records, f"{name}: '{pair.router}'")
            taken = answer.replies[-1]
            selection = recorded(pair, taken.outputs) if taken.status == "ok" else None
            if selection is not None:
                feed(found, name, f"'{pair.router}'", pair.layer, selection, layers, keep)
    return found


def replay_recorded(
    recordings: Sequence[Recording],
    judge: Judge,
    layers: dict[str, Caller],
    formats: Sequence[str],
    experts: int = 0,
    keep: Kept | None = None,
) -> Found:
    """The same for selections that were recorded before.

    judge: what the parts of a recording are worth now. formats: of layers, in turn. experts: how many there are where a
    recording has no case. Raises `UsageError` for a recording that no layer can take.
    """
    found: Found = {}
    for index, item in enumerate(recordings):
        name = f"{item.backend} on {item.device}" if item.case else item.name
        own = found.setdefault((name, ""), Outcome())
        variant = formats[index % len(formats)]
        if item.case:
            pair = pair_of(Case.parse(item.case), variant, index, index % 2 == 1)
            selection, layer, where = recorded(pair, item.outputs), pair.layer, f"'{pair.router}'"
            problems = judge(item)
        else:
            ids, weights = _of_a_model(item, experts)
            selection = fitted(ids, weights, experts)
            sizes = {"tokens": ids.shape[0], "experts": experts, "topk": ids.shape[1]}
            layer = layer_of(variant, index, sizes, index, absent=bool((selection[0] < 0).any()))
            where, problems = item.name, _ill_formed(ids, weights, experts)
        own.selections[problems[0][0] if problems else "pass"] += 1
        own.failing += [f"{name}: {where}: {message}" for verdict, message in problems[:1] if verdict != "known"]
        if selection is not None and layer.integer("tokens") <= MOST_RECORDED:
            feed(found, name, where, layer, selection, layers, keep)
    return found


def _of_a_model(item: Recording, experts: int) -> tuple[Tensor, Tensor]:
    """Ids and weights of a recording without a case. Raises `UsageError`."""
    given = answer_of(item.outputs)
    if given is None:
        raise UsageError(f"{item.name}: selection and weights are no ids and numbers of one shape [tokens, topk]")
    tokens, topk = given[0].shape
    if not 1 <= experts <= MAX_EXPERTS:
        raise UsageError(f"{item.name}: say with --experts how many experts there are, at most {MAX_EXPERTS}")
    if not 1 <= topk <= min(experts, 32) or not 1 <= tokens <= MOST_RECORDED:
        raise UsageError(
            f"{item.name}: {tokens} tokens with {topk} of {experts} experts; at most {MOST_RECORDED} with 32"
        )
    return given


def _ill_formed(ids: Tensor, weights: Tensor, experts: int) -> list[tuple[str, str]]:
    """What is wrong with a selection whose logits nobody knows: ids are distinct experts or -1, weights numbers."""
    outside = ((ids < -1) | (ids >= experts)).any(1)
    twice = ((ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0)).tril(-1).any(2).any(1)
    lost = ~weights.isfinite().all(1)
    for rows, words in (
        (outside, f"ids outside 0..{experts - 1}"),
        (twice, "an expert twice"),
        (lost, "a weight no number"),
    ):
        if bool(rows.any()):
            first = int(rows.nonzero()[0])
            return [
                ("wrong", f"{int(rows.sum())} of {len(rows)} tokens have {words}, first {first}: {ids[first].tolist()}")
            ]
    return []


def feed(
    found: Found,
    name: str,
    where: str,
    case: Case,
    selection: tuple[Tensor, Tensor],
    layers: dict[str, Caller],
    keep: Kept | None = None,
) -> None:
    """Judge every expert layer that claims a case on a selection. name: the router's. where: what it answered."""
    wires = inputs_of(case, *selection)
    for other, layer in layers.items():
        if not layer.covers(case):
            continue
        result = layer.examine(case, wires)
        outcome = found.setdefault((name, other), Outcome())
        for record in _count(
            outcome.outputs, outcome, result.records, f"{other} on the selection of {name} for {where}: '{case}'"
        ):
            line = keep(case, wires, result, record) if keep else None
            if line is not None:
                outcome.failing[-1] += f"; {line}"


def _count(counter: Counter[str], outcome: Outcome, records: Sequence[Record], where: str) -> list[Record]:
    """Count a call by its first failing record; the records that fail and that the ledger does not know."""
    failing = [record for record in records if record.failing]
    unknown = [record for record in failing if not record.ledger_id]
    counter["known" if failing and not unknown else unknown[0].verdict if unknown else "pass"] += 1
    outcome.failing += [f"{where}: {record.part} {record.verdict}: {record.message}" for record in unknown[:1]]
    return unknown[:1]


def markdown(found: Found) -> str:
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
