"""Frames: how the parent and a worker put messages and tensors on a descriptor.

A frame is ``MAGIC``, the length of a header (4 bytes, big endian), the header, then the tensors' bytes in the order
in which the header lists them. The header is a JSON object ``{"message": ..., "tensors": [{"name", "dtype", "shape",
"nbytes"}, ...]}``. Nothing is ever pickled, and every number is checked before a byte is read on its account.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from conformance.messages import Wire

MAGIC = b"BSCF"
MAX_HEADER = 2**24
"""Largest header in bytes: room for thousands of verdicts with their examples."""
MAX_PAYLOAD = 2**36
"""Largest sum of tensor bytes in one frame, unless the reader asks for less."""
MAX_TENSORS = 256
MAX_DIMENSIONS = 16
_PREFIX = struct.Struct(">4sI")
_CHUNK = 2**22

ITEMSIZE: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
}
"""Bytes of an element, by the name of a torch dtype without its prefix."""

Wait = Callable[[bool], None]
"""Called before each attempt to write (True) or read (False); raises to give up, on a deadline for instance."""


class FrameError(Exception):
    """Bytes that are no frame; the message is one line."""


class EndOfStreamError(FrameError):
    """The other side closed its end."""


@dataclass(frozen=True)
class Frame:
    """A message and its tensors."""

    message: dict[str, Any]
    tensors: tuple[Wire, ...] = ()


def _nothing(writing: bool) -> None:
    pass


def encode(message: Mapping[str, Any], tensors: Sequence[Wire] = ()) -> bytes:
    """Everything before the tensors' bytes: prefix and header. Raises `FrameError`."""
    entries = []
    for wire in tensors:
        _check_tensor(wire.name, wire.dtype, wire.shape, len(wire.data))
        entries.append({"name": wire.name, "dtype": wire.dtype, "shape": wire.shape, "nbytes": len(wire.data)})
    header = json.dumps({"message": message, "tensors": entries}, separators=(",", ":")).encode()
    if len(header) > MAX_HEADER:
        raise FrameError(f"frame: a header of {len(header)} bytes is above {MAX_HEADER}")
    if len(entries) > MAX_TENSORS:
        raise FrameError(f"frame: {len(entries)} tensors are more than {MAX_TENSORS}")
    return _PREFIX.pack(MAGIC, len(header)) + header


def write_frame(
    descriptor: int, message: Mapping[str, Any], tensors: Sequence[Wire] = (), wait: Wait = _nothing
) -> None:
    """Write one frame. Raises `FrameError` for what no frame can hold, OSError where the descriptor does."""
    for part in (encode(message, tensors), *(wire.data for wire in tensors)):
        _write_all(descriptor, part, wait)


def read_frame(descriptor: int, wait: Wait = _nothing, max_payload: int = MAX_PAYLOAD) -> Frame:
    """Read one frame. Raises `EndOfStreamError` where the stream ends, `FrameError` for anything malformed."""
    magic, length = _PREFIX.unpack(_read_exactly(descriptor, _PREFIX.size, wait))
    if magic != MAGIC:
        raise FrameError(f"frame: starts with {magic!r}, expected {MAGIC!r}")
    if length > MAX_HEADER:
        raise FrameError(f"frame: a header of {length} bytes is above {MAX_HEADER}")
    message, entries = _parse_header(_read_exactly(descriptor, length, wait))
    total = sum(nbytes for *_, nbytes in entries)
    if total > max_payload:
        raise FrameError(f"frame: tensors of {total} bytes are above {max_payload}")
    return Frame(
        message,
        tuple(
            Wire(name=name, dtype=dtype, shape=shape, data=_read_exactly(descriptor, nbytes, wait))
            for name, dtype, shape, nbytes in entries
        ),
    )


def _write_all(descriptor: int, data: bytes, wait: Wait) -> None:
    view = memoryview(data)
    while view:
        wait(True)
        try:
            view = view[os.write(descriptor, view[:_CHUNK]) :]
        except BlockingIOError:
            continue


def _read_exactly(descriptor: int, count: int, wait: Wait) -> bytes:
    chunks: list[bytes] = []
    missing = count
    while missing:
        wait(False)
        try:
            chunk = os.read(descriptor, min(missing, _CHUNK))
        except BlockingIOError:
            continue
        if not chunk:
            raise EndOfStreamError(f"frame: the stream ended {missing} bytes early")
        chunks.append(chunk)
        missing -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _parse_header(raw: bytes) -> tuple[dict[str, Any], list[tuple[str, str, tuple[int, ...], int]]]:
    try:
        header: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"frame: the header is not JSON: {type(error).__name__}") from None
    if not isinstance(header, dict) or set(header) != {"message", "tensors"}:
        raise FrameError("frame: the header is not an object of message and tensors")
    message, tensors = header["message"], header["tensors"]
    if not isinstance(message, dict) or not isinstance(tensors, list) or len(tensors) > MAX_TENSORS:
        raise FrameError(f"frame: message is no object, or tensors is no list of at most {MAX_TENSORS}")
    entries = [_parse_entry(entry) for entry in tensors]
    names = [name for name, *_ in entries]
    if len(set(names)) != len(names):
        raise FrameError("frame: two tensors have the same name")
    return message, entries


def _parse_entry(entry: Any) -> tuple[str, str, tuple[int, ...], int]:
    if not isinstance(entry, dict) or set(entry) != {"name", "dtype", "shape", "nbytes"}:
        raise FrameError("frame: a tensor's entry is not an object of name, dtype, shape and nbytes")
    name, dtype, shape, nbytes = entry["name"], entry["dtype"], entry["shape"], entry["nbytes"]
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise FrameError("frame: a tensor's name or dtype is no string, or its shape no list")
    if type(nbytes) is not int or not all(type(size) is int for size in shape):
        raise FrameError(f"frame: tensor {name[:80]!r} has a size that is no integer")
    _check_tensor(name, dtype, tuple(shape), nbytes)
    return name, dtype, tuple(shape), nbytes


def _check_tensor(name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    if len(name) > 80 or not name.isprintable():
        raise FrameError(f"frame: {name[:80]!r} is no name of a tensor (at most 80 printable characters)")
    if dtype not in ITEMSIZE:
        raise FrameError(f"frame: tensor {name!r} has the unknown dtype {dtype[:80]!r}")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise FrameError(f"frame: tensor {name!r} has an impossible shape of {len(shape)} dimensions")
    if prod(shape) * ITEMSIZE[dtype] != nbytes:
        raise FrameError(f"frame: tensor {name!r} of {dtype} {list(shape)} cannot have {nbytes} bytes")
