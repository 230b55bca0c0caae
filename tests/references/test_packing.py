"""Packing of 4-bit codes: low nibble first."""

from __future__ import annotations

import pytest
import torch

from references.packing import pack_fp4, unpack_fp4


def test_low_nibble_first() -> None:
    assert pack_fp4(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


def test_every_byte_unpacks_and_packs_again() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = unpack_fp4(packed)
    assert codes.shape == (16, 32)
    assert int(codes.max()) == 15
    assert codes[4, 6:8].tolist() == [0x3, 0x4]  # byte 0x43
    assert torch.equal(pack_fp4(codes), packed)
    assert torch.equal(unpack_fp4(packed.t()), unpack_fp4(packed.t().contiguous()))


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        pack_fp4(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        unpack_fp4(torch.zeros(2, 2, dtype=torch.int32))
