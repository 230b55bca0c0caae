"""The oracle's worker: judges the outputs of a call against the references."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from conformance import relations, shared_inputs
from conformance.messages import JudgeReply, Wire
from conformance.operations import OPERATIONS
from conformance.operations.checks import canonical, check_outputs
from conformance.worker_errors import is_out_of_memory
from conformance.worker_inputs import explicit
from conformance.worker_memory import release
from conformance.worker_tensors import from_wire, move
from fuzz.case import Case
from fuzz.hashing import sha256_of
from references.recipes import Recipe

CACHE_BYTES = 2**31
"""Inputs kept for the next judgement of the same case, in bytes."""


class Oracle:
    """Judges outputs; keeps the inputs of recent cases.

    device: where the references compute. cache_bytes: bound on the inputs kept; a case larger than that is not kept.
    """

    def __init__(self, device: str, cache_bytes: int = CACHE_BYTES) -> None:
        self._device = device
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[str, tuple[str, dict[str, Tensor], int]] = OrderedDict()

    def judge(
        self, text: str, recipe: Mapping[str, Any], wires: Sequence[Wire], given: Sequence[Wire] = ()
    ) -> dict[str, Any]:
        """A ``JudgeReply`` as plain data. given: explicit inputs instead of the case's own.

        Parts that are missing, unknown or of another shape or dtype are ``wrong``; if a part of the contract is among
        them, the values of the others are not judged, since earlier parts condition later ones. A twin's answer
        (``conformance.relations``) is judged where the case's own is right. Where the device's memory is full, which
        backends share, the CPU judges: the verdicts are the same.
        """
        try:
            return self._judge(text, recipe, wires, given)
        except BaseException as error:
            if self._device == "cpu" or not is_out_of_memory(error):
                raise
        self._kept.clear()
        release(self._device, kept=0)
        return Oracle("cpu")._judge(text, recipe, wires, given)

    def _judge(
        self, text: str, recipe: Mapping[str, Any], wires: Sequence[Wire], given: Sequence[Wire]
    ) -> dict[str, Any]:
        case = Case.parse(text)
        operation = OPERATIONS[case.operation]
        digest, inputs = self._explicit(case, given) if given else self._inputs(case)
        own, twin = relations.split(wires)
        outputs = {wire.name: from_wire(wire) for wire in own}
        specs = operation.outputs(case)
        problems = check_outputs(specs, outputs)
        verdicts = []
        if not any(problem.part in specs for problem in problems):
            parts = {name: canonical(spec, outputs[name]).to(self._device) for name, spec in specs.items()}
            verdicts = [
                replace(verdict, output_sha256=sha256_of({verdict.part: parts[verdict.part]}))
                if verdict.part in parts
                else verdict
                for verdict in operation.judge(case, inputs, parts, Recipe.from_json(dict(recipe)))
            ]
            if twin and not problems and all(verdict.verdict == "pass" for verdict in verdicts):
                answer = {wire.name: from_wire(wire) for wire in twin}
                verdicts += relations.judge(case, inputs, parts, answer, Recipe.from_json(dict(recipe)))
        return asdict(JudgeReply(input_sha256=digest, parts=[asdict(verdict) for verdict in (*verdicts, *problems)]))

    def _explicit(self, case: Case, given: Sequence[Wire]) -> tuple[str, dict[str, Tensor]]:
        inputs = explicit(case, given)
        digest = sha256_of(inputs)
        return digest, {name: move(tensor, self._device) for name, tensor in inputs.items()}

    def _inputs(self, case: Case) -> tuple[str, dict[str, Tensor]]:
        kept = self._kept.get(case.text)
        if kept is not None:
            self._kept.move_to_end(case.text)
            return kept[0], kept[1]
        inputs = shared_inputs.inputs(case, "oracle")
        digest = sha256_of(inputs)
        if self._device != "cpu":
            inputs = {name: move(tensor, self._device) for name, tensor in inputs.items()}
        size = sum(tensor.untyped_storage().nbytes() for tensor in inputs.values())
        if size <= self._cache_bytes:
            self._kept[case.text] = (digest, inputs, size)
            while sum(entry[2] for entry in self._kept.values()) > self._cache_bytes:
                self._kept.popitem(last=False)
        return digest, inputs
