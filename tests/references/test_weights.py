"""Weight orders: hand-worked rows, permutation laws, and FlashInfer's own preparation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references import layouts, weights


def test_tile_128_takes_every_fourth_row_of_32() -> None:
    indices = weights.row_shuffle_indices(64, 128).tolist()
    assert indices[:16] == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29]
    assert indices[24:32] == [3, 7, 11, 15, 19, 23, 27, 31]
    assert indices[32:34] == [32, 36]


def test_tile_64_takes_every_second_row_of_16() -> None:
    indices = weights.row_shuffle_indices(32, 64).tolist()
    assert indices[:16] == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert indices[16:18] == [16, 18]


def test_gated_rows_alternate_and_halves_swap() -> None:
    assert weights.gated_row_indices(6).tolist() == [0, 3, 1, 4, 2, 5]
    assert weights.swapped_halves_indices(6).tolist() == [3, 4, 5, 0, 1, 2]
    # Stored row 1 of a gated, shuffled FC1: place 4 of the alternated rows, which is row 2 of the first half.
    assert weights.gated_shuffle_indices(64, 128)[1] == 2
    assert weights.gated_shuffle_indices(64, 128)[8] == 32  # place 1: row 0 of the second half


@given(rows=st.integers(1, 12).map(lambda n: 32 * n), tile=st.sampled_from([8, 64, 128, 192, 256]), data=st.data())
def test_orders_are_permutations_that_invert_undoes(rows: int, tile: int, data: st.DataObject) -> None:
    make = data.draw(
        st.sampled_from(
            [
                lambda: weights.row_shuffle_indices(rows, tile),
                lambda: weights.gated_row_indices(rows),
                lambda: weights.swapped_halves_indices(rows),
                lambda: weights.gated_shuffle_indices(rows, tile),
            ]
        )
    )
    order = make()
    assert sorted(order.tolist()) == list(range(rows))
    weight = torch.arange(2 * rows * 3).view(2, rows, 3)  # two experts
    stored = weights.apply(weight, order)
    assert torch.equal(stored[1, 5], weight[1, order[5]])
    assert torch.equal(weights.apply(stored, weights.invert(order)), weight)


@given(data=st.data(), rows=st.integers(1, 40))
def test_compose_applies_the_first_order_first(data: st.DataObject, rows: int) -> None:
    first = torch.tensor(data.draw(st.permutations(range(rows))))
    second = torch.tensor(data.draw(st.permutations(range(rows))))
    x = torch.arange(rows)
    both = weights.apply(x, weights.compose(first, second), dim=0)
    assert torch.equal(both, weights.apply(weights.apply(x, first, dim=0), second, dim=0))


def test_block_major_k_worked_by_hand() -> None:
    weight = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert weights.to_layout(weight, "BlockMajorK", 2).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert weights.to_layout(weight, "MajorMn").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@given(
    experts=st.integers(1, 3),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 4),
    block=st.integers(1, 5),
    layout=st.sampled_from(weights.WEIGHT_LAYOUTS),
)
def test_from_layout_inverts_to_layout(experts: int, rows: int, blocks: int, block: int, layout: str) -> None:
    weight = torch.arange(experts * rows * blocks * block).view(experts, rows, -1)
    stored = weights.to_layout(weight, layout, block if layout == "BlockMajorK" else None)
    assert stored.is_contiguous()
    assert torch.equal(weights.from_layout(stored, layout), weight)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="40 rows are no multiple of 32"):
        weights.row_shuffle_indices(40, 128)
    with pytest.raises(ValueError, match="epilogue tile 0"):
        weights.row_shuffle_indices(32, 0)
    with pytest.raises(ValueError, match="7 rows have no halves"):
        weights.gated_row_indices(7)
    with pytest.raises(ValueError, match="5 columns are no multiple of the block 2"):
        weights.to_layout(torch.zeros(2, 5), "BlockMajorK", 2)
    with pytest.raises(ValueError, match="BlockMajorK takes a positive block"):
        weights.to_layout(torch.zeros(2, 4), "MajorK", 2)
    with pytest.raises(ValueError, match="is none of MajorK"):
        weights.from_layout(torch.zeros(2, 4), "KMajor")
    with pytest.raises(ValueError, match="has 4 entries, the order 3"):
        weights.apply(torch.zeros(4, 2), torch.arange(3))


@pytest.mark.parametrize("tile", [64, 128, 192, 256])
@pytest.mark.parametrize("rows", [32, 128, 1536])
def test_orders_equal_flashinfer(rows: int, tile: int) -> None:
    utils = pytest.importorskip("flashinfer.utils")
    core = pytest.importorskip("flashinfer.fused_moe.core")
    weight = torch.zeros(rows, 8, dtype=torch.uint8)
    assert torch.equal(weights.row_shuffle_indices(rows, tile), utils.get_shuffle_matrix_a_row_indices(weight, tile))
    gated = core.get_reorder_rows_for_gated_act_gemm_row_indices(weight)
    assert torch.equal(weights.gated_row_indices(rows), gated)
    w1 = core._maybe_get_cached_w3_w1_permute_indices({}, weight, tile, is_gated_act_gemm=True)
    assert torch.equal(weights.gated_shuffle_indices(rows, tile), w1)
    if rows % 128 == 0:
        scales = utils.get_shuffle_matrix_sf_a_row_indices(weight, tile, 32)
        assert torch.equal(weights.row_shuffle_indices(rows, tile), scales)


def test_block_layout_equals_flashinfer() -> None:
    core = pytest.importorskip("flashinfer.fused_moe.core")
    weight = torch.arange(5 * 384, dtype=torch.int32).view(5, 384)
    assert torch.equal(weights.to_layout(weight, "BlockMajorK", 128), core.convert_to_block_layout(weight, 128))


def test_shuffled_scales_are_interleaved_too() -> None:
    """Row order and 128x4 interleave are both needed (flashinfer-ai/flashinfer#4087): one alone moves other bytes."""
    scales = torch.randint(0, 256, (128, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    order = weights.row_shuffle_indices(128, 128)
    stored = layouts.pack(weights.apply(scales, order), "interleave_128x4")
    # Stored row 33 (second 32-row group, place 1) is plain row 36; its column 1 is byte 1*16 + 1*4 + 1.
    assert stored[21] == scales[36, 1]
    assert not torch.equal(stored, weights.apply(scales, order).flatten())
    back = weights.apply(layouts.unpack(stored, "interleave_128x4", 128, 4), weights.invert(order))
    assert torch.equal(back, scales)
