"""What the parent and its worker processes say to each other, as plain data.

Tensors travel beside these messages as raw buffers (see ``conformance.frames``). Only the standard library,
``references`` and ``reports.record`` are imported, so that the parent needs no torch to orchestrate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

CallStatus = Literal["ok", "refused", "error", "oom", "crash", "hang"]


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A tensor as it travels: name, dtype as torch prints it without the prefix, shape, and its bytes (C order)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


POISONS = {"nan": 0xFF, "finite": 0x5A}
"""The byte that fills output buffers. 0xFF makes every float a NaN (E8M0 and E4M3 too) and every integer its largest
or -1; 0x5A makes fp32 and bf16 about 1.5e16, fp16 203.25, E4M3 26 and E8M0 2^-37: finite, not zero, not plausible."""
INPUT = "input:"
"""What the names of explicit inputs start with on the wire, where outputs may have the same names."""


def as_inputs(wires: Sequence[Wire]) -> tuple[Wire, ...]:
    """Explicit inputs under the names that they travel with."""
    return tuple(replace(wire, name=INPUT + wire.name) for wire in wires)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A claim with its recipe, both in JSON form, and the recipe's text over the operation's open choices."""

    claim: dict[str, Any]
    recipe: dict[str, Any]
    recipe_text: str
    claim_text: str


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a worker says of a backend on its device.

    interpreter: such as ``CPython 3.11.7, torch 2.13.0+cpu, numpy 2.4.6``. device_name: such as ``NVIDIA H200``.
    sm: such as ``90``; empty on a CPU. pace: share of the plan that a slow backend asks for (1.0 for all of it).
    libraries: name -> version of what the interpreter holds (torch, triton, numpy, cuda, driver, ...).
    """

    backend: str
    version: str
    interpreter: str
    device: str
    device_name: str
    sm: str
    pace: float
    claims: list[Claimed]
    libraries: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CallReply:
    """The outcome of one call of a backend.

    status: ``ok`` (outputs present), ``refused`` (it raised Unsupported), ``error`` (another exception), ``oom``,
        ``crash`` (the process died), ``hang`` (no answer within the deadline).
    inputs_changed: the inputs hash differently after the call. seconds: prepare and run, device synchronised.
    suspect: not the call failed but the harness's own work in the backend's process, which is of no more use. The
        backend is to blame if the judge's process can do that work.
    """

    status: CallStatus
    message: str = ""
    input_sha256: str = ""
    inputs_changed: bool = False
    outputs: tuple[Wire, ...] = ()
    seconds: float = 0.0
    suspect: bool = False


@dataclass(frozen=True, kw_only=True)
class JudgeReply:
    """The oracle's answer: its own hash of the inputs, and one part verdict (``PartVerdict`` as a dict) a part."""

    input_sha256: str
    parts: list[dict[str, Any]]
