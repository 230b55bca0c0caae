"""Enclosures: intervals of real numbers on FP64 tensors, every operation rounded outward.

An enclosure holds, per element, every value between ``lo`` and ``hi``, both ends included and infinities among them; a
NaN in both ends means that the value is NaN. An operation returns the hull of all defined results of its operands'
values; where no result is defined (inf - inf, 0 * inf) it is NaN. Results that FP64 holds exactly are not widened:
rounding errors are computed by error-free transformations (Knuth's TwoSum, Dekker's product), and one ulp is added only
on the side where the exact result lies outside. Works on any device in eager mode; compilers that contract a*b+c or
flush subnormals would break it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from references.rounding import power_of_two, round_to

_INF = float("inf")
_MAX = torch.finfo(torch.float64).max
_TINY = 2.0**-1074
_UNIT = 2.0**-53

_EXACT_INPUTS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
)


@dataclass(frozen=True)
class Enclosure:
    """``lo`` <= value <= ``hi``, elementwise; float64 tensors of one shape and device.

    Made by `Enclosure.from_value` or from two bounds, which must be ordered or both NaN (unchecked: it would cost a
    device synchronisation). Raises TypeError for another dtype, ValueError for unequal shapes.
    """

    lo: Tensor
    hi: Tensor

    def __post_init__(self) -> None:
        if self.lo.dtype != torch.float64 or self.hi.dtype != torch.float64:
            raise TypeError(f"bounds are {self.lo.dtype} and {self.hi.dtype}, expected torch.float64")
        if self.lo.shape != self.hi.shape:
            raise ValueError(f"bounds have shapes {tuple(self.lo.shape)} and {tuple(self.hi.shape)}")

    @classmethod
    def from_value(cls, value: Tensor) -> Enclosure:
        """The exact value of a float64, 32, 16 or bfloat16 tensor, or integers up to 32 bits; TypeError otherwise."""
        exact = _exact(value)
        return cls(exact, exact)

    @property
    def shape(self) -> torch.Size:
        """The shape of both bounds."""
        return self.lo.shape

    @property
    def is_point(self) -> bool:
        """Whether both bounds are one tensor, as `from_value` makes them: known without looking at the data."""
        return self.lo is self.hi

    # Arithmetic

    def __neg__(self) -> Enclosure:
        lo = -self.hi
        return Enclosure(lo, lo if self.is_point else -self.lo)

    def __add__(self, other: Enclosure) -> Enclosure:
        lo, hi = _add(self.lo, other.lo)
        if not (self.is_point and other.is_point):
            hi = _add(self.hi, other.hi)[1]
        # inf - inf at one end: all defined results are the other end.
        return Enclosure(torch.where(lo.isnan(), hi, lo), torch.where(hi.isnan(), lo, hi))

    def __sub__(self, other: Enclosure) -> Enclosure:
        return self + -other

    def __mul__(self, other: Enclosure) -> Enclosure:
        lo, hi = _corner(self, other, self.lo, other.lo)
        if not (self.is_point and other.is_point):
            for a, b in ((self.lo, other.hi), (self.hi, other.lo), (self.hi, other.hi)):
                down, up = _corner(self, other, a, b)
                lo, hi = torch.minimum(lo, down), torch.maximum(hi, up)
        nothing = lo > hi
        return Enclosure(lo.masked_fill(nothing, float("nan")), hi.masked_fill(nothing, float("nan")))

    def scaled(self, exponent: Tensor | int) -> Enclosure:
        """Times 2**exponent, integers within -1022..1023 that broadcast; exact but for under- and overflow."""
        factor = power_of_two(torch.as_tensor(exponent, device=self.lo.device))
        lo, hi = self.lo * factor, self.hi * factor
        return Enclosure(
            torch.where(lo / factor > self.lo, _below(lo), lo), torch.where(hi / factor < self.hi, _above(hi), hi)
        )

    def widened(self, radius: Tensor | float) -> Enclosure:
        """With ``radius`` >= 0 (broadcasting, to the result's shape) added on both sides."""
        by = torch.as_tensor(radius, dtype=torch.float64, device=self.lo.device)
        return self + Enclosure(-by, by)

    def sum(self, dim: int) -> Enclosure:
        """The sum along a dimension, by pairwise additions that are each rounded outward; 0 for an empty one.

        Needs no error bound: exact sums (integers, few exponents) stay exact, others widen by about log2(n) ulp.
        """
        lo, hi = self.lo.movedim(dim, -1), self.hi.movedim(dim, -1)
        if lo.shape[-1] == 0:
            zero = lo.new_zeros(lo.shape[:-1])
            return Enclosure(zero, zero)
        terms = Enclosure(lo, hi)
        while (count := terms.shape[-1]) > 1:
            half = count // 2
            pairs = terms._columns(0, half) + terms._columns(half, 2 * half)
            rest = terms._columns(2 * half, count)
            terms = Enclosure(torch.cat([pairs.lo, rest.lo], -1), torch.cat([pairs.hi, rest.hi], -1))
        return Enclosure(terms.lo[..., 0], terms.hi[..., 0])

    def dot(self, other: Enclosure, dim: int = -1) -> Enclosure:
        """The sum along ``dim`` of the products: tight, but it forms all of them; see `matmul`."""
        return (self * other).sum(dim)

    # Order

    def abs(self) -> Enclosure:
        """The absolute value."""
        low, high = self.lo.abs(), self.hi.abs()
        inside = (self.lo <= 0) & (self.hi >= 0)
        return Enclosure(torch.minimum(low, high).masked_fill(inside, 0.0), torch.maximum(low, high))

    def maximum(self, other: Enclosure) -> Enclosure:
        """The larger value, elementwise; NaN if either is."""
        return Enclosure(torch.maximum(self.lo, other.lo), torch.maximum(self.hi, other.hi))

    def minimum(self, other: Enclosure) -> Enclosure:
        """The smaller value, elementwise; NaN if either is."""
        return Enclosure(torch.minimum(self.lo, other.lo), torch.minimum(self.hi, other.hi))

    def amax(self, dim: int) -> Enclosure:
        """The largest value along a dimension."""
        return Enclosure(self.lo.amax(dim), self.hi.amax(dim))

    def amin(self, dim: int) -> Enclosure:
        """The smallest value along a dimension."""
        return Enclosure(self.lo.amin(dim), self.hi.amin(dim))

    def hull(self, other: Enclosure) -> Enclosure:
        """The smallest enclosure of both; NaN if either is."""
        return Enclosure(torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi))

    def monotone(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        increasing: bool = True,
        relative: float = 0.0,
        absolute: float = 0.0,
    ) -> Enclosure:
        """The image under a monotone function that is evaluated with an error.

        function: float64 to float64, defined on the whole enclosure, within ``relative`` * |y| + ``absolute`` of the
            exact value where y is what it computes; an infinite y may be an overflow.
        Raises ValueError unless 0 <= relative < 1 and 0 <= absolute < inf.
        """
        if not 0 <= relative < 1 or not 0 <= absolute < _INF:
            raise ValueError(f"relative={relative} is not within 0..1 or absolute={absolute} not finite and >= 0")
        low, high = function(self.lo), function(self.hi)
        if not increasing:
            low, high = high, low
        low, high = low.clamp(max=_MAX), high.clamp(min=-_MAX)
        return Enclosure(
            (Enclosure(low, low) - _error(low, relative, absolute)).lo,
            (Enclosure(high, high) + _error(high, relative, absolute)).hi,
        )

    # Membership

    @property
    def width(self) -> Tensor:
        """``hi - lo``, rounded up; 0 where both ends are equal, infinities included."""
        return torch.where(self.lo == self.hi, torch.zeros_like(self.lo), _add(self.hi, -self.lo)[1])

    @property
    def centre(self) -> Tensor:
        """The middle, rounded; the finite end of a half-infinite enclosure, 0 of the whole line."""
        middle = 0.5 * self.lo + 0.5 * self.hi
        unbounded = torch.where(self.lo.isfinite(), self.lo, torch.where(self.hi.isfinite(), self.hi, 0.0 * middle))
        unbounded = torch.where(unbounded.isnan() & ~self.lo.isnan(), torch.zeros_like(middle), unbounded)
        centre = torch.where(middle.isfinite(), middle, unbounded)
        return torch.where(self.lo == self.hi, self.lo, centre)

    @property
    def radius(self) -> Tensor:
        """The distance from `centre` to the farther end, rounded up: ``centre +- radius`` holds the enclosure."""
        centre = self.centre
        distance = torch.maximum(_add(self.hi, -centre)[1], _add(centre, -self.lo)[1])
        return torch.where(self.lo == self.hi, torch.zeros_like(distance), distance)

    def contains(self, value: Tensor) -> Tensor:
        """bool: whether each value (dtypes of `from_value`) is inside; NaN is inside NaN only, -0 equals +0."""
        exact = _exact(value)
        return ((self.lo <= exact) & (exact <= self.hi)) | (self.lo.isnan() & exact.isnan())

    def intersects(self, other: Enclosure) -> Tensor:
        """bool: whether the two have a value in common; NaN with NaN only."""
        return ((self.lo <= other.hi) & (other.lo <= self.hi)) | (self.lo.isnan() & other.lo.isnan())

    def headroom(self, value: Tensor) -> Tensor:
        """|value - centre| / radius as float64: at most 1 exactly where `contains` is true, inf without a distance."""
        inside, radius = self.contains(value), self.radius
        ratio = (_exact(value) - self.centre).abs() / radius
        # Rounding may carry the ratio across 1, and 0/0 or inf/inf has none: membership decides.
        within = torch.where(ratio.isnan(), (radius > 0).to(ratio.dtype), ratio.clamp(max=1.0))
        beyond = torch.where(ratio.isnan(), torch.full_like(ratio, _INF), ratio.clamp(min=1.0 + 2 * _UNIT))
        return torch.where(inside, within, beyond)

    def to_dtype(self, dtype: torch.dtype) -> Enclosure:
        """The enclosure after rounding to an output dtype: what is admissible are its floats in [RN(lo), RN(hi)].

        dtype: float64, float32, bfloat16 or float16 (ties to even, overflow to inf). Raises ValueError for another.
        """
        low = round_to(self.lo, dtype)
        return Enclosure(low, low if self.is_point else round_to(self.hi, dtype))

    def _columns(self, start: int, stop: int) -> Enclosure:
        lo = self.lo[..., start:stop]
        return Enclosure(lo, lo if self.is_point else self.hi[..., start:stop])


def matmul(a: Enclosure, b: Enclosure) -> Enclosure:
    """``a @ b`` for ``[..., m, k]`` and ``[..., k, n]``, by FP64 matrix products of centres and radii.

    With u = 2^-53, a product of k terms in any order, fused or not, errs by at most g |A||B| + k 2^-1075 (1 + g), where
    g = ku / (1 - ku) and the second term is underflow. |AB - mA mB| <= |mA| rB + rA (|mB| + rB) adds the operands'
    radii. The bound's own products err by the same factor; k <= 2^40 keeps 2(k + 8)u above all of these together.
    The library must form inner products by additions and multiplications in FP64 (no Strassen, no emulation).
    A row or column with a NaN gives NaN; overflow or an infinite operand gives the whole line.
    """
    k = a.shape[-1]
    if k > 2**40:
        raise ValueError(f"an inner dimension of {k} is above 2^40")
    middle_a, middle_b = a.centre, b.centre
    product = middle_a @ middle_b
    relative = 2 * (k + 8) * _UNIT
    size_a, size_b = middle_a.abs(), middle_b.abs()
    radius = (size_a @ size_b) * relative
    if not b.is_point:
        radius = radius + size_a @ b.radius
    if not a.is_point:
        radius = radius + a.radius @ (size_b if b.is_point else size_b + b.radius)
    radius = radius * (1 + relative) + (2 * k + 8) * _TINY
    lo, hi = _below(product - radius), _above(product + radius)
    unbounded = ~(product.isfinite() & radius.isfinite())
    nan = a.lo.isnan().any(-1)[..., :, None] | b.lo.isnan().any(-2)[..., None, :]
    return Enclosure(
        lo.masked_fill(unbounded, -_INF).masked_fill(nan, float("nan")),
        hi.masked_fill(unbounded, _INF).masked_fill(nan, float("nan")),
    )


def _exact(value: Tensor) -> Tensor:
    if value.dtype not in _EXACT_INPUTS:
        raise TypeError(f"{value.dtype} is not held exactly by float64 here; decode codes first")
    return value.to(torch.float64)


def _below(x: Tensor) -> Tensor:
    return torch.nextafter(x, x.new_tensor(-_INF))


def _above(x: Tensor) -> Tensor:
    return torch.nextafter(x, x.new_tensor(_INF))


def _outward(nearest: Tensor, error: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of ``nearest + error``: one ulp out on the error's side, on both where it is NaN; none where ``exact``."""
    down = torch.where((error >= 0) | exact, nearest, _below(nearest))
    up = torch.where((error <= 0) | exact, nearest, _above(nearest))
    return down, up


def _add(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b rounded down and up. Overflow leaves a NaN error, so the bounds become the largest float and inf."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    return _outward(total, error, a.isinf() | b.isinf())


def _mul(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a * b rounded down and up."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    # Dekker's partial products need room below: the last bit of a 53 x 53 bit product is 2^-105 of it.
    unsafe = product.abs() < 2.0**-960
    zero = (a == 0) | (b == 0)
    down, up = _outward(product, error.masked_fill(unsafe, float("nan")), zero | a.isinf() | b.isinf())
    sign = torch.sign(a) * torch.sign(b)
    return torch.where(sign > 0, down.clamp(min=0.0), down), torch.where(sign < 0, up.clamp(max=0.0), up)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Veltkamp: x as a sum of two numbers of 26 bits; NaN above 2^996, where the constant overflows."""
    scaled = x * 134217729.0
    high = scaled - (scaled - x)
    return high, x - high


def _corner(a: Enclosure, b: Enclosure, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the product of two ends. 0 * inf counts as 0 if inf is only a bound, as nothing if it is the value."""
    down, up = _mul(x, y)
    undefined = down.isnan() & ~x.isnan() & ~y.isnan()
    infinite_value = torch.where(x.isinf(), a.lo == a.hi, b.lo == b.hi)
    down = torch.where(undefined, torch.where(infinite_value, _INF, 0.0).to(down.dtype), down)
    up = torch.where(undefined, torch.where(infinite_value, -_INF, 0.0).to(up.dtype), up)
    return down, up


def _error(value: Tensor, relative: float, absolute: float) -> Enclosure:
    """relative * |value| + absolute, rounded up."""
    radius = torch.full_like(value, absolute)
    if relative:
        radius = _add(_mul(value.abs(), torch.full_like(value, relative))[1], radius)[1]
    return Enclosure(radius, radius)
