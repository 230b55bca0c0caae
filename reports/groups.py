"""Calls and groups: what records amount to, one level up and two levels up.

A *call* is one case on one backend (device and options included); its records are the parts of its answer. A *group* is
the calls of one operation and variant on one backend and device. All counts in the reports are counts of calls.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from reports.record import Record

FAIL, KNOWN, PASS, REFUSED, UNSUPPORTED = "fail", "known", "pass", "refused", "unsupported"
STATUSES = (FAIL, KNOWN, PASS, REFUSED, UNSUPPORTED)
"""Of a call: a part fails and no ledger entry explains it; all parts that fail are known; some part passes; refused;
not claimed. The first that applies."""

PROPERTY = "property:"
"""What the names of parts begin with that say something of an answer beside its values."""


@dataclass(frozen=True)
class Call:
    """One case on one backend. parts: its records, earlier parts first."""

    parts: tuple[Record, ...]

    @cached_property
    def status(self) -> str:
        """One of `STATUSES`."""
        failing = [record for record in self.parts if record.failing]
        if failing:
            return FAIL if any(not record.ledger_id for record in failing) else KNOWN
        verdicts = {record.verdict for record in self.parts}
        return PASS if "pass" in verdicts else REFUSED if "refused" in verdicts else UNSUPPORTED

    @cached_property
    def lead(self) -> Record:
        """The record that speaks for the call: the first part that fails, else the one with the largest headroom."""
        if self.status in (FAIL, KNOWN):
            unexplained = self.status == FAIL
            return next(item for item in self.parts if item.failing and unexplained == (not item.ledger_id))
        return max(self.parts, key=lambda item: -1.0 if item.headroom is None else item.headroom)

    @cached_property
    def headroom(self) -> float | None:
        """The largest over the parts; None where nothing was judged."""
        return max((item.headroom for item in self.parts if item.headroom is not None), default=None)


@dataclass(frozen=True)
class Group:
    """The calls of one operation and variant on one backend and device.

    claims, sources: from the run, where it lists them. recipes: those of the records, else of the run.
    """

    operation: str
    variant: str
    backend: str
    version: str
    device: str
    sm: str
    calls: tuple[Call, ...]
    claims: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @cached_property
    def counts(self) -> Counter[str]:
        """Status -> calls."""
        return Counter(call.status for call in self.calls)

    @property
    def judged(self) -> int:
        """Calls that were made: all but the unsupported ones."""
        return len(self.calls) - self.counts[UNSUPPORTED]

    @cached_property
    def failing(self) -> Counter[str]:
        """Verdict -> unexplained failures."""
        return Counter(call.lead.verdict for call in self.calls if call.status == FAIL)

    @cached_property
    def known(self) -> Counter[str]:
        """Verdict -> known failures."""
        return Counter(call.lead.verdict for call in self.calls if call.status == KNOWN)

    @property
    def status(self) -> str:
        """The worst status of a call."""
        return next((status for status in STATUSES if self.counts[status]), UNSUPPORTED)

    @cached_property
    def headroom(self) -> float | None:
        """The largest over the calls."""
        return max((call.headroom for call in self.calls if call.headroom is not None), default=None)

    @cached_property
    def bit_equal(self) -> float | None:
        """The mean over the judged parts of the answers of the share of elements that equal the nominal answer.

        A property's part compares two answers, which need not be equal: it does not count.
        """
        return mean([share for shares in self.bit_equal_by_recipe.values() for share in shares])

    @cached_property
    def bit_equal_by_recipe(self) -> dict[str, list[float]]:
        """Recipe -> the shares that `bit_equal` is the mean of."""
        shares: dict[str, list[float]] = {}
        for call in self.calls:
            for item in call.parts:
                if item.bit_equal is not None and not item.part.startswith(PROPERTY):
                    shares.setdefault(item.recipe, []).append(item.bit_equal)
        return shares

    @cached_property
    def over_fp32(self) -> float | None:
        """The median over the parts of the error over that of an FP32 reference, where both have one."""
        found = [
            item.error / item.fp32_error
            for call in self.calls
            for item in call.parts
            if item.error is not None and item.fp32_error and math.isfinite(item.fp32_error)
        ]
        return statistics.median(found) if found else None

    @cached_property
    def seconds(self) -> float:
        """Time in the backend: a call's parts share one time, so the largest of them counts."""
        return math.fsum(max(item.seconds for item in call.parts) for call in self.calls)

    @cached_property
    def worst(self) -> Call | None:
        """The first unexplained failure, else the first known one, else the largest headroom, else a judged call."""
        for status in (FAIL, KNOWN):
            for call in self.calls:
                if call.status == status:
                    return call
        judged = [call for call in self.calls if call.status in (PASS, REFUSED)]
        return max(judged, key=lambda call: -1.0 if call.headroom is None else call.headroom, default=None)


def mean(numbers: Sequence[float]) -> float | None:
    """The arithmetic mean; None of nothing."""
    return math.fsum(numbers) / len(numbers) if numbers else None


def calls_by_group(ordered: Sequence[Record]) -> Iterator[list[Call]]:
    """The calls of each group, from records in the order of ``reports.frame.order``."""

    def place(item: Record) -> tuple[str, ...]:
        return (item.operation, item.variant, item.backend, item.version, item.device)

    for _, found in groupby(ordered, key=place):
        yield [Call(tuple(parts)) for _, parts in groupby(found, key=lambda item: (item.case, item.options))]
