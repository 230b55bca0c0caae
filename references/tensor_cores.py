"""Exact models of Hopper's tensor cores: the dot product that the hardware computes, bit for bit.

The rule, stated for a group of ``products`` products that are taken together with the running value:

1. A product is an integer significand times 2^(ea + eb). The operands' exponents are not normalised after the
   multiplication; a subnormal operand has its format's smallest normal exponent. Products with a zero operand take no
   part.
2. E is the largest of these exponents and of the running value's own (normalised) exponent.
3. Every term is truncated toward zero to a multiple of 2^(E - fraction_bits), then all are added exactly.
4. The sum is truncated toward zero to ``significand_bits`` significant bits. That is the new running value;
   it starts at 0.

Source: measured on an H200 (SM90) with Triton's ``tl.dot`` (``benchmarks/hopper_check.py``); see
``docs/results/h200-tensor-cores.md``. Every step is exact in FP64: a term has at most 22 bits, sums stay below 2^53.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.rounding import power_of_two, round_to


@dataclass(frozen=True)
class TensorCore:
    """One instruction's arithmetic.

    products: how many products join the running value at a time. fraction_bits: kept below the largest exponent.
    significand_bits: of the running value after each group. least_exponent: exponent of the smallest bit the running
    value can hold (FP32's 2^-149).
    pattern: order in which a stretch of ``len(pattern)`` K elements is taken; empty for the natural order.
    """

    products: int
    fraction_bits: int
    significand_bits: int
    least_exponent: int = -149
    pattern: tuple[int, ...] = ()


HOPPER_FP8 = TensorCore(products=32, fraction_bits=13, significand_bits=14)
"""FP8 ``wgmma``."""
HOPPER_F16 = TensorCore(products=16, fraction_bits=25, significand_bits=24)
"""F16 ``wgmma`` and ``mma.sync``."""
HOPPER_BF16 = HOPPER_F16
"""BF16 follows the same rule; only the operands' exponents differ."""
HOPPER_FP8_MMA = TensorCore(
    products=16,
    fraction_bits=25,
    significand_bits=24,
    pattern=tuple(k for k in range(32) if k % 4 < 2) + tuple(k for k in range(32) if k % 4 >= 2),
)
"""FP8 through ``mma.sync``: operands upcast to F16, each 32 of K as the 16 with k % 4 < 2, then the other 16."""

LEAST_NORMAL = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126}
"""Smallest normal exponent of the operand formats."""


def exponents(values: Tensor, operand: str) -> Tensor:
    """The exponent that the multiplier sees, int32, of FP64 values of the format ``operand``; zeros get the least."""
    _, exponent = torch.frexp(values)
    return torch.where(values == 0, LEAST_NORMAL[operand], (exponent - 1).clamp(min=LEAST_NORMAL[operand]))


def tensor_core_dot(a: Tensor, b: Tensor, operand: str, core: TensorCore, running: Tensor | None = None) -> Tensor:
    """The running value after all of K, FP64 `[m, n]`, exactly as the hardware holds it.

    a: FP64 `[m, k]`, b: FP64 `[n, k]`, both representable in ``operand`` (``e4m3``, ``f16``, ``bf16``) and finite. A
    ragged K is padded with zeros, which take no part.
    running: where to start from, FP64 `[m, n]`; zeros if None.
    Memory: a few `[rows, n, products]` FP64 tensors at a time, rows chosen to stay near 256 MiB.
    """
    stretch = max(core.products, len(core.pattern))
    a, b = (_padded(matrix, stretch) for matrix in (a, b))
    if core.pattern:
        order = torch.tensor(core.pattern, device=a.device)
        a, b = (matrix.view(len(matrix), -1, stretch)[:, :, order].flatten(1) for matrix in (a, b))
    ea, eb = exponents(a, operand), exponents(b, operand)
    out = a.new_zeros(a.shape[0], b.shape[0]) if running is None else running.clone()
    for rows in _row_chunks(a.shape[0], b.shape[0] * core.products):
        value = out[rows]
        for start in range(0, a.shape[1], core.products):
            ks = slice(start, start + core.products)
            value = _step(value, a[rows, ks], b[:, ks], ea[rows, ks], eb[:, ks], core)
        out[rows] = value
    return out


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % multiple))


def _row_chunks(rows: int, width: int) -> Iterator[slice]:
    chunk = max(1, 2**25 // max(1, width))
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


_NOTHING = -(2**20)  # an exponent below every other


def _step(value: Tensor, a: Tensor, b: Tensor, ea: Tensor, eb: Tensor, core: TensorCore) -> Tensor:
    product = a[:, None, :] * b[None, :, :]
    exponent = torch.where(product != 0, ea[:, None, :] + eb[None, :, :], _NOTHING)
    _, own = torch.frexp(value)
    largest = torch.maximum(exponent.amax(dim=2), torch.where(value != 0, own - 1, _NOTHING))
    nothing = largest == _NOTHING
    unit = torch.where(nothing, 0, largest - core.fraction_bits)
    terms = torch.trunc(product * power_of_two(-unit)[:, :, None]).sum(dim=2)
    total = terms + torch.trunc(value * power_of_two(-unit))
    return truncate(total, core.significand_bits, core.least_exponent - unit) * power_of_two(unit)


def truncate(values: Tensor, significand_bits: int, least: Tensor | int) -> Tensor:
    """FP64 values cut toward zero to ``significand_bits`` bits, none of them below 2^least."""
    _, exponent = torch.frexp(values)
    last = torch.maximum(exponent - significand_bits, torch.as_tensor(least, device=values.device))
    return torch.trunc(values * power_of_two(-last)) * power_of_two(last)


def fma_fp32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """RN32(a * b + c) of FP64 tensors that hold FP32 values, as FP64.

    The product is exact in FP64; the sum is rounded to odd there, so that the second rounding to FP32 is the only one
    (53 >= 24 + 2 bits). Results in FP32's subnormal range are rounded to its grid by the conversion.
    """
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    # One step of the bit pattern moves away from zero; toward zero where the error has the other sign.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return round_to(torch.where(to_odd, bits + step, bits).view(torch.float64), torch.float32)


def multiply_fp32(a: Tensor, b: Tensor) -> Tensor:
    """RN32(a * b) of FP64 tensors that hold FP32 values, as FP64; the product is exact before its one rounding."""
    return round_to(a * b, torch.float32)
