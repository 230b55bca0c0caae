"""Case: one input to one operation, as pure data with a complete text form.

    quantize mxfp8 v=1 block=1x32 dtype=bf16 k=96 m=5 scale=ceil stride=contiguous values=scale_ladder seed=7

The text is the identity: the id is the first 16 hex digits of its SHA-256, and every tensor follows from it (see
``fuzz.values``). Nothing is defaulted and nothing else is accepted. Only the standard library is imported here, so that
any process can read a case.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fuzz.grammar import GRAMMAR, Choice, Size

VERSION = 1
MAX_SEED = 2**32 - 1
_WORD = re.compile(r"[A-Za-z0-9_.+,:-]+\Z")
_KEY = re.compile(r"[a-z_]+\Z")


class CaseError(ValueError):
    """A case that is malformed or impossible; the message is one line."""


@dataclass(frozen=True)
class Case:
    """One input to one operation.

    operation: such as ``quantize``.
    variant: the format, UE8M0 policy, layout or routing method.
    params: (key, value) pairs, sorted by key; exactly the keys that the operation and variant ask for.
    seed: 0 to 2**32 - 1.
    """

    operation: str
    variant: str
    params: tuple[tuple[str, str], ...]
    seed: int

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def make(cls, operation: str, variant: str, *, seed: int, **params: str | int) -> Case:
        """A case from keyword parameters, in any order."""
        return cls(operation, variant, tuple(sorted((key, str(value)) for key, value in params.items())), seed)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that a text describes. Raises `CaseError`."""
        if not text.isascii() or not text.isprintable():
            raise CaseError(f"case: not printable ASCII: {text[:200]!r}")
        words = text.split(" ")
        if len(words) < 4:
            raise CaseError(f"case: expected 'OPERATION VARIANT v=1 KEY=VALUE ... seed=N', got {text[:200]!r}")
        operation, variant, *rest = words
        pairs = []
        for word in rest:
            key, equals, value = word.partition("=")
            if not equals or not _KEY.match(key) or not _WORD.match(value):
                raise CaseError(f"case: {word!r} is not KEY=VALUE (single spaces, keys [a-z_]+)")
            pairs.append((key, value))
        if pairs[0] != ("v", str(VERSION)):
            raise CaseError(f"case: third word is {rest[0]!r}, expected 'v={VERSION}'")
        if pairs[-1][0] != "seed" or not _is_canonical_integer(pairs[-1][1]):
            raise CaseError(f"case: last word is {rest[-1]!r}, expected 'seed=N'")
        params = pairs[1:-1]
        keys = [key for key, _ in params]
        if keys != sorted(set(keys)):
            raise CaseError("case: keys are not sorted and distinct between v= and seed=")
        return cls(operation, variant, tuple(params), int(pairs[-1][1]))

    @cached_property
    def text(self) -> str:
        """The canonical text."""
        middle = "".join(f" {key}={value}" for key, value in self.params)
        return f"{self.operation} {self.variant} v={VERSION}{middle} seed={self.seed}"

    @cached_property
    def id(self) -> str:
        """The first 16 hex digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def _values(self) -> dict[str, str]:
        return dict(self.params)

    def __getitem__(self, key: str) -> str:
        return self._values[key]

    def __str__(self) -> str:
        return self.text

    def integer(self, key: str) -> int:
        """The value of a size, as an integer."""
        return int(self._values[key])

    def replace(self, *, seed: int | None = None, **params: str | int) -> Case:
        """A copy with some parameters or the seed changed."""
        changed = {**self._values, **{key: str(value) for key, value in params.items()}}
        return Case.make(self.operation, self.variant, seed=self.seed if seed is None else seed, **changed)

    def to_json(self) -> dict[str, Any]:
        """Plain data: operation, variant, v, params, seed."""
        return {
            "operation": self.operation,
            "variant": self.variant,
            "v": VERSION,
            "params": dict(self.params),
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The inverse of `to_json`. Raises `CaseError`."""
        if not isinstance(data, Mapping) or set(data) != {"operation", "variant", "v", "params", "seed"}:
            raise CaseError("case: expected an object with operation, variant, v, params, seed")
        params, seed = data["params"], data["seed"]
        if data["v"] != VERSION:
            raise CaseError(f"case: version {data['v']!r} is not {VERSION}")
        if not isinstance(params, Mapping) or not all(isinstance(value, str) for value in params.values()):
            raise CaseError("case: params is not an object of strings")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise CaseError(f"case: seed {seed!r} is not an integer")
        return cls(str(data["operation"]), str(data["variant"]), tuple(sorted(params.items())), seed)


def _is_canonical_integer(text: str) -> bool:
    return text.isdecimal() and str(int(text)) == text


def _validate(case: Case) -> None:
    variants = GRAMMAR.get(case.operation)
    if variants is None:
        raise CaseError(f"case: unknown operation {case.operation!r}; known: {', '.join(sorted(GRAMMAR))}")
    rule = variants.get(case.variant)
    if rule is None:
        raise CaseError(f"case: {case.operation} has no variant {case.variant!r}; known: {', '.join(sorted(variants))}")
    given = dict(case.params)
    missing, extra = sorted(set(rule.keys) - set(given)), sorted(set(given) - set(rule.keys))
    if missing or extra:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"takes no {', '.join(extra)}"] * bool(extra)
        raise CaseError(f"case: {case.operation} {case.variant} {' and '.join(parts)}")
    for key, value in case.params:
        _validate_value(key, value, rule.keys[key])
    if not 0 <= case.seed <= MAX_SEED:
        raise CaseError(f"case: seed={case.seed} is not within 0..{MAX_SEED}")
    problem = rule.check(given)
    if problem:
        raise CaseError(f"case: {problem}")


def _validate_value(key: str, value: str, domain: Choice | Size) -> None:
    if isinstance(domain, Choice):
        if value not in domain.values:
            raise CaseError(f"case: {key}={value} is none of {', '.join(domain.values)}")
        return
    if not _is_canonical_integer(value) or not domain.least <= int(value) <= domain.most:
        raise CaseError(f"case: {key}={value} is not an integer within {domain.least}..{domain.most}")
    if int(value) % domain.multiple:
        raise CaseError(f"case: {key}={value} is not a multiple of {domain.multiple}")
