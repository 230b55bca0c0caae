"""How far a GEMM's sum may lie from the exact one, for each accumulator that a recipe can name.

Notation for one output: terms t_k = a_k b_k (exact), S = sum |t_k|, P and N the sums of the positive and of the
negative terms' magnitudes, Q = max(P, N) = (S + |sum|) / 2. Every partial sum of the exact terms, in any order and any
tree, lies within [-N, P], so its magnitude is at most Q; so is every single term.

**Sums.** Let an order consist of steps, step j erring by at most c_j times the largest magnitude that occurs in it
before rounding. That magnitude is at most Q + R, R being the total error, so R <= c (Q + R) with c = sum c_j, hence
R <= c / (1 - c) Q. What remains is c for each accumulator over n products:

- ``fp32_rn``: n - 1 scalar additions (an FMA rounds once), u = 2^-24 each: c = (n - 1) 2^-24.
- ``fp64``: the same with u = 2^-53.
- ``fp32_any``: the larger of two, i = ceil(n / 4), or n if that is less. n scalar additions that truncate (u = 2^-23)
  and i promotions into another accumulator: c = (n + i) 2^-23. Or i instructions that add t >= 4 products to the
  running value, each term truncated to 24 or more bits below the largest exponent and the sum truncated to FP32, all
  but the first with a running value: c = (n + i - 1) 2^-24 + i 2^-23, and i 2^-23 for as many promotions.
- ``hopper_f16``, ``f16_upcast``: ceil(n / 16) instructions of 16 products, 17 terms truncated to 25 bits below the
  largest exponent, the sum to 24 bits: (17 2^-25 + 2^-23) each, and one FP32 rounding (2^-24) for each K block that is
  promoted and each part of K that is added. The largest exponent is of a product before normalisation, hence at most
  that of the product's value.
- ``bf16_split_k``: each of ``split_k`` partial sums is an ``fp32_any`` sum, rounded to BF16 (2^-9), then added by
  split_k - 1 additions that round to BF16 or finer. With R the FP32 error, the conversions err by at most 2^-9 (S + R)
  together and 2^-134 each among BF16's subnormal numbers, the additions by c / (1 - c) (Q + R + the former) with
  c = (split_k - 1) 2^-9.
- ``hopper_fp8``: see `references.hopper`.

**Zeros.** Adding zero is exact, cut or not, so the n of ``fp32_any``, ``fp32_rn`` and ``fp64`` counts the products that
are not zero.

**Binades.** A rounding errs by at most half a unit in the last place, 2^-24 times the power of two up to the rounded
magnitude, which grows with the magnitude; a truncation by a whole unit, and what an instruction cuts off is counted
from a power of two as well. So every c_j may be taken of the largest *power of two* up to Q + R: with any bound R' on
R, R <= c 2^floor(log2(Q + R')), down to half of what it was. This needs scales that are powers of two: by others a
kernel may move a sum to another place in its binade before it rounds.

**Subnormal operands.** FP8 and F16 units take a subnormal operand with its format's smallest normal exponent, so the
largest exponent may exceed the largest product's. ``fp32_any`` and ``hopper_f16`` therefore count magnitudes with
|code| raised to the smallest normal number (sum: S^); the largest exponent then belongs to a magnitude of at most Q +
(S^ - S).

**Scales.** A product meets at most three roundings on the way (dequantise both operands, multiply; or sA * sB and times
the dot product), five with two-level scales, none where scales are powers of two: factors (1 + d)^r with |d| <= 2^-24,
so a term errs by g = r u / (1 - r u) relatively, all terms by g S, and Q grows to Q + g S.

**Underflow.** An FP32 result below 2^-126 errs by up to 2^-149 instead (2^-150 if it is rounded to nearest, 2^-126 if
subnormals may be flushed), and later factors multiply that error. What may underflow: a dequantised element (times the
other operand, summed), sA * sB (times the dot product), dot * sA (times sB), a global product, and each of the sums.
The total is bounded by row sums and row maxima. Where all of these quantities are normal numbers there is no such term.

**Lattices.** Every term of output (m, n) is a multiple of 2^q, q the sum of the least set bits of row m of A and of row
n of B. If S <= 2^(p + q), p the accumulator's significant bits, then every partial sum and every scaled partial sum is
a multiple of 2^q below 2^(p + q): nothing is ever rounded and the error is zero, in any order.

**Fine terms.** Where scales are powers of two few terms can cause a rounding at all. Let V >= Q + R bound every value
that occurs, L = 2^(floor(log2 V) - p + 1) be the accumulator's unit there, and call a term *fine* if its least set bit
lies below L. The granularity of a value is its least set bit. A node of the summation tree whose children have a
granularity of L or more is exact. A node that rounds raises its granularity above that of its finest child: charge the
loss, less than the new granularity (half of it if rounded to nearest), to that child, and follow finest children
downward. Granularities only fall on the way, so the path ends at a fine term; every node lies on one path, and the
granularities at the losses of a path are distinct powers of two up to L, each above the least set bit of the term at
its end. An instruction first truncates each child to 2^(E - 24) <= L / 2, which is one more node on the child's path.
With C_0 fine terms, C_1 of them with their least bit below L / 2, at most C_0 losses are of L and at most C_1 of each
smaller power: R <= L C_0 + (L/2 + L/4 + ...) C_1 = L (C_0 + C_1), half of it if rounded to nearest, whatever the order;
no fine term, no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.gemm_formats import Operand
from references.recipes import Recipe
from references.rounding import power_of_two

U64 = 2.0**-53
U32 = 2.0**-24
U32_TRUNCATING = 2.0**-23
U_BF16 = 2.0**-9
LEAST_BF16 = 2.0**-134
"""Half of BF16's smallest number."""
LEAST_PRODUCTS = 4
"""Products that an FP32 tensor-core instruction adds at least."""
F16_PRODUCTS = 16
SLACK = 1 + 2.0**-40
"""Covers the roundings of FP64 in the evaluation of a bound: far fewer than 2^12 operations, each within 2^-53."""

UNNORMALISED = ("fp32_any", "hopper_f16")
"""Accumulators that may meet operands' exponents below which nothing is normalised."""
BITS = {"fp32_any": 24, "fp32_rn": 24, "fp64": 53, "hopper_f16": 24, "f16_upcast": 24, "bf16_split_k": 8}
"""Significant bits that every partial sum keeps."""

FINE_FACTOR = {"fp32_any": 1.0, "fp32_rn": 0.5, "fp64": 0.5, "hopper_f16": 1.0, "f16_upcast": 1.0}
"""What a fine term can cost, in units of L, and once more if its least bit is below L / 2."""
SPARSE = 2.0**-5
"""Share of zeros in an operand from which on the products that are not zero are counted."""
COUNTED = {"cpu": 2**28, "cuda": 2**36}
"""Products up to which fine terms are counted, by device type; beyond, the number of all terms bounds the error."""
PIECE = {"cpu": 2**20, "cuda": 2**28}
"""Elements that are looked at together, by device type."""
NARROW, WIDE = 60, 2**13
"""Least set bits from a row's lowest one on that are told apart, in a byte and in two: sums and differences fit."""
WORDS = 32
"""Words whose bytes are added before the bytes are, each of them counting two at most: 127 would do."""


@dataclass(frozen=True)
class Sums:
    """Exact facts of the products of two operands, each ``[m, n]``.

    exact: FP64 sum of the terms, within ``error``. size: upper bound on the sum of magnitudes. clamped: the same with
    subnormal codes raised to the smallest normal number. unit: exponent q of a power of two that divides every term,
    int32, large where there are no nonzero terms.
    """

    exact: Tensor
    size: Tensor
    clamped: Tensor
    unit: Tensor
    error: Tensor
    n: int


def sums(a: Operand, b: Operand, *, subnormals: bool = True) -> Sums:
    """The facts about ``a @ b.T``; without ``subnormals``, ``clamped`` is ``size``.

    A product of two FP64 values is rounded once, and a sum of n in any order errs by at most (n - 1) u more, so FP64's
    own error is at most g S with g = (n + 1) u / (1 - (n + 1) u); it is zero on a lattice of 53 bits.
    """
    n = a.values.shape[1]
    exact = a.values @ b.values.T
    growth = gamma(n + 1, U64)
    size = (a.size @ b.size.T) * (1 + 2 * growth)
    clamped = size
    if subnormals and (a.raised is not None or b.raised is not None):
        left, right = (item.size if item.raised is None else item.raised for item in (a, b))
        clamped = (left @ right.T) * (1 + 2 * growth)
    unit = a.row_least_bits[0][:, None] + b.row_least_bits[0][None, :]
    error = torch.where(on_lattice(size, unit, 53), 0.0, growth * size)
    return Sums(exact, size, clamped, unit, error, n)


def on_lattice(size: Tensor, unit: Tensor, bits: int) -> Tensor:
    """Whether magnitudes that add up to ``size`` fit ``bits`` significant bits over the unit 2^``unit``."""
    return size <= power_of_two((unit + bits).clamp(-1022, 1023))


def gamma(roundings: float, unit: float) -> float:
    """r u / (1 - r u): the relative error of r roundings within u. Raises ValueError where that is no bound."""
    product = roundings * unit
    if product >= 0.5:
        raise ValueError(f"gemm: {roundings} roundings of {unit} leave no bound")
    return product / (1 - product)


@dataclass(frozen=True)
class Radius:
    """An error bound by source, each FP64 ``[m, n]``: of sums, and of scale multiplications with underflow."""

    accumulation: Tensor
    scaling: Tensor

    @property
    def total(self) -> Tensor:
        """Their sum."""
        return self.accumulation + self.scaling


def radius(facts: Sums, a: Operand, b: Operand, recipe: Recipe) -> Radius:
    """The error bound of every output under ``recipe.accumulator``, any but ``hopper_fp8``."""
    kind, n = recipe.accumulator, facts.n
    unit = U64 if kind == "fp64" else U32
    scaling = facts.size * gamma(scale_roundings(a, b), unit)
    inner = (facts.size + facts.exact.abs() + facts.error) * 0.5 + scaling
    if kind in UNNORMALISED:
        inner = inner + (facts.clamped - facts.size).clamp(min=0.0)
    whole, width = scale_roundings(a, b) == 0, min(a.width, b.width)
    gamma(float(_coefficient(recipe, n, width, torch.tensor(float(n), dtype=torch.float64))), 1.0)  # is it a bound?
    accumulation = _steps(inner, _coefficient(recipe, n, width, nonzero_terms(a, b)), binades=whole)
    if kind == "bf16_split_k":
        converted = U_BF16 * (facts.size + scaling + accumulation) + recipe.split_k * LEAST_BF16
        gamma(recipe.split_k - 1, U_BF16)
        added = _steps(inner + accumulation + converted, (recipe.split_k - 1) * U_BF16, binades=whole)
        accumulation = accumulation + converted + added
    if whole and kind in FINE_FACTOR:
        accumulation = torch.minimum(accumulation, _fine(facts, a, b, inner + accumulation, kind))
    held = on_lattice(facts.clamped if kind in UNNORMALISED else facts.size, facts.unit, BITS[kind])
    tiny, safe = underflow(a, b, recipe, n)
    exact = held & safe
    return Radius(
        torch.where(exact, 0.0, accumulation * SLACK),
        torch.where(exact, 0.0, (scaling + torch.where(safe, 0.0, tiny)) * SLACK),
    )


def nonzero_terms(a: Operand, b: Operand) -> Tensor:
    """Products that may be other than zero, FP64: ``[m, n]`` where an operand is `SPARSE`, else K alone on the CPU."""
    left, right = a.values != 0, b.values != 0
    k = a.values.shape[1]
    if k >= 2**24 or min(float(side.to(torch.uint8).mean(dtype=torch.float32)) for side in (left, right)) > 1 - SPARSE:
        return torch.tensor(float(k), dtype=torch.float64)
    return (left.to(torch.float32) @ right.to(torch.float32).T).to(torch.float64)  # whole numbers below 2^24


def _steps(largest: Tensor, c: Tensor | float, *, binades: bool) -> Tensor:
    """R for steps whose c_j add up to ``c`` on exact sums up to ``largest``. binades: whether units are known."""
    found = largest * (c / (1 - c))
    if not binades:
        return found
    _, exponent = torch.frexp((largest + found) * SLACK)
    sharp = c * power_of_two((exponent - 1).clamp(-1022, 1023))
    return torch.where(found.isfinite(), torch.minimum(found, sharp), found)


def _fine(facts: Sums, a: Operand, b: Operand, largest: Tensor, kind: str) -> Tensor:
    """The bound by fine terms; infinite where counting them would take too long."""
    m, n, k = a.values.shape[0], b.values.shape[0], facts.n
    device = a.values.device.type
    if m * n * k > COUNTED.get(device, COUNTED["cpu"]):
        return torch.full_like(largest, torch.inf)
    _, exponent = torch.frexp(largest * SLACK)
    last = (exponent - BITS[kind]).clamp(-1000, 1000)
    lowest = a.row_least_bits[0], b.row_least_bits[0]
    # A term is fine if the sum of its two least bits, each counted from its row's lowest one, is below this.
    above = last - lowest[0][:, None] - lowest[1][None, :]
    dtype = torch.int8 if bool((above <= NARROW).all()) else torch.int16
    reach = NARROW if dtype == torch.int8 else WIDE
    left, right = (
        (side.least_bits - low[:, None]).clamp(max=reach).to(dtype) for side, low in zip((a, b), lowest, strict=True)
    )
    above = above.clamp(-1, reach).to(dtype)
    count = torch.empty_like(largest)
    for part in row_blocks(n, k, device):
        some = right[part]
        step = max(1, PIECE.get(device, PIECE["cpu"]) // some.numel())
        for start in range(0, m, step):
            rows = slice(start, start + step)
            depth = above[rows, part, None] - left[rows, None, :]
            depth = depth.sub_(some).clamp_(0, 2).to(torch.int8)
            count[rows, part] = _count(depth.view(torch.uint8)).to(count.dtype)
    return torch.where(largest.isfinite(), FINE_FACTOR[kind] * count * power_of_two(last), torch.inf)


def row_blocks(rows: int, width: int, device: str) -> Iterator[slice]:
    """Slices of the rows of a matrix, each within `PIECE` elements where one row is."""
    step = max(1, PIECE.get(device, PIECE["cpu"]) // width)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _count(found: Tensor) -> Tensor:
    """Sums of bytes up to 2 over the last dimension, int64, eight at a time: bytes are added quickest in a word."""
    if found.shape[-1] < WORDS * 8:
        return found.sum(-1)
    missing = -found.shape[-1] % (WORDS * 8)
    padded = torch.nn.functional.pad(found, (0, missing)) if missing else found
    words = padded.view(torch.int64).view(*found.shape[:-1], -1, WORDS).sum(-1)  # no byte reaches 256
    total: Tensor = words.view(torch.uint8).sum(-1)
    return total


def _coefficient(recipe: Recipe, n: int, width: int, terms: Tensor) -> Tensor:
    """c for n products, ``terms`` of which are not zero: FP64, ``[m, n]`` or one number, like these."""
    match recipe.accumulator:
        case "fp32_rn":
            return (terms - 1).clamp(min=0.0) * U32
        case "fp64":
            return (terms - 1).clamp(min=0.0) * U64
        case "fp32_any" | "bf16_split_k":
            instructions = terms.clamp(max=-(-n // LEAST_PRODUCTS))
            cut = (terms + instructions - 1).clamp(min=0.0) * U32 + 2 * instructions * U32_TRUNCATING
            return torch.maximum((terms + instructions) * U32_TRUNCATING, cut)
        case "hopper_f16" | "f16_upcast":
            # Blocks narrower than an instruction cut it short: one more for each.
            block = min(width, 128) if recipe.promotion == "every_128" else width
            blocks = -(-n // block)
            instructions_ = blocks * -(-block // F16_PRODUCTS)
            each = (F16_PRODUCTS + 1) * 2.0**-25 + 2.0**-23
            return torch.full_like(terms, instructions_ * each + (blocks + recipe.k_parts - 1) * U32)
    raise ValueError(f"gemm: no closed bound for accumulator {recipe.accumulator}")


def scale_roundings(a: Operand, b: Operand) -> int:
    """How many roundings a term can meet through its scales."""
    kinds = {a.side.scale, b.side.scale}
    if kinds <= {None, "ue8m0"}:
        return 0
    return 5 if "e4m3" in kinds else 3


def underflow(a: Operand, b: Operand, recipe: Recipe, steps: int, *, everywhere: bool = False) -> tuple[Tensor, Tensor]:
    """What underflow can add to the error, and where nothing can underflow; both ``[m, n]``.

    steps: FMAs or sums whose result may underflow, of one output. everywhere: say so of outputs that are safe, too;
    without it a product that is safe throughout is answered with zeros.
    """
    (va, ca, sa), (vb, cb, sb) = (
        tuple(part[:, None] for part in a.row_least_bits),
        tuple(part[None, :] for part in b.row_least_bits),
    )
    safe = (va >= -126) & (vb >= -126) & (va + vb >= -126) & (va + cb >= -126) & (ca + vb >= -126) & (sa + sb >= -126)
    # A global product, and block scales without the global one, are within 2^18 of the scales themselves.
    if a.side.scale == "e4m3":
        safe = safe & (sa + sb >= -100)
    if not everywhere and bool(safe.all()):
        return torch.zeros_like(safe, dtype=torch.float64), safe
    flush = recipe.subnormals == "flush"
    to_nearest = recipe.accumulator in ("fp32_rn", "hopper_fp8")
    tiny = 2.0**-126 if flush else 2.0**-150 if to_nearest else 2.0**-149
    (reach_a, _, rows_a, scales_a), (reach_b, codes_b, rows_b, scales_b) = (
        tuple(part[:, None] for part in a.row_sizes),
        tuple(part[None, :] for part in b.row_sizes),
    )
    # A flushed scale, not only a flushed product, errs by 2^-126 times the code.
    by_codes = (1 + reach_a + reach_b) if flush else 1.0
    total = by_codes * (rows_a + rows_b)
    total = total + reach_a * codes_b
    total = total + scales_a * (1 + reach_b) + scales_b * (1 + reach_a)
    return (total + steps) * tiny, safe
