"""Hypothesis strategies that draw cases from the grammar.

Every draw has fewer than 100 outcomes and larger numbers are put together from digits. Hypothesis mixes the larger
integer constants of whatever local modules happen to be loaded into wider ranges, so a seed would not fix the cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from hypothesis import reject, settings
from hypothesis import strategies as st

from fuzz.case import Case
from fuzz.grammar import GRAMMAR, Choice, Size
from fuzz.moe_shapes import COUNT as MOE_COUNT
from fuzz.moe_shapes import sizes as moe_sizes
from fuzz.routing_shapes import SHAPES, TOKENS, fitted

_PRIMES = (5, 7, 13, 17, 31, 61, 97, 127, 251, 509, 1021, 2039)
_DIGIT = st.integers(0, 63)
_ASPECT = st.integers(0, 3)


@dataclass(frozen=True)
class Limits:
    """How large a drawn case may be.

    max_elements: of its matrix or vector. blocks: room for this many full blocks is given in any case, and so are the
    grammar's least sizes.
    """

    max_elements: int = 2**13
    blocks: int = 6

    def __post_init__(self) -> None:
        if self.max_elements < 1:
            raise ValueError(f"max_elements={self.max_elements} is not positive")

    def room(self, operation: str, sizes: Iterable[str], given: Mapping[str, str]) -> int:
        """The elements that a case of an operation with these words may have, by its size keys."""
        plain = {key: word for key, word in given.items() if key != "grouping"}  # aligned groups get no more room
        block = math.prod(unit(operation, key, plain) for key in sizes)
        return max(self.max_elements, self.blocks * block)


def cases(
    operation: str | None = None, variant: str | None = None, limits: Limits = Limits()
) -> st.SearchStrategy[Case]:
    """Valid cases of an operation and variant (any, where None), over every key.

    They shrink towards the first words of the grammar, sizes of 1 and seed 0. Raises ValueError for a name that the
    grammar does not have.
    """
    groups = [
        (known, word)
        for known, variants in GRAMMAR.items()
        for word in variants
        if operation in (None, known) and variant in (None, word)
    ]
    if not groups:
        raise ValueError(f"no operation {operation or 'at all'} with variant {variant or 'at all'}")
    return _cases(tuple(groups), limits)


def register_profiles() -> None:
    """Register the settings profiles ``ci`` (repeatable), ``dev`` and ``nightly`` (long) with Hypothesis."""
    settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, database=None, print_blob=True)
    settings.register_profile("dev", max_examples=100, deadline=None, derandomize=False)
    settings.register_profile("nightly", max_examples=2000, deadline=None, derandomize=False, print_blob=True)


@st.composite
def _cases(draw: st.DrawFn, groups: tuple[tuple[str, str], ...], limits: Limits) -> Case:
    operation, variant = groups[0] if len(groups) == 1 else draw(st.sampled_from(groups))
    rule = GRAMMAR[operation][variant]
    given: dict[str, str] = {}
    for key, domain in rule.keys.items():
        if isinstance(domain, Choice) and key != "values":
            given[key] = domain.values[0] if len(domain.values) == 1 else draw(_word(domain.values))
    sizes = {key: domain for key, domain in rule.keys.items() if isinstance(domain, Size)}
    order = list(sizes)
    if operation == "moe":
        given |= draw(_moe_sizes(variant, limits.room(operation, sizes, given)))
        order = []
    if operation == "routing":
        given |= draw(_router_sizes(variant, limits.room(operation, sizes, given)))
        order = []
    aspect = draw(_ASPECT) if len(order) > 1 else 3
    if aspect % 2:
        order.reverse()
    room = limits.room(operation, sizes, given) if order else 1
    for place, key in enumerate(order):
        others = 1
        for later in order[place + 1 :]:
            others *= least(sizes[later])
        block, most = unit(operation, key, given), max(1, room // others)
        if aspect < 2 and place == 0:  # balanced; otherwise the first takes the room: tall or wide
            most = min(most, max(2 * block + 1, math.isqrt(room)))
        size = draw(_size(sizes[key], block, most))
        given[key] = str(size)
        room = max(1, room // size)
    profiles = rule.keys.get("values")
    if isinstance(profiles, Choice):
        allowed = tuple(word for word in profiles.values if rule.check({**given, "values": word}) is None)
        if not allowed:
            reject()
        given["values"] = draw(_word(allowed))
    elif rule.check(given) is not None:
        reject()
    return Case(operation, variant, tuple(sorted(given.items())), draw(_seeds()))


def unit(operation: str, key: str, given: Mapping[str, str]) -> int:
    """The block size along a size key, around which sizes are interesting."""
    if operation == "scale_layout":
        return {"rows": 128, "cols": 4}.get(key, 4)
    if operation == "requantize":
        return 128
    if operation in ("gemm", "grouped_gemm"):
        rows = 128 if given.get("grouping") == "contiguous_128" else 16
        return {"k": 128, "n": 64, "groups": 2}.get(key, rows)
    if operation == "routing":
        return {"experts": 512, "tokens": 50}.get(key, 1)
    if operation == "moe":
        return {"experts": 2, "hidden": 128, "intermediate": 64}.get(key, 1)
    height, _, width = given.get("block", "").partition("x")
    if not width:
        return 64
    return int(width) if key == "k" else int(height)


def least(domain: Size) -> int:
    """The smallest size of a domain."""
    return -(-domain.least // domain.multiple) * domain.multiple


@lru_cache(4096)
def interesting_sizes(domain: Size, unit: int, room: int) -> tuple[int, ...]:
    """Sizes that matter, ascending: the least, multiples of the block and their neighbours, powers of two, primes."""
    sizes = {1, 2, 3, *_PRIMES, *(2**power for power in range(13))}
    for blocks in (1, 2, 3, 4, 5, 8):
        sizes |= {blocks * unit - 1, blocks * unit, blocks * unit + 1}
    if unit >= 128:  # tiles of a kernel that end a block early
        sizes |= {blocks * unit + tile for blocks in (0, 1, 2, 4) for tile in (32, 64, 96)}
    if domain.multiple > 1:
        sizes |= {size * domain.multiple for size in sizes}
    most = min(room, domain.most)
    fitting = {size for size in sizes if domain.least <= size <= most and size % domain.multiple == 0}
    return tuple(sorted(fitting | {least(domain)}))[:99]


@st.composite
def _router_sizes(draw: st.DrawFn, method: str, room: int) -> dict[str, str]:
    """A router in use or any other, with a few tokens or many."""
    shape = draw(st.sampled_from(SHAPES))
    if draw(st.booleans()):
        experts, groups, kept, topk = (draw(_DIGIT) for _ in range(4))
        shape = (1 + experts * 8 + groups % 8, 1 + groups, 1 + kept % (1 + groups), 1 + topk % 32)
    tokens = draw(st.sampled_from((1, *TOKENS)))
    if draw(st.booleans()):
        tokens = 1 + draw(_DIGIT)
    return fitted(method, shape, tokens, room)


def _moe_sizes(variant: str, room: int) -> st.SearchStrategy[dict[str, str]]:
    """Shapes of the table with any of its numbers of tokens."""
    return st.integers(0, min(99, MOE_COUNT) - 1).map(lambda index: moe_sizes(variant, index, room))


@lru_cache(4096)
def _word(words: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.sampled_from(words)


@lru_cache(4096)
def _size(domain: Size, unit: int, room: int) -> st.SearchStrategy[int]:
    first, most = least(domain), max(least(domain), min(room, domain.most))
    count = (most - first) // domain.multiple + 1
    anywhere = st.tuples(_DIGIT, _DIGIT).map(
        lambda digits: first + (digits[0] * 64 + digits[1]) * count // 4096 * domain.multiple
    )
    matters = st.sampled_from(interesting_sizes(domain, unit, room))
    return st.one_of(matters, matters, matters, anywhere) if count > 2 else matters


@lru_cache(1)
def _seeds() -> st.SearchStrategy[int]:
    """Seeds 0 .. 96^3 - 1: enough to tell cases apart."""
    digit = st.integers(0, 95)
    return st.tuples(digit, digit, digit).map(lambda digits: (digits[0] * 96 + digits[1]) * 96 + digits[2])
