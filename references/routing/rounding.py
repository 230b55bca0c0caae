"""Roundings to FP32, BF16 and FP16 of values held in FP64. All are monotone, so they map interval ends to ends."""

from __future__ import annotations

import torch
from torch import Tensor

from references.rounding import round_to

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
U32 = 2.0**-24
"""Unit roundoff of FP32."""
TINY = 2.0**-126
"""Smallest normal FP32: what flushing a subnormal, or an underflow, may cost."""
SLACK = 2.0**-46
"""Relative error granted to our own FP64 evaluation: 64 roundings of 2^-52."""


def to_fp32(x: Tensor) -> Tensor:
    """RN32 of FP64 values, as FP64; overflow to inf."""
    return x.to(torch.float32).to(torch.float64)


def add_fp32(a: Tensor, b: Tensor) -> Tensor:
    """RN32(a + b) of FP64 values, as FP64, with a single rounding.

    The FP64 sum is first rounded to odd with the help of its exact error (Knuth's TwoSum), which makes the second
    rounding harmless (Boldo and Melquiond, IEEE TC 57(4), 2008).
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf).to(total)
    odd = torch.where(even & (error != 0) & torch.isfinite(error), torch.nextafter(total, toward), total)
    return to_fp32(odd)


def to_dtype(x: Tensor, name: str) -> Tensor:
    """RN(RN32(x)) of FP64 values, as FP64: an FP32 result stored as ``fp32``, ``bf16`` or ``fp16``."""
    return to_fp32(x) if name == "fp32" else round_to(to_fp32(x), DTYPES[name])
