"""Shards of block-quantised weights: worked cuts, and the laws that joining them again must obey."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.blocks import expand
from references.sharding import Shard, even_cuts, gated_cuts, misplaced, refined_block, shard


def values(part: Shard) -> torch.Tensor:
    """The dequantised shard, with the codes as plain integers 0..255: exact in FP64."""
    return part.payload.double() * part.element_scales().double()


def whole(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and a different power of two in every block."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    exponents = torch.randperm(grid[0] * grid[1], generator=generator).view(grid) % 16
    return payload, 2.0 ** exponents.float()


def test_a_cut_on_block_edges_keeps_the_block() -> None:
    payload, scales = whole(4, 512, (128, 128))
    left, right = shard(payload, scales, block=(128, 128), cuts=even_cuts(512, 2), dim=1)
    assert left.block == right.block == (128, 128)
    assert torch.equal(right.scales, scales[:, 2:])
    assert torch.equal(right.payload, payload[:, 256:])


def test_a_cut_inside_a_block_repeats_its_scale() -> None:
    scales = torch.tensor([[1.0, 2.0, 4.0]])
    payload = torch.ones(1, 384, dtype=torch.uint8)
    left, right = shard(payload, scales, block=(128, 128), cuts=even_cuts(384, 2), dim=1)
    assert left.block == right.block == (128, 64)
    assert left.scales.tolist() == [[1, 1, 2]]
    assert right.scales.tolist() == [[2, 4, 4]]  # block 1 belongs to both ranks, never block 2's scale first


def test_ranks_narrower_than_a_block_share_its_scale() -> None:
    scales = torch.tensor([[3.0], [5.0]])
    parts = shard(torch.ones(256, 1, dtype=torch.uint8), scales, block=(128, 128), cuts=even_cuts(256, 4), dim=0)
    assert [part.scales.flatten().tolist() for part in parts] == [[3], [3], [5], [5]]
    assert [part.block for part in parts] == [(64, 128)] * 4


def test_gated_rows_are_cut_in_each_half() -> None:
    # Two halves of 192 rows over two ranks: the local second half starts at row 96, so cells have 32 rows.
    payload, scales = whole(384, 1, (128, 128))
    cuts = gated_cuts(384, 2)
    assert cuts == [(range(0, 96), range(192, 288)), (range(96, 192), range(288, 384))]
    parts = shard(payload, scales, block=(128, 128), cuts=cuts, dim=0)
    a, b, c = scales.flatten().tolist()
    assert parts[0].block == (32, 128)
    assert parts[0].scales.flatten().tolist() == [a, a, a, b, b, c]
    assert parts[1].scales.flatten().tolist() == [a, b, b, c, c, c]


def test_258_columns_over_two_ranks_cannot_keep_blocks_of_128() -> None:
    """Two grids of two blocks a rank would give column 128 to rank 0's second block; rank 1 starts at 129."""
    payload, scales = whole(1, 258, (128, 128))
    parts = shard(payload, scales, block=(128, 128), cuts=even_cuts(258, 2), dim=1)
    assert [part.block for part in parts] == [(128, 1)] * 2
    assert torch.equal(torch.cat([part.element_scales() for part in parts], 1), expand(scales, (128, 128), (1, 258)))
    with pytest.raises(ValueError, match="block 128 straddles a cut: it must divide 1"):
        shard(payload, scales, block=(128, 128), cuts=even_cuts(258, 2), dim=1, shard_block=128)


def test_packed_payload_is_cut_by_bytes() -> None:
    payload = torch.tensor([[0x21, 0x43, 0x65, 0x87]], dtype=torch.uint8)
    scales = torch.tensor([[1, 2]], dtype=torch.uint8)
    parts = shard(payload, scales, block=(1, 4), cuts=even_cuts(8, 4, multiple=2), dim=1, per_byte=2)
    assert [part.payload.tolist() for part in parts] == [[[0x21]], [[0x43]], [[0x65]], [[0x87]]]
    assert [part.scales.tolist() for part in parts] == [[[1]], [[1]], [[2]], [[2]]]
    with pytest.raises(ValueError, match="splits a byte of 2 elements"):
        shard(payload, scales, block=(1, 4), cuts=[(range(0, 3),), (range(3, 8),)], dim=1, per_byte=2)


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 70))
BLOCKS = st.tuples(st.integers(1, 24), st.integers(1, 24))


@given(shape=SHAPES, block=BLOCKS, ranks=st.integers(1, 6), dim=st.sampled_from([0, 1]), seed=st.integers(0, 999))
@settings(deadline=None)
def test_concatenated_shards_are_the_whole(
    shape: tuple[int, int], block: tuple[int, int], ranks: int, dim: int, seed: int
) -> None:
    payload, scales = whole(*shape, block, seed)
    parts = shard(payload, scales, block=block, cuts=even_cuts(shape[dim], ranks), dim=dim)
    joined = torch.cat([values(part) for part in parts], dim)
    assert torch.equal(joined, payload.double() * expand(scales, block, shape).double())
    for part in parts:
        grid = tuple(-(-size // step) for size, step in zip(part.shape, part.block, strict=True))
        assert tuple(part.scales.shape) == grid
        assert tuple(part.payload.shape) == part.shape


@given(half=st.integers(1, 60), block=BLOCKS, ranks=st.integers(1, 5), seed=st.integers(0, 999))
@settings(deadline=None)
def test_gated_shards_hold_their_part_of_each_half(half: int, block: tuple[int, int], ranks: int, seed: int) -> None:
    payload, scales = whole(2 * half, 5, block, seed)
    parts = shard(payload, scales, block=block, cuts=gated_cuts(2 * half, ranks), dim=0)
    first = torch.cat([values(part)[: part.shape[0] // 2] for part in parts])
    second = torch.cat([values(part)[part.shape[0] // 2 :] for part in parts])
    expected = payload.double() * expand(scales, block, (2 * half, 5)).double()
    assert torch.equal(torch.cat([first, second]), expected)


@given(shape=SHAPES, block=BLOCKS, ranks=st.integers(1, 6), seed=st.integers(0, 999))
@settings(deadline=None)
def test_partial_products_sum_to_the_uncut_product(
    shape: tuple[int, int], block: tuple[int, int], ranks: int, seed: int
) -> None:
    """Row-parallel layer: integers below 2^53 throughout, so FP64 is exact in any order."""
    payload, scales = whole(*shape, block, seed)
    x = torch.randint(-64, 65, (3, shape[1]), generator=torch.Generator().manual_seed(seed)).double()
    uncut = x @ (payload.double() * expand(scales, block, shape).double()).T
    cuts = even_cuts(shape[1], ranks)
    parts = shard(payload, scales, block=block, cuts=cuts, dim=1)
    partial = [x[:, cut[0].start : cut[0].stop] @ values(part).T for cut, part in zip(cuts, parts, strict=True)]
    assert torch.equal(torch.stack(partial).sum(0), uncut)


@given(size=st.integers(0, 200), ranks=st.integers(1, 9), multiple=st.integers(1, 8))
def test_even_cuts_tile_the_size(size: int, ranks: int, multiple: int) -> None:
    cuts = even_cuts(size, ranks, multiple)
    assert [i for (part,) in cuts for i in part] == list(range(size))
    assert all(part.start % multiple == 0 or not len(part) for (part,) in cuts)
    assert len(cuts) == ranks
    assert max(len(part) for (part,) in cuts) - min(len(part) for (part,) in cuts[:-1] or cuts) < 2 * multiple


@given(size=st.integers(1, 100), ranks=st.integers(1, 6), block=st.integers(1, 40))
def test_refined_block_is_the_largest_that_no_cell_straddles(size: int, ranks: int, block: int) -> None:
    cuts = even_cuts(size, ranks)

    def fits(cell: int) -> bool:
        return all(part.start % cell == 0 for (part,) in cuts if len(part))

    assert refined_block(block, cuts) == max(cell for cell in range(1, block + 1) if block % cell == 0 and fits(cell))


def test_misplaced_finds_a_neighbours_scale_and_accepts_any_correct_grid() -> None:
    payload, scales = whole(2, 384, (1, 128))
    cuts = even_cuts(384, 2)
    expected = shard(payload, scales, block=(1, 128), cuts=cuts, dim=1)[1]
    finer = shard(payload, scales, block=(1, 128), cuts=cuts, dim=1, shard_block=16)[1]
    assert not misplaced(finer, expected).any()
    # The classic fault: rank 1 keeps blocks of 128 from stored block ceil(192 / 128) = 2, one too far.
    faulty = Shard(expected.payload, scales[:, [2, 2]], (1, 128), expected.shape)
    assert misplaced(faulty, expected).sum() == 2 * 64
    assert misplaced(faulty, expected)[:, :64].all()


def test_misplaced_ignores_padding_and_sees_a_wrong_byte() -> None:
    payload, scales = whole(2, 8, (1, 4))
    (expected,) = shard(payload, scales, block=(1, 4), cuts=even_cuts(8, 1), dim=1)
    padded = Shard(
        torch.nn.functional.pad(payload, (0, 4, 0, 2), value=0xAA),
        torch.nn.functional.pad(scales, (0, 1, 0, 2), value=float("nan")),
        (1, 4),
        (4, 12),
    )
    assert not misplaced(padded, expected).any()
    wrong = payload.clone()
    wrong[1, 3] ^= 1
    assert misplaced(Shard(wrong, scales, (1, 4), (2, 8)), expected).nonzero().tolist() == [[1, 3]]
    packed = Shard(wrong, scales.repeat(1, 2), (1, 4), (2, 16))
    (packed_expected,) = shard(payload, scales.repeat(1, 2), block=(1, 4), cuts=even_cuts(16, 1), dim=1, per_byte=2)
    assert misplaced(packed, packed_expected).nonzero().tolist() == [[1, 6], [1, 7]]
    with pytest.raises(ValueError, match=r"smaller than \(2, 8\)"):
        misplaced(Shard(payload[:1], scales[:1], (1, 4), (1, 8)), expected)


def test_wrong_arguments_are_named() -> None:
    payload, scales = whole(4, 8, (2, 4))
    with pytest.raises(ValueError, match=r"scales are \(2, 2\), expected \(4, 2\)"):
        shard(payload, scales, block=(1, 4), cuts=even_cuts(8, 2), dim=1)
    with pytest.raises(ValueError, match="dim=2"):
        shard(payload, scales, block=(2, 4), cuts=even_cuts(8, 2), dim=2)
    with pytest.raises(ValueError, match=r"no range within 0\.\.8"):
        shard(payload, scales, block=(2, 4), cuts=[(range(4, 12),)], dim=1)
    with pytest.raises(ValueError, match="ranks=0"):
        even_cuts(8, 0)
    with pytest.raises(ValueError, match="7 rows have no halves"):
        gated_cuts(7, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [0, 1])
def test_cuda_equals_cpu(dim: int) -> None:
    payload, scales = whole(384, 300, (128, 128))
    cuts = even_cuts((384, 300)[dim], 5)
    here = shard(payload, scales, block=(128, 128), cuts=cuts, dim=dim)
    there = shard(payload.cuda(), scales.cuda(), block=(128, 128), cuts=cuts, dim=dim)
    for ours, theirs in zip(here, there, strict=True):
        assert torch.equal(ours.payload, theirs.payload.cpu())
        assert torch.equal(ours.element_scales(), theirs.element_scales().cpu())
