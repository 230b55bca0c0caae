"""Level one of shrinking: a smaller, simpler Case that still fails, found by a greedy walk over its grammar.

Nothing here knows what failing means: a predicate says it. The walk is deterministic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR, Choice, Size

SIMPLE_VALUES = ("zeros", "zero", "constant", "all_equal", "index", "single", "integer", "codes", "normal")
"""Profiles in the order of simplicity; the others follow in the order of the grammar."""


@dataclass
class Budget:
    """What a search may spend: calls of its predicate, and seconds from now on."""

    tries: int
    seconds: float
    used: int = 0
    _ends: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.seconds

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.used >= self.tries or time.monotonic() >= self._ends

    def part(self, share: float) -> Budget:
        """A budget of a share of what is left."""
        return Budget(int((self.tries - self.used) * share), max(0.0, (self._ends - time.monotonic()) * share))


def shrink_case(case: Case, fails: Callable[[Case], bool], budget: Budget) -> Case:
    """The simplest case that the walk finds; the case itself if none.

    fails: whether another case fails in the same way; False for a case that is not claimed.
    """
    best, tried = case, {case.text}

    def accepted(other: Case) -> bool:
        nonlocal best
        if other.text in tried or budget.spent:
            return False
        tried.add(other.text)
        budget.used += 1
        if not fails(other):
            return False
        best = other
        return True

    moved = True
    while moved and not budget.spent:
        moved = False
        for seed in (0, 1, 2, 3):
            if best.seed > seed and accepted(best.replace(seed=seed)):
                moved = True
                break
        for key, domain in GRAMMAR[best.operation][best.variant].keys.items():
            while any(map(accepted, _simpler(best, key, domain))):
                moved = True
    return best


def with_word(case: Case, key: str, word: str) -> Case:
    """The case with one parameter changed. Raises `CaseError`."""
    params = tuple((name, word if name == key else value) for name, value in case.params)
    return Case(case.operation, case.variant, params, case.seed)


def _simpler(case: Case, key: str, domain: Choice | Size) -> Iterator[Case]:
    """Cases that differ in one parameter and are simpler, the simplest first."""
    value = case[key]
    words = _sizes(int(value), domain) if isinstance(domain, Size) else _words(value, key, domain)
    for word in words:
        try:
            yield with_word(case, key, word)
        except CaseError:
            continue


def _sizes(value: int, domain: Size) -> Iterator[str]:
    step = domain.multiple
    least = -(-domain.least // step) * step
    candidates = (least, value // 8, value // 4, value // 2, value * 3 // 4, value - step)
    for number in dict.fromkeys(max(least, candidate // step * step) for candidate in candidates):
        if number < value:
            yield str(number)


def _words(value: str, key: str, domain: Choice) -> Iterator[str]:
    ranked = list(domain.values)
    if key == "values":
        ranked.sort(key=lambda word: SIMPLE_VALUES.index(word) if word in SIMPLE_VALUES else len(SIMPLE_VALUES))
    yield from ranked[: ranked.index(value)]
