"""Bounds on FP32 sums against every order and tree of a few terms, by rational numbers, and the worst long orders."""

import random
import sys
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch

from conformance.operations.gemm import inputs as inputs_of
from conformance.operations.gemm import operands
from fuzz.case import Case
from fuzz.grammar import GEMM_SCALES, GEMM_VALUES
from references.accumulators import _fine, nonzero_terms, radius, sums
from references.gemm_formats import Operand, Side
from references.recipes import Recipe
from references.routing.scores import Interval
from references.routing.weights import sum_error

sys.path.insert(0, str(Path(__file__).parent))
from gemm_variants import nearest, toward_zero

BF16 = Side(None, None, None)
RN, ANY = (Recipe(source="a test", accumulator=name) for name in ("fp32_rn", "fp32_any"))


def row(values):
    numbers = torch.tensor([values], dtype=torch.float64)
    return Operand(numbers, numbers.new_ones(1, 1), len(values), numbers, BF16)


def bound(values, recipe):
    """The radius of a sum of these terms."""
    a, b = row(values), row([1.0] * len(values))
    return Fraction(float(radius(sums(a, b), a, b, recipe).accumulation))


def rounded(value, *, cut, bits=24):
    """A rational number to ``bits`` bits: cut toward zero, or to the nearest with ties to even."""
    if not value:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - bits + 1)
    steps = int(size / unit) if cut else round(size / unit)
    return steps * unit if value > 0 else -steps * unit


def reachable(terms, *, cut):
    """What scalar additions can make of all terms, over every order and every tree."""

    @cache
    def of(subset):
        if len(subset) == 1:
            return frozenset({terms[subset[0]]})
        first, rest, found = subset[0], subset[1:], set()
        for size in range(len(rest)):
            for chosen in combinations(rest, size):
                other = tuple(item for item in rest if item not in chosen)
                found |= {rounded(x + y, cut=cut) for x in of((first, *chosen)) for y in of(other)}
        return frozenset(found)

    return of(tuple(range(len(terms))))


def instruction(running, products):
    """Products and a running value cut at 24 bits below the largest exponent, the sum cut to FP32."""
    some = [item for item in (running, *products) if item]
    if not some:
        return Fraction(0)
    largest = max(map(abs, some))
    exponent = largest.numerator.bit_length() - largest.denominator.bit_length()
    exponent -= largest < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 24)
    kept = sum((abs(item) // unit * unit * (1 if item > 0 else -1) for item in some), Fraction(0))
    return rounded(kept, cut=True)


def draw(noise, count):
    """Terms of up to 16 bits whose exponents spread: FP32 rounds some, all or none of their sums."""
    spread = noise.choice((6, 9, 10, 12, 20))
    return [
        noise.choice((-1, 1, 1, 1))
        * noise.choice((0, *[noise.getrandbits(16) | noise.choice((1, 4))] * 9))
        * Fraction(2) ** noise.choice((0, -noise.randint(0, spread), -spread))
        for _ in range(count)
    ]


@pytest.mark.parametrize("cut", [False, True])
def test_every_tree_of_a_few_terms_is_within_its_bound(cut):
    noise, nearest_edge = random.Random(7), Fraction(0)
    for count, draws in ((2, 150), (3, 150), (4, 60), (5, 20)):
        for _ in range(draws):
            terms = draw(noise, count)
            found, exact = bound(list(map(float, terms)), ANY if cut else RN), sum(terms)
            worst = max(abs(value - exact) for value in reachable(tuple(terms), cut=cut))
            assert worst <= found, terms
            if found:
                nearest_edge = max(nearest_edge, worst / found)
    assert nearest_edge > (0.3 if cut else 0.9)


def test_instructions_of_four_products_are_within_their_bound():
    noise, nearest_edge = random.Random(3), Fraction(0)
    for _ in range(400):
        terms = draw(noise, noise.choice((4, 8, 11)))
        found, exact = bound(list(map(float, terms)), ANY), sum(terms)
        for order in (terms, terms[::-1], sorted(terms, key=abs), sorted(terms)[::-1]):
            running = promoted = Fraction(0)
            for start in range(0, len(order), 4):
                running = instruction(running, order[start : start + 4])
                promoted = rounded(promoted + instruction(Fraction(0), order[start : start + 4]), cut=True)
            worst = max(abs(running - exact), abs(promoted - exact))
            assert worst <= found, order
            if found:
                nearest_edge = max(nearest_edge, worst / found)
    assert nearest_edge > 0.2


@pytest.mark.parametrize("first", [2**24, 2**25 - 1024])
@pytest.mark.parametrize("count", [2, 9, 100])
def test_a_large_term_first_and_ones_behind_it_reach_the_bound(first, count):
    """Above 2^24 FP32 holds even numbers alone: every 1 is a tie and is lost, and the bound is one for each of them."""
    terms = [float(first), *[1.0] * count]
    total = torch.tensor(terms[0], dtype=torch.float64)
    for term in terms[1:]:
        total = nearest(total + term)
    assert float(total) == first
    assert count <= bound(terms, RN) <= count * (1 + Fraction(1, 2**30))


def test_the_place_in_a_binade_counts_only_without_other_scales():
    """7 * 2^21 is just below 2^24, 2^-24 of it 0.875: rounding to halves errs by 0.25, and so it is counted."""
    terms = [7.0 * 2**21 - 64.0, *[0.25] * 64]
    assert bound(terms, RN) == pytest.approx(64 * 0.5, rel=1e-6)
    a, b = (
        row(terms),
        Operand(*(torch.ones(1, n, dtype=torch.float64) for n in (65, 1)), 65, row([1.0] * 65).values, BF16),
    )
    scaled = Operand(b.codes, b.scales * 1.5, 65, b.values * 1.5, Side(None, None, "fp32"))
    found = radius(sums(a, scaled), a, scaled, RN).accumulation / 1.5
    assert float(found) == pytest.approx(64 * 0.875, rel=1e-4)


def test_zeros_are_not_added():
    terms = [2.0**24, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert bound(terms, RN) == pytest.approx(2.0, rel=1e-6)
    assert float(nonzero_terms(row(terms), row([1.0] * 7))) == 3
    assert float(nonzero_terms(row([1.0] * 7), row([1.0] * 7))) == 7


def test_a_term_that_only_the_largest_sums_round_costs_half():
    """The unit at 2^25 is 4: of the two fine terms a 2 can be rounded off once, at 4, and a 1 at 2 as well."""
    big = [2.0**20] * 40
    assert bound([*big, 2.0], RN) == pytest.approx(2.0, rel=1e-6)
    assert bound([*big, 1.0], RN) == pytest.approx(4.0, rel=1e-6)
    assert bound(big, RN) == 0


@pytest.mark.parametrize("seed", range(6))
def test_orders_by_size_and_by_sign_stay_inside(seed):
    """Long sums, largest first, smallest first, one sign first and signs by turns, to nearest and cut."""
    noise = torch.Generator().manual_seed(seed)
    count = (40, 200, 700)[seed % 3]
    values = torch.randn(count, generator=noise, dtype=torch.float64)
    terms = (values * torch.exp2(torch.randint(-seed * 2, 1, (count,), generator=noise))).to(torch.float32).double()
    large = terms.abs().sort(descending=True).indices
    up = terms.sort().indices
    turns = torch.stack((up[: count // 2], up.flip(0)[: count // 2]), 1).flatten()
    for rounding, recipe in ((nearest, RN), (toward_zero, ANY)):
        allowed = float(bound(terms.tolist(), recipe))
        assert allowed > 0
        for order in (large, large.flip(0), up, up.flip(0), turns):
            total = torch.zeros((), dtype=torch.float64)
            for term in terms[order]:
                total = rounding(total + term)
            assert float((total - terms[order].sum()).abs()) <= allowed * (1 + 1e-9)


@pytest.mark.parametrize("values", GEMM_VALUES)
@pytest.mark.parametrize("variant", ["mxfp8", "w4a8", "w4a16", "bf16", "fp16"])
def test_fine_terms_are_counted_one_by_one(variant, values):
    """Also where bits spread too far for a byte, and where rows are zero."""
    words = {"layout": "plain", "out": "fp32", "scale": GEMM_SCALES[variant][0]}
    case = Case.make("gemm", variant, seed=4, k=294, m=5, n=9, values=values, **words)
    a, b = operands(case, inputs_of(case))
    a.values[2], a.codes[2] = 0.0, 0.0
    a = Operand(a.codes, a.scales, a.width, a.values, a.side)
    facts = sums(a, b)
    terms = (a.least_bits[:, None, :] + b.least_bits[None, :, :]).to(torch.int64)
    for shift in (2.0**-40, 1.0, 2.0**40):
        largest = (facts.size * shift).clamp(min=2.0**-300) * 1.01
        last = torch.frexp(largest)[1] - 24
        expected = sum((terms < last[..., None] - less).sum(2) for less in (0, 1))
        found = _fine(facts, a, b, largest, "fp32_any")
        assert torch.equal(found, expected * torch.exp2(last.double()))


def softmax_bound(terms):
    """The bound on a sum of nonnegative terms, absolute."""
    exact = torch.tensor([list(map(float, terms))], dtype=torch.float64)
    return float(sum_error(Interval(exact, exact, exact))) * float(sum(terms)) * (1 + 2.0**-10)


def test_every_tree_of_nonnegative_terms_is_within_the_bound_of_a_softmax():
    noise, nearest_edge = random.Random(5), 0.0
    for count, draws in ((2, 100), (3, 100), (4, 40), (5, 12)):
        for _ in range(draws):
            terms = [abs(term) for term in draw(noise, count)]
            worst = float(max(abs(value - sum(terms)) for value in reachable(tuple(terms), cut=False)))
            found = softmax_bound(terms)
            assert worst <= found or not any(terms), terms
            if any(terms):
                nearest_edge = max(nearest_edge, worst / found)
    assert nearest_edge > 0.7


@pytest.mark.parametrize(("first", "least"), [(2.0**24, 0.97), (2.0**30, 0.85)])
def test_a_large_term_first_reaches_the_bound_of_a_softmax(first, least):
    """All 400 ones behind it are lost, each a tie or less: all that the bound allows but for the first's own."""
    assert float(nearest(torch.tensor(first + 1.0, dtype=torch.float64))) == first
    assert least < 400 / softmax_bound([first, *[1.0] * 400]) <= 1


def test_equal_terms_count_half():
    """Their partial sums are 2, 3, ... n of n: (n + 2) (n - 1) / 2 in all, of a sum of n."""
    found = sum_error(Interval(*[torch.ones(1, 400, dtype=torch.float64)] * 3))
    assert float(found) == pytest.approx(402 * 399 / 2 / 400 * 2.0**-24)
