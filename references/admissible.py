"""What a correct implementation of a block scheme may answer under a recipe: scales, payload, dequantised matrix.

Parts are judged in order: the payload is conditioned on the scales that were returned. Most sets hold one answer. They
are wider only where the recipe declares an error, or where a format leaves the order of FP32 operations open:

**Two-level scales (nvfp4).** amax / 6 / global and x / (scale * global) may be evaluated in any order, with
reciprocals taken first or not. The longest known chain is x * RN(1 / RN(scale * RN(1 / RN(1 / global)))), five
roundings; r roundings to nearest, each within u = 2^-24, stay within r u / (1 - r u) of the exact value (Higham,
Accuracy and Stability, lemma 3.1), which is the relative bound here with r = 5. A rounding whose result is subnormal
errs by at most 2^-150 instead; what later operations make of that is added as an absolute term, factor by factor. An
order that overflows in an intermediate result although the answer is finite is not admitted. Where scale and global are
powers of two no rounding happens in any order, so that the payload has no relative bound there: a tie is a tie.

**Flush to zero** (``subnormals=flush``). An operand or result that is an FP32 subnormal may be replaced by zero, so
zero becomes admissible beside the regular answer; a division by a scale that was flushed to zero is not admitted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references import ue8m0
from references.blocks import (
    F32,
    F64,
    block_amax,
    dequantize,
    divisor,
    expand,
    expand_rows,
    floored,
    global_value,
    nominal_payload,
    scale_values,
    scales_from_amax,
)
from references.chunks import row_pieces
from references.elements import E4M3FN, encode, ordinal
from references.judging import Codes, Interval, Judgement, judge_codes, judge_interval, judge_payload
from references.recipes import Recipe
from references.rounding import half_ulp, round_to
from references.schemes import Scheme

__all__ = [
    "Codes",
    "Interval",
    "Judgement",
    "admissible_output",
    "admissible_payload",
    "admissible_scales",
    "judge_codes",
    "judge_interval",
    "judge_payload",
]

ROUNDINGS = 5
CHAIN = ROUNDINGS * 2.0**-24 / (1 - ROUNDINGS * 2.0**-24)
"""Relative error of the longest admitted chain of FP32 operations."""
TINY = 2.0**-150
"""Largest error of an FP32 rounding with a subnormal result."""
SLACK = 2.0**-49
"""Relative allowance for the FP64 evaluation of a bound: fewer than 16 operations, each within 2^-53."""
LEAST_NORMAL = 2.0**-126
"""The smallest normal FP32 number."""
FAR = 2.0**126
"""The reciprocal of anything above is an FP32 subnormal."""


def _around(exact: Tensor, relative: Tensor | float, absolute: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Bounds of what lies within the errors of FP64 numbers, never across zero; infinities, NaN and zeros stay."""
    width = exact.abs() * (relative + SLACK) + absolute
    low, high = exact - width, exact + width
    low = torch.where(exact > 0, low.clamp(min=0.0), low)
    high = torch.where(exact < 0, high.clamp(max=0.0), high)
    fixed = exact.isinf() | exact.isnan() | (exact == 0)
    return torch.where(fixed, exact, low), torch.where(fixed, exact, high)


def admissible_scales(
    x: Tensor, scheme: Scheme, recipe: Recipe, *, global_scale: Tensor | None = None
) -> Codes | Interval:
    """The admissible scales of a matrix ``[m, k]``: `Codes` for UE8M0 and E4M3, `Interval` for FP32; grid-shaped."""
    amax = block_amax(x, scheme.block)
    stored = scales_from_amax(amax, scheme, recipe, global_scale=global_scale)
    amax = floored(amax, recipe.amax_floor)
    if scheme.scale == "e4m3":
        return _two_level_scales(amax, stored, scheme, recipe, global_value(global_scale, amax.device))
    if scheme.scale == "ue8m0" and scheme.policy not in ("ceil", "ceil_clamped"):
        codes = stored.to(torch.int16)  # read from the bits of amax: nothing is open
        return Codes(codes, codes, codes, nan=ue8m0.NAN)
    low, high, exact = _fp32_scales(amax, scheme, recipe)
    flushed = (low < LEAST_NORMAL) & (exact > 0) if recipe.subnormals == "flush" else None
    low, high, exact = (floored(item, recipe.scale_floor) for item in (low, high, exact))
    if scheme.scale == "ue8m0":
        if flushed is not None:
            low = torch.where(flushed, floored(torch.zeros_like(low), recipe.scale_floor), low)
        policy = str(scheme.policy)
        codes_low, codes_high = (ue8m0.encode(item.to(F32), policy).to(torch.int16) for item in (low, high))
        return Codes(codes_low, codes_high, stored.to(torch.int16), nan=ue8m0.NAN)
    if recipe.scale_floor > 0:
        flushed = None
    return _interval(low, high, stored.to(F64), exact, F32, flushed)


def _fp32_scales(amax: Tensor, scheme: Scheme, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 numbers (in FP64) between which amax / qmax lies as computed, and the exact quotient."""
    exact = amax.to(F64) / torch.full((), scheme.element.max, dtype=F64, device=amax.device)
    if recipe.scale_arithmetic == "approximate":
        low, high = _around(exact, recipe.scale_error)
        return round_to(low, F32), round_to(high, F32), exact
    only = ue8m0.scale_from_amax(amax, scheme.element, recipe.scale_arithmetic).to(F64)
    return only, only, exact


def _two_level_scales(amax: Tensor, stored: Tensor, scheme: Scheme, recipe: Recipe, outer: Tensor) -> Codes:
    wide = amax.to(F64)
    first = wide / torch.full((), scheme.element.max, dtype=F64, device=amax.device)
    exact = first / outer
    relative = (1 + recipe.scale_error) * (1 + CHAIN) - 1
    # Subnormal amax / 6, then / global; 1 / global or 1 / (6 global), then * amax; the last result itself.
    absolute = TINY * (1 / outer.abs() + wide + 1)
    low, high = _around(exact, relative, absolute)
    low, high = (ordinal(encode(floored(item, recipe.scale_floor), E4M3FN), E4M3FN) for item in (low, high))
    nominal = ordinal(stored, E4M3FN)
    zero = None
    if recipe.subnormals == "flush":
        small = (first < LEAST_NORMAL) | (exact < LEAST_NORMAL) | (wide / outer < LEAST_NORMAL) | (outer > FAR)
        zero = small if recipe.scale_floor == 0 else None
    return Codes(torch.minimum(low, nominal), torch.maximum(high, nominal), nominal, zero=zero)


def admissible_payload(
    x: Tensor, scales: Tensor, scheme: Scheme, recipe: Recipe, *, global_scale: Tensor | None = None
) -> Codes:
    """The admissible payload of a matrix ``[m, k]`` under the scales that were returned.

    scales: their values in FP64 (`blocks.scale_values`), grid-shaped, without the global scale. Where a scale is zero
    there is no quotient to round: a zero payload and a saturated one are both admissible for a nonzero element. An
    element format without NaN admits every code for a NaN quotient.
    """
    codes = nominal_payload(x, scales, scheme, recipe, global_scale=global_scale)
    element = scheme.element
    nominal = ordinal(codes, element)
    negative = (codes & element.sign) != 0
    low, high, zero = nominal, nominal, None
    wide = scheme.two_level or recipe.payload_arithmetic == "approximate"
    if wide:
        low, high = _payload_bounds(x, scales, nominal, scheme, recipe, global_scale)
    divisors = divisor(scales, scheme, global_scale)
    if bool((divisors == 0).any()):
        zero = expand(divisors == 0, scheme.block, tuple(x.shape))
    if not element.nan_codes:
        lost = expand(divisors.isnan(), scheme.block, tuple(x.shape)) | x.isnan()
        if bool(lost.any()):
            low, high = low.masked_fill(lost, -element.max_code), high.masked_fill(lost, element.max_code)
    if recipe.subnormals == "flush":
        flushed = _flushed(x, scales, divisors, scheme, recipe, global_scale)
        zero = flushed if zero is None else zero | flushed
    return Codes(low, high, nominal, zero=zero, negative=negative)


def _payload_bounds(
    x: Tensor, scales: Tensor, nominal: Tensor, scheme: Scheme, recipe: Recipe, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape, element = tuple(x.shape), scheme.element
    low, high = torch.empty_like(nominal), torch.empty_like(nominal)
    outer = global_value(global_scale, x.device) if scheme.two_level else None
    for rows in row_pieces(shape[0], shape[1], x.device):
        values = x[rows].to(F64)
        inner = expand_rows(scales, scheme.block, shape, rows)
        if outer is None:
            # The declared error includes every rounding; an FP32 underflow is far below half the smallest code.
            bounds = _around(torch.where(values == 0, values, values / inner), recipe.payload_error)
        else:
            total = inner * outer
            relative = (1 + recipe.payload_error) * (1 + CHAIN) * (1 + _subnormal_divisor(total)) - 1
            if recipe.payload_error == 0:  # nothing is rounded, here in FP64 neither
                shifted = _power_of_two(inner) & _power_of_two(outer) & (total.abs() >= LEAST_NORMAL)
                relative = torch.where(shifted, -SLACK, relative)
            # x / scale or its like subnormal, then / global or / scale; 1 / global or 1 / (scale global), then * x.
            absolute = TINY * ((1 / outer.abs() + 1 / inner.abs() + 1) + values.abs() * (1 + 1 / inner.abs()))
            bounds = _around(torch.where(values == 0, values, values / total), relative, absolute)
        low[rows], high[rows] = (ordinal(encode(item, element), element) for item in bounds)
    return torch.minimum(low, nominal), torch.maximum(high, nominal)


def _power_of_two(values: Tensor) -> Tensor:
    return torch.frexp(values.abs()).mantissa == 0.5


def _subnormal_divisor(total: Tensor) -> Tensor:
    """Relative error of a quotient whose divisor scale * global was rounded to an FP32 subnormal; inf for 0."""
    size = total.abs()
    error = TINY / (size - TINY)
    error = torch.where(size <= TINY, torch.full_like(size, float("inf")), error)
    return torch.where(size < LEAST_NORMAL, error, torch.zeros_like(size))


def _flushed(
    x: Tensor, scales: Tensor, divisors: Tensor, scheme: Scheme, recipe: Recipe, global_scale: Tensor | None
) -> Tensor:
    """Where a flushed subnormal makes the payload zero: x itself, a quotient on the way, or a reciprocal."""
    shape = tuple(x.shape)
    size = x.abs().to(F64)
    found = (size < LEAST_NORMAL) & (size > 0)
    if scheme.two_level:
        outer = global_value(global_scale, x.device)
        found |= (size > 0) & (size / expand(scales, scheme.block, shape) < LEAST_NORMAL)
        reciprocal = (divisors.to(F64) > FAR) | (outer > FAR)
    elif recipe.payload_arithmetic == "divide":
        return found
    else:
        reciprocal = divisors.to(F64) > FAR
    return found | expand(reciprocal, scheme.block, shape)


def admissible_output(
    payload: Tensor,
    scales: Tensor,
    scheme: Scheme,
    recipe: Recipe,
    dtype: torch.dtype,
    *,
    global_scale: Tensor | None = None,
) -> Interval:
    """The admissible dequantised matrix ``[m, k]`` in ``dtype``, from unpacked payload codes and stored scales.

    One value an element, the product rounded as ``recipe.dequant_rounding`` says. Under ``subnormals=flush`` zero is
    admissible as well where the exact product is below 2^-126: FP32 and BF16 share that limit, and FP16, whose own
    subnormals are FP32 normals that no FP32 flush touches, rounds such a product to zero anyway. The same holds where
    the scale that is multiplied (a stored one, the global one, or their product under two levels) is an FP32 subnormal.
    """
    exact = dequantize(payload, scales, scheme, global_scale=global_scale)
    if recipe.dequant_rounding == "scale_first":
        nominal = dequantize(payload, scales, scheme, global_scale=global_scale, dtype=dtype, recipe=recipe).to(F64)
    elif recipe.dequant_rounding == "via_fp32":
        nominal = round_to(round_to(exact, F32), dtype)
    else:
        nominal = round_to(exact, dtype)
    zero = None
    if recipe.subnormals == "flush":
        values = scale_values(scales, scheme).abs()
        small = values < LEAST_NORMAL
        if scheme.two_level:
            outer = global_value(global_scale, values.device).abs()
            small |= (outer < LEAST_NORMAL) | (values * outer < LEAST_NORMAL)
        zero = (exact.abs() < LEAST_NORMAL) | expand(small, scheme.block, tuple(payload.shape))
    return _interval(nominal, nominal, nominal, exact, dtype, zero)


def _interval(
    low: Tensor, high: Tensor, nominal: Tensor, exact: Tensor, dtype: torch.dtype, zero: Tensor | None
) -> Interval:
    """An interval around the exact value, whose radius is half an ulp or, if that is more, reaches the farther end."""
    radius = half_ulp(nominal, dtype)
    for end in (low, high, nominal):
        radius = torch.maximum(radius, (end - exact).abs().nan_to_num(nan=0.0, posinf=0.0))
    return Interval(low, high, nominal, exact, radius, zero)
