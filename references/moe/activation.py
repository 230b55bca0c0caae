"""SwiGLU on intervals: silu(gate) * up as FP32 arithmetic may compute it.

silu(x) = x / (1 + exp(-x)) falls down to -0.278464542761... at x = -1.278464542761... and rises from there, so its
range over an interval is spanned by the ends and, if it is inside, the minimum.

**Errors.** Let s = 1 / (1 + exp(-x)) and eps = exp_error + exp_slope |x| the relative error of the recipe's exp. It
enters through 1 + exp(-x), of which exp(-x) is the share 1 - s: relatively a = (1 - s) eps, and a / (1 - a) in the
quotient. The sum 1 + exp(-x), the product x * sigmoid and the product with ``up`` are FP32 roundings of u = 2^-24 each,
the division errs by ``division_error``. Under ``sigmoid=tanh``, 0.5 tanh(0.5 x) + 0.5 errs absolutely by
0.5 tanh(0.5 |x|) tanh_error and by u s, times |x|.

**Underflow.** exp(-x) overflows FP32 below x = -88.7, where silu is still -2^-121.5: what is lost, and what is flushed
or rounded among the subnormal numbers on the way, is at most 2^-126 max(1, |x|), times 1 + |up|. Under ``tanh`` the
sigmoid is an exact 0 or a multiple of 2^-25 for such x, which the absolute term of tanh covers.

**Saturation.** From x = 32 on exp(-x) is below 2^-46, so 1 + exp(-x) = 1, and an IEEE division (``division_error`` =
2^-24) gives x itself: no error but the rounding of the product, which is exact for small integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.accumulators import gamma
from references.enclosures import Enclosure
from references.recipes import Recipe

U32 = 2.0**-24
MINIMUM_AT = (-1.2784645427610740, -1.2784645427610737)
"""Numbers on both sides of the place of silu's minimum."""
MINIMUM = -0.27846454276107385
"""A number below silu's minimum, -0.278464542761073795..."""
EVALUATION = 2.0**-49
"""Relative error of silu in FP64: exp within 2 ulp, a sum and a quotient, 2^-50 at most."""
SATURATED = 32.0
LOST = -700.0
"""Below, FP64 has no exp(-x) or loses digits of silu, which is within 2^-1000 of 0."""
LEAST_NORMAL = 2.0**-126


def silu(x: Tensor) -> Tensor:
    """silu of FP64 numbers, within `EVALUATION`; 0 below -745."""
    return x / (1 + torch.exp(-x))


def silu_range(x: Enclosure) -> Enclosure:
    """The exact values of silu over an interval."""
    low, high = silu(x.lo), silu(x.hi)
    least, most = torch.minimum(low, high), torch.maximum(low, high)
    inside = (x.lo <= MINIMUM_AT[1]) & (x.hi >= MINIMUM_AT[0])
    least = least - EVALUATION * least.abs() - (x.lo < LOST).to(least) * 2.0**-1000
    most = most + EVALUATION * most.abs()
    return Enclosure(torch.where(inside, MINIMUM, least), torch.where((x.lo == 0) & (x.hi == 0), 0.0, most))


def clamped(gate: Enclosure, up: Enclosure, limit: float | None) -> tuple[Enclosure, Enclosure]:
    """Gate at most ``limit``, up within +-``limit``; unchanged for None."""
    if limit is None:
        return gate, up
    return (
        Enclosure(gate.lo.clamp(max=limit), gate.hi.clamp(max=limit)),
        Enclosure(up.lo.clamp(-limit, limit), up.hi.clamp(-limit, limit)),
    )


def _least(x: Enclosure) -> Tensor:
    """The smallest magnitude within an interval."""
    return torch.where((x.lo <= 0) & (x.hi >= 0), 0.0, torch.minimum(x.lo.abs(), x.hi.abs()))


def swiglu(gate: Enclosure, up: Enclosure, recipe: Recipe, limit: float | None = None) -> Enclosure:
    """silu(gate) * up in FP32 arithmetic, before it is stored; FP64 intervals of one shape."""
    gate, up = clamped(gate, up, limit)
    exact = silu_range(gate)
    size = torch.maximum(gate.lo.abs(), gate.hi.abs())
    low_s = 1 / (1 + torch.exp(-gate.lo))
    if recipe.sigmoid == "exp":
        a = (1 - low_s) * (recipe.exp_error + recipe.exp_slope * size) * (1 + EVALUATION)
        relative = (1 + a / (1 - a)) * (1 + recipe.division_error) * (1 + gamma(3, U32)) - 1
        # An overflow of exp is a loss of everything: the absolute term covers it.
        relative = torch.where(a < 0.5, relative, 1.0)
        settled = (gate.lo >= SATURATED) & (recipe.division_error == U32)
        # A product in FP32 remains, and the caller rounds to FP32 at least.
        relative = torch.where(settled, 0.0, relative)
        absolute = torch.zeros_like(size)
    else:
        relative = torch.full_like(size, gamma(4, U32))
        absolute = size * (0.5 * torch.tanh(0.5 * size) * recipe.tanh_error * (1 + EVALUATION) + U32)
    reach = torch.maximum(exact.lo.abs(), exact.hi.abs())
    exact = exact.widened(reach * relative + absolute)
    result = exact * up
    small = (_least(result) < 2.0**-100) | (_least(exact) < 2.0**-100)
    small = small & (size > 0)
    up_size = torch.maximum(up.lo.abs(), up.hi.abs())
    tiny = LEAST_NORMAL * size.clamp(min=1.0) * (1 + up_size)
    return result.widened(torch.where(small & (up_size > 0), tiny, 0.0))
