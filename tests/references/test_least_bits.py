"""Least set bits of codes and operands: tables against the numbers themselves."""

import pytest
import torch

from references import gemm_formats
from references.elements import E2M1, E4M3FN, E5M2, decode
from references.gemm_formats import Side, Stored, operand, sides
from references.least_bits import NOTHING, ZERO_CODE, code_least_bits, least_bit
from references.rounding import round_to

SEED = torch.Generator().manual_seed(3)


@pytest.mark.parametrize("element", [E4M3FN, E5M2, E2M1], ids=lambda e: e.name)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 256)])
def test_codes_have_the_least_bits_of_their_values(element, shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=SEED)
    values = decode(codes, element)
    finite = values.isfinite()
    expected = least_bit(values)
    found = code_least_bits(codes, element).to(torch.int32)
    assert torch.equal(found[finite & (values != 0)], expected[finite & (values != 0)])
    assert bool((found[values == 0] == ZERO_CODE).all())


def test_least_bits_of_e4m3_by_hand():
    # 0, 2^-9, 3 2^-9, 2^-6, 1, 1.125, 448 = 7 2^6, -1.
    codes = torch.tensor([0x00, 0x01, 0x03, 0x08, 0x38, 0x39, 0x7E, 0xB8], dtype=torch.uint8)
    assert code_least_bits(codes[None], E4M3FN)[0].tolist() == [ZERO_CODE, -9, -9, -6, 0, -3, 6, 0]


@pytest.mark.parametrize(
    "words", [("deepseek_fp8", "fp32"), ("deepseek_fp8", "ue8m0"), ("nvfp4", "e4m3"), ("mxfp8", "ue8m0")]
)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("k", [32, 130, 384])
def test_facts_from_codes_are_those_of_the_numbers(words, which, k):
    side = sides(*words)[which]
    rows = 131
    operand_ = operand(*stored(side, rows, k))
    plain = type(operand_)(operand_.codes, operand_.scales, operand_.width, operand_.values, side)
    assert operand_.raw is not None
    assert plain.raw is None
    assert torch.equal(operand_.values, operand_.codes * operand_.spread(operand_.scales))
    assert torch.equal(operand_.least_bits, plain.least_bits)
    for found, expected in zip(operand_.row_least_bits, plain.row_least_bits, strict=True):
        assert torch.equal(found, expected)
    if plain.raised is None:
        assert operand_.raised is None
    else:
        assert torch.equal(operand_.raised, plain.raised)
    some = torch.tensor([5, 1, 130])
    assert torch.equal(operand_.rows(some).least_bits, operand_.least_bits[some])
    assert torch.equal(operand_.rows(some).row_least_bits[0], operand_.row_least_bits[0][some])


def test_a_zero_row_has_no_least_bit():
    side = sides("deepseek_fp8", "fp32")[0]
    codes = torch.zeros(2, 256, dtype=torch.uint8)
    codes[1, 200] = 0x80 | 0x38  # -1
    found = operand(codes, torch.full((2, 2), 0.5), side)
    assert found.row_least_bits[0].tolist() == [NOTHING, -1]
    assert found.row_least_bits[1].tolist() == [NOTHING, 0]


def test_subnormal_codes_are_raised_to_the_smallest_normal_number():
    side = Side(E4M3FN, (1, 128), "fp32")
    # 0, 2^-9, -3 2^-9, 2^-6, 2 with the scale 4.
    codes = torch.tensor([[0x00, 0x01, 0x83, 0x08, 0x40]], dtype=torch.uint8)
    found = operand(codes, torch.tensor([[4.0]]), side).raised
    assert found is not None
    assert found.tolist() == [[0.0, 2.0**-4, 2.0**-4, 2.0**-4, 8.0]]
    assert operand(codes[:, [0, 3, 4]], torch.tensor([[4.0]]), side).raised is None


@pytest.mark.parametrize(
    "words", [("deepseek_fp8", "fp32"), ("nvfp4", "e4m3"), ("fp8_per_tensor", "fp32"), ("bf16", "ue8m0")]
)
def test_pieces_make_up_the_matrix(words, monkeypatch):
    side = sides(*words)[1]
    matrix = Stored(*stored(side, 389, 256))
    monkeypatch.setitem(gemm_formats.PIECE, "cpu", 256 * 140)
    pieces = list(matrix.pieces())
    assert len(pieces) > 1
    assert torch.equal(torch.cat([piece.decoded().values for piece in pieces]), matrix.decoded().values)
    assert torch.equal(matrix.values(), matrix.decoded().values)
    if side.scale != "e4m3":  # else two roundings
        assert torch.equal(matrix.values(torch.float32).double(), round_to(matrix.values(), torch.float32))


def stored(side, rows, k):
    if side.element is None:
        return torch.randn(rows, k, generator=SEED).to(torch.bfloat16), None, side, None
    codes = torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=SEED)
    if side.element.bits == 8:
        codes[(codes & 0x7F) == 0x7F] = 0
    numbers = codes[:, : k // 2] if side.element.bits == 4 else codes
    height, width = side.block or (rows, k)
    grid = -(-rows // height), -(-k // width)
    match side.scale:
        case "fp32":
            scales = torch.rand(grid, generator=SEED) + 0.5
        case "ue8m0":
            scales = torch.randint(120, 130, grid, dtype=torch.uint8, generator=SEED)
        case _:
            scales = torch.randint(1, 100, grid, dtype=torch.uint8, generator=SEED)
    outer = torch.tensor([0.3]) if side.scale == "e4m3" else None
    return numbers, scales, side, outer
