"""Targets of a run: a backend on a device, what it claims, and its share of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from conformance.journal import Key
from conformance.ledger import Ledger
from conformance.messages import CallReply, Claimed, Description
from fuzz.case import Case
from fuzz.plan import first, pace
from references.backend import Claim

SWEPT_SHARE = 0.25
"""Share of a backend's cases that is run again under each of its call options."""
MAX_BEYOND = 24
"""Calls beyond the claims of one target on one operation x variant."""


Dared = Mapping[Case, Claimed]


class BackendWorker(Protocol):
    """The part of ``process.Worker`` that calls a backend."""

    def call(self, case: str, backend: str, options: Mapping[str, str], deadline: float) -> CallReply:
        """Call a backend on a case's inputs; a failure of any kind is a reply."""

    def close(self) -> None:
        """End the process."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A backend on a device.

    start: a worker, new unless ``before`` says how many cases it has run. options: call options, which are part of a
    record's identity. swept: a target of ``conformance.sweeps``, run on some of the cases whose claim lists its option.
    ledger: the entries that apply. most: claimed cases of each operation x variant, all if None.
    """

    description: Description
    start: Callable[[], BackendWorker]
    before: Callable[[], int] = lambda: 0
    options: Mapping[str, str] = field(default_factory=dict)
    swept: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    most: int | None = None

    @cached_property
    def _claims(self) -> dict[tuple[str, str], list[tuple[Claim, Claimed]]]:
        claims: dict[tuple[str, str], list[tuple[Claim, Claimed]]] = {}
        for claimed in self.description.claims:
            claim = Claim.from_json(claimed.claim)
            claims.setdefault((claim.operation, claim.variant), []).append((claim, claimed))
        return claims

    @property
    def groups(self) -> dict[tuple[str, str], list[Claim]]:
        """(operation, variant) -> the claims on it."""
        return {group: [claim for claim, _ in claims] for group, claims in self._claims.items()}

    @property
    def options_text(self) -> str:
        """The options as sorted ``key=value`` words."""
        return " ".join(f"{key}={value}" for key, value in sorted(self.options.items()))

    def claimed(self, case: Case) -> Claimed | str:
        """The first claim that covers a case, or the reason why none does."""
        reasons = []
        for claim, claimed in self._claims.get((case.operation, case.variant), []):
            reason = claim.refusal(case)
            if reason is None:
                return claimed
            reasons.append(reason)
        return "; ".join(dict.fromkeys(reasons)) or f"no claim for {case.operation} {case.variant}"

    def covers(self, case: Case) -> bool:
        """Whether some claim covers a case."""
        return not isinstance(self.claimed(case), str)

    def beyond(self, case: Case) -> Claimed | None:
        """The first claim that a case oversteps in nothing but limits that the library promises to enforce."""
        claims = self._claims.get((case.operation, case.variant), [])
        return next((claimed for claim, claimed in claims if claim.dares(case)), None)

    def left_out(self, plan: Sequence[Case], share: Sequence[Case]) -> int:
        """How many claimed cases of the plan the share lacks."""
        return sum(self.covers(case) for case in set(plan).difference(share))

    def dared(self, share: Sequence[Case]) -> Dared:
        """The cases beyond the claims that are called all the same: the first `MAX_BEYOND` of each group."""
        dared: dict[Case, Claimed] = {}
        counted: Counter[tuple[str, str]] = Counter()
        for case in share:
            group = (case.operation, case.variant)
            if group in self._claims and counted[group] < MAX_BEYOND and not self.covers(case):
                claimed = self.beyond(case)
                if claimed is not None:
                    dared[case] = claimed
                    counted[group] += 1
        return dared

    def _offers(self, case: Case) -> bool:
        """Whether the claim that covers a case lists this target's options."""
        claimed = self.claimed(case)
        listed = {} if isinstance(claimed, str) else claimed.claim.get("options", {})
        return not isinstance(claimed, str) and all(word in listed.get(key, ()) for key, word in self.options.items())

    def key(self, case: Case) -> Key:
        """What identifies the case's records on this target."""
        return (case.text, self.description.backend, self.description.device, self.options_text)

    def share(self, plan: Sequence[Case]) -> list[Case]:
        """The ledger's witnesses, then the plan without claimed cases beyond ``most`` or the pace of a slow backend.

        Of the claimed cases in each group (operation x variant) the first are kept, at least one. Under ``most``, of
        those beyond the claims one of each group is left to say why, and those that are called all the same.
        """
        if self.swept:
            offered = first([case for case in plan if self._offers(case)], self.most)
            return list(dict.fromkeys(pace(offered, SWEPT_SHARE * self.description.pace)))
        claimed = [case for case in plan if self.covers(case)]
        left_out = set(claimed).difference(pace(first(claimed, self.most), self.description.pace))
        if self.most is not None:
            unclaimed = [case for case in plan if not self.covers(case)]
            left_out |= set(unclaimed).difference(self.dared(unclaimed), first(unclaimed, 1))
        cases = [*self.ledger.witnesses(), *(case for case in plan if case not in left_out)]
        return list(dict.fromkeys(cases))
