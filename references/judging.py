"""Admissible sets of codes and of numbers, membership in them, and headroom: how close to the edge an answer is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from references.elements import NAN_ORDINAL, Element, ordinal

_JUST_OUTSIDE = math.nextafter(1.0, 2.0)


@dataclass(frozen=True)
class Codes:
    """Admissible codes: all between two ordinals, both included.

    lo, hi: integer ordinals of one shape (`elements.ordinal`; for UE8M0 the code itself). nominal: the answer of the
    nominal arithmetic. zero: where ordinal 0 is admissible as well, though outside lo..hi. negative: the sign that a
    zero has under ``zero_sign=keep``. nan: the ordinal that stands for NaN, at no distance from any other.
    """

    lo: Tensor
    hi: Tensor
    nominal: Tensor
    zero: Tensor | None = None
    negative: Tensor | None = None
    nan: int = NAN_ORDINAL


@dataclass(frozen=True)
class Interval:
    """Admissible numbers: the numbers of the output's dtype between two of them, both included; NaN admits NaN alone.

    lo, hi, nominal: FP64 of one shape. centre: the exact value. radius: |out - centre| that counts as headroom 1.
    zero: where a zero is admissible as well.
    """

    lo: Tensor
    hi: Tensor
    nominal: Tensor
    centre: Tensor
    radius: Tensor
    zero: Tensor | None = None


class Judgement(NamedTuple):
    """inside: bool, admissible or not. headroom: at most 1 exactly where inside; inf where there is no distance."""

    inside: Tensor
    headroom: Tensor


def judge_codes(actual: Tensor, codes: Codes, *, negative: Tensor | None = None, zero_sign: str = "any") -> Judgement:
    """Membership of ordinals; headroom 0 for the nominal code, 1 + distance in codes outside.

    negative: sign bits of the actual codes; with ``zero_sign=keep`` a zero of the wrong sign is one code off.
    """
    found, lo, hi, nominal = (item.to(torch.int32) for item in (actual, codes.lo, codes.hi, codes.nominal))
    between = (found >= lo) & (found <= hi)
    room = torch.where(found >= nominal, hi - nominal, nominal - lo).clamp(min=1)
    within = (found - nominal).abs().to(torch.float32) / room
    beyond = 1.0 + torch.maximum(found - hi, lo - found).to(torch.float32)
    headroom = torch.where(between, within, beyond)
    inside = between
    if codes.zero is not None:
        extra = codes.zero & (found == 0) & ~between
        inside, headroom = inside | extra, headroom.masked_fill(extra, 1.0)
    headroom = headroom.masked_fill((found == codes.nan) != (nominal == codes.nan), math.inf)
    if zero_sign == "keep" and negative is not None and codes.negative is not None:
        flipped = inside & (found == 0) & (negative != codes.negative)
        inside, headroom = inside & ~flipped, headroom.masked_fill(flipped, 2.0)
    return Judgement(inside, headroom)


def judge_payload(payload: Tensor, codes: Codes, element: Element, zero_sign: str = "any") -> Judgement:
    """`judge_codes` for unpacked payload codes uint8."""
    negative = (payload & element.sign) != 0
    return judge_codes(ordinal(payload, element), codes, negative=negative, zero_sign=zero_sign)


def judge_interval(actual: Tensor, interval: Interval, *, zero_sign: str = "any") -> Judgement:
    """Membership of FP64 numbers; headroom |actual - centre| / radius, kept on its side of 1.

    Under ``zero_sign=keep`` a zero whose sign is not the nominal answer's has headroom 2.
    """
    is_nan, wants_nan = actual.isnan(), interval.nominal.isnan()
    inside = ((actual >= interval.lo) & (actual <= interval.hi)) | (is_nan & wants_nan)
    if interval.zero is not None:
        inside = inside | (interval.zero & (actual == 0))
    distance = ((actual - interval.centre).abs() / interval.radius).nan_to_num(nan=math.inf, posinf=math.inf)
    distance = distance.masked_fill((actual == interval.nominal) & actual.isinf() | (is_nan & wants_nan), 0.0)
    distance = distance.masked_fill(actual == interval.centre, 0.0)
    headroom = torch.where(inside, distance.clamp(max=1.0), distance.clamp(min=_JUST_OUTSIDE))
    if zero_sign == "keep":
        flipped = inside & (actual == 0) & (actual.signbit() != interval.nominal.signbit())
        inside, headroom = inside & ~flipped, headroom.masked_fill(flipped, 2.0)
    return Judgement(inside, headroom)
