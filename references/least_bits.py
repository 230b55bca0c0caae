"""The least set bit of numbers: what decides whether sums of them are ever rounded.

2^q divides a number, and no higher power does; q of a product is the sum of both numbers' q.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from references.chunks import pieces
from references.elements import Element, table

NOTHING = 2**12
"""Least set bit of a zero: above that of every number."""
ZERO_CODE = 127
"""The same for a code, whose least set bit is kept in a byte."""


def least_bit(values: Tensor) -> Tensor:
    """Exponent of the least set bit of FP64 values, int32; `NOTHING` for zero."""
    mantissa, exponent = torch.frexp(values)
    whole = (mantissa * 2.0**53).to(torch.int64)
    _, low = torch.frexp((whole & -whole).to(torch.float64))
    return torch.where(values == 0, NOTHING, exponent - 53 + low - 1).to(torch.int32)


def code_least_bits(codes: Tensor, element: Element) -> Tensor:
    """The same of codes uint8 ``[m, k]`` of an element without looking at their values, int8; `ZERO_CODE` for zero."""
    out = torch.empty(codes.shape, dtype=torch.int8, device=codes.device)
    flat, target = codes.reshape(-1), out.view(-1)
    even = flat.numel() // 2 * 2
    if flat.storage_offset() % 2:
        flat = flat.clone()
    pairs = _pair_table(element, codes.device)
    for piece in pieces(even // 2, codes.device):
        torch.take(
            pairs, flat[:even].view(torch.uint16)[piece].to(torch.int64), out=target[:even].view(torch.int16)[piece]
        )
    if even < flat.numel():
        target[even:] = _table(element, codes.device)[flat[even:].to(torch.int64)]
    return out


@lru_cache(maxsize=16)
def _table(element: Element, device: torch.device) -> Tensor:
    found = least_bit(table(element).nan_to_num(0.0, 0.0, 0.0))
    return torch.where(found == NOTHING, ZERO_CODE, found).to(torch.int8).repeat(256 // element.count).to(device)


@lru_cache(maxsize=16)
def _pair_table(element: Element, device: torch.device) -> Tensor:
    """Two codes at once, by low code + 256 * high code: int16 that holds two bytes."""
    one = _table(element, device)
    return torch.stack((one.repeat(256), one.repeat_interleave(256)), dim=1).view(torch.int16).view(-1)
