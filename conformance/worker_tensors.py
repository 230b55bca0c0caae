"""Tensors inside a worker: onto the wire and off it, between devices, poisoned buffers with guarded surroundings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.frames import ITEMSIZE
from conformance.messages import POISONS, Wire
from conformance.operations.base import OutputSpec

GUARD = 512
"""Bytes watched before and behind each output buffer; keeps the alignment that allocators give."""
GUARD_BYTE = 0xA5


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without its prefix, such as ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def unsendable(value: Any) -> str | None:
    """Why a returned object cannot be taken as a part, in a few words; None if it can."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return "is not a plain dense tensor"
    if value.device.type == "meta":
        return "is a meta tensor, without values"
    if dtype_name(value.dtype) not in ITEMSIZE:
        return f"has the unsupported dtype {dtype_name(value.dtype)}"
    return None


def to_wire(name: str, tensor: Tensor) -> Wire:
    """A tensor as it travels: its elements in C order, whatever its strides and device."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Wire(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=data)


def from_wire(wire: Wire) -> Tensor:
    """The inverse of `to_wire`, on the CPU. Raises `AttributeError` for a dtype that this torch lacks."""
    dtype = getattr(torch, wire.dtype)
    if not wire.data:
        return torch.empty(wire.shape, dtype=dtype)
    return torch.frombuffer(bytearray(wire.data), dtype=torch.uint8).view(dtype).reshape(wire.shape)


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage behind a tensor, as uint8 of one dimension; shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def move(tensor: Tensor, device: str) -> Tensor:
    """A copy on another device with the same strides and offset, surroundings of a view included."""
    raw = storage_bytes(tensor).to(device, copy=True)
    moved = torch.empty(0, dtype=tensor.dtype, device=device)
    return moved.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class Buffers:
    """Poisoned output buffers, one a part, each in the middle of guard bytes.

    specs: the parts. device: where. poison: a key of `POISONS`.
    """

    def __init__(self, specs: Mapping[str, OutputSpec], device: str, poison: str) -> None:
        self._around: dict[str, Tensor] = {}
        self._poison = POISONS[poison]
        self.out: dict[str, Tensor] = {}
        for name, spec in specs.items():
            inner = spec.dtype.itemsize
            for size in spec.shape:
                inner *= size
            whole = torch.full((inner + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8, device=device)
            whole[GUARD : GUARD + inner] = POISONS[poison]
            self._around[name] = whole
            self.out[name] = whole[GUARD : GUARD + inner].view(spec.dtype).view(spec.shape)

    def poison_again(self) -> None:
        """Overwrite whatever a call has left in the buffers."""
        for whole in self._around.values():
            whole[GUARD:-GUARD] = self._poison

    def overrun(self) -> str | None:
        """Which buffer was written beside, in a few words; None if none was."""
        for name, whole in self._around.items():
            before, behind = (int((part != GUARD_BYTE).sum()) for part in (whole[:GUARD], whole[-GUARD:]))
            if before or behind:
                return f"wrote outside the buffer of {name}: {before} bytes before it, {behind} behind it"
        return None
