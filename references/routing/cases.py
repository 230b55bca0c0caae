"""What the text of a ``routing`` case says of its router (keys: docs/routing.md)."""

from __future__ import annotations

from typing import get_args

from references.backend import CaseLike
from references.recipes import ROUTING_CHOICES, Recipe
from references.routing.methods import METHODS, RoutingConfig
from references.routing.recipe import RoutingRecipe, WeightDtype


def config_of(case: CaseLike) -> RoutingConfig:
    """The router of a case."""
    rule = METHODS[case.variant]
    return RoutingConfig(
        method=case.variant,
        experts=case.integer("experts"),
        top_k=case.integer("topk"),
        n_group=case.integer("groups") if rule.group_score != "none" else 1,
        topk_group=case.integer("topk_group") if rule.group_score != "none" else 1,
        renormalize=case["renormalize"] == "on" if rule.renormalize is None else None,
        scaling_factor=float(case["scaling"]) if rule.scaled else 1.0,
        shared_experts=case.integer("shared"),
        num_token_non_padded=real_tokens(case) if case["padding"] == "some" else None,
    )


def real_tokens(case: CaseLike) -> int:
    """Tokens that are no padding: with ``padding=some`` the first three quarters, rounded down."""
    tokens = case.integer("tokens")
    return tokens * 3 // 4 if case["padding"] == "some" else tokens


def weight_name(case: CaseLike) -> WeightDtype:
    """The dtype of the weights: ``fp32`` (beside local ids too), ``bf16`` (the packed form too) or ``fp16``."""
    word = {"packed": "bf16", "local": "fp32"}.get(case["out"], case["out"])
    return next(name for name in get_args(WeightDtype) if name == word)


def routing_recipe(recipe: Recipe, case: CaseLike) -> RoutingRecipe:
    """The router's part of a backend's recipe, with the dtype of the weights that the case asks for."""
    chosen = {name: getattr(recipe, name) for name in ROUTING_CHOICES}
    return RoutingRecipe(source=recipe.source, weight_dtype=weight_name(case), **chosen)
