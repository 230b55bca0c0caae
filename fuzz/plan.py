"""Plans: the list of cases of a run, drawn before anything runs, so that all backends see the same.

For each group (operation, variant) a plan starts with cornerstones, which never change, and goes on with cases that
Hypothesis draws from the plan's seed. Groups take turns, so every prefix of a plan looks at all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, product
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR, Choice, Size
from fuzz.moe_shapes import sizes as moe_sizes
from fuzz.routing_shapes import corner
from fuzz.scale_profiles import SPECIAL
from fuzz.strategies import Limits, cases, least, unit

Group = tuple[str, str]

_BATCH = 32

MAX_ELEMENTS = 2**13
"""Elements of a case in a plan, unless asked otherwise; a cornerstone that lists a set of values may take more."""

_SETS = {"boundary": 1536, "special": len(SPECIAL), "pow2_edges": 254 * 7 * 3}
"""``ue8m0`` profiles that enumerate: how many numbers hold all of them."""

_EDGES_IN = {"dtype": "fp32"}
"""Where a quantiser's ``pow2_edges`` tell a policy on the bits from ``ceil(log2(amax))``."""

# Rows and columns as (blocks, more elements) for one case after another: several ragged blocks first.
_ROOMY = (((2, 1), (2, 2)), ((0, 5), (5, -2)), ((1, 1), (3, 0)), ((0, 17), (4, 2)))
_EDGES = (
    ((0, 1), (0, 2)),
    ((0, 1), (1, 0)),
    ((1, 0), (1, 0)),
    ((1, 0), (0, 2)),
    ((1, -1), (1, -2)),
    ((0, 3), (1, 2)),
    ((0, 127), (0, 2)),
    ((0, 1), (16, 2)),
    # A scale block that ends with a tile of K of 32, 64 or 96, under each bucket of rows that kernels are chosen by.
    ((0, 2), (1, 32)),
    ((0, 7), (2, 64)),
    ((0, 12), (0, 96)),
    ((4, 0), (2, 32)),
    ((9, 0), (1, 64)),
    ((65, 1), (1, 0)),
    # Squares, where only strides and layouts tell rows from columns: a GEMM's blocks of 128 of N by K, and a matrix.
    ((0, 3), (1, 72)),
    ((0, 6), (0, 6)),
)


def draw_plan(groups: Sequence[Group], per_group: int, seed: int, max_elements: int = MAX_ELEMENTS) -> list[Case]:
    """Exactly ``per_group`` distinct cases for each group, the groups taking turns.

    The same arguments and the same version of Hypothesis give the same plan, whatever else is loaded. Where per_group
    is too small for a group's cornerstones, the first of them make the plan. Raises ValueError for a group that the
    grammar does not have.
    """
    columns = []
    for operation, variant in groups:
        if variant not in GRAMMAR.get(operation, {}):
            raise ValueError(f"no operation {operation} with variant {variant}")
        chosen: dict[str, Case] = {}
        fixed = cornerstones((operation, variant), max_elements)
        for case in fixed[: max(len(_singles((operation, variant), max_elements)), per_group * 3 // 4 + 1)]:
            chosen[case.text] = case
        if len(chosen) < per_group:
            _draw((operation, variant), per_group, seed, Limits(max_elements), chosen)
        columns.append(list(chosen.values())[:per_group])
    return [case for turn in zip(*columns, strict=True) for case in turn]


def cornerstones(group: Group, max_elements: int = MAX_ELEMENTS) -> list[Case]:
    """The fixed cases of a group, distinct.

    First every word of every key, then the smallest and the odd shapes, then every profile with every other word.
    """
    distinct: dict[str, Case] = {}
    for case in (*_singles(group, max_elements), *_shapes(group, max_elements), *_pairs(group, max_elements)):
        distinct.setdefault(case.text, case)
    return list(distinct.values())


def pace(plan: Iterable[Case], share: float) -> list[Case]:
    """The first ``share`` (0 to 1, rounded up to whole cases) of each group of a plan, in its order."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share} is not within 0..1")
    plan = list(plan)
    left = {group: math.ceil(share * count) for group, count in Counter(map(_group, plan)).items()}
    kept = []
    for case in plan:
        if left[_group(case)] > 0:
            left[_group(case)] -= 1
            kept.append(case)
    return kept


def first(plan: Iterable[Case], most: int | None) -> list[Case]:
    """The first ``most`` cases of each group of a plan, in its order; all of them if None."""
    taken: Counter[Group] = Counter()
    kept = []
    for case in plan:
        taken[_group(case)] += 1
        if most is None or taken[_group(case)] <= most:
            kept.append(case)
    return kept


def write_plan(path: Path, plan: Iterable[Case], comments: Iterable[str] = ()) -> None:
    """Write a plan as text: comments with a leading ``# ``, then one case a line."""
    lines = [f"# {comment}" for comment in comments] + [case.text for case in plan]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def read_plan(path: Path) -> list[Case]:
    """Read a plan; blank lines and lines that start with ``#`` are left out.

    Raises `CaseError` that names the file and the line; OSError where the file cannot be read.
    """
    plan = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            plan.append(Case.parse(line.removesuffix("\r")))
        except CaseError as error:
            raise CaseError(f"{path}:{number}: {error}") from None
    return plan


def _group(case: Case) -> Group:
    return case.operation, case.variant


def _draw(group: Group, per_group: int, plan_seed: int, limits: Limits, chosen: dict[str, Case]) -> None:
    """Add drawn cases until there are enough; the body only records, so nothing ever shrinks or fails.

    Cases are drawn by the batch: an example costs Hypothesis more than a case does, and its first, simplest example and
    the copies that it likes to try then thin out a batch instead of the plan.
    """

    def record(batch: list[Case]) -> None:
        for case in batch:
            if len(chosen) < per_group:
                chosen.setdefault(case.text, case)

    batches = st.lists(cases(*group, limits=limits), min_size=_BATCH, max_size=_BATCH)
    attempt = 0
    while len(chosen) < per_group:
        text = f"{plan_seed} {group[0]} {group[1]} {attempt}"
        attempt += 1
        once = settings(
            max_examples=2 + (per_group - len(chosen)) // _BATCH,
            derandomize=False,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            backend="hypothesis",
        )
        derived = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        seed(derived)(once(given(batches)(record)))()


def _singles(group: Group, max_elements: int) -> list[Case]:
    """Every word of every key at least once, on shapes with room."""
    words = _words(group)
    count = max(map(len, words.values()))
    found = [_case(group, index, _sharp(group, _turn(words, index)), _ROOMY, max_elements) for index in range(count)]
    # A combination that the grammar refuses was replaced; whatever word went missing with it gets a case of its own.
    for key, list_ in words.items():
        for word in list_:
            if all(case[key] != word for case in found):
                found.append(_case(group, len(found), {key: word}, _ROOMY, max_elements))
    if group[0] == "quantize" and "floor" in words.get("scale", ()):
        found.append(
            _case(group, len(found), {"values": "pow2_edges", **_EDGES_IN, "scale": "floor"}, _ROOMY, max_elements)
        )
    return found


def _sharp(group: Group, picked: dict[str, str]) -> dict[str, str]:
    """The words with a dtype in which an amax can lie so close to a power of two that a logarithm is wrong."""
    return {**picked, **_EDGES_IN} if group[0] == "quantize" and picked["values"] == "pow2_edges" else picked


def _shapes(group: Group, max_elements: int) -> Iterator[Case]:
    words = _words(group)
    for index in range(len(_EDGES)):
        yield _case(group, index, _turn(words, index + 1), _EDGES, max_elements)


def _pairs(group: Group, max_elements: int) -> Iterator[Case]:
    words = _words(group)
    if group[0] in ("routing", "moe"):
        yield from (_case(group, index, row, _ROOMY, max_elements) for index, row in enumerate(_pairwise(words)))
        return
    profiles = words.pop("values")
    others = sorted(((key, list_) for key, list_ in words.items() if len(list_) > 1), key=lambda item: len(item[1]))
    steps = max((len(list_) for _, list_ in others), default=1)
    for index, (number, step) in enumerate(product(range(len(profiles)), range(steps))):
        picked = {"values": profiles[number]}
        for place, (key, list_) in enumerate(others):
            picked[key] = list_[(step + number // len(list_) ** place) % len(list_)]
        yield _case(group, index, picked, _ROOMY, max_elements)


def _pairwise(words: dict[str, tuple[str, ...]]) -> Iterator[dict[str, str]]:
    """Rows that hold every pair of words of any two keys, greedily few: for routers and expert layers."""
    keys = [key for key, list_ in words.items() if len(list_) > 1]
    left = {
        ((one, a), (other, b))
        for place, one in enumerate(keys)
        for other in keys[place + 1 :]
        for a, b in product(words[one], words[other])
    }
    while left:
        row = dict(min(left, key=lambda pair: [(keys.index(key), words[key].index(word)) for key, word in pair]))
        for key in keys:
            if key not in row:
                gains = {word: len(left & _pairs_of({**row, key: word}, keys)) for word in words[key]}
                row[key] = max(words[key], key=lambda word, gains=gains: gains[word])  # type: ignore[misc]
        left -= _pairs_of(row, keys)
        yield row


def _pairs_of(row: dict[str, str], keys: Sequence[str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    items = [(key, row[key]) for key in keys if key in row]
    return {(one, other) for place, one in enumerate(items) for other in items[place + 1 :]}


def _turn(words: dict[str, tuple[str, ...]], index: int) -> dict[str, str]:
    """A word for every key: each goes round, later keys with another start every time, so that none march in step."""
    profiles = words["values"]
    others = [(key, list_) for key, list_ in words.items() if key != "values" and len(list_) > 1]
    others.sort(key=lambda item: len(item[1]))
    picked = {"values": profiles[index % len(profiles)]}
    for place, (key, list_) in enumerate(others):
        picked[key] = list_[(index + index // len(list_) ** (place + 1)) % len(list_)]
    return picked


def _words(group: Group) -> dict[str, tuple[str, ...]]:
    rule = GRAMMAR[group[0]][group[1]]
    return {key: domain.values for key, domain in rule.keys.items() if isinstance(domain, Choice)}


_Shapes = tuple[tuple[tuple[int, int], tuple[int, int]], ...]


def _case(group: Group, index: int, picked: dict[str, str], shapes: _Shapes, max_elements: int) -> Case:
    """A case with the words picked and the index for its seed; words change where the grammar refuses them."""
    operation, variant = group
    rule = GRAMMAR[operation][variant]
    free = {key: list_ for key, list_ in _words(group).items() if key != "values"}
    starts = {key: list_.index(picked[key]) if key in picked else index % len(list_) for key, list_ in free.items()}
    profiles = _words(group)["values"]
    values = picked.get("values", profiles[index % len(profiles)])
    # Turn the words of the later keys first, each beginning with the one that was picked.
    turned = [list_[starts[key] :] + list_[: starts[key]] for key, list_ in free.items()]
    for combination in product(*turned):
        given_ = {"values": values, **dict(zip(free, combination, strict=True))}
        given_ |= _sizes(group, given_, shapes[(index + index // len(shapes)) % len(shapes)], index, max_elements)
        if rule.check(given_) is None:
            return Case(operation, variant, tuple(sorted(given_.items())), index)
    raise ValueError(f"no case of {operation} {variant} with values={values}")


def _sizes(
    group: Group, words: dict[str, str], shape: tuple[tuple[int, int], tuple[int, int]], index: int, max_elements: int
) -> dict[str, str]:
    rule = GRAMMAR[group[0]][group[1]]
    sizes = {key: domain for key, domain in rule.keys.items() if isinstance(domain, Size)}
    if group[0] == "ue8m0":
        blocks, more = shape[1]
        return {"n": str(_SETS.get(words["values"], max(1, blocks * 64 + more)))}
    room = Limits(max_elements).room(group[0], sizes, words)
    if group[0] == "moe":
        return moe_sizes(group[1], index + 1, room)
    if group[0] == "routing":
        return corner(group[1], index, room)
    found = {}
    # Columns first: a cut that makes room falls on the rows.
    for key, (blocks, more) in zip(sorted(sizes, key=_is_rows), cycle(reversed(shape)), strict=False):
        domain = sizes[key]
        size = min(blocks * unit(group[0], key, words) + more, room) // domain.multiple * domain.multiple
        found[key] = str(max(size, least(domain)))
        room //= int(found[key])
    return found


def _is_rows(key: str) -> bool:
    return key in ("m", "n", "rows")
