"""Packed ids, expert maps, padding, shared experts, NaN and infinite logits, and the checks on arguments."""

import math

import pytest
import torch

from references.routing import METHODS, Reason, RoutingConfig, RoutingRecipe, judge_selection, judge_weights, nominal
from references.routing.forms import bf16_bits, expert_map, mask_padding, pack, to_local, unpack

RECIPE = RoutingRecipe(source="test")
CONFIG = RoutingConfig(method="DeepSeekV3", experts=8, top_k=2, n_group=4, topk_group=2, scaling_factor=2.5)


def test_pack_by_hand():
    packed = pack(torch.tensor([[0, 5, -1, 32767]]), torch.tensor([[1.0, 0.5, 0.0, -2.0]]))
    assert [value & 0xFFFFFFFF for value in packed[0].tolist()] == [0x00003F80, 0x00053F00, 0xFFFF0000, 0x7FFFC000]
    assert packed.dtype == torch.int32


def test_unpack_inverts_pack_for_every_bf16_weight():
    bits = torch.arange(2**16, dtype=torch.int32)
    weights = (bits << 16).view(torch.float32)
    numbers = ~torch.isnan(weights)
    ids = torch.arange(2**16, dtype=torch.int32) % 513 - 1
    back_ids, back = unpack(pack(ids, weights))
    assert torch.equal(ids, back_ids)
    assert torch.equal(weights[numbers], back[numbers])
    assert torch.isnan(back[~numbers]).all()


def test_bf16_bits_round_to_even():
    weights = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20])
    assert bf16_bits(weights).tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_pack_refuses_an_id_that_does_not_fit():
    with pytest.raises(ValueError, match="outside"):
        pack(torch.tensor([32768]), torch.tensor([1.0]))


def test_expert_maps_cover_every_expert_once():
    maps = [expert_map(12, rank, 3).tolist() for rank in range(3)]
    assert maps[1] == [-1] * 4 + [0, 1, 2, 3] + [-1] * 4
    assert all(sum(column[e] >= 0 for column in maps) == 1 for e in range(12))
    with pytest.raises(ValueError, match="experts on rank"):
        expert_map(12, 0, 5)


def test_minus_one_never_wraps_to_the_end_of_the_map():
    """vllm-project/vllm#46408: map[-1] is the last expert's slot."""
    assert to_local(torch.tensor([[-1, 3, 0]]), torch.tensor([-1, -1, 0, 1])).tolist() == [[-1, 1, -1]]


def test_mask_padding_by_hand():
    ids, weights = mask_padding(torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2), 1)
    assert ids.tolist() == [[1, 2], [-1, -1]]
    assert weights.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def padded(method="DeepSeekV3", **more):
    config = RoutingConfig(method=method, experts=8, top_k=2, num_token_non_padded=3, **more)
    return config, torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(8)


def test_padded_rows_must_be_skipped_or_weigh_nothing():
    config, x, b = padded()
    ids, weights = nominal(x, b, config, RECIPE)
    assert ids[3:].eq(-1).all()
    assert judge_selection(ids, x, b, config, RECIPE).inside.all()
    routed = nominal(x, b, RoutingConfig(method="DeepSeekV3", experts=8, top_k=2), RECIPE)
    leaked = judge_selection(routed[0], x, b, config, RECIPE)
    assert leaked.inside.tolist() == [True] * 3 + [False] * 2
    assert leaked.reason[3:].eq(Reason.PADDING).all()
    zero = RoutingRecipe(source="test", padded_rows="zero_weight")
    assert judge_selection(routed[0], x, b, config, zero).inside.all()
    verdict = judge_weights(routed[1], routed[0], x, b, config, zero).inside
    assert verdict.all(1).tolist() == [True] * 3 + [False] * 2
    assert judge_weights(weights, ids, x, b, config, zero).inside.all()


@pytest.mark.parametrize(("scaling", "weight"), [("topk", 1.0), ("later", 0.4)])
def test_shared_experts_follow_with_weight_one_or_its_share(scaling, weight):
    config = RoutingConfig(method="DeepSeekV3", experts=8, top_k=2, scaling_factor=2.5, shared_experts=2)
    recipe = RoutingRecipe(source="test", scaling=scaling)
    x, b = torch.linspace(-1, 1, 8)[None], torch.zeros(8)
    ids, weights = nominal(x, b, config, recipe)
    assert ids.tolist() == [[7, 6, 8, 9]]
    assert weights[0, 2:].tolist() == pytest.approx([weight] * 2, abs=1e-7)
    assert weights[0, :2].sum().item() == pytest.approx(2.5 if scaling == "topk" else 1.0, abs=1e-6)
    assert judge_weights(weights, ids, x, b, config, recipe).inside.all()
    wrong = weights.clone()
    wrong[0, 3] *= 1.001
    assert judge_weights(wrong, ids, x, b, config, recipe).inside.tolist() == [[True, True, True, False]]
    overwritten = torch.tensor([[7, 8, 6, 9]])
    assert not judge_selection(overwritten, x, b, config, recipe).inside.any()
    again = torch.tensor([[7, 6, 8, 8]])
    assert judge_selection(again, x, b, config, recipe).reason.tolist() == [Reason.SHARED_EXPERT]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_nan_rows_need_valid_distinct_ids_and_no_more(method):
    rule = METHODS[method]
    config = RoutingConfig(method=method, experts=6, top_k=min(2, rule.max_top_k))
    x = torch.full((3, 6), math.nan)
    x[2] = torch.tensor([0.5, math.nan, 1.0, 2.0, -1.0, 0.0])
    b = torch.zeros(6) if rule.biased else None
    ids, weights = nominal(x, b, config, RECIPE)
    assert ids[0].tolist() == list(range(config.top_k))
    assert judge_selection(ids, x, b, config, RECIPE).inside.all()
    assert judge_weights(weights, ids, x, b, config, RECIPE).inside.all()
    if config.top_k > 1:
        same = judge_selection(torch.zeros(3, 2, dtype=torch.int64), x, b, config, RECIPE)
        assert same.reason.tolist() == [Reason.DUPLICATE] * 3
    beyond = torch.full((3, config.top_k), 6)
    assert judge_selection(beyond, x, b, config, RECIPE).reason.tolist() == [Reason.OUT_OF_RANGE] * 3


def test_a_nan_elsewhere_frees_no_sigmoid_weight():
    config = RoutingConfig(method="SigmoidRenorm", experts=4, top_k=2)
    x = torch.tensor([[0.0, 0.0, math.nan, -1.0]])
    ids = torch.tensor([[0, 1]])
    assert judge_weights(torch.tensor([[0.5, 0.5]]), ids, x, None, config, RECIPE).inside.all()
    assert not judge_weights(torch.tensor([[0.9, 0.1]]), ids, x, None, config, RECIPE).inside.any()
    assert judge_weights(torch.tensor([[0.9, math.nan]]), torch.tensor([[0, 2]]), x, None, config, RECIPE).inside.all()


def test_infinite_logits_by_hand():
    x = torch.tensor([[math.inf, 0.0, -math.inf, 1.0]])
    sigmoid = RoutingConfig(method="Sigmoid", experts=4, top_k=4)
    ids = torch.tensor([[0, 3, 1, 2]])
    assert judge_selection(ids, x, None, sigmoid, RECIPE).inside.all()
    right = torch.tensor([[1.0, 0.7310586, 0.5, 0.0]])
    assert judge_weights(right, ids, x, None, sigmoid, RECIPE).inside.all()
    logits = RoutingConfig(method="TopK", experts=4, top_k=2)
    assert judge_selection(torch.tensor([[0, 3]]), x, None, logits, RECIPE).inside.all()
    assert not judge_selection(torch.tensor([[3, 1]]), x, None, logits, RECIPE).inside.any()
    assert judge_weights(torch.tensor([[math.inf, 1.0]]), torch.tensor([[0, 3]]), x, None, logits, RECIPE).inside.all()


def test_minus_infinity_masks_an_expert_in_a_softmax():
    config = RoutingConfig(method="Default", experts=3, top_k=2)
    x = torch.tensor([[0.0, -math.inf, 0.0]])
    ids, weights = nominal(x, None, config, RECIPE)
    assert ids.tolist() == [[0, 2]]
    assert weights.tolist() == [[0.5, 0.5]]
    assert judge_selection(torch.tensor([[0, 1]]), x, None, config, RECIPE).reason.tolist() == [Reason.NOT_TOP_K]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_leave_the_nominal_answer_admissible(method, dtype):
    rule = METHODS[method]
    config = RoutingConfig(method=method, experts=6, top_k=min(3, rule.max_top_k))
    x = torch.tensor(
        [
            [math.inf, math.inf, 0, 1, 2, 3],
            [-math.inf] * 6,
            [-math.inf, 0, -math.inf, -math.inf, -math.inf, -math.inf],
            [math.inf] * 6,
            [60000.0, -60000.0, 0, 1, 1, 0],
        ]
    ).to(dtype)
    b = torch.full((6,), 0.25) if rule.biased else None
    ids, weights = nominal(x, b, config, RECIPE)
    assert judge_selection(ids, x, b, config, RECIPE).inside.all()
    assert judge_weights(weights, ids, x, b, config, RECIPE).inside.all()
    assert not torch.isnan(weights).any()


def test_chunks_of_tokens_change_nothing(monkeypatch):
    x, b = torch.randn(100, 8, generator=torch.Generator().manual_seed(2)), torch.zeros(8)
    whole = (
        *nominal(x, b, CONFIG, RECIPE),
        judge_selection(nominal(x, b, CONFIG, RECIPE)[0], x, b, CONFIG, RECIPE).margin,
    )
    monkeypatch.setattr("references.chunks.CPU_ELEMENTS", 56)
    ids, weights = nominal(x, b, CONFIG, RECIPE)
    for one, other in zip(whole, (ids, weights, judge_selection(ids, x, b, CONFIG, RECIPE).margin), strict=True):
        assert torch.equal(one, other)


def test_no_token_is_an_empty_answer():
    x, b = torch.zeros(0, 8), torch.zeros(8)
    ids, weights = nominal(x, b, CONFIG, RECIPE)
    assert ids.shape == weights.shape == (0, 2)
    assert judge_selection(ids, x, b, CONFIG, RECIPE).inside.shape == (0,)
    assert judge_weights(weights, ids, x, b, CONFIG, RECIPE).inside.shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "Nonsense"}, "unknown method"),
        ({"experts": 513}, "not within 1..512"),
        ({"top_k": 33, "experts": 64}, "top_k=33"),
        ({"method": "Llama4", "top_k": 2}, "top_k=2"),
        ({"n_group": 3}, "does not divide"),
        ({"method": "TopK", "n_group": 2}, "has no groups"),
        ({"n_group": 8}, "at least two experts"),
        ({"n_group": 4, "top_k": 3}, "exceeds"),
        ({"method": "Default", "renormalize": True}, "fixes renormalize"),
        ({"scaling_factor": 0.0}, "finite number"),
        ({"method": "TopK", "scaling_factor": 2.0}, "no scaling factor"),
    ],
)
def test_impossible_routers_are_refused_by_name(changes, message):
    arguments = {"method": "DeepSeekV3", "experts": 8, "top_k": 2, **changes}
    with pytest.raises(ValueError, match=message):
        RoutingConfig(**arguments)


def test_arguments_that_do_not_fit_are_refused():
    x, b, ids = torch.zeros(2, 8), torch.zeros(8), torch.tensor([[0, 1], [0, 1]])
    for arguments, message in [
        ((ids, x, None, CONFIG, RECIPE), "needs a bias"),
        ((ids, x[:, :4], b, CONFIG, RECIPE), "are not"),
        ((ids, x.double(), b, CONFIG, RECIPE), "expected float32"),
        ((ids[:, :1], x, b, CONFIG, RECIPE), r"ids \(2, 1\)"),
        ((ids, x, b, CONFIG, RoutingRecipe(source="test", dropped_fill="zero")), "no choice of DeepSeekV3"),
    ]:
        with pytest.raises(ValueError, match=message):
            judge_selection(*arguments)


def test_recipe_survives_json_and_rejects_nonsense():
    recipe = RoutingRecipe(source="test", sigmoid="tanh", weight_dtype="bf16")
    assert RoutingRecipe.from_json(recipe.to_json()) == recipe
    assert recipe.text() == "sigmoid=tanh weight_dtype=bf16"
    assert RECIPE.text() == "default"
    for bad in ({"sigmoid": "erf"}, {"exp_error": -1.0}, {"division_error": 0.0}):
        with pytest.raises(ValueError, match="routing recipe"):
            RoutingRecipe(source="test", **bad)
    with pytest.raises(ValueError, match="source"):
        RoutingRecipe(source=" ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_gpu_judges_as_the_cpu_does(method):
    rule = METHODS[method]
    grouped = {"n_group": 8, "topk_group": 4} if rule.group_score != "none" else {}
    config = RoutingConfig(method=method, experts=64, top_k=min(6, rule.max_top_k), **grouped)
    source = torch.Generator().manual_seed(3)
    x = torch.randn(512, 64, generator=source)
    x[::2] = (x[::2] * 2).round() / 2
    b = torch.randn(64, generator=source).round() if rule.biased else None
    recipe = RoutingRecipe(source="test", group_tie_rule="lowest_index")
    ids, weights = nominal(x, b, config, recipe)
    tried = ids.clone()
    tried[::3, 0] = (tried[::3, 0] + 1) % 64
    moved = tried.cuda(), x.cuda(), None if b is None else b.cuda()
    expected = judge_selection(tried, x, b, config, recipe).reason
    assert torch.equal(expected, judge_selection(*moved, config, recipe).reason.cpu())
    assert torch.equal(ids, nominal(*moved[1:], config, recipe)[0].cpu())
    assert judge_weights(weights.cuda(), ids.cuda(), *moved[1:], config, recipe).inside.all()
