"""Scale layouts against their index formulas, worked by hand and by brute force, and against other libraries."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references import layouts

SIZES = st.tuples(st.integers(1, 300), st.integers(1, 13))


def plain_bits(layout: str, rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Uniform random bits in the plain dtype, NaN payloads and signs included."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, cols, 4), dtype=torch.uint8, generator=generator)
    if layouts.plain_dtype(layout) == torch.uint8:
        return raw[..., 0].contiguous()
    return raw.view(torch.float32).reshape(rows, cols)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def slot_of(layout: str, r: int, c: int, rows: int, cols: int) -> tuple[int, ...]:
    """The index formulas of docs/operations.md, one element at a time."""
    if layout == "interleave_128x4":
        tile = (r // 128) * -(-cols // 4) + c // 4
        return (tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4,)
    if layout == "mn_major_packed":
        return (c // 4, r, c % 4)
    return (c, r)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 5), (33, 4), (129, 6), (128, 8), (260, 3)])
def test_every_scale_is_where_the_formula_puts_it_and_the_rest_is_zero_padding(
    layout: str, rows: int, cols: int
) -> None:
    scales = plain_bits(layout, rows, cols)
    packed = layouts.pack(scales, layout)
    assert tuple(packed.shape) == layouts.packed_shape(layout, rows, cols)
    assert packed.dtype == layouts.packed_dtype(layout)
    assert packed.is_contiguous()
    slots, source = layouts.slots(packed, layout), bits(scales)
    expected = torch.zeros_like(slots)
    owned = torch.zeros(slots.shape, dtype=torch.bool)
    for r in range(rows):
        for c in range(cols):
            place = slot_of(layout, r, c, rows, cols)
            assert not owned[place]
            expected[place], owned[place] = source[r, c], True
    assert torch.equal(slots, expected)
    assert torch.equal(layouts.padding_mask(layout, rows, cols), ~owned)


def test_interleave_positions_worked_by_hand() -> None:
    scales = torch.zeros(129, 5, dtype=torch.uint8)
    scales[33, 1] = 7  # row 1 of the second group of 32, so byte 1*16 + 1*4 + 1
    scales[0, 4] = 8  # first byte of the second column tile
    scales[128, 0] = 9  # first byte of the second row tile, after two column tiles
    packed = layouts.pack(scales, "interleave_128x4")
    assert packed.numel() == 256 * 8
    assert packed.nonzero().flatten().tolist() == [21, 512, 1024]
    assert packed[[21, 512, 1024]].tolist() == [7, 8, 9]


def test_packed_words_worked_by_hand() -> None:
    scales = torch.tensor([[0x01, 0x02, 0x03, 0x84, 0xFF], [0x7F, 0x80, 0xFF, 0xFE, 0x00]], dtype=torch.uint8)
    packed = layouts.pack(scales, "mn_major_packed")
    assert packed.shape == (2, 4)
    little_endian = [
        struct.unpack("<i", bytes([1, 2, 3, 0x84]))[0],
        struct.unpack("<i", bytes([127, 128, 255, 254]))[0],
    ]
    assert packed[0].tolist() == [*little_endian, 0, 0]
    assert packed[1].tolist() == [0xFF, 0, 0, 0]
    assert packed[0, 0] < 0  # a code of 128 or more in the top byte is the sign bit
    assert layouts.slots(packed, "mn_major_packed")[0, 0].tolist() == [1, 2, 3, 0x84]


def test_mn_major_and_k_major_worked_by_hand() -> None:
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert layouts.pack(scales, "k_major").tolist() == [[1, 4], [2, 5], [3, 6]]
    assert layouts.pack(scales, "mn_major").tolist() == [[1, 4, 0, 0], [2, 5, 0, 0], [3, 6, 0, 0]]


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@given(size=SIZES, seed=st.integers(0, 2**32 - 1), garbage=st.booleans())
@settings(max_examples=40, deadline=None)
def test_unpack_inverts_pack_bit_for_bit_whatever_the_padding_holds(
    layout: str, size: tuple[int, int], seed: int, garbage: bool
) -> None:
    rows, cols = size
    scales = plain_bits(layout, rows, cols, seed)
    packed = layouts.pack(scales, layout)
    if garbage:
        padding = layouts.padding_mask(layout, rows, cols)
        if layout == "mn_major_packed":
            fill = padding.to(torch.int64) * 0xFF << torch.tensor([0, 8, 16, 24])
            word = fill.sum(-1)
            packed = packed | torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
        else:
            packed = packed.clone()
            packed.view(torch.uint8 if packed.dtype == torch.uint8 else torch.int32)[padding] = 0xFF
    back = layouts.unpack(packed, layout, rows, cols)
    assert back.dtype == scales.dtype
    assert torch.equal(bits(back), bits(scales))


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_strides_do_not_matter(layout: str) -> None:
    scales = plain_bits(layout, 37, 7)
    column_major = scales.t().contiguous().t()
    assert torch.equal(bits(layouts.pack(column_major, layout)), bits(layouts.pack(scales, layout)))
    strided = torch.empty(2 * layouts.pack(scales, layout).numel(), dtype=layouts.packed_dtype(layout))[::2]
    packed = layouts.pack(scales, layout)
    strided = strided.view_as(packed) if packed.dim() == 1 else strided.reshape(packed.shape)
    strided.copy_(packed)
    assert torch.equal(bits(layouts.unpack(strided, layout, 37, 7)), bits(scales))


@pytest.mark.parametrize("layout", ["mn_major", "k_major"])
def test_signalling_nans_keep_their_payload(layout: str) -> None:
    words = torch.tensor([[0x7F800001, -0x7FFFFF], [0x7FBFFFFF, -1]], dtype=torch.int32)
    packed = layouts.pack(words.view(torch.float32), layout)
    assert torch.equal(layouts.unpack(packed, layout, 2, 2).view(torch.int32), words)


def test_wrong_arguments_are_named() -> None:
    byte, real = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="layout 'rows' is none of interleave_128x4"):
        layouts.pack(byte, "rows")
    with pytest.raises(ValueError, match=r"dtype is torch\.float32, expected torch\.uint8"):
        layouts.pack(real, "interleave_128x4")
    with pytest.raises(ValueError, match="expected a matrix"):
        layouts.pack(byte[0], "interleave_128x4")
    with pytest.raises(ValueError, match=r"shape is \(2, 3\), expected \(3, 4\)"):
        layouts.unpack(real, "mn_major", 2, 3)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (100, 7), (128, 4), (300, 9)])
def test_interleave_equals_torchao(rows: int, cols: int) -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = plain_bits("interleave_128x4", rows, cols)
    packed = utils.to_blocked(scales)
    assert torch.equal(layouts.pack(scales, "interleave_128x4"), packed)
    assert torch.equal(layouts.unpack(packed, "interleave_128x4", rows, cols), scales)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (100, 7), (128, 4), (300, 9)])
def test_interleave_is_what_flashinfer_reads(rows: int, cols: int) -> None:
    gemm = pytest.importorskip("flashinfer.trace.templates.gemm")
    scales = plain_bits("interleave_128x4", rows, cols)
    assert torch.equal(gemm._unswizzle_sf_128x4(layouts.pack(scales, "interleave_128x4"), rows, cols), scales)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_cuda_equals_cpu(layout: str) -> None:
    scales = plain_bits(layout, 301, 13)
    packed = layouts.pack(scales.cuda(), layout)
    assert torch.equal(bits(packed).cpu(), bits(layouts.pack(scales, layout)))
    assert torch.equal(bits(layouts.unpack(packed, layout, 301, 13)).cpu(), bits(scales))
    mask = layouts.padding_mask(layout, 301, 13)
    assert torch.equal(layouts.padding_mask(layout, 301, 13, "cuda").cpu(), mask)
