"""What is wrong with a claim that a backend makes, before anything is run on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.call_options import CARRIED_OUT
from conformance.operations import OPERATIONS
from fuzz.grammar import GRAMMAR, Choice, Size
from references.backend import Claim

_OPTION = re.compile(r"[a-z_]+\Z")
_WORD = re.compile(r"[A-Za-z0-9_.+,:-]+\Z")
POISON = "poison"
"""The call option that is the harness's own."""


def is_line(text: object) -> bool:
    """Whether something is a text that can stand in a report: one line, printable, not empty."""
    return isinstance(text, str) and text.isprintable() and bool(text.strip())


def claim_problem(claim: Claim) -> str | None:
    """Why no case could ever meet this claim or no report could show it, in one line; None if all is well."""
    if not is_line(claim.source):
        return "source is not one line of text"
    variants = GRAMMAR.get(claim.operation)
    if variants is None or claim.operation not in OPERATIONS:
        return f"unknown operation; known: {', '.join(sorted(OPERATIONS))}"
    rule = variants.get(claim.variant)
    if rule is None:
        return f"unknown variant; known: {', '.join(sorted(variants))}"
    for name in ("where", "multiples", "maxima", "options"):
        if not isinstance(getattr(claim, name), Mapping):
            return f"{name} is no mapping"
    for key in (*claim.where, *claim.multiples, *claim.maxima):
        if key not in rule.keys:
            return f"unknown parameter {key!r}; known: {', '.join(rule.keys)}"
    for key in dict.fromkeys((*claim.multiples, *claim.maxima)):
        domain = rule.keys[key]
        problem = _limits_problem(claim, key, domain) if isinstance(domain, Size) else f"{key} is no size"
        if problem:
            return problem
    for key, values in claim.where.items():
        problem = _where_problem(claim, key, values, rule.keys[key])
        if problem:
            return problem
    return _options_problem(claim.options) or _enforced_problem(claim)


def _words(values: Any, what: str) -> str | None:
    """Why ``values`` is no tuple of texts; None if it is."""
    if isinstance(values, str):
        return f"{what} is a string, not a tuple of strings"
    if not isinstance(values, Sequence) or not values:
        return f"{what} is {values!r}, not a tuple of strings"
    return None


def _limits_problem(claim: Claim, key: str, domain: Size) -> str | None:
    multiple, most = claim.multiples.get(key, 1), claim.maxima.get(key, domain.most)
    if type(multiple) is not int or multiple < 1:
        return f"{key} in multiples is {multiple!r}, not a positive integer"
    if type(most) is not int or most < 1:
        return f"{key} in maxima is {most!r}, not a positive integer"
    if most < domain.least or not most // multiple:
        return f"no {key} is a multiple of {multiple} and at most {most}"
    return None


def _where_problem(claim: Claim, key: str, values: Any, domain: object) -> str | None:
    problem = _words(values, f"{key} in where")
    if problem:
        return problem
    for value in values:
        if isinstance(domain, Choice) and value not in domain.values:
            return f"{key}={value} is none of {', '.join(domain.values)}"
        if isinstance(domain, Size) and not (isinstance(value, str) and value.isdecimal() and str(int(value)) == value):
            return f"{key}={value!r} is no integer in text form"
    if isinstance(domain, Size):
        multiple, most = claim.multiples.get(key, 1), claim.maxima.get(key, domain.most)
        if not any(domain.least <= int(value) <= most and int(value) % multiple == 0 for value in values):
            return f"none of {key}={'|'.join(values)} is within the claim's other limits"
    return None


def _options_problem(options: Mapping[Any, Any]) -> str | None:
    for key, words in options.items():
        if not isinstance(key, str) or not _OPTION.match(key) or key == POISON:
            return f"{key!r} is no name of a call option (small letters and _; {POISON} is taken)"
        problem = _words(words, f"{key} in options")
        if problem:
            return problem
        for word in words:
            if not isinstance(word, str) or not _WORD.match(word):
                return f"{key}={word!r} in options is no word of letters, digits and _ . + , : -"
            if word not in CARRIED_OUT.get(key, (word,)):
                return f"{key}={word} in options is none of {', '.join(CARRIED_OUT[key])}"
    return None


def _enforced_problem(claim: Claim) -> str | None:
    enforced: Any = claim.enforced
    if isinstance(enforced, str):
        return "enforced is a string, not a tuple of strings"
    if not isinstance(enforced, Sequence):
        return f"enforced is {enforced!r}, not a tuple of strings"
    limited = [*claim.where, *claim.multiples, *claim.maxima]
    odd = next((key for key in enforced if key not in limited), None)
    return None if odd is None else f"enforced names {odd!r}, which the claim does not limit"
