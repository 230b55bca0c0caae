"""Tensor files in the safetensors format: read strictly, written plainly. Only the standard library is imported.

A file is the length of a header (8 bytes, little endian), the header, then the tensors' bytes without gaps. The header
is a JSON object: name -> ``{"dtype", "shape", "data_offsets"}``, and ``__metadata__`` with strings.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

from conformance.frames import ITEMSIZE, MAX_DIMENSIONS
from conformance.messages import Wire

MAX_BYTES = 2**26
"""Largest file, in bytes."""
MAX_HEADER = 2**20
MAX_TENSORS = 256
CHUNK = 2**20
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Names of dtypes in the file -> of torch. The others travel as ``uint8`` with their own last dimension."""
_NAMES = {torch: name for name, torch in _DTYPES.items()}


class TensorFileError(ValueError):
    """Bytes that are no tensor file of ours; the message is one line."""


def dump(wires: Sequence[Wire]) -> bytes:
    """The file's bytes. Raises `TensorFileError` for a dtype that the format lacks, or above `MAX_BYTES`."""
    header: dict[str, Any] = {}
    place = 0
    for wire in wires:
        if wire.dtype not in _NAMES:
            raise TensorFileError(f"tensor file: {wire.name!r} is {wire.dtype}, which the format lacks")
        end = place + len(wire.data)
        header[wire.name] = {"dtype": _NAMES[wire.dtype], "shape": list(wire.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text + b"".join(wire.data for wire in wires)
    if len(whole) > MAX_BYTES:
        raise TensorFileError(f"tensor file: {len(whole)} bytes are above {MAX_BYTES}")
    return whole


def parse(raw: bytes) -> list[Wire]:
    """The tensors of a file. Raises `TensorFileError` for anything odd."""
    if len(raw) > MAX_BYTES:
        raise TensorFileError(f"tensor file: {len(raw)} bytes are above {MAX_BYTES}")
    if len(raw) < 8:
        raise TensorFileError("tensor file: truncated")
    length = struct.unpack("<Q", raw[:8])[0]
    if length > MAX_HEADER or 8 + length > len(raw):
        raise TensorFileError(f"tensor file: a header of {length} bytes, in a file of {len(raw)}")
    header = strict_json(raw[8 : 8 + length], "tensor file")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise TensorFileError(f"tensor file: {len(header)} tensors are more than {MAX_TENSORS}")
    data = raw[8 + length :]
    wires, place = [], 0
    for name, entry in header.items():
        wire, begin, end = _tensor(name, entry, data)
        if begin != place:
            raise TensorFileError(f"tensor file: {name[:80]!r} does not begin where the tensor before it ends")
        place = end
        wires.append(wire)
    if place != len(data):
        raise TensorFileError(f"tensor file: {len(data) - place} bytes belong to no tensor")
    return wires


def _tensor(name: str, entry: Any, data: bytes) -> tuple[Wire, int, int]:
    shown = repr(name[:80])
    if not name.isprintable() or not name or len(name) > 80:
        raise TensorFileError(f"tensor file: {shown} is no name of a tensor")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"tensor file: {shown} is no object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise TensorFileError(f"tensor file: {shown} has the unknown dtype {str(dtype)[:40]!r}")
    numbers = [shape, offsets]
    if not all(isinstance(item, list) and all(type(n) is int and n >= 0 for n in item) for item in numbers):
        raise TensorFileError(f"tensor file: {shown} has a shape or offsets that are no natural numbers")
    if len(shape) > MAX_DIMENSIONS or len(offsets) != 2:
        raise TensorFileError(f"tensor file: {shown} has an impossible shape or offsets")
    begin, end = offsets
    size = prod(shape) * ITEMSIZE[_DTYPES[dtype]]
    if not begin <= end <= len(data) or end - begin != size:
        raise TensorFileError(f"tensor file: {shown} of {dtype} {shape} cannot lie at {begin}..{end} of {len(data)}")
    return Wire(name=name, dtype=_DTYPES[dtype], shape=tuple(shape), data=data[begin:end]), begin, end


def strict_json(raw: bytes, what: str) -> dict[str, Any]:
    """An object of strict JSON: UTF-8, no NaN, no duplicated key, no abyss. Raises `TensorFileError`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            raise TensorFileError(f"{what}: an object has a key twice")
        return found

    def constant(word: str) -> Any:
        raise TensorFileError(f"{what}: {word} is no JSON")

    try:
        found: Any = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except TensorFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{what}: not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise TensorFileError(f"{what}: not an object")
    return found


def input_sha256(wires: Sequence[Wire]) -> str:
    """The hash of explicit inputs, as ``fuzz.hashing.sha256_of`` has it of their tensors."""
    total = hashlib.sha256()
    for wire in sorted(wires, key=lambda item: item.name):
        total.update(f"{wire.name} {wire.dtype} {'x'.join(map(str, wire.shape))}\n".encode())
        for start in range(0, len(wire.data), CHUNK):
            total.update(hashlib.sha256(wire.data[start : start + CHUNK]).digest())
    return total.hexdigest()
