"""A smaller case that a mutant fails in the same way: sizes halved, the simplest words, seed 0, as far as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR, Choice
from fuzz.strategies import least

TRIES = 120
"""Cases that are tried for one catch at most."""


def smaller(case: Case, fails: Callable[[Case], bool], tries: int = TRIES) -> Case:
    """The smallest case that was found by greedy steps, each of which still fails. fails: whether a case does."""
    left, moved = tries, True
    while moved:
        moved = False
        for candidate in steps(case):
            if left <= 0:
                return case
            left -= 1
            if fails(candidate):
                case, moved = candidate, True
                break
    return case


def steps(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first: every size at its least, halved, one less; words before its own; seed 0."""
    keys = GRAMMAR[case.operation][case.variant].keys
    for key, domain in keys.items():
        if isinstance(domain, Choice):
            for word in domain.values[: domain.values.index(case[key])]:
                yield from _changed(case, key, word)
            continue
        size, first = case.integer(key), least(domain)
        for value in (first, size // 2 // domain.multiple * domain.multiple, size - domain.multiple):
            if first <= value < size:
                yield from _changed(case, key, str(value))
    if case.seed:
        yield case.replace(seed=0)


def _changed(case: Case, key: str, word: str) -> Iterator[Case]:
    words: dict[str, Any] = {key: word}
    try:
        yield case.replace(**words)
    except CaseError:
        return
