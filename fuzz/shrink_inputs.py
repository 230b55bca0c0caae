"""Level two of shrinking: explicit inputs, cut down and simplified as long as they fail in the same way.

First ranges of tokens, experts, rows and K blocks are dropped, the case's sizes with them; then words of the case that
its inputs do not depend on are made simpler; then whole tensors, rows, blocks and elements are set to the simplest
value; then what is left is brought nearer to it: without the sign, to a power of two, to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuzz.anatomy import Part, drop, droppable, granule, parts
from fuzz.case import Case, CaseError
from fuzz.grammar import GRAMMAR, Choice
from fuzz.shrink_case import Budget, with_word

Bits = npt.NDArray[np.uint32]
Inputs = dict[str, Tensor]
Fails = Callable[[Case, Mapping[str, Tensor]], bool]
ENOUGH = 64
"""So many elements that differ from the simplest value are few: another simplest value is not tried."""
_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Reduced:
    """What level two leaves.

    differing: elements that are not the simplest value of their tensor. elements: of all tensors together.
    by_input: differing elements of each input that has any. simplest: bits of each input's simplest value, where it is
    one number.
    """

    case: Case
    inputs: Inputs
    differing: int
    elements: int
    by_input: dict[str, int]
    simplest: dict[str, int]


def reduce_inputs(case: Case, inputs: Mapping[str, Tensor], fails: Fails, budget: Budget) -> Reduced:
    """Reduce inputs that fail. fails: whether other ones do in the same way; never asked beyond the budget."""
    search = _Search(case, {name: tensor.contiguous() for name, tensor in inputs.items()}, fails, budget)
    search.cut()
    search.simplify_words()
    search.simplify_values()
    search.cut()
    return search.result()


def to_bits(tensor: Tensor, part: Part) -> Bits:
    """The elements of an input as bits, one a number, in C order; a packed byte is two, the low one first."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    if part.nibbles:
        return np.stack([raw & 15, raw >> 4], axis=1).reshape(-1).astype(np.uint32)
    return raw.view(_WIDTH[tensor.element_size()]).astype(np.uint32)


def from_bits(bits: Bits, part: Part, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_bits`."""
    if part.nibbles:
        pairs = bits.astype(np.uint8).reshape(-1, 2)
        raw = pairs[:, 0] | (pairs[:, 1] << 4)
    else:
        raw = bits.astype(_WIDTH[part.dtype.itemsize]).view(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(raw)).view(part.dtype).view(shape)


def simplest(part: Part, shape: tuple[int, ...], choice: int = 0) -> Bits:
    """The simplest values of an input, as bits. choice: of several simplest ones."""
    if part.fills:
        count = int(np.prod(shape)) * (2 if part.nibbles else 1)
        return np.full(count, part.fills[choice], dtype=np.uint32)
    return np.broadcast_to(np.arange(shape[-1], dtype=np.uint32), shape).reshape(-1).copy()


def differing(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Input -> elements that differ from its simplest value: of several simplest ones, the nearest.

    Of the groups of rows, which only make sense together, the places count where another group begins.
    """
    counts = {}
    for name, part in parts(case).items():
        bits = to_bits(inputs[name], part)
        if part.unit == "whole":
            counts[name] = int((bits != np.append(part.fills[0], bits[:-1])).sum())
            continue
        choices = range(max(1, len(part.fills)))
        counts[name] = min(int((bits != simplest(part, part.shape(case), choice)).sum()) for choice in choices)
    return counts


class _Search:
    def __init__(self, case: Case, inputs: Inputs, fails: Fails, budget: Budget) -> None:
        self.case, self.inputs = case, inputs
        self._fails, self._budget = fails, budget

    def _try(self, case: Case, inputs: Inputs) -> bool:
        if self._budget.spent:
            return False
        self._budget.used += 1
        if not self._fails(case, inputs):
            return False
        self.case, self.inputs = case, inputs
        return True

    def cut(self) -> None:
        """Drop ranges of every size, halves first, down to single granules."""
        for key in droppable(self.case):
            step = granule(self.case, key) if key in dict(self.case.params) else 1
            chunk = -(-self.case.integer(key) // step)
            while chunk >= 1 and not self._budget.spent:
                self._cut_once(key, chunk * step)
                chunk //= 2

    def _cut_once(self, key: str, length: int) -> None:
        """Try to drop every range of this length, from the end."""
        size = self.case.integer(key)
        start = (size - 1) // length * length
        while start >= 0 and not self._budget.spent:
            stop = min(start + length, self.case.integer(key))
            if stop > start:
                smaller = drop(self.case, self.inputs, key, start, stop)
                if smaller is not None:
                    self._try(*smaller)
            start -= length

    def simplify_words(self) -> None:
        """Simpler words and a simpler seed where the inputs stay those of the case."""
        if self.case.seed:
            self._try(self.case.replace(seed=0), self.inputs)
        for key, domain in GRAMMAR[self.case.operation][self.case.variant].keys.items():
            if not isinstance(domain, Choice) or key == "values":  # the profile says what the simplest value is
                continue
            for word in domain.values[: domain.values.index(self.case[key])]:
                try:
                    other = with_word(self.case, key, word)
                except CaseError:
                    continue
                if _form(other) == _form(self.case) and self._try(other, self.inputs):
                    break

    def simplify_values(self) -> None:
        """Towards the simplest values: whole inputs, then groups of elements, then each element."""
        ordered = sorted(self.inputs, key=lambda name: -self.inputs[name].numel())
        for name in ordered:
            part = parts(self.case)[name]
            for choice in range(max(1, len(part.fills))):
                if self._set(name, simplest(part, part.shape(self.case), choice)):
                    break
        for name in ordered:
            self._reset(name)
        for name in ordered:
            self._nearer(name)

    def _set(self, name: str, bits: Bits) -> bool:
        part = parts(self.case)[name]
        if np.array_equal(bits, to_bits(self.inputs[name], part)):
            return True
        tensor = from_bits(bits, part, part.shape(self.case))
        return self._try(self.case, {**self.inputs, name: tensor})

    def _reset(self, name: str) -> None:
        """Delta debugging: set ranges of what differs to the simplest value, ever shorter ones."""
        part = parts(self.case)[name]
        if part.unit == "whole":
            return
        start, kept = to_bits(self.inputs[name], part), None
        for choice in range(max(1, len(part.fills))):
            base = simplest(part, part.shape(self.case), choice)
            self._reset_to(name, part, base)
            found = to_bits(self.inputs[name], part)
            count = int((found != base).sum())
            if kept is None or count < kept[0]:
                kept = (count, found)
            if count <= ENOUGH or self._budget.spent or choice + 1 == max(1, len(part.fills)):
                break
            self.inputs = {**self.inputs, name: from_bits(start, part, part.shape(self.case))}
        assert kept is not None
        self.inputs = {**self.inputs, name: from_bits(kept[1], part, part.shape(self.case))}

    def _reset_to(self, name: str, part: Part, base: Bits) -> None:
        for groups in _groups(part, part.shape(self.case)):
            bits = to_bits(self.inputs[name], part)
            alive = [group for group in groups if (bits[group] != base[group]).any()]
            chunk = len(alive)
            while chunk >= 1 and not self._budget.spent:
                survivors: list[npt.NDArray[np.int64]] = []
                for start in range(0, len(alive), chunk):
                    some = alive[start : start + chunk]
                    places = np.concatenate(some)
                    tried = bits.copy()
                    tried[places] = base[places]
                    if self._set(name, tried):
                        bits = tried
                    else:
                        survivors += some
                if len(survivors) < len(alive) and chunk == 1 and len(alive) > 1:
                    alive = survivors  # what went may have kept others here
                    continue
                alive, chunk = survivors, chunk // 2

    def _nearer(self, name: str) -> None:
        """Simplify the elements that differ still, one by one."""
        part = parts(self.case)[name]
        if part.unit != "element":
            return
        bits = to_bits(self.inputs[name], part)
        fills = part.fills
        base = min(fills, key=lambda fill: int((bits != fill).sum()))
        for place in np.flatnonzero(bits != base)[: 4 * ENOUGH]:
            for value in _simpler_values(int(bits[place]), part):
                if self._budget.spent:
                    return
                tried = bits.copy()
                tried[place] = value
                if self._set(name, tried):
                    bits = tried
                    break

    def result(self) -> Reduced:
        """What is left."""
        counts = differing(self.case, self.inputs)
        known = parts(self.case)
        total = sum(self.inputs[name].numel() * (2 if part.nibbles else 1) for name, part in known.items())
        return Reduced(
            case=self.case,
            inputs=self.inputs,
            differing=sum(counts.values()),
            elements=total,
            by_input={name: count for name, count in counts.items() if count},
            simplest={name: part.fills[0] for name, part in known.items() if part.fills},
        )


def _form(case: Case) -> object:
    return {name: (part.dtype, part.shape(case)) for name, part in parts(case).items()}


def _groups(part: Part, shape: tuple[int, ...]) -> Iterator[Sequence[npt.NDArray[np.int64]]]:
    """Ways to take an input apart: by slabs, by rows, by columns, by elements; each a list of flat places."""
    whole = (*shape[:-1], shape[-1] * (2 if part.nibbles else 1))
    places = np.arange(int(np.prod(whole)), dtype=np.int64).reshape(whole)
    if part.unit == "row":
        yield list(places.reshape(-1, whole[-1]))
        return
    if len(whole) == 3:
        yield [slab.reshape(-1) for slab in places]
    if len(whole) > 1:
        matrix = places.reshape(-1, whole[-1])
        yield list(matrix)
        yield list(matrix.T)
    yield list(places.reshape(-1, 1))


def _simpler_values(bits: int, part: Part) -> Iterator[int]:
    """Values nearer to the simplest, as bits, the nearest first."""
    width, mantissa = {
        torch.float32: (32, 23),
        torch.bfloat16: (16, 7),
        torch.float16: (16, 10),
    }.get(part.dtype, (4, 1) if part.nibbles else (8, 3))
    if part.dtype == torch.int32:
        yield from (value for value in (1,) if bits > value)
        return
    sign = 1 << (width - 1)
    magnitude, fraction = bits & (sign - 1), (1 << mantissa) - 1
    found = [part.fills[0], *part.fills[1:]]
    if len(part.fills) > 1:  # a value, not a scale: it has a sign and a mantissa
        power = magnitude & ~fraction
        short = [fraction >> keep for keep in (1, 2, 3)]  # mantissa bits that go
        found += [power, power + fraction + 1, bits & ~fraction, magnitude]
        found += [magnitude & ~low for low in short] + [bits & ~low for low in short]
    for value in dict.fromkeys(found):
        if value != bits:
            yield value
