"""Two 4-bit codes to a byte, low nibble first: the stored order of E2M1 payloads."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_fp4(codes: Tensor) -> Tensor:
    """4-bit codes uint8 ``[m, k]`` (k even) to bytes uint8 ``[m, k/2]``; bits above the fourth are ignored."""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(
            f"pack_fp4: expected uint8 with an even last dimension, got {codes.dtype} {tuple(codes.shape)}"
        )
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes uint8 ``[m, k/2]`` to 4-bit codes uint8 ``[m, k]``."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"unpack_fp4: expected uint8, got {packed.dtype}")
    codes = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(packed, 15, out=codes[..., 0::2])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1::2])
    return codes
