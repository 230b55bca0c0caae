"""The plan of a run: which cases, and in which order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from conformance.discover import UsageError, unknown
from conformance.messages import Description
from fuzz import plan as plans
from fuzz.case import Case, CaseError
from fuzz.extent import extent, is_large
from fuzz.grammar import GRAMMAR, Choice, Size
from fuzz.real_shapes import real_cases
from references.backend import Claim

DEFAULT_CASES = 40
"""Cases drawn for each operation x variant."""
HEAVY_CASES = {"moe": 32}
"""The same for operations whose cases each take the time of many."""
LEAST = 200
"""Claimed cases that each operation x backend gets at least, unless the number of cases is given; a slow backend, in
proportion to its pace."""

MOST_LARGE = 2
"""Cases that take long to draw, of those that are added for one backend: a layer of 256 experts takes seconds."""
ROOM = (2**23, 2**20)
"""Elements of matrices and output that a case bent to a claim has at most, where the claim lets it: with its first
seed, and with others."""
LAST_TO_SHRINK = ("groups", "experts")
PASSED_OVER = 64
"""Such cases that are passed over in a row before the search for small ones ends."""

PROBED = ("ue8m0", "quantize", "gemm")
"""Operations whose open choices can be measured."""

Group = tuple[str, str]


def probed(operations: Sequence[str], formats: Sequence[str]) -> list[Group]:
    """`groups` of a probe. Raises `UsageError`."""
    for name in operations:
        if name not in PROBED:
            raise UsageError(f"nothing to probe in operation {name!r}; known: {', '.join(PROBED)}")
    return groups(operations or PROBED, formats)


def check(word: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises `UsageError` for a name that is not known."""
    for name in names:
        if name not in known:
            raise UsageError(unknown(word, name, known))


def groups(operations: Sequence[str], formats: Sequence[str]) -> list[Group]:
    """The (operation, variant) pairs that are asked for; all of them if nothing is. Raises `UsageError`."""
    every = [(operation, variant) for operation, variants in GRAMMAR.items() for variant in variants]
    for word, wanted, known in (
        ("operation", operations, list(GRAMMAR)),
        ("format", formats, sorted({variant for _, variant in every})),
    ):
        check(word, wanted, known)
    chosen = [
        (operation, variant)
        for operation, variant in every
        if (not operations or operation in operations) and (not formats or variant in formats)
    ]
    if not chosen:
        raise UsageError(f"no operation {', '.join(operations)} has a format {', '.join(formats)}")
    return chosen


def parse(texts: Iterable[str]) -> list[Case]:
    """Cases from their texts. Raises `UsageError`."""
    try:
        return [Case.parse(text) for text in texts]
    except CaseError as error:
        raise UsageError(str(error)) from None


def read(path: Path) -> list[Case]:
    """A plan from a file. Raises `UsageError`."""
    try:
        return plans.read_plan(path)
    except OSError as error:
        raise UsageError(f"--plan {path}: {error.strerror}") from None
    except CaseError as error:
        raise UsageError(f"--plan {error}") from None


def draw(
    chosen: Sequence[Group],
    descriptions: Sequence[Description],
    seed: int,
    cases: int | None,
    least: int | None = None,
) -> list[Case]:
    """Draw a plan with every group that some backend claims in turn.

    cases: for each group; None for the default, topped up to `LEAST`. least: claimed cases that each group x backend
    gets at least.
    """
    claimed = {(item.claim["operation"], item.claim["variant"]) for about in descriptions for item in about.claims}
    chosen = [group for group in chosen if group in claimed] or chosen
    plan = [
        case
        for operation in dict.fromkeys(operation for operation, _ in chosen)
        for case in plans.draw_plan(
            [group for group in chosen if group[0] == operation],
            HEAVY_CASES.get(operation, DEFAULT_CASES) if cases is None else cases,
            seed,
        )
    ]
    if cases is None:
        by_operation: dict[str, list[Group]] = {}
        for group in chosen:
            by_operation.setdefault(group[0], []).append(group)
        plan = [*plan, *_top_up(plan, list(by_operation.values()), descriptions, LEAST)]
    if least is not None:
        plan = [*plan, *_top_up(plan, [[group] for group in chosen], descriptions, least)]
    return interleaved(dict.fromkeys(plan))


def real(chosen: Sequence[Group], descriptions: Sequence[Description]) -> list[Case]:
    """The cases of real sizes that some backend claims, their words bent to its claims, one of each group in turn.

    The output past 2^31 elements is among them where no backend runs on a CPU. Raises `UsageError`.
    """
    vast = all(about.device != "cpu" for about in descriptions)
    found: dict[Case, None] = {}
    for about in descriptions:
        for claim in (Claim.from_json(item.claim) for item in about.claims):
            group = claim.operation, claim.variant
            for number, case in enumerate(real_cases(*group, vast=vast) if group in chosen else ()):
                bent = case if claim.refusal(case) is None else bend(case, claim, number, 0)
                if bent is not None and _sizes(bent) == _sizes(case):
                    found.setdefault(bent)
    plan = interleaved(found)
    if not plan:
        raise UsageError("--shapes real: no operation and format that is asked for and claimed has real shapes")
    return plan


def interleaved(plan: Iterable[Case]) -> list[Case]:
    """One case of each group in turn, so that a run that is cut short has seen them all."""
    columns: dict[Group, list[Case]] = {}
    for case in plan:
        columns.setdefault((case.operation, case.variant), []).append(case)
    return [case for case in chain.from_iterable(zip_longest(*columns.values())) if case is not None]


def digest(plan: Iterable[Case]) -> str:
    """SHA-256 over the texts of the cases, a newline after each."""
    return hashlib.sha256("".join(f"{case.text}\n" for case in plan).encode()).hexdigest()


def _top_up(
    plan: Sequence[Case], classes: Sequence[Sequence[Group]], descriptions: Sequence[Description], least: int
) -> list[Case]:
    """Cases of the plan bent to the claims of backends that claim fewer than ``least`` of a class of groups."""
    added: dict[Case, None] = {}
    pools: dict[Group, list[Case]] = {}
    for case in dict.fromkeys(plan):
        pools.setdefault((case.operation, case.variant), []).append(case)
    for description in sorted(descriptions, key=lambda item: (item.backend, item.device)):
        claims = [Claim.from_json(item.claim) for item in description.claims]
        for groups in classes:
            mine = [claim for claim in claims if (claim.operation, claim.variant) in groups]
            pool = [case for group in groups for case in pools.get(group, ())]
            lacking = least - sum(any(claim.refusal(case) is None for claim in mine) for case in pool) if mine else 0
            small = [case for case in pool if not is_large(case)]
            for case in _few_large(_bent(small, mine, least, set(pool)), max(0, lacking)):
                added[case] = None
                pools[case.operation, case.variant].append(case)
    return list(added)


def _few_large(cases: Iterator[Case], count: int) -> Iterator[Case]:
    """The first of the cases, but `MOST_LARGE` large ones at most; as many more of them in a row end the search."""
    large = passed = 0
    while count > 0 and passed <= MOST_LARGE:
        case = next(cases, None)
        if case is None:
            return
        if is_large(case) and large == MOST_LARGE:
            passed += 1
            continue
        large, passed, count = large + is_large(case), 0, count - 1
        yield case


def _bent(pool: Sequence[Case], claims: Sequence[Claim], turns: int, known: set[Case]) -> Iterator[Case]:
    """Distinct cases that the claims cover, each claim in turn, as many as can be had. known: those not to be given."""
    for turn in range(1, 1 + turns):
        before = len(known)
        for claim in claims:
            for number, case in enumerate(item for item in pool if item.variant == claim.variant):
                bent = bend(case, claim, number, turn)
                if bent is not None:
                    bent = moderate(bent, claim, ROOM[turn > 1])
                if bent is not None and bent not in known:
                    known.add(bent)
                    yield bent
        if len(known) == before:
            return


def _sizes(case: Case) -> dict[str, str]:
    rule = GRAMMAR[case.operation][case.variant]
    return {key: case[key] for key, domain in rule.keys.items() if not isinstance(domain, Choice)}


def bend(case: Case, claim: Claim, number: int, turn: int) -> Case | None:
    """The case changed as little as the claim asks for, with another seed; None where that is no case.

    number: picks among the values that the claim lists. turn: picks the seed.
    """
    domains: Mapping[str, object] = GRAMMAR[case.operation][case.variant].keys
    changes: dict[str, str | int] = {}
    for place, (key, values) in enumerate(sorted(claim.where.items())):
        if case[key] not in values:
            changes[key] = values[(number + place) % len(values)]
    for key, domain in domains.items():
        if isinstance(domain, Choice) or key in changes:
            continue
        multiple = claim.multiples.get(key, 1)
        value = min(case.integer(key), claim.maxima.get(key, case.integer(key)))
        changes[key] = max(multiple, value // multiple * multiple)
    try:
        bent = case.replace(seed=(case.seed + turn * 1_000_003) % 2**32, **changes)
    except CaseError:
        return None
    return bent if claim.refusal(bent) is None else None


def moderate(case: Case, claim: Claim, room: int) -> Case:
    """A claimed case with its sizes halved, the largest first, until it is within ``room`` or nothing can be halved.

    Multiples that a claim asks for raise sizes that were drawn small, so that others may be far too large beside them.
    """
    rule = GRAMMAR[case.operation][case.variant]
    steps = {
        key: math.lcm(claim.multiples.get(key, 1), domain.multiple)
        for key, domain in rule.keys.items()
        if isinstance(domain, Size) and key not in claim.where
    }
    while extent(case) > room:
        order = sorted(steps, key=lambda key: (key in LAST_TO_SHRINK, -case.integer(key) // steps[key], key))
        smaller = next(filter(None, (_halved(case, key, steps[key], claim) for key in order)), None)
        if smaller is None:
            break
        case = smaller
    return case


def _halved(case: Case, key: str, step: int, claim: Claim) -> Case | None:
    """The case with half of a size, where that is claimed and takes a tenth of its extent away at least."""
    try:
        found = case.replace(**{key: case.integer(key) // 2 // step * step})
    except CaseError:
        return None
    return found if claim.refusal(found) is None and extent(found) <= 0.9 * extent(case) else None
