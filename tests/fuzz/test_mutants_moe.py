"""Every mutant of an expert layer is wrong on the small input of its own bug report."""

from __future__ import annotations

import pytest
import torch

from fuzz.case import Case
from fuzz.mutants import MUTANTS, correct, moe
from references.elements import E2M1, encode
from references.packing import pack_fp4

FAULTY = {mutant.family: mutant.answer for mutant in MUTANTS}


def one_unit(
    family: str,
    x: list[list[float]],
    gate: list[float],
    up: list[float],
    *,
    ids: list[list[int]] | None = None,
    weights: list[list[float]] | None = None,
    **words: str,
) -> tuple[list[list[float]], list[list[float]]]:
    """FP32 outputs of the mutant and of a correct layer: BF16, hidden and intermediate size 1, W2 = 1 everywhere.

    gate, up: of each expert. ids, weights: expert 0 with weight 1 for every token if absent.
    """
    ids = ids or [[0]] * len(x)
    weights = weights or [[1.0] * len(ids[0])] * len(x)
    given = {"gate": "first", "ids": "spread", "limit": "none", "scaling": "1", "weight": "output", **words}
    case = Case.make(
        "moe",
        "bf16",
        seed=0,
        experts=len(gate),
        hidden=1,
        intermediate=1,
        out="fp32",
        scale="none",
        tokens=len(x),
        topk=len(ids[0]),
        values="normal",
        **given,
    )
    inputs = {
        "x": torch.tensor(x, dtype=torch.bfloat16),
        "ids": torch.tensor(ids, dtype=torch.int32),
        "weights": torch.tensor(weights),
        "w1": torch.tensor([[[g], [u]] for g, u in zip(gate, up, strict=True)], dtype=torch.bfloat16),
        "w2": torch.ones(len(gate), 1, 1, dtype=torch.bfloat16),
    }
    found = FAULTY[family](case, inputs)["output"], moe.layer(case, inputs)["output"]
    return found[0].tolist(), found[1].tolist()


@pytest.mark.parametrize(
    ("family", "gate", "up", "words", "faulty", "right"),
    [
        # silu(2) * -1 = -1.7616 and silu(-1) * 2 = -0.5379; the intermediate is rounded to BF16.
        ("gate-up-order", 2.0, -1.0, {}, -0.5379, -1.7616),
        # The report has a limit of 10; at 7, silu(7) * -7 = -48.955.
        ("swiglu-clamp-missing", 12.0, -11.0, {"limit": "7"}, -131.999, -48.955),
        ("moe-rsf-twice", 1.0, 1.0, {"scaling": "2.5"}, 6.25 * 0.7311, 2.5 * 0.7311),
    ],
)
def test_a_step_is_another(
    family: str, gate: float, up: float, words: dict[str, str], faulty: float, right: float
) -> None:
    found = one_unit(family, [[1.0]], [gate], [up], **words)
    assert found[0][0][0] == pytest.approx(faulty, rel=2**-8)
    assert found[1][0][0] == pytest.approx(right, rel=2**-8)


@pytest.mark.parametrize(("family", "faulty"), [("moe-router-weight-twice", 0.3655), ("weight-on-output", 1.7616)])
def test_a_weight_on_the_input_is_not_on_the_output(family: str, faulty: float) -> None:
    # x = 2, w = 0.5, f(x) = silu(x) x: f(1) = 0.7311.
    found = one_unit(family, [[2.0]], [1.0], [1.0], weights=[[0.5]], weight="input")
    assert found[0][0][0] == pytest.approx(faulty, rel=2**-8)
    assert found[1][0][0] == pytest.approx(0.7311, rel=2**-8)


def test_no_expert_becomes_the_last_one() -> None:
    found = one_unit("moe-expert-map-minus-one-wraps", [[2.0]], [1.0, 2.0], [1.0, 1.0], ids=[[-1]])
    assert found[1] == [[0.0]]
    # silu(4) * 2, the last expert.
    assert found[0][0][0] == pytest.approx(7.856, rel=2**-8)


def test_one_token_of_an_expert_is_left() -> None:
    found = one_unit("moe-align-drops-tokens", [[1.0]] * 4, [1.0], [1.0])
    assert [row[0] > 0 for row in found[0]] == [True, False, False, False]
    assert [row[0] > 0 for row in found[1]] == [True] * 4


@pytest.mark.parametrize(
    ("terms", "faulty", "right"),
    [([256.0, *[1.0] * 7], 256.0, 263.0), ([1.0, 256.0, 1.0, 1.0, 1.0, -256.0, 1.0, 1.0], 2.0, 6.0)],
)
def test_small_terms_are_lost_in_bf16(terms: list[float], faulty: float, right: float) -> None:
    # Experts with a gate of 64, where silu(64) * up is 64 up.
    found = one_unit(
        "moe-sum-bf16-accumulate",
        [[1.0]],
        [64.0] * 8,
        [1.0 / 64.0] * 8,
        ids=[list(range(8))],
        weights=[terms],
    )
    assert found == ([[faulty]], [[right]])


def test_up_has_the_global_scale_of_another_shard() -> None:
    case = Case.parse(
        "moe nvfp4 v=1 experts=2 gate=first hidden=2 ids=spread intermediate=2 limit=none out=fp32 scale=e4m3 "
        "scaling=1 tokens=1 topk=1 values=normal weight=output seed=0"
    )
    ones = pack_fp4(encode(torch.ones(2, 4, 2), E2M1).view(8, 2)).view(2, 4, 1)
    inputs = {"w1": ones, "w1_scales": torch.full((2, 4, 1), 0x38, dtype=torch.uint8)}
    inputs["w1_global_scale"] = torch.tensor([4.83e-5, 3.85e-5])
    config = moe.config_of(case)
    mutant = moe.first_weight(config, inputs, 1, moe.Steps(up_shard=lambda expert: 0))
    right = moe.first_weight(config, inputs, 1, moe.CORRECT)
    assert (mutant / right)[:, 0].tolist() == pytest.approx([1.0, 1.0, 1.2545, 1.2545], rel=1e-3)


def test_a_maximum_counts_a_shard_that_was_never_written() -> None:
    words = "block=tensor dtype=fp32 k=1 m=1 scale=fp32 stride=contiguous values=normal"
    case = Case.parse(f"quantize fp8_per_tensor v=1 {words} seed=0")
    inputs = {"x": torch.ones(1, 1)}
    found = FAULTY["moe-nongated-treated-as-gated"](case, inputs)["scales"], correct.quantize(case, inputs)["scales"]
    assert [float(scale) for scale in found] == pytest.approx([1000 / 448, 1 / 448])  # type: ignore[arg-type]
