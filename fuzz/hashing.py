"""The hash of a set of tensors, by which two machines check that they mean the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

CHUNK = 2**20
"""Bytes that are hashed at a time."""


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, of named tensors: of each name (sorted), dtype, shape and the SHA-256s of its 1-MiB chunks.

    Strides and devices play no part: the bytes are those of the contiguous tensor (C order).
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        total.update(f"{name} {dtype} {'x'.join(map(str, tensor.shape))}\n".encode())
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, data.size, CHUNK):
            total.update(hashlib.sha256(data[start : start + CHUNK].tobytes()).digest())
    return total.hexdigest()
