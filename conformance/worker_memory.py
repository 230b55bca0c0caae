"""Memory of a device that the workers of a run share."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch

KEPT = 2**28
"""Bytes that a worker may keep for its next tensors, of those that torch has from the device."""


def release(device: str, kept: int = KEPT) -> None:
    """Give the device back what torch keeps beyond ``kept`` bytes without using it: other processes may need it."""
    if kept == 0:
        gc.collect()
    if not device.startswith("cuda"):
        return
    with suppress(RuntimeError):  # a lost context is told where it was lost
        if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > kept:
            torch.cuda.empty_cache()
