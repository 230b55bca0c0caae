"""Requantising an intermediate that is only known within an interval.

An element h in [lo, hi] gives its block's amax an interval, and that every scale from policy(lo) to policy(hi). For
each candidate scale s the codes run from encode(lo / s) to encode(hi / s); the enclosure of the dequantised element is
the hull over the candidates. Under a single power-of-two scale an element moves only if a rounding boundary lies within
its interval, so most elements have no radius at all; under a continuous scale nearly all move a little.

**Power-of-two scales.** Quotients are exact, by division or by reciprocal. The four coarsest candidates are tried one
by one. A block whose amax may be nearly zero has many more; for those, with the next scale s', a code lies within
max(2^-(m+1) |h|, 2^(emin-m-1) s') of its element (m mantissa bits) or is clipped toward zero, which bounds all of them.

**FP32 and two-level scales.** x / s, x RN(1/s) and x RN(qmax/amax) all lie within 4 u of x / s, a two-level quotient
within 8 u (five roundings), u = 2^-24; ``payload_error`` is added. Codes run over both the element's and the scale's
interval, and each end is multiplied by the end of the scale that takes it farther out.

Everything here is finite: a NaN or an infinity has no interval.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references import ue8m0
from references.blocks import F32, F64, block_amax, expand, floored, global_value, grid_rows, quantize, scale_values
from references.elements import E4M3FN, Element, decode, encode
from references.gemm_formats import Side, Stored
from references.moe.product import Uncertain
from references.packing import pack_fp4
from references.recipes import Recipe
from references.rounding import power_of_two, round_to
from references.schemes import Scheme

U32 = 2.0**-24
FEW = 4
"""Candidate scales that are tried one by one."""
LEAST_NORMAL = 2.0**-126


def requantise(
    low: Tensor, high: Tensor, nominal: Tensor, scheme: Scheme | None, side: Side, recipe: Recipe, given: Tensor | None
) -> Uncertain:
    """The operand that a matrix within ``low`` .. ``high`` may become, around that of ``nominal``; all FP64 ``[m, k]``.

    scheme: None for a BF16 operand, which is only rounded. given: the static or the global scale, float32 ``[1]``.
    """
    dtype = torch.bfloat16 if scheme is None else F32
    # What is quantised is a number of that dtype, and rounding is monotone.
    low, high = round_to(low, dtype), round_to(high, dtype)
    exact = Uncertain.exactly(quantised(nominal, scheme, side, recipe, given).decoded())
    if scheme is None:
        return _around(exact, low, high, None)
    if bool((low == high).all()) and not _free(scheme, recipe):
        return exact
    crosses = (low < 0) & (high > 0)
    least = torch.where(crosses, 0.0, torch.minimum(low.abs(), high.abs())).to(F32)
    most = torch.maximum(low.abs(), high.abs()).to(F32)
    amax = block_amax(least, scheme.block), block_amax(most, scheme.block)
    if scheme.scale == "ue8m0":
        codes = _ue8m0_codes(amax, scheme, recipe)
        ends = _hull_over_powers(low, high, codes, scheme)
        top = power_of_two(codes[1] - 127)
    else:
        bounds = _scale_bounds(amax, scheme, recipe, given)
        error = (8 if scheme.two_level else 4) * U32 + recipe.payload_error
        ends = _hull_over_interval(low, high, bounds, scheme, error)
        top = bounds[1]
    if recipe.subnormals == "flush":
        may = least.to(F64) < LEAST_NORMAL
        ends = torch.where(may, ends[0].clamp(max=0.0), ends[0]), torch.where(may, ends[1].clamp(min=0.0), ends[1])
    return _around(exact, *ends, grid_rows(top, scheme.block, (low.shape[0], low.shape[1]), slice(0, low.shape[0])))


def quantised(x: Tensor, scheme: Scheme | None, side: Side, recipe: Recipe, given: Tensor | None) -> Stored:
    """The nominal operand that a certain matrix FP64 ``[m, k]`` becomes."""
    if scheme is None:
        return Stored(round_to(x, torch.bfloat16).to(torch.bfloat16), None, side)
    two_level, static = scheme.two_level, scheme.scale == "static"
    outer = given if two_level else None
    found = quantize(round_to(x, F32).to(F32), scheme, recipe, global_scale=outer, scale=given if static else None)
    payload = pack_fp4(found.payload) if scheme.element.bits == 4 else found.payload
    scales = found.scales if found.scales is not None else _given(given).reshape(1, 1)
    return Stored(payload, scales, side, outer)


def _given(scale: Tensor | None) -> Tensor:
    if scale is None:
        raise ValueError("moe: a static scheme needs a scale")
    return scale


def _free(scheme: Scheme, recipe: Recipe) -> bool:
    """Whether a certain element may become more than one code."""
    approximate = "approximate" in (recipe.scale_arithmetic, recipe.payload_arithmetic)
    return approximate or scheme.two_level or recipe.subnormals == "flush"


def _around(exact: Uncertain, low: Tensor, high: Tensor, scales: Tensor | None) -> Uncertain:
    values = exact.nominal.values
    reach = torch.maximum(high - values, values - low).clamp(min=0.0)
    top = exact.scales if scales is None else torch.maximum(exact.scales, scales)
    return Uncertain(exact.nominal, reach, top)


def _ue8m0_codes(amax: tuple[Tensor, Tensor], scheme: Scheme, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The lowest and the highest code of every block, int64."""
    policy = str(scheme.policy)
    ends = []
    for item, side in zip(amax, (-1, 1), strict=True):
        item = floored(item, recipe.amax_floor)
        if policy not in ("ceil", "ceil_clamped"):
            ends.append(ue8m0.from_amax(item, scheme.element, policy).to(torch.int64))
            continue
        scale = _fp32_scale(item, scheme.element, recipe, side)
        ends.append(ue8m0.encode(round_to(scale, F32).to(F32), policy).to(torch.int64))
    return ends[0], ends[1]


def _fp32_scale(amax: Tensor, element: Element, recipe: Recipe, side: int) -> Tensor:
    """The smallest (side -1) or largest (1) FP32 scale of block maxima, FP64."""
    if recipe.scale_arithmetic == "approximate":
        scale = ue8m0.scale_from_amax(amax, element).to(F64) * (1 + side * (recipe.scale_error + 2 * U32))
    else:
        scale = ue8m0.scale_from_amax(amax, element, recipe.scale_arithmetic).to(F64)
    return floored(scale, recipe.scale_floor)


def _scale_bounds(
    amax: tuple[Tensor, Tensor], scheme: Scheme, recipe: Recipe, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest dequantised scale of every block, FP64."""
    if scheme.scale == "static":
        value = _given(given).to(F64).reshape(1, 1)
        return value, value
    low, high = (
        _fp32_scale(floored(item, recipe.amax_floor), scheme.element, recipe, side)
        for item, side in zip(amax, (-1, 1), strict=True)
    )
    if not scheme.two_level:
        return low, high
    outer = global_value(given, low.device)
    ends = (low / outer * (1 - 8 * U32), high / outer * (1 + 8 * U32))
    stored = (encode(floored(item, recipe.scale_floor), E4M3FN) for item in ends)
    first, second = (scale_values(item, scheme) * outer for item in stored)
    return first, second


def _rounded(quotient: Tensor, element: Element) -> Tensor:
    return decode(encode(quotient.contiguous(), element), element)


def _hull_over_powers(low: Tensor, high: Tensor, codes: tuple[Tensor, Tensor], scheme: Scheme) -> tuple[Tensor, Tensor]:
    shape, element = (low.shape[0], low.shape[1]), scheme.element
    ends: tuple[Tensor, Tensor] | None = None
    span = int((codes[1] - codes[0]).max()) if codes[0].numel() else 0
    for step in range(min(span + 1, FEW)):
        scale = expand(power_of_two(torch.maximum(codes[1] - step, codes[0]) - 127), scheme.block, shape)
        first, second = _rounded(low / scale, element) * scale, _rounded(high / scale, element) * scale
        ends = (first, second) if ends is None else (torch.minimum(ends[0], first), torch.maximum(ends[1], second))
    if ends is None:
        raise ValueError("moe: nothing to requantise")
    if span < FEW:
        return ends
    more = expand((codes[1] - codes[0]) >= FEW, scheme.block, shape)
    finer = expand(power_of_two((codes[1] - FEW - 127).clamp(min=-127)), scheme.block, shape)
    error = torch.maximum(low.abs(), high.abs()) * 2.0 ** -(element.mantissa_bits + 1)
    error = torch.maximum(error, finer * 2.0 ** (element.emin - element.mantissa_bits - 1))
    return (
        torch.where(more, torch.minimum(ends[0], (low - error).clamp(max=0.0)), ends[0]),
        torch.where(more, torch.maximum(ends[1], (high + error).clamp(min=0.0)), ends[1]),
    )


def _hull_over_interval(
    low: Tensor, high: Tensor, bounds: tuple[Tensor, Tensor], scheme: Scheme, error: float
) -> tuple[Tensor, Tensor]:
    shape, element = (low.shape[0], low.shape[1]), scheme.element
    small, large = (expand(item, scheme.block, shape) for item in bounds)
    ends = []
    for x, side in ((low, -1), (high, 1)):
        outward = x * side >= 0
        quotient = x / torch.where(outward, small, large) * torch.where(outward, 1 + error, 1 - error)
        code = _rounded(torch.where(x == 0, x, quotient), element)
        ends.append(code * torch.where(code * side >= 0, large, small))
    return ends[0], ends[1]
