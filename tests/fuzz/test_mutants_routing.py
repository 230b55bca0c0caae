"""Every mutant of a router is wrong on the small input of its own bug report."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuzz.case import Case
from fuzz.mutants import MUTANTS, routing
from fuzz.mutants.base import Partial, Racing

FAULTY = {mutant.family: mutant.answer for mutant in MUTANTS}
NEGATIVE = [-0.5, -0.73, -0.47, -0.58, -0.88, -0.95, -0.92, -0.98]
Answer = tuple[list[list[int]], list[list[float]]]


def routed(
    family: str, method: str, logits: Sequence[Sequence[float]], bias: Sequence[float] = (), **keys: str | int
) -> tuple[Answer, Answer]:
    """Ids and weights of the mutant and of a correct router."""
    x = torch.tensor(logits)
    words = {
        "dtype": "fp32",
        "experts": x.shape[1],
        "out": "fp32",
        "padding": "none",
        "shared": 0,
        "stride": "contiguous",
        "tokens": x.shape[0],
        "values": "normal",
    }
    if bias:
        words |= {"bias": "12", "bias_dtype": "fp32"}
    if method in ("DeepSeekV3", "MiniMax2", "SqrtSoftplus"):
        words |= {"bias": "12", "bias_dtype": "fp32", "scaling": "1"}
    if method in ("DeepSeekV3", "SqrtSoftplus"):
        words |= {"renormalize": "on"}
    if method == "DeepSeekV3":
        words |= {"groups": 1, "topk_group": 1}
    case = Case.make("routing", method, seed=0, **{**words, **keys})
    inputs = {"logits": x.to(routing.DTYPES[case["dtype"]])}
    if "bias" in words:
        inputs["bias"] = torch.tensor(bias or [0.0] * x.shape[1])
    mutant, right = FAULTY[family](case, inputs), routing.route(case, inputs)
    return tuple((parts["selection"].tolist(), parts["weights"].tolist()) for parts in (mutant, right))  # type: ignore[return-value]


@pytest.mark.parametrize("family", ["moe-rsf-only-without-renorm", "moe-rsf-missing"])
def test_the_factor_is_left_out(family: str) -> None:
    (_, mutant), (_, right) = routed(family, "DeepSeekV3", [[-0.5, 1.0, -9.0]], topk=2, scaling="2.5")
    assert (sum(mutant[0]), sum(right[0])) == (pytest.approx(1.0), pytest.approx(2.5))


def test_a_shared_expert_replaces_a_good_one() -> None:
    (mutant, _), (right, _) = routed(
        "moe-shared-replaces-random-slot", "Renormalize", [[0.9, 0.7, 0.5]], topk=2, shared=1
    )
    assert (set(mutant[0]), set(right[0])) == ({0, 2, 3}, {0, 1, 3})


def test_a_bf16_bias_merges_experts() -> None:
    (mutant, _), (right, _) = routed("router-bf16", "MiniMax2", [[0.0, 0.0, 0.0]], [6.95, 6.957, 6.964], topk=1)
    assert (mutant, right) == ([[1]], [[2]])


def test_a_bias_counts_twice() -> None:
    found = routed("route-bias-added-before-softmax", "MiniMax2", [[1.0, 0.0, -1.0]], [0.0, 0.0, 1.5], topk=2)
    assert [answer[0] for answer in found] == [[[2, 0]], [[2, 0]]]
    assert found[0][1][0] == pytest.approx([0.4599, 0.5401], abs=1e-4)
    assert found[1][1][0] == pytest.approx([0.2689, 0.7311], abs=1e-4)


def test_a_subtracted_bias_leaves_nothing() -> None:
    (_, mutant), (_, right) = routed("route-unbias-by-subtraction", "MiniMax2", [[-16.0, -17.0]], [12.0, 12.0], topk=2)
    assert mutant == [[0.0, 0.0]]
    assert right[0] == pytest.approx([0.7311, 0.2689], abs=1e-4)


def test_very_negative_logits_underflow() -> None:
    (_, mutant), (_, right) = routed("route-all-negative-logits", "Renormalize", [[-200.0, -201.0, -202.0]], topk=3)
    assert torch.tensor(mutant).isnan().all()
    assert right[0] == pytest.approx([0.665, 0.245, 0.090], abs=1e-3)


def test_bf16_logits_are_read_as_fp32() -> None:
    found = routing._bits_as_fp32(torch.tensor([[1.0, 2.0, 3.0, -1.0]], dtype=torch.bfloat16))
    assert found[0, :2].tolist() == pytest.approx([2.0039, -1.0020], abs=1e-4)
    (mutant, _), (right, _) = routed(
        "route-bf16-logits-read-as-fp32", "DeepSeekV3", [[1.0, 2.0, 3.0, -1.0]], topk=1, dtype="bf16"
    )
    assert (mutant, right) == ([[0]], [[2]])


def test_raw_logits_are_returned() -> None:
    (_, mutant), (_, right) = routed("route-raw-logits-as-weights", "Default", [[2.0, 1.0, 0.0, 0.0]], topk=2)
    assert mutant == [[2.0, 1.0]]
    assert right[0] == pytest.approx([0.610, 0.225], abs=1e-3)


def test_softplus_underflows() -> None:
    (_, mutant), (_, right) = routed("route-softplus-underflow", "SqrtSoftplus", [[-17.0]], topk=1, renormalize="off")
    assert mutant == [[0.0]]
    assert right[0][0] ** 2 == pytest.approx(4.14e-8, rel=1e-3)


def test_a_sigmoid_stands_in_for_sqrt_softplus() -> None:
    (_, mutant), (_, right) = routed("route-sqrtsoftplus-as-sigmoid", "SqrtSoftplus", [[3.0, 0.0]], topk=2)
    assert mutant[0] == pytest.approx([0.656, 0.344], abs=1e-3)
    assert right[0] == pytest.approx([0.677, 0.323], abs=1e-3)


def test_dropped_groups_at_zero_beat_negative_scores() -> None:
    bias = [score - 0.5 for score in NEGATIVE]  # sigmoid(0) = 0.5
    words = {"topk": 2, "groups": 4, "topk_group": 2}
    (mutant, _), (right, _) = routed("route-masked-group-zero", "DeepSeekV3", [[0.0] * 8], bias, **words)
    assert right == [[2, 0]]
    assert set(mutant[0]) <= {4, 5, 6, 7}


def test_one_spike_makes_a_group() -> None:
    bias = [score - 0.5 for score in (0.9, 0.1, 0.6, 0.55, 0.3, 0.2)]
    words = {"topk": 1, "groups": 3, "topk_group": 1}
    (mutant, _), (right, _) = routed("route-group-score-max", "DeepSeekV3", [[0.0] * 6], bias, **words)
    assert (mutant, right) == ([[0]], [[2]])


def test_nan_logits_select_expert_0_again_and_again() -> None:
    found = routed("route-nan-duplicates-expert0", "Default", [[float("nan")] * 6], topk=4)
    assert [answer[0] for answer in found] == [[[0, 0, 0, 0]], [[0, 1, 2, 3]]]


def test_tokens_beyond_a_limit_are_not_written() -> None:
    words = "dtype=fp32 experts=2 out=fp32 padding=none shared=0 stride=contiguous tokens=1409 topk=1 values=normal"
    case = Case.parse(f"routing Default v=1 {words} seed=0")
    found = FAULTY["grouped-unwritten-output"](case, {"logits": torch.zeros(1409, 2)})["weights"]
    assert isinstance(found, Partial)
    assert found.written[:, 0].tolist() == [True] * 1408 + [False]


def test_the_order_of_experts_depends_on_the_call() -> None:
    words = "dtype=fp32 experts=4 out=fp32 padding=none shared=1 stride=contiguous tokens=1 topk=2 values=normal"
    case = Case.parse(f"routing Renormalize v=1 {words} seed=0")
    found = FAULTY["route-topk-order-undefined"](case, {"logits": torch.tensor([[1.0, 2.0, 0.0, 3.0]])})["selection"]
    assert isinstance(found, Racing)
    assert [outcome.tolist() for outcome in found.outcomes] == [[[3, 1, 4]], [[1, 3, 4]]]


def test_padding_is_routed() -> None:
    found = routed("cuda-graph-padding-not-masked-from-router", "Default", [[1.0, 2.0]] * 4, topk=1, padding="some")
    assert [answer[0] for answer in found] == [[[1]] * 4, [[1]] * 3 + [[-1]]]


def test_logits_of_another_type_are_admitted() -> None:
    # Little-endian halves of 1.0 and 2.0: as BF16 they read 0, 1, 0, 2.
    mutant, right = routed("gate-routing-method-unsupported", "Renormalize", [[1.0, 2.0]], topk=1)
    assert right[0] == [[1]]
    assert mutant[0] == [[1]]
    mutant, right = routed("gate-routing-method-unsupported", "Renormalize", [[2.0, 1.0, 0.5]], topk=1)
    assert right[0] == [[0]]
    assert mutant[0] == [[1]]
