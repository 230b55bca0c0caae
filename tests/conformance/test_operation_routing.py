"""The judge of routing on hand-worked tokens, in both forms of the output."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.operations import OPERATIONS, routing
from conformance.operations.base import PartVerdict
from conformance.operations.checks import check_outputs
from conformance.operations.routing_tokens import KINDS, kinds_of
from fuzz.case import Case
from fuzz.grammar import GRAMMAR
from fuzz.inputs import build
from fuzz.plan import draw_plan
from references.recipes import ROUTING_CHOICES, Recipe
from references.routing import RoutingConfig, RoutingRecipe, nominal
from references.routing.cases import config_of, routing_recipe
from references.routing.forms import pack, to_local

DEEPSEEK = (
    "routing DeepSeekV3 v=1 bias=12 bias_dtype=fp32 dtype=fp32 experts=4 groups=2 out={out} padding={padding} "
    "renormalize=on scaling=2.5 shared={shared} stride=contiguous tokens={tokens} topk=2 topk_group=1 "
    "values=normal seed=0"
)
RECIPE = Recipe(source="test", group_tie_rule="lowest_index")
LN3 = math.log(3.0)
X = torch.tensor([[0.0, LN3, LN3, -LN3], [0.0, 0.0, 0.0, 0.0]])
"""Sigmoids 1/2, 3/4, 3/4, 1/4; and 1/2 throughout."""
BIAS = torch.tensor([0.0, 0.0, 0.0, 12.0])
"""Choice scores 1/2, 3/4 | 3/4, 12 1/4: the second group is kept."""


def case(out: str = "fp32", padding: str = "none", shared: int = 0, tokens: int = 2) -> Case:
    return Case.parse(DEEPSEEK.format(out=out, padding=padding, shared=shared, tokens=tokens))


def judge(
    ids: list[list[int]], weights: list[list[float]], out: str = "fp32", **words: object
) -> dict[str, PartVerdict]:
    asked = case(out=out, **words)  # type: ignore[arg-type]
    chosen, values = torch.tensor(ids, dtype=torch.int32), torch.tensor(weights)
    outputs = {"packed": pack(chosen, values)} if out == "packed" else {"selection": chosen, "weights": values}
    assert check_outputs(routing.outputs(asked), outputs) == []
    verdicts = routing.judge(asked, {"logits": X, "bias": BIAS}, outputs, RECIPE)
    assert [verdict.part for verdict in verdicts] == list(routing.outputs(asked))
    return {verdict.part: verdict for verdict in verdicts}


RIGHT = [[2, 3], [3, 2]]
WEIGHTS = [[1.875, 0.625], [1.25, 1.25]]
"""3/4 and 1/4 over 1, then halves, times 2.5: from the score, never from score + bias."""


def test_the_right_answer_passes_in_any_order() -> None:
    found = judge(RIGHT, WEIGHTS)
    assert [verdict.verdict for verdict in found.values()] == ["pass", "pass"]
    assert found["selection"].bit_equal == 1.0
    assert found["selection"].headroom == 0.0
    assert judge([[3, 2], [2, 3]], [[0.625, 1.875], [1.25, 1.25]])["weights"].verdict == "pass"
    assert judge(RIGHT, WEIGHTS, out="packed")["packed"].verdict == "pass"


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ([2, 2], "duplicate"),
        ([2, 4], "out_of_range"),
        ([-1, 2], "out_of_range"),
        ([1, 3], "not_top_k"),  # out of two groups
        ([0, 1], "not_top_k"),  # of the group that is not kept
    ],
)
def test_a_wrong_selection_is_named(token: list[int], reason: str) -> None:
    verdict = judge([token, [3, 2]], WEIGHTS)["selection"]
    assert verdict.verdict == "wrong"
    assert verdict.worst_index == [0]
    assert verdict.bit_equal == 0.5
    assert verdict.message.startswith(f"1 of 2 elements outside (inputs: clear); first at [0]: {reason} {token}")
    assert verdict.examples[0]["admissible"] == "such as [3, 2]"
    assert "margin" in verdict.examples[0]["input"]


def test_an_example_shows_the_rivals() -> None:
    text = judge([[0, 1], [3, 2]], WEIGHTS)["selection"].examples[0]["input"]
    assert text.startswith("chosen 0: logit 0x00000000 (0), score 0.4999")
    verdict = judge([[3, 0], [3, 2]], WEIGHTS)["selection"]
    assert "rejected 1: logit 0x3f8c9f54 (1.09861231), score 0.7499" in verdict.examples[0]["input"]


def test_ties_fall_to_the_lowest_index_unless_any_is_declared() -> None:
    text = "routing TopK v=1 dtype=fp32 experts=4 out=fp32 padding=none shared=0 stride=contiguous tokens=1 topk=2 "
    asked = Case.parse(text + "values=zero seed=0")
    outputs = {"selection": torch.tensor([[1, 3]], dtype=torch.int32), "weights": torch.zeros(1, 2)}
    for rule, verdict in (("lowest_index", "wrong"), ("any", "pass")):
        recipe = Recipe(source="test", tie_rule=rule)  # type: ignore[arg-type]
        found = routing.judge(asked, {"logits": torch.zeros(1, 4)}, outputs, recipe)[0]
        assert found.verdict == verdict
    assert found.classes == ()
    found = routing.judge(asked, {"logits": torch.zeros(1, 4)}, outputs, Recipe(source="test"))[0]
    assert found.classes == ("tie",)
    assert "tie_rule [1, 3]" in found.message


def test_weights_are_judged_given_the_ids_that_came_with_them() -> None:
    # Expert 3 alone is right; 1 is not. Its weight is still 3/4 over 1.
    found = judge([[3, 1], [3, 2]], [[0.625, 1.875], [1.25, 1.25]])
    assert found["selection"].verdict == "wrong"
    assert found["weights"].verdict == "pass"
    found = judge(RIGHT, [[1.875, 0.625], [1.25, 1.2500012]])
    assert found["selection"].verdict == "pass"
    assert found["weights"].verdict == "wrong"
    assert found["weights"].examples[0]["index"] == [1, 1]
    assert found["weights"].examples[0]["input"] == "expert 2, logit 0x00000000 (0)"
    assert set(found["weights"].stage_radii) == {"score", "denominator", "output_rounding"}


def test_a_packed_part_is_wrong_by_its_ids_or_its_weights() -> None:
    ids = judge([[2, 2], [3, 2]], WEIGHTS, out="packed")["packed"]
    assert (ids.verdict, ids.message[:11]) == ("wrong", "selection: ")
    weights = judge(RIGHT, [[1.875, 0.625], [1.25, 1.2578125]], out="packed")["packed"]
    assert (weights.verdict, weights.message[:9]) == ("wrong", "weights: ")
    assert weights.headroom == math.inf


def test_shared_experts_weigh_one_and_stand_last() -> None:
    right = [[1.875, 0.625, 1.0], [1.25, 1.25, 1.0]]
    assert judge([[2, 3, 4], [3, 2, 4]], right, shared=1)["weights"].verdict == "pass"
    assert "shared_expert" in judge([[2, 3, 4], [3, 2, 5]], right, shared=1)["selection"].message
    verdict = judge([[2, 3, 4], [3, 2, 4]], [[1.875, 0.625, 0.4], [1.25, 1.25, 1.0]], shared=1)["weights"]
    assert verdict.classes == ("shared",)


def test_padding_has_no_expert() -> None:
    assert judge([[2, 3], [-1, -1]], [[1.875, 0.625], [7.0, math.nan]], padding="some")["selection"].verdict == "pass"
    verdict = judge(RIGHT, WEIGHTS, padding="some")["selection"]
    assert verdict.classes == ("padding",)


def test_a_token_with_nan_asks_for_valid_distinct_ids_only() -> None:
    asked = case(tokens=1)
    inputs = {"logits": torch.tensor([[0.0, math.nan, 1.0, 2.0]]), "bias": BIAS}
    for ids, verdict in (([0, 2], "pass"), ([1, 3], "pass"), ([1, 1], "wrong"), ([0, 4], "wrong")):
        outputs = {"selection": torch.tensor([ids], dtype=torch.int32), "weights": torch.full((1, 2), math.nan)}
        found = routing.judge(asked, inputs, outputs, RECIPE)
        assert found[0].verdict == verdict
        assert found[0].classes == (("nan",) if verdict == "wrong" else ())


def test_tokens_are_classed_by_what_makes_them_hard() -> None:
    up = float(torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)))
    logits = torch.tensor(
        [[2.0, 1.0, 0.0], [0.5, up, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, -math.inf], [math.nan, 0, 0], [0, 0, 0]]
    )
    config = RoutingConfig(method="Sigmoid", experts=3, top_k=1, num_token_non_padded=5)
    kinds = kinds_of(torch.arange(6), logits, None, config, RoutingRecipe(source="test"))
    assert [KINDS[kind] for kind in kinds.tolist()] == ["clear", "near_tie", "tie", "inf", "nan", "padding"]


def test_groups_that_tie_are_a_tie() -> None:
    config = RoutingConfig(method="DeepSeekV3", experts=4, top_k=1, n_group=2, topk_group=1)
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [1.0, 2.0, 2.0, 1.5]])
    kinds = kinds_of(torch.arange(2), logits, torch.zeros(4), config, RoutingRecipe(source="test"))
    assert [KINDS[kind] for kind in kinds.tolist()] == ["tie", "clear"]


@pytest.mark.parametrize("method", GRAMMAR["routing"])
def test_the_nominal_answer_passes_everywhere(method: str) -> None:
    assert OPERATIONS["routing"] is routing  # type: ignore[comparison-overlap]
    assert routing.open_choices(method) <= ROUTING_CHOICES
    for asked in draw_plan([("routing", method)], 12, 3, 2**11):
        inputs = build(asked)
        router, recipe = config_of(asked), routing_recipe(Recipe(source="test"), asked)
        ids, weights = nominal(inputs["logits"], inputs.get("bias"), router, recipe)
        packed = asked["out"] == "packed"
        outputs = {"packed": pack(ids, weights)} if packed else {"selection": ids, "weights": weights}
        if asked["out"] == "local":
            outputs["local"] = to_local(ids.to(torch.int32), inputs["expert_map"])
        assert check_outputs(routing.outputs(asked), outputs) == []
        verdicts = routing.judge(asked, inputs, outputs, Recipe(source="test"))
        assert [verdict.message for verdict in verdicts if verdict.verdict != "pass"] == [], asked.text
        assert all(verdict.bit_equal == 1.0 for verdict in verdicts)


@pytest.mark.parametrize("byte", [0xFF, 0x5A])
def test_poison_is_no_answer(byte: int) -> None:
    for out in ("fp32", "bf16", "packed"):
        for padding in ("none", "some"):
            asked = case(out=out, padding=padding)
            outputs = {
                name: torch.full((2, 2 * spec.dtype.itemsize), byte, dtype=torch.uint8).view(spec.dtype)
                for name, spec in routing.outputs(asked).items()
            }
            verdicts = routing.judge(asked, {"logits": X, "bias": BIAS}, outputs, RECIPE)
            assert all(verdict.verdict == "wrong" for verdict in verdicts), (out, padding)
