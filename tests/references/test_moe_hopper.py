"""What Hopper's FP8 unit may lose on operands in doubt: by hand, and against the unit's exact arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from references.accumulators import sums
from references.blocks import quantize
from references.elements import E4M3FN, encode
from references.gemm_formats import Operand, Stored, operand, sides
from references.moe import hopper, product, requantise
from references.moe.product import Uncertain
from references.recipes import Recipe
from references.schemes import scheme
from references.tensor_cores import HOPPER_FP8, fma_fp32, multiply_fp32, tensor_core_dot

HOPPER = Recipe(source="a test", accumulator="hopper_fp8")
F64 = torch.float64


def tensor(values: Tensor) -> Operand:
    """Numbers of E4M3 under scales of one."""
    ones = torch.full((values.shape[0], values.shape[1] // 32), 127, dtype=torch.uint8)
    return operand(encode(values.float(), E4M3FN), ones, sides("mxfp8", "ue8m0")[0])


def lost(a: Tensor, b: Tensor, width: int) -> Tensor:
    left, right = tensor(a), tensor(b)
    return hopper.losses(left, torch.zeros_like(left.values), left, right, sums(left, right).unit, width)


def test_nothing_is_lost_on_small_integers() -> None:
    a = torch.arange(-8, 8).repeat(4)[None].to(F64)
    assert lost(a, a, 64).tolist() == [[0.0]]


def test_one_small_term_beside_a_large_one_by_hand() -> None:
    """256 * 256 = 2^16 and 2^-9 * 1, which counts as 2^-6: it may go, and the sum may lose what is below 2^3."""
    a, b = torch.zeros(1, 32, dtype=F64), torch.zeros(1, 32, dtype=F64)
    a[0, 0], a[0, 1], b[0, 0], b[0, 1] = 256.0, 2.0**-9, 256.0, 1.0
    assert lost(a, b, 32).item() == pytest.approx(2.0**-6 + 2.0**3, rel=1e-9)
    assert tensor_core_dot(a, b, "e4m3", HOPPER_FP8).item() == 2.0**16  # what was lost: 2^-9
    a[0, 1] = 8.0  # a multiple of 2^3, as far as a cut at 2^16 reaches
    assert lost(a, b, 32).item() == 0.0


def test_the_running_value_counts_in_the_next_group() -> None:
    """The second group holds 2^-9 alone: it goes where the first left 2^16 behind, which may be cut on its way."""
    a, b = torch.zeros(1, 64, dtype=F64), torch.zeros(1, 64, dtype=F64)
    a[0, 0], b[0, 0], a[0, 32], b[0, 32] = 256.0, 256.0, 2.0**-9, 1.0
    assert lost(a, b, 64).item() == pytest.approx(2.0**3 + (2.0**-6 + 2.0**3 + 2.0**3), rel=1e-9)
    assert lost(a, b, 32).item() == pytest.approx(2.0**3, rel=1e-9)  # blocks of their own


def test_a_scale_that_is_no_power_of_two_takes_the_bounds_themselves() -> None:
    """1.75 times the numbers above: the exponent of 1.75 * 2^16 is 2^16, but the unit cuts at 1.75 * 2^3."""
    codes = torch.zeros(1, 32, dtype=F64)
    codes[0, 0], codes[0, 1] = 256.0, 2.0**-9
    side = sides("fp8_per_tensor", "fp32")[0]
    left = operand(encode(codes.float(), E4M3FN), torch.tensor([[1.75]]), side)
    codes[0, 1] = 1.0
    right = operand(encode(codes.float(), E4M3FN), torch.tensor([[1.0]]), side)
    found = hopper.losses(left, torch.zeros_like(left.values), left, right, sums(left, right).unit, 32)
    assert found.item() == pytest.approx(1.75 * (2.0**-6 + 2.0**3), rel=1e-6)


def answers(values: Tensor, scales: Tensor, b: Operand, *, every: int) -> Tensor:
    """An FP32 accumulator that takes scaled sums of Hopper's unit, block by block of K."""
    total = values.new_zeros(values.shape[0], b.values.shape[0])
    for start in range(0, values.shape[1], every):
        ks = slice(start, start + every)
        dot = tensor_core_dot(values[:, ks], b.codes[:, ks], "e4m3", HOPPER_FP8)
        left, right = scales[:, start // 128, None].expand_as(dot), b.scales[:, start // 128].expand_as(dot)
        total = fma_fp32(multiply_fp32(dot, left), right, total)
    return total


@pytest.mark.parametrize("policy", ["fp32", "ceil"])
@pytest.mark.parametrize("doubt", [0.0, 2.0**-8])
@pytest.mark.parametrize("shape", ["normal", "outliers", "cancelling", "small"])
def test_candidates_stay_inside_a_radius_that_is_not_far_off(policy: str, doubt: float, shape: str) -> None:
    seed = torch.Generator().manual_seed(len(shape) + int(doubt * 2**20))
    middle, weight = (torch.randn(rows, 320, generator=seed, dtype=F64) for rows in (6, 40))
    if shape == "outliers":
        middle *= torch.exp2(torch.randint(-12, 12, middle.shape, generator=seed).double())
    if shape == "cancelling":
        middle[:, 160:], weight[:, 160:] = -middle[:, :160].flip(1), weight[:, :160].flip(1)
    if shape == "small":
        middle[:, 64:] *= 2.0**-14  # subnormal codes beside large ones
    words = ("deepseek_fp8", "ue8m0" if policy == "ceil" else "fp32")
    first, second = sides(*words)
    stored = quantize(weight.float(), scheme("deepseek_fp8", "128x128", policy), HOPPER)
    matrix = Stored(stored.payload, stored.scales, second)
    b, radius = matrix.decoded(), middle.abs() * doubt
    scheme_ = scheme("deepseek_fp8", "1x128", policy)
    a = requantise(middle - radius, middle + radius, middle, scheme_, first, HOPPER, None)
    found = product(a, matrix, HOPPER, a.reach[None])
    bound, largest = found.carried[0] + found.accumulation, 0.0
    for trial in range(3):
        h = middle + (2 * torch.rand(middle.shape, generator=seed, dtype=F64) - 1) * radius * (trial > 0)
        given = quantize(h.float(), scheme_, HOPPER)
        left = operand(given.payload, given.scales, first)
        distance = (answers(left.codes, left.scales, b, every=128) - found.centre).abs()
        assert bool((distance <= bound).all())
        largest = max(largest, float((distance / bound).max()))
    if doubt == 0.0:
        assert largest > 0.1


def test_it_is_far_below_what_magnitudes_allow() -> None:
    """34 * 2^-13 of all that is in an instruction, four of them to a block, is what magnitudes alone give."""
    seed = torch.Generator().manual_seed(5)
    a, b = (torch.randn(rows, 1024, generator=seed, dtype=F64) for rows in (8, 64))
    left, right = tensor(a), tensor(b)
    found = lost(a, b, 128)
    magnitudes = 4 * 34 * 2.0**-13 * (left.size @ right.size.T)
    assert float((magnitudes / found).min()) > 50


def codes_of(rows: int, k: int, seed: int) -> Tensor:
    """Any codes but NaN, or codes of which few are large."""
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (rows, k), generator=source, dtype=torch.int64)
    if seed % 2:
        drawn = (drawn & 0x80) | ((drawn & 0x7F) // torch.randint(1, 9, (rows, k), generator=source))
    return torch.where(drawn & 0x7F == 0x7F, drawn - 1, drawn).to(torch.uint8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every", [128, 330])
def test_any_codes_stay_inside_whether_each_is_looked_at_or_not(
    seed: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dot products of blocks of K, on codes in doubt by one step, without scales."""
    side = sides("fp8_per_tensor", "fp32")[0]
    one, raw = torch.ones(1, 1), codes_of(5, 330, seed)
    nominal, b = operand(raw, one, side), operand(codes_of(9, 330, seed + 50), one, side)
    others = [raw]
    for step in (-1, 1):
        moved = (raw & 0x80) | ((raw & 0x7F).to(torch.int16) + step).clamp(0, 0x7E).to(torch.uint8)
        others.append(
            torch.where(torch.rand(raw.shape, generator=torch.Generator().manual_seed(seed)) < 0.5, moved, raw)
        )
    candidates = [operand(item, one, side) for item in others]
    reach = torch.stack([(item.values - nominal.values).abs() for item in candidates]).amax(0)
    known = Uncertain(nominal, reach, nominal.scales)
    for uncertain, among in ((known, candidates), (Uncertain.exactly(nominal), candidates[:1])):
        a = uncertain.stand_in if uncertain.moved is not None else nominal
        bounds = []
        for most in (2**30, 0):
            monkeypatch.setitem(hopper.COUNTED, "cpu", most)
            bounds.append(hopper.losses(nominal, uncertain.reach, a, b, sums(a, b).unit, every))
        assert bool((bounds[0] <= bounds[1] * (1 + 1e-9)).all())
        for item in among:
            distance = torch.zeros_like(bounds[0])
            for start in range(0, 330, every):
                ks = slice(start, start + every)
                left, right = item.codes[:, ks], b.codes[:, ks]
                distance += tensor_core_dot(left, right, "e4m3", HOPPER_FP8) - left @ right.T
            assert bool((distance.abs() <= bounds[0]).all())
