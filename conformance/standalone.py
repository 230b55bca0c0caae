"""What an exported script does: make the inputs, call the library, compare the elements that were wrong.

`conformance.script` writes this file's text into the script, below the data, so that the script needs torch and the
library only; nothing of ours is imported here.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import math
import signal
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FILLS = (0xFF, 0x5A, 0xFF, 0x5A, 0xFF)
"""Bytes that output buffers hold before each call; two calls unless answers differ."""


class Case:
    """The parameters of a case, as an adapter reads them."""

    def __init__(self, text: str) -> None:
        self.operation, self.variant, *words = text.split(" ")
        self.text = text
        self._values = dict(word.split("=", 1) for word in words)
        self.seed = int(self._values["seed"])

    def __getitem__(self, key: str) -> str:
        return self._values[key]

    def integer(self, key: str) -> int:
        """The value of a size."""
        return int(self._values[key])


def tensor(spec: Mapping[str, Any]) -> torch.Tensor:
    """An input: bits of one value everywhere, but for some places; or all bytes, compressed."""
    dtype = getattr(torch, spec["dtype"])
    width = dtype.itemsize
    holder = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    shape, count = spec["shape"], math.prod(spec["shape"])
    if "zlib" in spec:
        raw = bytearray(zlib.decompress(base64.b64decode(spec["zlib"])))
        flat = torch.frombuffer(raw, dtype=holder) if raw else torch.empty(0, dtype=holder)
    else:
        flat = torch.full((count,), signed(spec["fill"], holder), dtype=holder)
        for place, bits in spec["at"]:
            flat[place] = signed(bits, holder)
    found = flat.view(dtype).view(shape)
    if "stride" in spec:  # a view into memory that holds garbage beside it
        around = torch.full((spec["storage"],), signed(spec["garbage"], holder), dtype=holder)
        view = torch.as_strided(around, shape, spec["stride"], spec["offset"])
        view.copy_(found.view(holder))
        found = view.view(dtype)
    return found


def signed(bits: int, holder: torch.dtype) -> int:
    """Bits as a number that an integer dtype takes."""
    size = 8 * holder.itemsize
    return bits - (1 << size) if holder != torch.uint8 and bits >> (size - 1) else bits


def library(data: Mapping[str, Any]) -> Any:
    """The adapter of the library: its own module, or the text that came with the script."""
    if data["sources"]:
        folder = tempfile.mkdtemp(prefix="adapter-")
        for name, text in data["sources"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
    found = importlib.import_module(data["module"])
    for word in filter(None, data["attribute"].split(".")):
        found = getattr(found, word)
    offer: Any = getattr(found, "backends", found)
    return next(backend for backend in offer() if backend.name == data["backend"])


def buffers(data: Mapping[str, Any], fill: int, device: str) -> dict[str, torch.Tensor]:
    """Output buffers, every byte the same."""
    found = {}
    for name, (dtype, shape) in data["outputs"].items():
        kind = getattr(torch, dtype)
        raw = torch.full((math.prod(shape) * kind.itemsize,), fill, dtype=torch.uint8, device=device)
        found[name] = raw.view(kind).view(shape)
    return found


def call(backend: Any, data: Mapping[str, Any], fill: int, device: str) -> tuple[dict[str, torch.Tensor], bool]:
    """The answer, on the CPU, and whether the call wrote its inputs."""
    inputs = {name: tensor(spec).to(device) for name, spec in data["inputs"].items()}
    if data["earlier"]:  # the same memory holds other inputs first: what is kept by address is stale then
        meant = {name: item.clone() for name, item in inputs.items()}
        for name, spec in data["earlier"].items():
            inputs[name].copy_(tensor(spec).to(device))
        with torch.no_grad():
            backend.run(backend.prepare(Case(data["case"]), inputs, data["options"]), buffers(data, fill, device))
        for name, item in meant.items():
            inputs[name].copy_(item)
    before = {name: item.clone().reshape(-1).view(torch.uint8) for name, item in inputs.items()}
    with torch.no_grad():
        prepared = backend.prepare(Case(data["case"]), inputs, data["options"])
        answer = backend.run(prepared, buffers(data, fill, device))
    found = {name: part.detach().cpu().contiguous() for name, part in answer.items()}
    same = all(torch.equal(item.reshape(-1).view(torch.uint8), before[name]) for name, item in inputs.items())
    return found, not same


def bits_at(part: torch.Tensor, index: list[int], digits: int) -> int:
    """The bits of an element; ``digits``: hexadecimal ones, 1 for half a byte, 2 of an int32 for a byte of a word."""
    raw = part.contiguous().view(-1).view(torch.uint8)
    shape = list(part.shape)
    if digits == 1:
        shape[-1] *= 2
    words = len(index) > len(shape)
    if words:
        shape.append(4)
    place = 0
    for coordinate, size in zip(index, shape, strict=True):
        place = place * size + coordinate
    if digits == 1:
        return int(raw[place // 2]) >> 4 * (place % 2) & 15
    width = digits // 2
    return int.from_bytes(bytes(raw[place * width : (place + 1) * width].tolist()), "little")


def value(bits: int, digits: int, plain: bool, dtype: str) -> float:
    """Bits as a number in the order of the format. plain: unsigned codes; other codes have a sign, and 0x7f is NaN."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point and kind.itemsize > 1:
        holder = torch.int32 if kind.itemsize == 4 else torch.int16
        return float(torch.tensor([signed(bits, holder)], dtype=holder).view(kind))
    if plain:
        return float(bits)
    magnitude = bits & ((1 << (4 * digits - 1)) - 1)
    if digits == 2 and magnitude == 0x7F:
        return math.nan
    return float(-magnitude if bits >> (4 * digits - 1) else magnitude)


def admits(item: Mapping[str, Any], bits: int, dtype: str) -> bool:
    """Whether an element's bits are admissible."""
    if bits in (item["lo"], item["hi"]):
        return True
    lo, hi, found = (value(each, item["digits"], item["plain"], dtype) for each in (item["lo"], item["hi"], bits))
    if item["zero"] and found == 0:
        return True
    if item["exact"]:
        return False
    return math.isnan(lo) if math.isnan(found) else lo <= found <= hi


def wrong_elements(data: Mapping[str, Any], answer: Mapping[str, torch.Tensor]) -> list[str]:
    """A line for each element that was wrong and still is; the others are said to be right."""
    lines = []
    for item in data["expected"]:
        part = answer[item["part"]]
        if "ids" in item:
            row = part[item["index"][0]]
            ids = (row >> 16 if item["packed"] else row).to(torch.int64).tolist()
            bad, actual = sorted(ids) != sorted(item["ids"]), str(ids)
        else:
            dtype = data["outputs"][item["part"]][0]
            bits = bits_at(part, item["index"], item["digits"])
            if item["part"] == "packed":  # a weight below an id
                bits, dtype = int(part[tuple(item["index"])]) & 0xFFFF, "bfloat16"
            bad, actual = not admits(item, bits, dtype), f"0x{bits:0{item['digits']}x}"
        where = f"{item['part']}{item['index']}"
        print(f"{where}: expected {item['admissible']}, actual {actual}: {'WRONG' if bad else 'right'}")
        if bad:
            lines.append(where)
    return lines


def misshapen(data: Mapping[str, Any], answer: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with the shapes and dtypes of the parts."""
    lines = [f"{name}: no such part in the contract" for name in answer if name not in data["outputs"]]
    for name, (dtype, shape) in data["outputs"].items():
        part = answer.get(name)
        if part is None:
            lines.append(f"{name}: missing")
        elif list(part.shape) != shape or part.dtype.itemsize != getattr(torch, dtype).itemsize:
            lines.append(f"{name}: expected {dtype} {shape}, actual {part.dtype} {list(part.shape)}")
    return lines


def check(data: Mapping[str, Any], backend: Any, device: str) -> list[str]:
    """What is still wrong, a line for each thing; empty once the library is right."""
    kind, verdict = data["kind"], data["verdict"]
    answers, wrote = [], False
    for fill in FILLS:
        found, changed = call(backend, data, fill, device)
        answers.append(found)
        wrote = wrote or changed
        if len(answers) == 2 and verdict != "flaky" and kind != "unwritten":
            break
    lines = ["the call wrote its inputs"] if wrote else []
    lines += misshapen(data, answers[0])
    if lines:
        return lines
    if verdict == "flaky" or kind == "unwritten":
        raw = [{name: part.view(-1).view(torch.uint8) for name, part in found.items()} for found in answers]
        moving = [name for name in raw[0] if any(not torch.equal(raw[0][name], other[name]) for other in raw[1:])]
        return [f"{name}: identical calls on buffers with other contents differ" for name in moving]
    for found in answers:
        lines = wrong_elements(data, found)
        if lines:
            return lines
    if not data["expected"] and verdict == "wrong":
        print("nothing is known of single elements: compare the answers of two versions, or judge it with the harness")
    return []


def main(data: Mapping[str, Any], words: list[str] | None = None) -> int:
    """Exit code 1 while the bug is there, 0 once it is gone."""
    parser = argparse.ArgumentParser(description=data["title"])
    parser.add_argument("--device", default=data["device"])
    device = parser.parse_args(words).device
    print(data["title"])
    print(f"case: {data['case']}")
    if hasattr(signal, "SIGALRM") and data["verdict"] == "hang":
        signal.alarm(int(data["deadline"]))  # the default action ends the process, with a code that is not 0
    try:
        lines = check(data, library(data), device)
    except Exception as error:
        lines = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    for line in lines:
        print(f"wrong: {line}")
    print(f"the bug is there ({data['part']}: {data['verdict']})" if lines else "the bug is gone")
    return 1 if lines else 0
