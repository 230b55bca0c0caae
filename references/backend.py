"""The seam to an implementation under test: claims, refusals and the Backend protocol.

It lives beside the references because a backend module may import only torch, numpy, the standard library,
``references`` and its own library, so that it can run in an interpreter that has nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from references.recipes import Recipe

if TYPE_CHECKING:  # the parent reads claims without importing torch
    from torch import Tensor


NORMAL_VALUES = (
    "normal",
    "wide",
    "codes",
    "scale_ladder",
    "cancellation",
    "outliers",
    "integer",
    "single",
    "zeros",
)
"""Profiles of a product's operands under which no FP32 subnormal arises: all of ``gemm``'s but ``subnormal``."""


class Unsupported(Exception):  # noqa: N818 - a refusal, not an error
    """Raised by a backend to refuse a call cleanly; the message is the reason."""


class CaseLike(Protocol):
    """What a backend may read of a Case (see ``fuzz.case.Case``)."""

    @property
    def operation(self) -> str:
        """Such as ``quantize``."""

    @property
    def variant(self) -> str:
        """The format, UE8M0 policy, layout or routing method."""

    @property
    def seed(self) -> int:
        """The seed of the inputs."""

    def __getitem__(self, key: str) -> str:
        """The value of a parameter, as text; KeyError if the operation has no such key."""

    def integer(self, key: str) -> int:
        """The value of a parameter, as an integer."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that a backend says it supports: an operation and variant, narrowed by its parameters.

    where: parameter -> the values supported; a parameter that is absent here may take any value.
    multiples: parameter -> every supported value is a multiple of this.
    maxima: parameter -> the largest supported value.
    options: call option -> the words under which the answer has to be the same, each swept beside the plain call; see
        docs/operations.md for those that the harness itself carries out (``stream``, ``graph``, ``inputs``).
    enforced: parameters of ``where``, ``multiples`` and ``maxima`` whose limits the library promises to enforce: a call
        beyond them has to end in an exception, and is made.
    source: where the library says so.
    """

    operation: str
    variant: str
    source: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)
    maxima: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    enforced: tuple[str, ...] = ()

    def refusal(self, case: CaseLike) -> str | None:
        """Why this claim does not cover the case, in a few words; None if it does."""
        if (case.operation, case.variant) != (self.operation, self.variant):
            return f"claims {self.operation} {self.variant} only"
        return next((reason for _, reason in self._overstepped(case)), None)

    def dares(self, case: CaseLike) -> bool:
        """Whether the case oversteps this claim in nothing but limits that the library promises to enforce."""
        if (case.operation, case.variant) != (self.operation, self.variant):
            return False
        keys = {key for key, _ in self._overstepped(case)}
        return bool(keys) and keys <= set(self.enforced)

    def _overstepped(self, case: CaseLike) -> Iterator[tuple[str, str]]:
        """(parameter, reason) for every limit that a case of the claim's operation and variant oversteps."""
        for key, values in self.where.items():
            if case[key] not in values:
                yield key, f"{key}={case[key]} is none of {', '.join(values)}"
        for key, multiple in self.multiples.items():
            if case.integer(key) % multiple:
                yield key, f"{key}={case[key]} is no multiple of {multiple}"
        for key, maximum in self.maxima.items():
            if case.integer(key) > maximum:
                yield key, f"{key}={case[key]} is above {maximum}"

    def text(self) -> str:
        """The claim in one line, for tables."""
        words = [f"{key}={'|'.join(values)}" for key, values in sorted(self.where.items())]
        words += [f"{key}%{multiple}=0" for key, multiple in sorted(self.multiples.items())]
        words += [f"{key}<={maximum}" for key, maximum in sorted(self.maxima.items())]
        return " ".join(words) or "all"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "operation": self.operation,
            "variant": self.variant,
            "source": self.source,
            "where": {key: list(values) for key, values in self.where.items()},
            "multiples": dict(self.multiples),
            "maxima": dict(self.maxima),
            "options": {key: list(words) for key, words in self.options.items()},
            "enforced": list(self.enforced),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Claim:
        """The inverse of `to_json`."""
        where = {key: tuple(values) for key, values in data["where"].items()}
        options = {key: tuple(words) for key, words in data.get("options", {}).items()}
        return cls(**{**data, "where": where, "options": options, "enforced": tuple(data.get("enforced", ()))})


@runtime_checkable
class Backend(Protocol):
    """An adapter to one real implementation.

    A plugin (a file, a module or an entry point in the group ``conformance.backends``) offers
    ``backends() -> Iterable[Backend]``.
    """

    name: str

    def version(self) -> str:
        """The version of the library under test."""

    def claims(self, device: str) -> Iterable[Claim]:
        """What is supported on ``device`` (``cpu`` or ``cuda:0``); empty where nothing is.

        Every worker process asks for its own device before its first call.
        """

    def recipe(self, claim: Claim) -> Recipe:
        """The declared choices for a claim."""

    def prepare(self, case: CaseLike, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Any:
        """Layouts, shuffles and weight preparation with the library's own means. Inputs are on the call's device."""

    def run(self, prepared: Any, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run once; return a tensor for each part.

        out: canonical output buffers, one a part, already poisoned; fill them or return tensors of your own.
        Raise `Unsupported` to refuse.
        """
