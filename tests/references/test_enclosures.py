"""Enclosures against exact rational arithmetic: whatever the operands' values, the result is inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.enclosures import Enclosure, matmul

INF, NAN = math.inf, math.nan
MAX, TINY, MIN_NORMAL = torch.finfo(torch.float64).max, 2.0**-1074, 2.0**-1022

FLOATS = st.one_of(
    st.floats(allow_nan=False),
    st.integers(-20, 20).map(float),
    st.sampled_from([0.0, -0.0, TINY, -TINY, MIN_NORMAL, -MIN_NORMAL, MAX, -MAX, INF, -INF, 1 + 2.0**-52]),
    st.tuples(st.integers(-(2**53), 2**53), st.integers(-1074, 960)).map(lambda pair: math.ldexp(*pair)),
)
FINITE = FLOATS.filter(math.isfinite)
INTERVALS = st.tuples(FLOATS, FLOATS).map(lambda pair: (min(pair), max(pair)))
Interval = tuple[float, float]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def enclosure(*intervals: Interval) -> Enclosure:
    return Enclosure(tensor(*(lo for lo, _ in intervals)), tensor(*(hi for _, hi in intervals)))


def point(*values: float) -> Enclosure:
    return Enclosure.from_value(tensor(*values))


def only(result: Enclosure) -> Interval:
    return result.lo.item(), result.hi.item()


def members(interval: Interval) -> list[Fraction | float]:
    """Both ends, and for a wide interval a point inside that FP64 need not hold."""
    lo, hi = interval
    if lo == hi or math.isinf(lo) or math.isinf(hi):
        inner = [Fraction(x) for x in (0, 1, Fraction(1, 3)) if lo <= x <= hi]
        return [exact(lo), exact(hi), *inner]
    return [exact(lo), exact(hi), Fraction(lo) + (Fraction(hi) - Fraction(lo)) / 3]


def exact(x: float) -> Fraction | float:
    return Fraction(x) if math.isfinite(x) else x


def plus(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b
    infinite = [x for x in (a, b) if isinstance(x, float)]
    return infinite[0] if len(set(infinite)) == 1 else NAN


def times(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    if a == 0 or b == 0:
        return NAN
    return math.copysign(INF, (1 if a > 0 else -1) * (1 if b > 0 else -1))


def holds(interval: Interval, x: Fraction | float) -> bool:
    lo, hi = interval
    return lo <= x <= hi  # Fraction and float compare exactly, infinities included


def check_binary(
    a: Interval, b: Interval, result: Enclosure, operation: Callable[..., Fraction | float]
) -> list[Fraction | float]:
    defined = [y for y in (operation(p, q) for p, q in product(members(a), members(b))) if y == y]
    if defined:
        lo, hi = only(result)
        assert lo <= hi
        assert all(holds((lo, hi), y) for y in defined), (a, b, (lo, hi), defined)
    return defined


@given(a=INTERVALS, b=INTERVALS)
@settings(max_examples=300, deadline=None)
def test_sums_and_differences_are_inside(a: Interval, b: Interval) -> None:
    check_binary(a, b, enclosure(a) + enclosure(b), plus)
    check_binary(a, (-b[1], -b[0]), enclosure(a) - enclosure(b), plus)


@given(a=INTERVALS, b=INTERVALS)
@settings(max_examples=300, deadline=None)
def test_products_are_inside(a: Interval, b: Interval) -> None:
    check_binary(a, b, enclosure(a) * enclosure(b), times)


@given(a=FINITE, b=FINITE)
@settings(max_examples=300, deadline=None)
def test_point_arithmetic_is_tight(a: float, b: float) -> None:
    """The result is one float where that is exact and two neighbours elsewhere.

    Products have two ulp near underflow and with factors above 2^995, where Dekker's product has no room.
    """
    total, value = point(a) + point(b), Fraction(a) + Fraction(b)
    check_tight(only(total), value)
    result, value = only(point(a) * point(b)), Fraction(a) * Fraction(b)
    if abs(value) > Fraction(2) ** -950 and max(abs(a), abs(b)) < 2.0**995:
        check_tight(result, value)
    assert holds(result, value)
    assert result[1] <= math.nextafter(math.nextafter(result[0], INF), INF)
    assert result[0] >= 0 or value <= 0
    assert result[1] <= 0 or value >= 0


def check_tight(result: Interval, value: Fraction) -> None:
    assert holds(result, value)
    if abs(value) <= MAX and Fraction(float(value)) == value:
        assert result == (value, value)
    else:
        assert result[1] == math.nextafter(result[0], INF)


def test_infinities_and_nan_follow_the_hull_of_defined_results() -> None:
    assert only(enclosure((1, INF)) + enclosure((-INF, -1))) == (-INF, INF)
    assert only(point(INF) + point(1)) == (INF, INF)
    assert only(point(INF) + enclosure((-INF, -1))) == (INF, INF)
    assert only(point(0) * enclosure((1, INF))) == (0, 0)
    assert only(enclosure((0, 1)) * point(INF)) == (INF, INF)
    assert only(enclosure((-1, 1)) * point(INF)) == (-INF, INF)
    for nothing in (point(INF) - point(INF), point(0) * point(INF), point(NAN) + point(1), point(NAN) * point(0)):
        assert all(math.isnan(end) for end in only(nothing))
    assert point(NAN).contains(tensor(NAN)).item()
    assert not point(1).contains(tensor(NAN)).item()
    assert not point(NAN).contains(tensor(1)).item()


def test_overflow_keeps_the_largest_float_inside() -> None:
    assert only(point(MAX) + point(MAX)) == (MAX, INF)
    assert only(point(-MAX) * point(2)) == (-INF, -MAX)
    assert only(point(MAX).scaled(1)) == (MAX, INF)
    assert only(enclosure((MAX, MAX)).sum(0) + point(MAX).sum(0)) == (MAX, INF)


@given(a=INTERVALS, exponent=st.integers(-1022, 1023))
@settings(max_examples=200, deadline=None)
def test_scaling_by_a_power_of_two_is_exact_in_range(a: Interval, exponent: int) -> None:
    result = enclosure(a).scaled(exponent)
    lo, hi = only(result)
    for x in members(a):
        assert holds((lo, hi), x * Fraction(2) ** exponent if isinstance(x, Fraction) else x)
    for end, bound in zip(a, (lo, hi), strict=True):
        if exactly(end, exponent):
            assert bound == math.ldexp(end, exponent)


def exactly(x: float, exponent: int) -> bool:
    """Whether FP64 holds x * 2**exponent."""
    if not math.isfinite(x) or abs(Fraction(x)) * Fraction(2) ** exponent > Fraction(MAX):
        return False
    return Fraction(math.ldexp(x, exponent)) == Fraction(x) * Fraction(2) ** exponent


@given(values=st.lists(INTERVALS, min_size=0, max_size=17))
@settings(max_examples=120, deadline=None)
def test_sum_is_inside_in_any_position(values: list[Interval]) -> None:
    matrix = Enclosure(enclosure(*values).lo[:, None], enclosure(*values).hi[:, None])
    result = matrix.sum(0)
    assert result.shape == (1,)
    for pick in (0, 1):
        total: Fraction | float = Fraction(0)
        for interval in values:
            total = plus(total, exact(interval[pick]))
        if total == total:
            assert holds(only(result), total)


@given(values=st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=40), exponent=st.integers(-1074, 900))
def test_sums_of_one_exponent_stay_exact(values: list[int], exponent: int) -> None:
    result = point(*(math.ldexp(value, exponent) for value in values)).sum(0)
    assert only(result) == (math.ldexp(sum(values), exponent),) * 2


@given(rows=st.lists(st.tuples(INTERVALS, INTERVALS), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_dot_is_inside(rows: list[tuple[Interval, Interval]]) -> None:
    result = enclosure(*(a for a, _ in rows)).dot(enclosure(*(b for _, b in rows)))
    for pick in product((0, 1), repeat=2):
        total: Fraction | float = Fraction(0)
        for a, b in rows:
            total = plus(total, times(exact(a[pick[0]]), exact(b[pick[1]])))
        if total == total:
            assert holds(only(result), total)


@given(
    m=st.integers(1, 3),
    k=st.integers(1, 7),
    n=st.integers(1, 3),
    low=st.integers(-1074, 400),
    spread=st.integers(0, 300),
    width=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_matmul_holds_every_choice_of_the_operands(
    m: int, k: int, n: int, low: int, spread: int, width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def operand(rows: int, columns: int) -> Enclosure:
        mantissa = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        exponent = low + torch.randint(0, spread + 1, (rows, columns), generator=generator)
        middle = torch.tensor(
            [math.ldexp(x, e) for x, e in zip(mantissa.flatten().tolist(), exponent.flatten().tolist(), strict=True)],
            dtype=torch.float64,
        ).view(rows, columns)
        if width == 0:
            return Enclosure.from_value(middle)
        return Enclosure.from_value(middle).widened(middle.abs() * (2.0**-20 if width == 1 else 3.0))

    a, b = operand(m, k), operand(k, n)
    result = matmul(a, b)
    for left, right in product((a.lo, a.hi), (b.lo, b.hi)):
        for i, j in product(range(m), range(n)):
            total = sum(Fraction(left[i, t].item()) * Fraction(right[t, j].item()) for t in range(k))
            assert holds((result.lo[i, j].item(), result.hi[i, j].item()), total)


def test_matmul_radius_is_small_and_broken_inputs_are_wide() -> None:
    a = torch.randn(4, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = matmul(Enclosure.from_value(a), Enclosure.from_value(a.T.contiguous()))
    assert (result.width <= (a.abs() @ a.abs().T) * 256 * 2.0**-50).all()
    broken = a[:, :2].clone()
    broken[0, 0], broken[1, 1] = NAN, INF
    result = matmul(Enclosure.from_value(broken), Enclosure.from_value(torch.eye(2, dtype=torch.float64)))
    assert result.lo[0].isnan().all()
    assert result.lo[1].tolist() == [-INF, -INF]
    assert result.contains(broken.nan_to_num())[2:].all()
    big = Enclosure.from_value(torch.full((1, 2), MAX, dtype=torch.float64))
    assert only(matmul(big, Enclosure.from_value(tensor(1, 1)[:, None]))) == (-INF, INF)


@given(a=INTERVALS, b=INTERVALS)
@settings(deadline=None)
def test_order_operations_are_inside_and_attained(a: Interval, b: Interval) -> None:
    x, y = enclosure(a), enclosure(b)
    both = Enclosure(torch.cat([x.lo, y.lo]), torch.cat([x.hi, y.hi]))
    for result, pick in (
        (x.maximum(y), max),
        (x.minimum(y), min),
        (both.amax(0), max),
        (both.amin(0), min),
    ):
        chosen = [pick(p, q) for p, q in product(members(a), members(b))]
        assert all(holds(only(result), value) for value in chosen)
        assert only(result) == (min(chosen), max(chosen))
    assert only(x.hull(y)) == (min(a[0], b[0]), max(a[1], b[1]))
    assert all(holds(only(x.abs()), abs(value)) for value in members(a))
    assert x.intersects(y).item() == (max(a[0], b[0]) <= min(a[1], b[1]))


@given(a=INTERVALS, x=FLOATS)
@settings(max_examples=200, deadline=None)
def test_headroom_is_at_most_one_exactly_inside(a: Interval, x: float) -> None:
    box = enclosure(a)
    inside = a[0] <= x <= a[1]
    assert box.contains(tensor(x)).item() == inside
    assert (box.headroom(tensor(x)).item() <= 1) == inside
    assert box.headroom(tensor(NAN)).item() == INF
    centre, radius, width = box.centre.item(), box.radius.item(), box.width.item()
    assert a[0] <= centre <= a[1]
    if all(map(math.isfinite, a)):
        assert Fraction(a[1]) - Fraction(a[0]) <= width
        assert all(abs(Fraction(end) - Fraction(centre)) <= radius for end in a)
    elif a[0] == a[1]:
        assert radius == width == 0
    else:
        assert radius == width == INF


def test_headroom_values_worked_by_hand() -> None:
    box = enclosure((1, 3), (1, 3), (1, 3), (1, 3), (2, 2), (2, 2), (NAN, NAN))
    assert box.headroom(tensor(2, 3, 1.5, 4, 2, 2.5, NAN)).tolist() == [0, 1, 0.5, 2, 0, INF, 0]
    assert box.headroom(torch.tensor([2, 3, 1.5, 4, 2, 2.5, NAN], dtype=torch.bfloat16)).tolist()[3] == 2


@given(a=INTERVALS.filter(lambda pair: abs(pair[0]) < 700 and abs(pair[1]) < 700))
@settings(max_examples=100, deadline=None)
def test_monotone_maps_hold_the_exact_image(a: Interval) -> None:
    """1 - x and x^2 on [0, inf) have exact rational values; exp is checked against itself with a wide error."""
    falling = enclosure(a).monotone(lambda x: 1 - x, increasing=False, relative=2.0**-52)
    assert all(holds(only(falling), 1 - x) for x in members(a) if isinstance(x, Fraction))
    square = enclosure(a).abs().monotone(lambda x: x * x, relative=2.0**-52, absolute=TINY)
    assert all(holds(only(square), x * x) for x in members(a) if isinstance(x, Fraction))
    exp = enclosure(a).monotone(torch.exp, relative=2.0**-50)
    assert all(holds(only(exp), math.exp(x)) for x in (*a, (a[0] + a[1]) / 2))


def test_monotone_overflow_and_arguments() -> None:
    assert only(point(1000.0).monotone(torch.exp, relative=2.0**-50))[1] == INF
    assert only(point(1000.0).monotone(torch.exp, relative=2.0**-50))[0] < MAX
    assert only(point(2.0).monotone(lambda x: x, absolute=1.0)) == (1, 3)
    with pytest.raises(ValueError, match="relative=1"):
        point(1.0).monotone(torch.exp, relative=1)


@given(a=INTERVALS, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=200, deadline=None)
def test_output_rounding_admits_the_rounded_members_and_no_float_beyond(a: Interval, dtype: torch.dtype) -> None:
    out = enclosure(a).to_dtype(dtype)
    lo, hi = only(out)
    info = torch.finfo(dtype)
    spacing = Fraction(info.smallest_normal) * Fraction(info.eps)
    for end, bound in zip(a, (lo, hi), strict=True):
        if math.isinf(bound):
            assert abs(end) >= info.max
            continue
        assert Fraction(bound) % spacing == 0
        # Nearest: no further than half a step of the binade below |bound|'s upper neighbour.
        step = max(spacing, Fraction(2) ** (math.frexp(bound)[1] - 1) * Fraction(info.eps)) if bound else spacing
        assert abs(Fraction(end) - Fraction(bound)) <= step / 2


def test_output_rounding_worked_by_hand() -> None:
    tie = point(1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-134, 3 * 2.0**-134).to_dtype(torch.bfloat16)
    assert tie.lo.tolist() == [1, 1 + 2.0**-6, 0, 2.0**-132]
    assert point(65519.99, 65520).to_dtype(torch.float16).hi.tolist() == [65504, INF]
    with pytest.raises(ValueError, match="float8"):
        point(1).to_dtype(torch.float8_e5m2)


def test_inputs_are_exact_or_refused() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8):
        assert only(Enclosure.from_value(torch.tensor([3], dtype=dtype))) == (3, 3)
    for dtype in (torch.int64, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(TypeError, match="not held exactly"):
            Enclosure.from_value(torch.zeros(1, dtype=dtype))
    with pytest.raises(TypeError, match="bounds are"):
        Enclosure(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="shapes"):
        Enclosure(tensor(1), tensor(1, 2))


def results(lo: torch.Tensor, hi: torch.Tensor) -> list[torch.Tensor]:
    box, other = Enclosure(lo, hi), Enclosure(lo.flip(0), hi.flip(0))
    boxes = [box + other, box - other, box * other, box.scaled(-700), box.scaled(900), box.abs(), box.amax(0)]
    boxes += [
        box.to_dtype(torch.float16),
        box.to_dtype(torch.float32),
        Enclosure(lo.view(64, -1), hi.view(64, -1)).sum(1),
    ]
    return [end for item in boxes for end in (item.lo, item.hi)] + [box.headroom(lo), box.radius, box.centre, box.width]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu() -> None:
    """Bit for bit on random bits, so that no kernel contracts, flushes or rounds differently."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (2, 4096), generator=generator).view(torch.float64)
    lo, hi = torch.minimum(words[0], words[1]), torch.maximum(words[0], words[1])
    for here, there in zip(results(lo, hi), results(lo.cuda(), hi.cuda()), strict=True):
        assert torch.equal(here.nan_to_num(0.125), there.cpu().nan_to_num(0.125))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_matmul_agrees_with_tight_dots() -> None:
    a = torch.randn(32, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fast = matmul(Enclosure.from_value(a.cuda()), Enclosure.from_value(a.T.contiguous().cuda()))
    wide = a[:, None].expand(32, 32, 512)
    tight = Enclosure.from_value(wide).dot(Enclosure.from_value(wide.transpose(0, 1)))
    assert (fast.lo.cpu() <= tight.hi).all()
    assert (tight.lo <= fast.hi.cpu()).all()
