"""Explicit inputs inside a worker: tensors that came with a request instead of those that the case's text gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from conformance.messages import INPUT, Wire
from conformance.worker_errors import ReportedError
from conformance.worker_tensors import from_wire
from fuzz.anatomy import laid_out, problem
from fuzz.case import Case


def plain_names(wires: Sequence[Wire]) -> list[Wire]:
    """The inputs of a request under their own names."""
    return [replace(wire, name=wire.name.removeprefix(INPUT)) for wire in wires]


def explicit(case: Case, wires: Sequence[Wire]) -> dict[str, Tensor]:
    """The tensors with the strides that the case asks for. Raises `ReportedError` if they are not a case's inputs."""
    inputs = {wire.name: from_wire(wire) for wire in wires}
    trouble = problem(case, inputs)
    if trouble:
        raise ReportedError(f"explicit inputs: {trouble}")
    return laid_out(case, inputs)
