"""Legal ways to evaluate a GEMM in FP32, simulated in FP64 on whole matrices, for the tests of the bounds."""

import torch

from references.rounding import round_to
from references.tensor_cores import HOPPER_F16, TensorCore, fma_fp32, multiply_fp32, tensor_core_dot, truncate

F32 = torch.float32


def nearest(values):
    return round_to(values, F32)


def toward_zero(values):
    return truncate(values, 24, -149)


def products(a, b):
    """FP32 products of operands that were dequantised to FP32, ``[k, m, n]``."""
    left, right = nearest(a.values), nearest(b.values)
    return nearest(left.T[:, :, None] * right.T[:, None, :])


def sequential(terms, rounding=nearest):
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = rounding(total + term)
    return total


def fused(a, b):
    """One FMA a product, on dequantised operands."""
    left, right = nearest(a.values), nearest(b.values)
    total = left.new_zeros(left.shape[0], right.shape[0])
    for k in range(left.shape[1]):
        total = fma_fp32(left[:, k, None].expand_as(total), right[None, :, k].expand_as(total), total)
    return total


def pairwise(terms):
    while len(terms) > 1:
        if len(terms) % 2:
            terms = torch.cat([terms, torch.zeros_like(terms[:1])])
        terms = nearest(terms[0::2] + terms[1::2])
    return terms[0]


def split(terms, parts, rounding=nearest):
    """Partial sums over contiguous parts of K, added in order."""
    return sequential(torch.stack([sequential(part, rounding) for part in terms.tensor_split(parts)]), rounding)


def strided_split(terms, parts):
    """As a warp does: lane i takes every parts-th product, then a butterfly."""
    lanes = [sequential(terms[lane::parts]) for lane in range(parts) if lane < len(terms)]
    return pairwise(torch.stack(lanes))


def blocks_of(a, b):
    width = min(a.width, b.width)
    for start in range(0, a.codes.shape[1], width):
        part = slice(start, start + width)
        yield (
            a.codes[:, part],
            b.codes[:, part],
            a.scales[:, start // a.width, None],
            b.scales[None, :, start // b.width],
        )


def by_blocks(a, b, dot, combine, rounding=nearest):
    """Dot products of scale blocks, each scaled and added."""
    total = a.codes.new_zeros(a.codes.shape[0], b.codes.shape[0])
    for left, right, scale_a, scale_b in blocks_of(a, b):
        scale_a, scale_b = nearest(scale_a).expand_as(total), nearest(scale_b).expand_as(total)
        value = dot(left, right)
        if combine == "dot_sa_sb":
            total = fma_fp32(multiply_fp32(value, scale_a), scale_b, total)
        elif combine == "dot_sasb":
            total = fma_fp32(value, multiply_fp32(scale_a, scale_b), total)
        else:
            total = rounding(total + rounding(rounding(value * scale_a) * scale_b))
    return total


def scalar_dot(left, right, rounding=nearest):
    return sequential(left.T[:, :, None] * right.T[:, None, :], rounding)


def core(products, fraction_bits):
    return TensorCore(products=products, fraction_bits=fraction_bits, significand_bits=24)


def core_dot(operand, tensor_core):
    return lambda left, right: tensor_core_dot(left, right, operand, tensor_core)


def variants(a, b):
    """Name -> FP32 accumulator; ``fp32_any`` admits all of them, ``fp32_rn`` those whose name starts with ``rn``."""
    terms = products(a, b)
    order = torch.randperm(len(terms), generator=torch.Generator().manual_seed(len(terms)))
    found = {
        "rn sequential": sequential(terms),
        "rn reversed": sequential(terms.flip(0)),
        "rn permuted": sequential(terms[order]),
        "rn fused": fused(a, b),
        "rn pairwise": pairwise(terms),
        "rn split 2": split(terms, 2),
        "rn split 7": split(terms, 7),
        "rn lanes 32": strided_split(terms, 32),
        "rn blocks, dot * sa * sb": by_blocks(a, b, scalar_dot, "dot_sa_sb"),
        "rn blocks, dot * (sa sb)": by_blocks(a, b, scalar_dot, "dot_sasb"),
        "rn blocks, no fma": by_blocks(a, b, scalar_dot, "separate"),
        "rn torch": (a.values.to(F32) @ b.values.to(F32).T).to(torch.float64),
        "truncating": sequential(terms, toward_zero),
        "truncating, permuted": sequential(terms[order], toward_zero),
        "truncating split 3": split(terms, 3, toward_zero),
        "truncating blocks": by_blocks(a, b, lambda x, y: scalar_dot(x, y, toward_zero), "dot_sasb"),
    }
    names = {a.side.name, b.side.name}
    if names <= {"e4m3", "e2m1"}:
        for products_, bits in ((4, 24), (8, 24), (16, 25), (32, 25), (64, 24)):
            dot = core_dot("e4m3", core(products_, bits))
            found[f"core {products_} x {bits} bits"] = by_blocks(a, b, dot, "dot_sasb")
        found["f16 core"] = by_blocks(a, b, core_dot("f16", HOPPER_F16), "dot_sa_sb")
    elif names == {"bf16"}:
        for products_, bits in ((4, 24), (8, 24), (16, 25), (64, 24)):
            found[f"core {products_} x {bits} bits"] = tensor_core_dot(
                a.values, b.values, "bf16", core(products_, bits)
            )
    return found
