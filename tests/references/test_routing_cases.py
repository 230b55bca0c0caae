"""A case's router, and the routing choices of the general recipe."""

import dataclasses

import pytest

from fuzz.case import Case
from fuzz.grammar import GRAMMAR, ROUTERS
from references.recipes import ROUTING_CHOICES, Recipe
from references.routing import METHODS, RoutingConfig, RoutingRecipe
from references.routing.cases import config_of, real_tokens, routing_recipe, weight_name
from references.routing.methods import MAX_EXPERTS, MAX_TOP_K

DEEPSEEK = Case.parse(
    "routing DeepSeekV3 v=1 bias=0.1 bias_dtype=bf16 dtype=fp32 experts=256 groups=8 out=packed padding=some "
    "renormalize=off scaling=2.5 shared=1 stride=contiguous tokens=17 topk=8 topk_group=4 values=ties seed=5"
)


def test_a_router_has_every_parameter_of_its_case():
    assert config_of(DEEPSEEK) == RoutingConfig(
        method="DeepSeekV3",
        experts=256,
        top_k=8,
        n_group=8,
        topk_group=4,
        renormalize=False,
        scaling_factor=2.5,
        shared_experts=1,
        num_token_non_padded=12,
    )


def test_keys_that_a_method_lacks_are_its_own_rule():
    text = "routing Llama4 v=1 dtype=bf16 experts=16 out=fp16 padding=none shared=0 stride=offset tokens=1 topk=1 "
    assert config_of(Case.parse(text + "values=zero seed=0")) == RoutingConfig(method="Llama4", experts=16, top_k=1)


@pytest.mark.parametrize(("tokens", "real"), [(1, 0), (2, 1), (4, 3), (17, 12)])
def test_padding_is_the_last_quarter(tokens, real):
    assert real_tokens(DEEPSEEK.replace(tokens=tokens)) == real
    assert real_tokens(DEEPSEEK.replace(tokens=tokens, padding="none")) == tokens


@pytest.mark.parametrize(("out", "dtype"), [("packed", "bf16"), ("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")])
def test_weights_have_the_dtype_that_the_case_asks_for(out, dtype):
    assert weight_name(DEEPSEEK.replace(out=out)) == dtype
    assert routing_recipe(Recipe(source="s"), DEEPSEEK.replace(out=out)) == RoutingRecipe(
        source="s", weight_dtype=dtype
    )


def test_the_general_recipe_has_every_choice_with_the_same_default():
    general = {field.name: field.default for field in dataclasses.fields(Recipe)}
    router = {field.name: field.default for field in dataclasses.fields(RoutingRecipe)}
    del router["source"], router["weight_dtype"]
    assert router == {name: general[name] for name in ROUTING_CHOICES}


def test_choices_reach_the_router():
    recipe = Recipe(source="s", tie_rule="any", denominator="max", exp_slope=2.0**-24, division_error=2.0**-22)
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.only(ROUTING_CHOICES) == recipe
    assert (
        recipe.text(ROUTING_CHOICES) == f"denominator=max division_error={2.0**-22} exp_slope={2.0**-24} tie_rule=any"
    )
    found = routing_recipe(recipe, DEEPSEEK)
    assert (found.tie_rule, found.denominator, found.exp_slope, found.division_error) == (
        "any",
        "max",
        2.0**-24,
        2.0**-22,
    )


@pytest.mark.parametrize("change", [{"division_error": 0.0}, {"exp_error": 0.5}, {"tie_rule": "highest"}])
def test_impossible_choices_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Recipe(source="s", **change)


@pytest.mark.parametrize("method", METHODS)
def test_the_grammar_asks_for_what_the_method_has(method):
    rule, router, keys = METHODS[method], ROUTERS[method], GRAMMAR["routing"][method].keys
    assert list(ROUTERS) == list(METHODS)
    assert router.biased == rule.biased == ("bias" in keys)
    assert router.grouped == (rule.group_score != "none") == ("groups" in keys)
    assert router.pair == (rule.group_score == "sum2")
    assert router.scaled == rule.scaled == ("scaling" in keys)
    assert router.renormalize == (rule.renormalize is None) == ("renormalize" in keys)
    assert keys["topk"].most == router.max_topk == rule.max_top_k <= MAX_TOP_K
    assert keys["experts"].most == MAX_EXPERTS
