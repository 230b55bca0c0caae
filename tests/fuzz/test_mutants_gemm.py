"""Every mutant of a GEMM is wrong on the small input of its own bug report."""

from __future__ import annotations

import pytest
import torch

from fuzz.case import Case
from fuzz.mutants import MUTANTS, gemm
from fuzz.mutants.base import Racing, Trap

FAULTY = {mutant.family: mutant.answer for mutant in MUTANTS}
ONE = 0x38


def multiplied(family: str, variant: str, scale: str, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 outputs of the mutant and of a correct implementation."""
    (m, k), n = inputs["a"].shape, inputs["b"].shape[0]
    case = Case.make("gemm", variant, seed=0, k=k, layout="plain", m=m, n=n, out="fp32", scale=scale, values="normal")
    mutant = FAULTY[family](case, inputs)["output"]
    return mutant, gemm.gemm(case, inputs)["output"]


def ones(rows: int, k: int) -> torch.Tensor:
    return torch.full((rows, k), ONE, dtype=torch.uint8)


def bf16(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bfloat16)


def deepseek(family: str, m: int, n: int, k: int, a_scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    b_scales = torch.ones(-(-n // 128), -(-k // 128))
    given = {"a": ones(m, k), "b": ones(n, k), "a_scales": a_scales, "b_scales": b_scales}
    return multiplied(family, "deepseek_fp8", "fp32", **given)


def test_a_tile_has_the_scales_of_its_first_block() -> None:
    scales = {"a_scales": torch.tensor([[127, 130]], dtype=torch.uint8), "b_scales": torch.tensor([[127, 127]]).byte()}
    found = multiplied("gemm-k-tile-larger-than-scale-group", "mxfp8", "ue8m0", a=ones(1, 64), b=ones(1, 64), **scales)
    assert [float(output) for output in found] == [64.0, 288.0]


def test_the_last_partial_block_is_not_scaled() -> None:
    found = deepseek("gemm-trailing-scale-block-dropped", 1, 1, 160, torch.full((1, 2), 0.5))
    assert [float(output) for output in found] == [96.0, 80.0]


def test_a_tile_is_stored_over_the_next_row() -> None:
    a = bf16(*([float(row)] * 64 for row in (1, 2, 4, 8)))
    b = torch.ones(33, 64, dtype=torch.bfloat16)
    mutant, right = multiplied("gemm-store-without-n-mask", "bf16", "none", a=a, b=b)
    assert right[:, 0].tolist() == [64.0, 128.0, 256.0, 512.0]
    assert mutant[:, 0].tolist() == [64.0, 64.0, 128.0, 256.0]
    assert mutant[:, 32].tolist() == right[:, 32].tolist()


def test_a_b_scale_keeps_the_wave_before() -> None:
    a_scales = torch.full((129, 1), 2.0)
    a_scales[128] = 4.0
    found = deepseek("gemm-b-scale-modified-in-place", 129, 1, 128, a_scales)
    assert [float(output[128, 0]) for output in found] == [1024.0, 512.0]


def test_a_group_is_read_once_for_128_rows() -> None:
    words = "grouping=contiguous groups=2 k=1 layout=plain m=256 n=1 out=fp32 scale=none values=normal seed=0"
    case = Case.parse(f"grouped_gemm bf16 v=1 {words}")
    inputs = {
        "a": torch.ones(256, 1, dtype=torch.bfloat16),
        "b": torch.tensor([[[3.0]], [[5.0]]], dtype=torch.bfloat16),
        "m_indices": (torch.arange(256) >= 100).to(torch.int32),
    }
    mutant = FAULTY["gemm-contiguous-unaligned-group"](case, inputs)["output"]
    right = gemm.grouped_gemm(case, inputs)["output"]
    assert (mutant != right).view(-1).nonzero().view(-1).tolist() == list(range(100, 128))


def test_partial_sums_lose_what_cancels_later() -> None:
    ones_ = bf16([1.0] * 4)
    found = multiplied("gemm-splitk-partials-in-bf16", "bf16", "none", a=ones_, b=bf16([1000.0, 0.5, -1000.0, 0.0]))
    assert [float(output) for output in found] == [0.0, 0.5]


def test_every_eighth_column_is_nan() -> None:
    mutant, right = deepseek("gemm-fp8-dot-miscompiled-columns", 1, 16, 128, torch.ones(1, 1))
    assert mutant.isnan()[0].nonzero().view(-1).tolist() == [0, 8]
    assert not right.isnan().any()


def test_every_row_has_the_scale_of_the_first() -> None:
    mutant, right = deepseek("groupwise-m-scale-only-first-row", 2, 1, 128, torch.tensor([[1.0], [2.0]]))
    assert (mutant.view(-1).tolist(), right.view(-1).tolist()) == ([128.0, 128.0], [128.0, 256.0])


def test_one_bucket_forgets_the_last_block() -> None:
    for rows, wanted in ((2, 256.0), (4, 128.0), (5, 256.0)):
        mutant, right = deepseek("bad-tactic", rows, 1, 256, torch.ones(rows, 2))
        assert (float(mutant[0, 0]), float(right[0, 0])) == (wanted, 256.0)


def test_a_stale_scale_arrives_in_one_of_two_calls() -> None:
    case = Case.parse("gemm deepseek_fp8 v=1 k=256 layout=plain m=1 n=1 out=fp32 scale=fp32 values=normal seed=0")
    inputs = {"a": ones(1, 256), "b": ones(1, 256), "a_scales": torch.tensor([[1.0, 2.0]])}
    found = FAULTY["gemm-small-m-scale-race"](case, {**inputs, "b_scales": torch.tensor([[1.0, 4.0]])})["output"]
    assert isinstance(found, Racing)
    assert [float(outcome) for outcome in found.outcomes] == [128.0 + 1024.0, 256.0 + 512.0]


def grouped(case: Case, m_indices: torch.Tensor) -> dict[str, torch.Tensor]:
    """BF16 operands of one column: A ones, B of group g is g + 1."""
    rows, groups = len(m_indices), case.integer("groups")
    b = torch.arange(1, groups + 1).to(torch.bfloat16).view(groups, 1, 1)
    return {"a": torch.ones(rows, 1, dtype=torch.bfloat16), "b": b, "m_indices": m_indices.to(torch.int32)}


def test_a_group_of_one_block_reads_the_next_one() -> None:
    words = "grouping=contiguous_128 groups=4 k=1 layout=plain m=768 n=1 out=fp32 scale=none values=normal seed=0"
    case = Case.parse(f"grouped_gemm bf16 v=1 {words}")
    sizes = torch.tensor([256, 128, 128, 256])
    found = FAULTY["gemm-k-grouped-descriptor-race"](case, grouped(case, torch.arange(4).repeat_interleave(sizes)))
    race = found["output"]
    assert isinstance(race, Racing)
    blocks = [outcome.view(6, 128)[:, 0].tolist() for outcome in race.outcomes]
    assert blocks == [[1, 1, 2, 3, 4, 4], [1, 1, 3, 4, 4, 4]]


def test_minus_one_is_an_address_outside() -> None:
    words = "grouping=contiguous groups=2 k=1 layout=plain m=3 n=1 out=fp32 scale=none values=normal seed=0"
    case = Case.parse(f"grouped_gemm bf16 v=1 {words}")
    faulty = FAULTY["gemm-minus-one-index-not-skipped"]
    assert faulty(case, grouped(case, torch.tensor([0, 1, 1])))["output"].tolist() == [[1.0], [2.0], [2.0]]  # type: ignore[union-attr]
    with pytest.raises(Trap, match="element -1 of 2"):
        faulty(case, grouped(case, torch.tensor([0, 1, -1])))


def test_a_kernel_for_whole_tiles_lacks_its_instructions() -> None:
    for k in (192, 256):
        given = {"a": bf16([1.0] * k), "b": bf16([1.0] * k)}
        words = f"k={k} layout=plain m=1 n=1 out=fp32 scale=none values=normal"
        case = Case.parse(f"gemm bf16 v=1 {words} seed=0")
        if k == 256:
            with pytest.raises(Trap):
                FAULTY["gate-hardcoded-sm100-instructions"](case, given)
        else:
            assert float(FAULTY["gate-hardcoded-sm100-instructions"](case, given)["output"]) == k  # type: ignore[arg-type]
