"""Routing: from router logits to expert ids and weights, answered with the set of admissible selections.

One concept a file: `methods` (what each method computes), `recipe` (what a backend may choose), `scores` (certified
intervals), `ties` and `selection` (admissible sets), `weights` (enclosures given the ids), `forms` (packed ids, expert
maps), `judge` (the entry points `nominal`, `judge_selection`, `judge_weights`). The contract is docs/routing.md.
"""

from references.routing.judge import judge_selection, judge_weights, nominal, selection_admissible
from references.routing.methods import METHODS, Method, RoutingConfig
from references.routing.recipe import RoutingRecipe

__all__ = [
    "METHODS",
    "Method",
    "RoutingConfig",
    "RoutingRecipe",
    "judge_selection",
    "judge_weights",
    "nominal",
    "selection_admissible",
]
