from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import capsule as capsules
from conformance import tensor_file
from conformance.capsule import Capsule, CapsuleError
from conformance.cli import main
from conformance.messages import Wire
from conformance.tensor_file import TensorFileError
from conformance.worker_tensors import to_wire
from fuzz.hashing import sha256_of

CASE = "ue8m0 ceil v=1 from=scale n=2 values=normal seed=0"
X = to_wire("x", torch.tensor([1.0, 3.0]))


def made(**changes: Any) -> Capsule:
    values: dict[str, Any] = {
        "case": CASE,
        "origin": CASE,
        "part": "scales",
        "verdict": "wrong",
        "backend": "lib",
        "input_sha256": tensor_file.input_sha256([X]),
        "explicit": True,
        "expected": ({"index": [1], "actual": "0x80 (2^1)", "admissible": "0x81 (2^2)", "input": "3"},),
        "tensors": capsules.tensors_of([X], [Wire(name="scales", dtype="uint8", shape=(2,), data=b"\x7f\x80")]),
    }
    return Capsule(**{**values, **changes})


def test_a_capsule_comes_back_as_it_was(tmp_path: Path) -> None:
    path = capsules.write(tmp_path, made())
    found = capsules.read(path)
    assert found == made()
    assert found.inputs == (X,)
    assert found.actual[0].data == b"\x7f\x80"


def test_the_tensor_file_is_safetensors_byte_for_byte() -> None:
    header = (
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"p":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}}'
    )
    padded = header + b" " * (-len(header) % 8)
    wires = [X, Wire(name="p", dtype="uint8", shape=(1,), data=b"\x7f")]
    expected = struct.pack("<Q", len(padded)) + padded + struct.pack("<ff", 1.0, 3.0) + b"\x7f"
    assert tensor_file.dump(wires) == expected
    assert tensor_file.parse(expected) == wires


def test_the_hash_of_wires_is_that_of_tensors() -> None:
    tensors = {"b": torch.arange(400000, dtype=torch.int32).view(2, -1), "a": torch.tensor([1.5], dtype=torch.bfloat16)}
    assert tensor_file.input_sha256([to_wire(*item) for item in tensors.items()]) == sha256_of(tensors)


Change = Callable[[dict[str, Any]], Any]
HOSTILE: dict[str, tuple[Change, str]] = {
    "another version": (lambda data: data.update(version=2), "version '2' is unknown"),
    "foreign": (lambda data: data.update(format="other"), "not written as a capsule"),
    "wrong hash": (lambda data: data.update(input_sha256="0" * 64), "its id is not that of its contents"),
    "short hash": (lambda data: data.update(input_sha256="12"), "input_sha256 is '12'"),
    "traversal": (
        lambda data: data["tensors"].update(file="../../etc/passwd.safetensors"),
        "is no name of a tensor file",
    ),
    "absolute": (lambda data: data["tensors"].update(file="/etc/passwd"), "is no name of a tensor file"),
    "other tensors": (lambda data: data["tensors"].update(sha256="0" * 64), "its SHA-256 differs"),
    "unknown key": (lambda data: data.update(run="rm -rf"), "'run' is unknown"),
    "missing key": (lambda data: data.pop("part"), "'part' is missing"),
    "wrong type": (lambda data: data.update(expected={}), "expected is no list"),
    "bad case": (lambda data: data.update(case="ue8m0 ceil"), "case: expected"),
    "terminal codes": (lambda data: data.update(message="\x1b[31mred"), "no line of printable text"),
    "bad device": (lambda data: data.update(device="cuda:0; rm"), "device is 'cuda:0; rm'"),
    "bad options": (lambda data: data.update(options="--plugin=evil"), "options is '--plugin=evil'"),
    "poison": (lambda data: data.update(options="poison=00"), "each has a key of its own"),
    "twice": (lambda data: data.update(options="tactic=1 tactic=2"), "each has a key of its own"),
    "huge number": (lambda data: data.update(times=10**30), "times is 1"),
    "passing": (lambda data: data.update(verdict="pass"), "verdict 'pass' is no failure"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_odd_capsules_are_refused_in_one_line(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, line = HOSTILE[name]
    path = capsules.write(tmp_path, made())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CapsuleError):
        capsules.read(path)
    assert main(["repro", str(path)]) == 2
    err = capfd.readouterr().err
    assert line in err
    assert err.startswith("conformance: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b'{"format": NaN}', "NaN is no JSON"),
        (b'{"a": 1, "a": 2}', "has a key twice"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b" " * (2**20 + 1), "more than 1048576 bytes"),
    ],
    ids=["empty", "truncated", "list", "nan", "twice", "deep", "no utf-8", "long"],
)
def test_what_is_no_json_is_refused_in_one_line(
    raw: bytes, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(CapsuleError, match=line):
        capsules.read(path)
    assert main(["repro", str(path)]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def _file(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"", "truncated"),
        (struct.pack("<Q", 2**60), "a header of"),
        (_file({"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, b"1234"), "cannot lie at"),
        (_file({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}}, b"1234"), "cannot lie at"),
        (_file({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), "no natural numbers"),
        (_file({"x": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "unknown dtype"),
        (_file({"x": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"12"), "does not begin where"),
        (_file({}, b"12"), "2 bytes belong to no tensor"),
        (_file({"\n": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}), "is no name of a tensor"),
    ],
)
def test_odd_tensor_files_are_refused(raw: bytes, line: str) -> None:
    with pytest.raises(TensorFileError, match=line):
        tensor_file.parse(raw)


def test_tensors_of_another_shape_than_the_case_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = "ue8m0 nearest v=1 from=scale n=3 values=normal seed=0"
    path = capsules.write(tmp_path, made(case=case, backend="ml_dtypes"))
    assert main(["repro", str(path)]) == 2
    assert capfd.readouterr().err.endswith("x is float32 [2], the case has float32 [3]\n")


@pytest.mark.parametrize(
    ("case", "digest", "line"),
    [
        ("ue8m0 nearest v=1 from=scale n=3 values=normal seed=0", "1" * 64, ": the inputs of its case hash to "),
        (
            "dequantize mxfp4 v=1 block=1x32 k=64 m=33554432 out=fp32 scale=ue8m0 values=codes seed=0",
            "1" * 64,
            "the case has 2214592512 elements of input: too many for --memory-limit",
        ),
    ],
    ids=["another hash", "huge"],
)
def test_a_case_that_does_not_fit_its_capsule_or_this_machine_is_refused(
    case: str, digest: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held = made(case=case, origin=case, backend="ml_dtypes", explicit=False, input_sha256=digest, tensors=())
    assert main(["repro", str(capsules.write(tmp_path, held))]) == 2
    err = capfd.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_a_capsule_cannot_name_code_to_load(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = capsules.write(tmp_path, made(plugins=("/tmp/evil.py",)))
    assert main(["repro", str(path)]) == 2
    assert "came from --plugin /tmp/evil.py: give --plugin again, if you trust it" in capfd.readouterr().err
