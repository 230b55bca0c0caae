"""Every mutant of the areas layout and memory is wrong on the small input of its own bug report."""

from __future__ import annotations

import torch

from fuzz.case import Case
from fuzz.mutants import MUTANTS, correct
from fuzz.mutants.base import Part, Partial
from references.elements import E4M3FN, decode

FAULTY = {mutant.family: mutant.answer for mutant in MUTANTS}


def moved(family: str, layout: str, scales: torch.Tensor, direction: str = "pack") -> tuple[Part, torch.Tensor]:
    """The scales of the mutant and of a correct implementation; plain ``[rows, cols]`` where they are packed."""
    rows, cols = scales.shape if direction == "pack" else scales.shape[::-1]
    case = Case.make("scale_layout", layout, seed=0, cols=cols, direction=direction, rows=rows, values="index")
    return FAULTY[family](case, {"scales": scales})["scales"], correct.move_scales(case, {"scales": scales})["scales"]


def numbered(rows: int, cols: int) -> torch.Tensor:
    return (torch.arange(rows * cols) % 251 + 1).view(rows, cols).to(torch.uint8)


def test_tail_bytes_are_not_written() -> None:
    mutant, right = moved("packed-tail-bytes-uninitialised", "mn_major_packed", torch.full((4, 6), 127).to(torch.uint8))
    assert isinstance(mutant, Partial)
    assert right[:, 0].tolist() == [0x7F7F7F7F, 0x00007F7F]
    assert mutant.written[:, 0].tolist() == [[True] * 4, [True, True, False, False]]
    buffer = torch.full(mutant.values.shape, 0xAA, dtype=torch.uint8)
    buffer[mutant.written] = mutant.values[mutant.written]
    assert buffer.view(torch.int32)[1, 0, 0].item() & 0xFFFFFFFF == 0xAAAA7F7F


def test_padding_is_not_written() -> None:
    mutant, right = moved("dirty-padding-scales", "interleave_128x4", numbered(32, 2))
    assert isinstance(mutant, Partial)
    assert int(mutant.written.sum()) == 64
    assert right[~mutant.written].eq(0).all()
    assert torch.equal(mutant.values, right)


def test_a_payload_is_stored_by_the_strides_of_the_input() -> None:
    text = (
        "quantize fp8_per_tensor v=1 block=tensor dtype=fp32 k=3 m=2 scale=static stride=transposed values=codes seed=0"
    )
    x = torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]).t()
    inputs = {"x": x, "scale": torch.ones(1)}
    assert x.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert x.stride() == (1, 2)
    mutant = FAULTY["noncontig-input-written-with-input-strides"](Case.parse(text), inputs)["payload"]
    assert isinstance(mutant, Partial)
    assert mutant.written.all()
    assert decode(mutant.values, E4M3FN).tolist() == [[1.0, 4.0, 2.0], [5.0, 3.0, 6.0]]


def test_a_gather_of_shards_has_too_many_blocks() -> None:
    text = (
        "quantize deepseek_fp8 v=1 block=128x128 dtype=fp32 k=258 m=1 scale=fp32 stride=contiguous values=codes seed=0"
    )
    case, inputs = Case.parse(text), {"x": torch.ones(1, 258)}
    mutant = FAULTY["tp-gather-scale-too-many-blocks"](case, inputs)
    assert mutant["scales"].shape == (1, 4)
    assert correct.quantize(case, inputs)["scales"].shape == (1, 3)
    assert mutant["payload"].shape == (1, 258)


def test_scales_stay_in_row_major_order() -> None:
    mutant, right = moved("weight-sf-permuted-not-interleaved", "interleave_128x4", numbered(128, 4))
    assert mutant[133] == right[21] == numbered(128, 4)[33, 1]
    assert mutant[21] != right[21]


def test_a_row_of_tiles_starts_at_the_unpadded_stride() -> None:
    plain = numbered(256, 9)
    mutant, right = moved("scale-row-group-stride-unpadded", "interleave_128x4", plain)
    assert mutant[128 * 9] == right[128 * 12] == plain[128, 0]
    assert mutant[128 * 9] != right[128 * 9]


def test_an_index_is_made_with_the_logical_stride() -> None:
    plain = numbered(2, 6)
    mutant, right = moved("swizzle-offset-from-logical-stride", "interleave_128x4", plain)
    assert mutant[512 + 2] == right[16] == plain[1, 0]  # (1, 0) at the place of (0, 6)
    assert mutant[16] != plain[1, 0]


def test_a_square_grid_is_transposed() -> None:
    text = "dequantize deepseek_fp8 v=1 block=128x128 k=256 m=256 out=fp32 scale=fp32 values=codes seed=0"
    payload = torch.full((256, 256), 0x38, dtype=torch.uint8)
    inputs = {"payload": payload, "scales": torch.tensor([[1.0, 2.0], [4.0, 8.0]])}
    case = Case.parse(text)
    found = FAULTY["scale-orientation-inferred-square"](case, inputs), correct.dequantise(case, inputs)
    assert [float(parts["output"][0, 128]) for parts in found] == [4.0, 2.0]
    oblong = Case.parse(text.replace("k=256", "k=128"))
    inputs = {"payload": payload[:, :128], "scales": torch.tensor([[1.0], [4.0]])}
    assert torch.equal(
        FAULTY["scale-orientation-inferred-square"](oblong, inputs)["output"],
        correct.dequantise(oblong, inputs)["output"],
    )


def test_column_major_scales_are_read_as_row_major() -> None:
    packed = torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])
    mutant, right = moved("transposed-scales", "k_major", packed, "unpack")
    assert mutant.tolist() == [[1.0, 4.0, 2.0], [5.0, 3.0, 6.0]]
    assert right.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_small_matrices_have_another_layout() -> None:
    plain = numbered(64, 4)
    mutant, right = moved("tactic-dependent-scale-layout", "interleave_128x4", plain)
    assert mutant[36] == right[144] == plain[9, 0]
    mutant, right = moved("tactic-dependent-scale-layout", "interleave_128x4", numbered(65, 4))
    assert torch.equal(mutant, right)


def test_a_buffer_without_room_for_padding_loses_scales() -> None:
    mutant, right = moved("nvfp4-swizzled-scale-underallocated", "interleave_128x4", numbered(33, 4))
    assert isinstance(mutant, Partial)
    assert int(mutant.written.sum()) == 132
    assert int((right != 0)[~mutant.written].sum()) > 0
