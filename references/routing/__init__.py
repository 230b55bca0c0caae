"""Routing: from router logits to expert ids and weights, answered with the set of admissible selections.

One concept a file: `methods` (what each method computes), `recipe` (what a backend may choose), `scores` (certified
intervals), `ties` and `selection` (admissible sets), `weights` (enclosures given the ids), `forms` (packed ids, expert
maps), `answer` (`nominal`), `selection_judge`, `weight_judge`. The contract is docs/routing.md.
"""

from references.routing.answer import nominal
from references.routing.methods import METHODS, Method, RoutingConfig
from references.routing.recipe import RoutingRecipe
from references.routing.selection_judge import Reason, SelectionJudgement, judge_selection, selection_admissible
from references.routing.weight_judge import WeightJudgement, judge_weights

__all__ = [
    "METHODS",
    "Method",
    "Reason",
    "RoutingConfig",
    "RoutingRecipe",
    "SelectionJudgement",
    "WeightJudgement",
    "judge_selection",
    "judge_weights",
    "nominal",
    "selection_admissible",
]
