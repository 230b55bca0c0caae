"""The hash is what its description says, and nothing else enters it."""

import hashlib

import pytest
import torch

from fuzz.hashing import CHUNK, sha256_of


def test_a_small_set_by_hand():
    tensors = {"b": torch.tensor([[1, 2]], dtype=torch.uint8), "a": torch.tensor(1.0)}
    one = b"a float32 \n" + hashlib.sha256(b"\x00\x00\x80\x3f").digest()
    two = b"b uint8 1x2\n" + hashlib.sha256(b"\x01\x02").digest()
    assert sha256_of(tensors) == hashlib.sha256(one + two).hexdigest()


def test_chunks_are_a_mebibyte_and_an_empty_tensor_has_none():
    data = torch.arange(2 * CHUNK + 5, dtype=torch.int64).to(torch.uint8)
    raw = data.numpy().tobytes()
    chunks = b"".join(hashlib.sha256(raw[start : start + 2**20]).digest() for start in (0, 2**20, 2**21))
    assert sha256_of({"x": data}) == hashlib.sha256(f"x uint8 {2**21 + 5}\n".encode() + chunks).hexdigest()
    assert sha256_of({"x": data[:0]}) == hashlib.sha256(b"x uint8 0\n").hexdigest()


def test_strides_and_what_lies_beside_play_no_part():
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16)
    padded = torch.full((3, 7), float("nan"), dtype=torch.bfloat16)
    padded[:, 2:6] = x
    views = [x, x.t().contiguous().t(), padded[:, 2:6]]
    assert len({view.stride() for view in views}) == 3
    assert len({sha256_of({"x": view}) for view in views}) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"y": torch.zeros(4)},
        {"x": torch.zeros(2, 2)},
        {"x": torch.zeros(4, dtype=torch.int32)},
        {"x": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {"x": torch.zeros(4), "y": torch.zeros(0)},
    ],
)
def test_names_shapes_dtypes_and_bits_do(other):
    assert sha256_of({"x": torch.zeros(4)}) != sha256_of(other)


def test_order_of_the_mapping_does_not():
    a, b = torch.zeros(1), torch.ones(1)
    assert sha256_of({"a": a, "b": b}) == sha256_of({"b": b, "a": a})
