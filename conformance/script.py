"""Capsules as standalone scripts: inputs, expected elements, the library's adapter, and `conformance.standalone`.

A script needs torch and the library. What it compares are the elements of the failing part that were outside of their
admissible set; it exits with 1 while one of them is, and with 0 once none is.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.capsule import Capsule
from conformance.discover import UsageError
from conformance.launch import PACKAGES, BackendSource, package_roots
from conformance.messages import Wire

MAX_PLACES = 4096
"""Elements beside the commonest one that are listed one by one."""
MAX_BYTES = 2**20
"""Compressed bytes of the inputs that a script may hold."""
_HEX = re.compile(r"(-?)0x([0-9a-f]+)")
_NUMPY: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def export(capsule: Capsule, source: BackendSource, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
    """The script's text. Raises `UsageError` where the inputs are too large, and for a property of two answers.

    inputs: name -> the tensor as the backend gets it, strides included. outputs: name -> ``OutputSpec``.
    """
    if capsule.part.startswith("property:") and capsule.part != "property:tensor":
        raise UsageError(f"{capsule.part} compares two answers, which a script does not: show it with repro")
    module, attribute, sources = _library(source)
    title = f"{capsule.backend} {capsule.version_of_backend}: {capsule.part} is {capsule.verdict}"
    data = {
        "title": f"{title}: {capsule.message}"[:500].rstrip(": "),
        "case": capsule.case,
        "backend": capsule.backend,
        "module": module,
        "attribute": attribute,
        "device": capsule.device,
        "options": capsule.options_dict,
        "part": capsule.part,
        "verdict": capsule.verdict,
        "kind": capsule.kind,
        "deadline": 30,
        "inputs": {name: spec(tensor) for name, tensor in inputs.items()},
        "earlier": _earlier(capsule),
        "outputs": {name: [str(item.dtype).removeprefix("torch."), list(item.shape)] for name, item in outputs.items()},
        "expected": list(expected(capsule)),
    }
    body = Path(__file__).with_name("standalone.py").read_text(encoding="utf-8")
    start = body.index("import argparse")
    versions = ", ".join(f"{name} {number}" for name, number in sorted(capsule.libraries.items()))
    head = f'''#!/usr/bin/env python3
"""{_quoted(title)}.

Exported by blockscale-conformance. It needs torch and the library only, prints what is expected and what comes out,
and exits with 1 while the bug is there. Seen with {_quoted(capsule.interpreter)}; {_quoted(versions)}
on {capsule.device} {_quoted(capsule.device_name)}.
Case: {_quoted(capsule.case)}
Inputs: SHA-256 {capsule.input_sha256}
"""

from __future__ import annotations

'''
    literal = json.dumps(data, indent=1)
    rows = "".join(f"    {name!r}: {_literal(text)},\n" for name, text in sources.items())
    adapter = f"SOURCES = {{\n{rows}}}\n"
    return (
        f'{head}{body[start:]}\n\nDATA = json.loads(\n    r"""\n{_raw(literal)}\n"""\n)\n{adapter}'
        'DATA["sources"] = SOURCES\n\nif __name__ == "__main__":\n    sys.exit(main(DATA))\n'
    ).replace("import importlib\n", "import importlib\nimport json\n", 1)


def _earlier(capsule: Capsule) -> dict[str, Any]:
    """The inputs that the memory holds before those that are meant, where the case is one that is called so."""
    from conformance import call_options
    from conformance.operations import OPERATIONS
    from fuzz.case import Case

    case = Case.parse(capsule.case)
    if capsule.options or not call_options.is_refilled(case):
        return {}
    found = OPERATIONS[case.operation].inputs(call_options.sister(case))
    return {name: spec(tensor.contiguous()) for name, tensor in found.items()}


def _raw(text: str) -> str:
    return text.replace('"""', "\\u0022\\u0022\\u0022")


def _quoted(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")


def _literal(text: str) -> str:
    """A text as a Python literal that people can read."""
    if "\\" in text or text.endswith('"') or ('"""' in text and "'''" in text):
        return "(\n" + "".join(f"        {line!r}\n" for line in text.splitlines(keepends=True)) + "    )"
    quotes = "'''" if '"""' in text else '"""'
    return f"{quotes}{text}{quotes}"


def spec(tensor: Any) -> dict[str, Any]:
    """A tensor as data: its commonest bits and the places of the others, or all bytes where those are many."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    width = plain.element_size()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    numbers = np.frombuffer(raw, dtype=_NUMPY[width])
    found: dict[str, Any] = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
    values, counts = np.unique(numbers, return_counts=True)
    fill = int(values[counts.argmax()]) if len(values) else 0
    places = np.flatnonzero(numbers != fill)
    if len(places) <= MAX_PLACES:
        found |= {"fill": fill, "at": [[int(place), int(numbers[place])] for place in places]}
    else:
        packed = base64.b64encode(zlib.compress(raw, 9)).decode()
        if len(packed) > MAX_BYTES:
            raise UsageError("the inputs are too large for a script: shrink the case first (--shrink)")
        found["zlib"] = packed
    if (tensor.numel() and not tensor.is_contiguous()) or tensor.storage_offset():
        storage = tensor.untyped_storage().nbytes() // width
        garbage = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}.get(found["dtype"], 0xFF)
        strides = {"stride": list(tensor.stride()), "offset": tensor.storage_offset()}
        found |= {**strides, "storage": storage, "garbage": garbage}
    return found


def expected(capsule: Capsule) -> Iterator[dict[str, Any]]:
    """The elements that a script compares: bits of both ends of what is admissible, or ids."""
    for item in capsule.expected:
        found = accepted(str(item["admissible"]), str(item["actual"]))
        if found is None:
            continue
        plain = capsule.part == "scales" and found.get("digits") == 2  # UE8M0 codes, or E4M3 codes above zero
        part = "packed" if capsule.part == "packed" else capsule.part
        packed = {"packed": capsule.part == "packed"} if "ids" in found else {"plain": plain}
        yield {"part": part, "index": item["index"], "admissible": item["admissible"], **packed, **found}


def accepted(text: str, actual: str = "") -> dict[str, Any] | None:
    """What an example's ``admissible`` says, as data; None where it names no bits.

    ``lo``, ``hi``: bits of the ends; digits: hexadecimal ones; zero: a zero of any sign is admissible as well; exact:
    no other bits are, although they mean the same number; or ids: experts of a token.
    """
    if text.startswith("such as ["):
        words = text.removeprefix("such as [").rstrip("]").split(", ")
        return None if "..." in words else {"ids": [int(word) for word in words]}
    ends = _HEX.findall(text)
    if not ends:
        return None
    digits = len(ends[0][1])
    numbers = [int(word, 16) | (1 << (4 * digits - 1) if sign else 0) for sign, word in ends[:2]]
    given = _HEX.match(actual)
    same_number = (
        given is not None and numbers[0] == numbers[-1] and _magnitude(given[2]) == _magnitude(ends[0][1]) == 0
    )
    exact = same_number or "(" not in text
    return {"lo": numbers[0], "hi": numbers[-1], "digits": digits, "zero": text.endswith(" or 0"), "exact": exact}


def _magnitude(word: str) -> int:
    return int(word, 16) & ((1 << (4 * len(word) - 1)) - 1)


def _library(source: BackendSource) -> tuple[str, str, dict[str, str]]:
    """Module, attribute and the texts that make it importable without this project."""
    if source.location == "conformance.mutant_backends":
        return source.location, "", {}  # the mutants are the library
    if source.kind == "builtin":
        return source.location, "", closure(source.location)
    if source.kind == "plugin_file":
        path = Path(source.location)
        text = path.read_text(encoding="utf-8")
        return path.stem, "", {path.name: text, **_closure_of(text)}
    module, _, attribute = source.location.partition(":")
    return module, attribute, {**closure("references.backend"), **closure("references.recipes")}


def closure(module: str) -> dict[str, str]:
    """The file of a module of ours and of everything of ours that it imports: path below the root -> text."""
    path = _file_of(module)
    if path is None:
        raise UsageError(f"{module}: its text is not at hand")
    found: dict[str, str] = {}
    _collect(module, found)
    return found


def _closure_of(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _imports(text):
        _collect(name, found)
    return found


def _collect(module: str, found: dict[str, str]) -> None:
    words = module.split(".")
    for count in range(1, len(words) + 1):
        name = ".".join(words[:count])
        path = _file_of(name)
        if path is None:
            return
        key = (
            "/".join([*words[:count], "__init__.py"]) if path.name == "__init__.py" else "/".join(words[:count]) + ".py"
        )
        if key in found:
            continue
        found[key] = path.read_text(encoding="utf-8")
        for other in _imports(found[key]):
            _collect(other, found)


def _imports(text: str) -> list[str]:
    """Modules of ours that a text imports, anywhere."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.partition(".")[0] in PACKAGES and _file_of(name) is not None]


def _file_of(module: str) -> Path | None:
    first, *rest = module.split(".")
    roots = package_roots()
    if first not in roots:
        return None
    base = Path(roots[first], *rest)
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def laid_out_inputs(case_text: str, inputs: Sequence[Wire]) -> dict[str, Any]:
    """The inputs as a backend gets them: explicit ones with the case's strides, else the case's own."""
    from conformance.operations import OPERATIONS
    from conformance.worker_inputs import explicit
    from fuzz.case import Case

    case = Case.parse(case_text)
    return explicit(case, inputs) if inputs else OPERATIONS[case.operation].inputs(case)
