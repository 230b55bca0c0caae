"""Correct ways to add the products of a matrix product in FP32, the worst orders among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import planted_moe_faults as layers
from conformance.backends import _torch_gemm as products
from references.gemm_formats import Operand
from references.recipes import Recipe
from references.tensor_cores import TensorCore, tensor_core_dot, truncate

F32, F64 = torch.float32, torch.float64
RN = Recipe(source="FP32, to nearest", accumulator="fp32_rn")
ANY = Recipe(source="FP32 in any order and rounding")
FP64 = Recipe(source="FP64, rounded once", accumulator="fp64")
PRODUCTS = 2**22
"""Products that are sorted together."""
MatMul = Callable[[Tensor, Tensor], Tensor]


def one_by_one_truncating(a: Tensor, b: Tensor) -> Tensor:
    """One product after another, every addition cut toward zero."""
    total = a.new_zeros(a.shape[0], b.shape[0], dtype=F64)
    for k in range(a.shape[1]):
        total = truncate(total + (a[:, k, None] * b[None, :, k]).to(F64), 24, -149)
    return total.to(F32)


def largest_first(a: Tensor, b: Tensor) -> Tensor:
    """Every output's products one after another, the largest first."""
    return _in_order(a, b, torch.abs, torch.add)


def positive_first(a: Tensor, b: Tensor) -> Tensor:
    """Every output's positive products, then the negative ones: partial sums become as large as they can."""
    return _in_order(a, b, torch.Tensor.clone, torch.add)


def positive_first_truncating(a: Tensor, b: Tensor) -> Tensor:
    """The same, every addition cut toward zero."""
    return _in_order(a, b, torch.Tensor.clone, lambda x, y: truncate(x.to(F64) + y.to(F64), 24, -149).to(F32))


def _in_order(a: Tensor, b: Tensor, key: Callable[[Tensor], Tensor], add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Products added one after another, those with the greatest key first."""
    found = [a.new_zeros(0, len(b))]
    step = max(1, PRODUCTS // max(1, b.numel()))
    for start in range(0, len(a), step):
        terms = a[start : start + step].T[:, :, None] * b.T[:, None, :]
        terms = terms.gather(0, key(terms).argsort(0, descending=True))
        total = torch.zeros_like(terms[0])
        for term in terms:
            total = add(total, term)
        found.append(total)
    return torch.cat(found)


def shuffled(a: Tensor, b: Tensor) -> Tensor:
    """K in a random order."""
    order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(a.shape[1]))
    return products.matmul(a[:, order], b[:, order])


def pairwise(a: Tensor, b: Tensor) -> Tensor:
    """Products added by a tree."""
    terms = a[:, None, :] * b[None, :, :]
    while terms.shape[2] > 1:
        terms = F.pad(terms, (0, terms.shape[2] % 2))
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms[..., 0]


MATMULS: Mapping[str, tuple[MatMul, Recipe]] = {
    "one FP32 matmul": (products.matmul, RN),
    "K backwards": (lambda a, b: products.matmul(a.flip(1), b.flip(1)), RN),
    "K shuffled": (shuffled, RN),
    "split-K in FP32": (layers.split_k, RN),
    "one product at a time": (layers.one_by_one, RN),
    "one product at a time, truncating": (one_by_one_truncating, ANY),
    "a tree": (pairwise, RN),
    "largest products first": (largest_first, RN),
    "positive products first": (positive_first, RN),
    "positive products first, truncating": (positive_first_truncating, ANY),
    "FP64 sums": (lambda a, b: (a.double() @ b.double().T).float(), RN),
}


SLOW = (
    "one product at a time",
    "one product at a time, truncating",
    "a tree",
    "largest products first",
    "positive products first",
    "positive products first, truncating",
)


def by_blocks(a: Operand, b: Operand) -> Tensor:
    """Each K block's dot product in FP32, times both scales, added."""
    width, k = min(a.width, b.width), a.codes.shape[1]
    total = torch.zeros(len(a.codes), len(b.codes))
    for start in range(0, k, width):
        part = slice(start, min(start + width, k))
        dot = a.codes[:, part].float() @ b.codes[:, part].float().T
        scale = a.scales[:, start // a.width, None].float() * b.scales[None, :, start // b.width].float()
        total = total + dot * scale
    return total


def by_instructions(a: Operand, b: Operand) -> Tensor:
    """Sixteen products at a time on operands dequantised to BF16 payloads: 25 bits below the largest, truncated."""
    core = TensorCore(products=16, fraction_bits=25, significand_bits=24)
    return tensor_core_dot(a.values, b.values, "bf16", core).to(F32)


def in_bf16(a: Operand, b: Operand) -> Tensor:
    """Three parts of K, each in FP32, rounded to BF16 and added in FP32."""
    size = -(-a.values.shape[1] // 3)
    total = torch.zeros(len(a.codes), len(b.codes))
    for start in range(0, a.values.shape[1], size):
        part = slice(start, start + size)
        total = total + (a.values[:, part].float() @ b.values[:, part].float().T).to(torch.bfloat16).float()
    return total


def in_fp64(a: Operand, b: Operand) -> Tensor:
    """Operands dequantised to FP64 and multiplied there; the caller rounds to its dtype, once."""
    return a.values @ b.values.T
