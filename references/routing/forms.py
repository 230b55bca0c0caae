"""How a selection travels: packed into int32, as separate ids and weights, and mapped to a rank's local experts."""

from __future__ import annotations

import torch
from torch import Tensor

from references.routing.rounding import to_dtype


def bf16_bits(weights: Tensor) -> Tensor:
    """The 16 bits of each weight rounded to BF16 (from FP32), as int32 0..65535; NaN is 0x7fc0."""
    rounded = to_dtype(weights.to(torch.float64), "bf16").to(torch.float32)
    bits = (rounded.view(torch.int32) >> 16) & 0xFFFF
    return torch.where(torch.isnan(rounded), 0x7FC0, bits)


def pack(ids: Tensor, weights: Tensor) -> Tensor:
    """(id << 16) | BF16 bits of the weight, int32, of ids -1..32767 and weights of the same shape.

    Source: flashinfer-ai/flashinfer, trtllm_fp8_block_scale_routed_moe. Raises ValueError for an id that does not fit.
    """
    if bool(((ids < -1) | (ids > 32767)).any()):
        raise ValueError("routing: a packed id is outside -1..32767")
    return (ids.to(torch.int32) << 16) | bf16_bits(weights)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The ids (int32, -1 kept) and the weights (FP32, exactly the BF16 value) of `pack`."""
    return packed >> 16, (packed << 16).view(torch.float32)


def expert_map(experts: int, rank: int, ranks: int, *, device: torch.device | None = None) -> Tensor:
    """Global to local ids for one of ``ranks`` ranks that hold equal runs of consecutive experts: int32, -1 elsewhere.

    Raises ValueError unless the experts divide.
    """
    if ranks < 1 or experts % ranks or not 0 <= rank < ranks:
        raise ValueError(f"routing: {experts} experts on rank {rank} of {ranks}")
    held = experts // ranks
    local = torch.arange(experts, dtype=torch.int32, device=device) - rank * held
    return torch.where((local >= 0) & (local < held), local, -1)


def to_local(ids: Tensor, mapping: Tensor) -> Tensor:
    """Local ids through ``mapping`` [experts]; -1 stays -1 and never reads the map's end. Same dtype as ids."""
    local = mapping.to(ids.device)[ids.clamp_min(0).to(torch.int64)].to(ids.dtype)
    return torch.where(ids < 0, torch.full_like(ids, -1), local)


def mask_padding(ids: Tensor, weights: Tensor, num_token_non_padded: int) -> tuple[Tensor, Tensor]:
    """Ids -1 and weights 0 from row ``num_token_non_padded`` on."""
    padding = (torch.arange(len(ids), device=ids.device) >= num_token_non_padded)[:, None]
    return torch.where(padding, torch.full_like(ids, -1), ids), torch.where(padding, torch.zeros_like(weights), weights)
