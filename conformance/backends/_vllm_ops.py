"""torch in place of vLLM's compiled operators around its expert kernel: they sort, sum and quantise, nothing waits.

Each takes the arguments of the operator in ``vllm/_custom_ops.py``. What these do is not vLLM's and not under test: the
order of rows is free, sums are FP32 and rounded once, and a static scale divides in FP32.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

LARGEST_E4M3 = 448.0


def moe_align_block_size(
    ids: Tensor,
    experts: int,
    block: int,
    rows: Tensor,
    owners: Tensor,
    padded: Tensor,
    expert_map: Tensor | None = None,
    scatter: Tensor | None = None,
) -> None:
    """Numbers of routed rows, expert after expert, each filled up to whole blocks with a number that is none.

    ids: integers of any shape; what is no expert is left out. rows: int32, receives the numbers. owners: int32, the
    expert of each block. padded: int32 ``[1]``, how many of ``rows`` count. expert_map: local experts by global ones.
    """
    if scatter is not None:
        raise NotImplementedError("no scatter index here")
    flat = ids.reshape(-1).to(torch.int64)
    known = (flat >= 0) & (flat < experts)
    if expert_map is not None:
        flat = expert_map.to(torch.int64)[torch.where(known, flat, 0)]
        known &= flat >= 0
    flat = torch.where(known, flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, known.to(flat.dtype))
    blocks = (counts + block - 1) // block
    ends = blocks.cumsum(0)
    order = torch.argsort(flat, stable=True)
    owner = flat[order]
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[owner]
    target = torch.where(known[order], (ends - blocks)[owner] * block + place, len(rows))
    whole = torch.full((len(rows) + 1,), flat.numel(), dtype=torch.int32, device=flat.device)
    rows.copy_(whole.scatter_(0, target, order.to(torch.int32))[:-1])
    number = torch.arange(len(owners), device=flat.device)
    owners.copy_(torch.searchsorted(ends, number, right=True).clamp(max=experts - 1))
    padded.copy_(ends[-1:] * block)


def moe_sum(parts: Tensor, out: Tensor) -> None:
    """The sum over the second dimension of ``[tokens, topk, hidden]``."""
    out.copy_(parts.float().sum(1))


def scaled_fp8_quant(x: Tensor, scale: Tensor | None, use_per_token_if_dynamic: bool = False) -> tuple[Tensor, Tensor]:
    """E4M3 of x / scale, saturating; a static scale only."""
    if scale is None or scale.numel() != 1:
        raise NotImplementedError("static scales of whole tensors only")
    return (x.float() / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn), scale


OPERATORS = SimpleNamespace(
    moe_align_block_size=moe_align_block_size, moe_sum=moe_sum, scaled_fp8_quant=scaled_fp8_quant
)
