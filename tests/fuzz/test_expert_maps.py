"""Maps of expert parallelism: what each kind holds, and what inputs, anatomy and the judges make of them."""

import pytest
import torch

from conformance.backends.torch_ops import TorchBackend
from conformance.operations import OPERATIONS
from fuzz.anatomy import drop, parts, problem
from fuzz.case import Case
from fuzz.expert_maps import KINDS, expert_map
from fuzz.grammar import MOE_SCALES, RANKS, ROUTERS
from fuzz.inputs import build
from fuzz.mutants import moe as layers
from fuzz.mutants import routing as routers
from fuzz.plan import draw_plan
from references.recipes import Recipe

RECIPE = Recipe(source="test", group_tie_rule="lowest_index")
TEXTS = [f"case {number}" for number in range(40)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [1, 2, 3, 8, 9, 64])
def test_a_rank_holds_its_share_and_numbers_it_from_zero(kind, experts):
    sizes = set()
    for text in TEXTS:
        found = expert_map(text, experts, kind, shared=2)
        assert found.dtype == torch.int32
        assert len(found) == experts + 2
        here = found[found >= 0].sort().values
        assert here.tolist() == list(range(len(here)))
        assert found[experts:].tolist() == [len(here) - 2, len(here) - 1]
        sizes.add(len(here) - 2)
    assert sizes <= {experts // RANKS, -(-experts // RANKS)}


def test_the_kinds_by_hand():
    linear = {tuple(expert_map(text, 6, "linear").tolist()) for text in TEXTS}
    assert linear == {(0, 1, -1, -1, -1, -1), (-1, -1, 0, 1, -1, -1), (-1, -1, -1, -1, 0, 1)}
    robin = {tuple(expert_map(text, 6, "round_robin").tolist()) for text in TEXTS}
    assert robin == {(0, -1, -1, 1, -1, -1), (-1, 0, -1, -1, 1, -1), (-1, -1, 0, -1, -1, 1)}
    shuffled = {tuple(expert_map(text, 6, "shuffled").tolist()) for text in TEXTS}
    assert len(shuffled) > 10
    with pytest.raises(ValueError, match="none of linear"):
        expert_map("", 6, "elsewhere")


def layer(ids="map_any", variant="bf16", seed=1, **words):
    given = {
        "experts": 4,
        "gate": "first",
        "hidden": 64,
        "ids": ids,
        "intermediate": 34,
        "limit": "none",
        "out": "fp32",
        "scale": MOE_SCALES[variant][0],
        "scaling": "1",
        "tokens": 40,
        "topk": 3,
        "values": "normal",
        "weight": "output",
    }
    return Case.make("moe", variant, seed=seed, **(given | words))


def router(**words):
    text = (
        "routing DeepSeekV3 v=1 bias=0 bias_dtype=fp32 dtype=fp32 experts=12 groups=1 out=local padding=some "
        "renormalize=on scaling=1 shared=1 stride=contiguous tokens=40 topk=3 topk_group=1 values=normal seed=0"
    )
    return Case.parse(text).replace(**words)


def verdicts(case, inputs, outputs, recipe=RECIPE):
    found = OPERATIONS[case.operation].judge(case, inputs, outputs, recipe)
    return {item.part: item.verdict for item in found}


def test_ids_of_a_layer_name_the_experts_of_all_ranks():
    for word in ("map_linear", "map_any"):
        found = build(layer(word))
        ids, mapping = found["ids"], found["expert_map"]
        assert mapping.shape == (RANKS * 4,)
        assert sorted(mapping[mapping >= 0].tolist()) == [0, 1, 2, 3]
        assert int(ids.max()) >= 8
        assert 0 < float((ids == -1).float().mean()) < 0.3
        assert all(len(set(row) - {-1}) == sum(item != -1 for item in row) for row in ids.tolist())
    linear = build(layer("map_linear"))["expert_map"].tolist()
    assert any(linear[first : first + 4] == [0, 1, 2, 3] for first in (0, 4, 8))


def test_every_method_and_format_is_right_with_a_map_and_without():
    backend, seen = TorchBackend("torch", "fp32"), 0
    for operation, variants, key, words in (
        ("routing", ROUTERS, "out", ("local",)),
        ("moe", MOE_SCALES, "ids", ("map_linear", "map_any")),
    ):
        for variant in variants:
            for case in draw_plan([(operation, variant)], 20, 2):
                if case[key] not in words:
                    continue
                inputs = build(case)
                assert problem(case, inputs) is None
                (claim,) = (item for item in backend.claims("cpu") if item.refusal(case) is None)
                answer = backend.run(backend.prepare(case, inputs, {}), {})
                found = verdicts(case, inputs, answer, backend.recipe(claim))
                assert set(found.values()) == {"pass"}, case.text
                seen += 1
    assert seen > 40


def test_experts_elsewhere_add_nothing():
    case = layer(values="normal")
    inputs = build(case)
    here = inputs["expert_map"][inputs["ids"].clamp(min=0).long()].masked_fill(inputs["ids"] < 0, -1)
    assert bool((here == -1).all(1).any())
    plain = {name: tensor for name, tensor in inputs.items() if name != "expert_map"} | {"ids": here}
    output = layers.layer(case, inputs)["output"]
    assert torch.equal(output, layers.layer(case.replace(ids="elsewhere"), plain)["output"])
    assert bool((output[(here == -1).all(1)] == 0).all())


def without_a_map(inputs):
    return inputs["ids"] % 4


def end_of_the_map(inputs):
    return inputs["expert_map"][inputs["ids"].long()]


def first_expert(inputs):
    return inputs["expert_map"][inputs["ids"].clamp(min=0).long()].clamp(min=0)


def by_an_offset(inputs):
    ids, mapping = inputs["ids"], inputs["expert_map"]
    local = ids - int((mapping == 0).nonzero())
    return torch.where((ids < 0) | (local < 0) | (local >= 4), -1, local)


@pytest.mark.parametrize("mapped", [without_a_map, end_of_the_map, first_expert, by_an_offset])
@pytest.mark.parametrize("ids", ["map_linear", "map_any"])
def test_a_map_that_is_misread_is_found(mapped, ids):
    outcomes = set()
    for seed in range(12):
        case = layer(ids, seed=seed)
        inputs = build(case)
        answer = layers.layer(case, inputs, layers.Steps(mapped=mapped))
        outcomes.add(verdicts(case, inputs, answer)["output"])
    assert ("wrong" in outcomes) == (mapped is not by_an_offset or ids == "map_any")


def test_local_ids_are_judged_given_the_ids():
    case = router()
    inputs = build(case)
    right = routers.route(case, inputs)
    assert verdicts(case, inputs, right) == {"selection": "pass", "weights": "pass", "local": "pass"}
    assert bool((right["local"][30:] == -1).all())
    # Padded rows have no expert; -1 read at the end of the map is the shared expert's number.
    wrapped = right | {"local": inputs["expert_map"][right["selection"].long()]}
    assert verdicts(case, inputs, wrapped) == {"selection": "pass", "weights": "pass", "local": "wrong"}
    # A selection that is wrong is not reported twice, here as ids of no expert.
    ids = right["selection"].clone()
    ids[0, 0] = 77
    assert verdicts(case, inputs, right | {"selection": ids})["local"] == "pass"
    unmapped = right | {"local": right["selection"]}
    assert verdicts(case, inputs, unmapped)["local"] == "wrong"


def test_padded_rows_that_nobody_judges_have_any_local_ids():
    case = router()
    inputs = build(case)
    right = routers.route(case, inputs)
    changed = right["local"].clone()
    changed[30:] = 5
    found = verdicts(case, inputs, right | {"local": changed}, Recipe(source="test", padded_rows="any"))
    assert found["local"] == "pass"
    assert verdicts(case, inputs, right | {"local": changed})["local"] == "wrong"


def test_maps_are_cut_with_nothing_and_checked():
    for case in (layer(), router()):
        inputs = build(case)
        assert parts(case)["expert_map"].fills == (0xFFFFFFFF,)
        assert drop(case, inputs, "experts", 0, 1) is None
        twice = inputs | {"expert_map": torch.zeros_like(inputs["expert_map"])}
        assert "expert_map does not hold distinct numbers" in str(problem(case, twice))
        nothing = inputs | {"expert_map": torch.full_like(inputs["expert_map"], -1)}
        assert problem(case, nothing) is None
        smaller = drop(case, inputs, "tokens", 0, 8)
        assert smaller is not None
        assert smaller[0].integer("tokens") == 32
    grouped = router(groups=4, topk_group=2, topk=3)
    assert drop(grouped, build(grouped), "groups", 0, 1) is None
    many = build(layer())
    assert "distinct experts of 12" in str(problem(layer(), many | {"ids": many["ids"].clamp(min=0) + 12}))
