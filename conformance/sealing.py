"""From a failure to its capsule: what an examination found, on which backend, with which inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.capsule import Capsule, tensors_of
from conformance.examine import Examination
from conformance.messages import Claimed, Description, Wire
from conformance.tensor_file import input_sha256
from fuzz.case import Case
from reports.record import Record

MAX_EXPLICIT = 2**24
"""Bytes of explicit inputs that a capsule takes; beyond, it holds the case alone."""


def seal(
    case: Case,
    inputs: Sequence[Wire],
    found: Examination,
    record: Record,
    about: Description,
    claimed: Claimed,
    *,
    cause: Mapping[str, str],
    origin: Case | None = None,
    plugins: tuple[str, ...] = (),
    options: str = "",
    shrunk: Mapping[str, Any] | None = None,
    times: tuple[int, int] = (1, 1),
) -> Capsule:
    """The capsule of one failing record.

    inputs: explicit ones, if the case's own are not meant. cause: kind and stage. origin: the case before shrinking.
    shrunk: ``differing``, ``elements``, ``note``. times: how often it was asked for and failed.
    """
    answers = [reply.outputs for reply in found.replies if reply.status == "ok"]
    examples = [_texts(item) for item in found.examples("packed" if record.part == "packed" else record.part)]
    return Capsule(
        case=case.text,
        origin=(origin or case).text,
        part=record.part,
        verdict=record.verdict,
        kind=cause.get("kind", ""),
        stage=cause.get("stage", ""),
        ledger_id=record.ledger_id,
        message=_line(record.message),
        backend=about.backend,
        version_of_backend=_line(about.version),
        interpreter=_line(about.interpreter),
        device=about.device,
        device_name=_line(about.device_name),
        sm=about.sm,
        libraries={_line(name): _line(number) for name, number in about.libraries.items()},
        options=options,
        plugins=plugins,
        recipe={key: value for key, value in claimed.recipe.items() if key != "source"},
        recipe_text=_line(claimed.recipe_text),
        input_sha256=record.input_sha256 or _input_sha256(case, inputs),
        explicit=bool(inputs),
        expected=tuple(examples),
        tensors=tensors_of(inputs, answers[0] if answers else ()),
        times=times[0],
        failed=times[1],
        **(shrunk or {}),
    )


def _input_sha256(case: Case, inputs: Sequence[Wire]) -> str:
    """Where no answer tells it, as after a crash or a hang."""
    from conformance.operations import OPERATIONS
    from fuzz.hashing import sha256_of

    return input_sha256(inputs) if inputs else sha256_of(OPERATIONS[case.operation].inputs(case))


def _texts(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if key == "index" else _line(str(value)) for key, value in item.items()}


def _line(text: str) -> str:
    """Text on one printable line."""
    return "".join(char if char.isprintable() else " " for char in text)[:4000]
