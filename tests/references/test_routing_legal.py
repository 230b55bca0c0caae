"""Legal FP32 routers (torch and numpy, several forms of each step) are never rejected; planted faults are."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from references.routing import METHODS, RoutingConfig, RoutingRecipe, judge_selection, judge_weights

F32 = np.float32
PROFILES = ("normal", "ties", "all_negative", "all_equal", "saturated", "tiny", "wide", "neg_bias")
BIASES = (0.0, 0.1, 12.0, 1e4)


def logits_of(profile, rng, shape):
    match profile:
        case "normal" | "neg_bias":
            x = rng.normal(0, 2, shape)
        case "ties":
            x = rng.integers(-2, 3, shape) * 0.5
        case "all_negative":
            x = rng.normal(-200, 5, shape)
        case "all_equal":
            x = np.full(shape, rng.normal())
        case "saturated":
            x = rng.uniform(14, 90, shape)
        case "tiny":
            x = rng.uniform(-100, -12, shape)
        case _:
            x = rng.normal(0, 1, shape) * 10.0 ** rng.integers(-3, 3, shape)
    return x.astype(F32)


def bias_of(profile, level, rng, experts):
    if profile == "neg_bias":
        return (rng.uniform(0, 1, experts) * 0.5 - 3.0).astype(F32)
    return (level + rng.normal(0, 0.05 * max(level, 0.1), experts) * (level > 0)).astype(F32)


@dataclass(frozen=True)
class Form:
    """One way to write the same router in FP32."""

    sigmoid: str = "exp"
    order: str = "forward"
    divide: str = "divide"
    sort: str = "stable"
    exp: str = "numpy"


def exp32(t, form):
    return np.exp(t, dtype=F32) if form.exp == "numpy" else torch.from_numpy(t).exp().numpy()


def sum32(values, form):
    if form.order == "pairwise":
        return values.sum(1, dtype=F32, keepdims=True)
    steps = values if form.order == "forward" else values[:, ::-1]
    return np.add.accumulate(steps, axis=1, dtype=F32)[:, -1:]


def over32(a, b, form):
    return a / b if form.divide == "divide" else a * (F32(1) / b)


def score32(kind, x, form):
    with np.errstate(all="ignore"):
        if kind == "logit":
            return x
        if kind == "softmax":
            e = exp32(x - x.max(1, keepdims=True), form)
            return over32(e, sum32(e, form), form)
        if kind == "sigmoid":
            if form.sigmoid == "tanh":
                return F32(0.5) * np.tanh(F32(0.5) * x) + F32(0.5)
            return (
                F32(1) / (F32(1) + exp32(-x, form))
                if form.exp == "numpy"
                else torch.sigmoid(torch.from_numpy(x)).numpy()
            )
        if form.exp == "torch":
            return torch.nn.functional.softplus(torch.from_numpy(x)).sqrt().numpy()
        return np.sqrt(np.maximum(x, F32(0)) + np.log1p(exp32(-np.abs(x), form)))


def top32(c, k, form):
    if form.sort == "topk":
        return torch.topk(torch.from_numpy(np.ascontiguousarray(c)), k, dim=1).indices.numpy()
    return np.argsort(-c, axis=1, kind="stable")[:, :k]


def route32(x, b, config, recipe, form, fault=""):
    """An FP32 router from FP32 logits; ``fault`` plants a historical mistake."""
    rule = config.rule
    tokens = len(x)
    if fault == "max_from_zero" and rule.choice == "softmax":
        with np.errstate(all="ignore"):
            e = np.exp(x - np.maximum(x.max(1, keepdims=True), F32(0)), dtype=F32)
            s = e / e.sum(1, keepdims=True, dtype=F32)
    else:
        s = score32(rule.choice, x, form)
    c = s
    if b is not None:
        used = torch.from_numpy(b).to(torch.bfloat16).float().numpy() if recipe.bias_dtype == "bf16" else b
        c = s if fault == "bias_ignored" else s + used
        if fault == "bias_in_bf16":
            c = s + torch.from_numpy(b).to(torch.bfloat16).float().numpy()
    if config.grouped and fault != "groups_ignored":
        groups = c.reshape(tokens, config.n_group, -1)
        ranked = np.sort(groups, 2)
        if rule.group_score == "max" or fault == "group_max":
            g = ranked[:, :, -1]
        elif fault == "group_top2_drops_ties":
            lower = np.where(groups >= ranked[:, :, -1:], F32(-np.inf), groups).max(2)
            g = ranked[:, :, -1] + lower
        else:
            g = ranked[:, :, -1] + ranked[:, :, -2]
        best = top32(g[:, ::-1] if fault == "group_highest_index" else g, config.topk_group, form)
        best = config.n_group - 1 - best if fault == "group_highest_index" else best
        kept = np.zeros(g.shape, bool)
        np.put_along_axis(kept, best, True, 1)
        zero = fault == "dropped_at_zero" or recipe.dropped_fill == "zero"
        c = np.where(np.repeat(kept, config.group_size, 1), c, F32(0.0 if zero else -np.inf))
    if fault == "tie_highest_index":
        ids = config.experts - 1 - top32(c[:, ::-1], config.top_k, form)
    elif fault == "unstable_sort":
        shuffle = np.random.default_rng(5).permutation(config.experts)
        ids = shuffle[top32(c[:, shuffle], config.top_k, form)]
    else:
        ids = top32(c, config.top_k, form)
    ids = ids.copy()
    if fault == "id_off_by_one":
        ids[:, 0] = (ids[:, 0] + 1) % config.experts
    if fault == "duplicate":
        ids[:, -1] = ids[:, 0]
    weights = weight32(x, s, c, ids, config, recipe, form, fault)
    shared = config.experts + np.arange(config.shared_experts)
    value = 1.0 if recipe.scaling == "topk" or fault == "shared_weight_one" else 1.0 / config.scaling_factor
    ids = np.concatenate([ids, np.tile(shared, (tokens, 1))], 1)
    weights = np.concatenate([weights, np.full((tokens, len(shared)), value, F32)], 1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.weight_dtype]
    return torch.from_numpy(ids), torch.from_numpy(weights).to(torch.bfloat16 if fault == "bf16_weights" else dtype)


def weight32(x, s, c, ids, config, recipe, form, fault):
    rule = config.rule
    if rule.weight == "logit":
        return np.take_along_axis(x, ids, 1)
    if rule.weight == "softmax_selected":
        w = np.take_along_axis(x, ids, 1)
        if fault == "max_from_zero":
            with np.errstate(all="ignore"):
                e = np.exp(w, dtype=F32)
                return e / e.sum(1, keepdims=True, dtype=F32)
        return score32("softmax", w, form)
    w = np.take_along_axis(s if rule.choice == rule.score else score32(rule.score, x, form), ids, 1)
    if fault == "bias_in_weights":
        w = np.take_along_axis(c, ids, 1)
    if recipe.dropped_fill == "zero" and config.grouped:
        w = np.take_along_axis(c, ids, 1)
    if config.normalized and fault != "unnormalised":
        total = sum32(w, form)
        if recipe.denominator == "add":
            total = total + F32(1e-20)
        elif recipe.denominator == "max":
            total = np.maximum(total, F32(1e-20))
        with np.errstate(all="ignore"):
            w = over32(w, total, form)
    if recipe.scaling == "topk" and fault != "factor_forgotten":
        w = w * F32(config.scaling_factor)
    if fault == "factor_twice":
        w = w * F32(config.scaling_factor)
    return w


def config_of(method, *, grouped, k=None, shared=0, experts=64, **more):
    rule = METHODS[method]
    extra = {"n_group": 8, "topk_group": 4} if grouped and rule.group_score != "none" else {}
    return RoutingConfig(
        method=method,
        experts=experts,
        top_k=min(rule.max_top_k, k or 6),
        scaling_factor=2.446 if rule.scaled else 1.0,
        shared_experts=shared,
        **extra,
        **more,
    )


FORMS = [
    (Form(), {}),
    (Form(order="backward", exp="torch"), {}),
    (Form(order="pairwise", divide="reciprocal"), {"division_error": 2.0**-22}),
    (Form(sigmoid="tanh"), {"sigmoid": "tanh"}),
    (Form(sort="topk"), {"tie_rule": "any"}),
    (Form(), {"bias_dtype": "bf16", "weight_dtype": "bf16"}),
    (Form(), {"denominator": "max", "group_tie_rule": "lowest_index", "weight_dtype": "fp16"}),
    (Form(exp="torch"), {"denominator": "none", "scaling": "later"}),
]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_legal_variants_are_never_rejected(method):
    rng = np.random.default_rng(sum(map(ord, method)))
    rule = METHODS[method]
    headroom = [[], []]
    for form, choices in FORMS:
        recipe = RoutingRecipe(source="test", **choices)
        for index, profile in enumerate(PROFILES):
            config = config_of(method, grouped=index % 2 == 0, shared=index % 3)
            for level in BIASES if rule.biased else (0.0,):
                x = logits_of(profile, rng, (24, config.experts))
                if index % 4 == 1:
                    x = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
                b = bias_of(profile, level, rng, config.experts) if rule.biased else None
                ids, weights = route32(x, b, config, recipe, form)
                logits, bias = torch.from_numpy(x), None if b is None else torch.from_numpy(b)
                selection = judge_selection(ids, logits, bias, config, recipe)
                assert selection.inside.all(), (form, profile, level, selection.reason.unique())
                assert (selection.headroom <= 1).all()
                verdict = judge_weights(weights, ids, logits, bias, config, recipe)
                assert verdict.inside.all(), (form, profile, level)
                assert (verdict.headroom <= 1).all()
                headroom[0].append(selection.headroom)
                headroom[1].append(verdict.headroom[:, : config.top_k].flatten())
    selection, weight = (torch.cat(part) for part in headroom)
    print(f"\nLEGAL {method}: {len(selection)} tokens, {int((selection > 0).sum())} off the nominal order")
    median = weight[weight > 0].median()
    print(f"LEGAL headroom: selection {selection.max():.3f}, weights median {median:.3f} max {weight.max():.3f}")


def test_legal_grouped_topk_with_dropped_groups_at_zero():
    rng = np.random.default_rng(9)
    recipe = RoutingRecipe(source="test", dropped_fill="zero")
    config = config_of("GroupedTopK", grouped=True, k=20)
    filled = 0
    for _ in range(20):
        x = logits_of("normal", rng, (32, 64))
        x[:, rng.permutation(64)[:50]] -= 150  # all but 14 underflow, so that some selected experts score 0
        ids, weights = route32(x, None, config, recipe, Form())
        logits = torch.from_numpy(x)
        assert judge_selection(ids, logits, None, config, recipe).inside.all()
        assert judge_weights(weights, ids, logits, None, config, recipe).inside.all()
        strict = replace(recipe, dropped_fill="minus_inf")
        filled += int((~judge_selection(ids, logits, None, config, strict).inside).sum())
    assert filled > 100


@dataclass(frozen=True)
class Fault:
    """A planted fault and where it shows: profile, bias level, the part that rejects it, the least share of tokens."""

    name: str
    method: str
    part: str
    share: float
    profile: str = "normal"
    level: float = 0.1
    grouped: bool = True
    recipe: tuple = ()
    shared: int = 0
    more: tuple = ()


FAULTS = [
    Fault("bias_in_weights", "DeepSeekV3", "weights", 0.9),
    Fault("bias_in_weights", "SqrtSoftplus", "weights", 0.9),
    Fault("bias_ignored", "DeepSeekV3", "selection", 0.1),
    Fault("bias_in_bf16", "DeepSeekV3", "selection", 0.1, level=12.0, grouped=False),
    Fault("groups_ignored", "DeepSeekV3", "selection", 0.3),
    Fault("groups_ignored", "GroupedTopK", "selection", 0.1),
    Fault("group_max", "DeepSeekV3", "selection", 0.1),
    Fault("group_top2_drops_ties", "DeepSeekV3", "selection", 0.3, profile="ties", level=0.0),
    Fault("group_highest_index", "DeepSeekV3", "selection", 0.9, profile="all_equal", level=0.0,
          recipe=(("group_tie_rule", "lowest_index"),)),
    Fault("dropped_at_zero", "DeepSeekV3", "selection", 0.9, profile="neg_bias"),
    Fault("unnormalised", "DeepSeekV3", "weights", 0.9),
    Fault("unnormalised", "SigmoidRenorm", "weights", 0.9),
    Fault("unnormalised", "RenormalizeNaive", "weights", 0.9),
    Fault("factor_twice", "DeepSeekV3", "weights", 1.0),
    Fault("factor_twice", "MiniMax2", "weights", 1.0),
    Fault("factor_forgotten", "DeepSeekV3", "weights", 1.0),
    Fault("shared_weight_one", "DeepSeekV3", "weights", 1.0, recipe=(("scaling", "later"),), shared=1),
    Fault("bf16_weights", "DeepSeekV3", "weights", 0.9),
    Fault("tie_highest_index", "DeepSeekV3", "selection", 0.5, profile="ties", level=0.0, grouped=False),
    Fault("tie_highest_index", "Renormalize", "selection", 0.5, profile="ties"),
    Fault("tie_highest_index", "SigmoidRenorm", "selection", 0.9, profile="all_equal"),
    Fault("tie_highest_index", "GroupedTopK", "selection", 0.5, profile="all_equal"),
    Fault("unstable_sort", "TopK", "selection", 0.5, profile="ties"),
    Fault("unstable_sort", "DeepSeekV3", "selection", 0.5, profile="ties", level=0.0, grouped=False),
    Fault("max_from_zero", "Renormalize", "weights", 0.9, profile="all_negative"),
    Fault("max_from_zero", "RenormalizeNaive", "selection", 0.9, profile="all_negative"),
    *(Fault("id_off_by_one", method, "selection", 0.8) for method in METHODS),
    *(Fault("duplicate", method, "selection", 1.0) for method in METHODS if method != "Llama4"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}-{fault.method}")
def test_planted_faults_are_rejected(fault):
    rng = np.random.default_rng(11)
    recipe = RoutingRecipe(source="test", **dict(fault.recipe))
    config = config_of(fault.method, grouped=fault.grouped, shared=fault.shared)
    x = logits_of(fault.profile, rng, (256, config.experts))
    b = bias_of(fault.profile, fault.level, rng, config.experts) if config.rule.biased else None
    ids, weights = route32(x, b, config, recipe, Form(), fault.name)
    logits, bias = torch.from_numpy(x), None if b is None else torch.from_numpy(b)
    selected = judge_selection(ids, logits, bias, config, recipe).inside
    weighed = judge_weights(weights, ids, logits, bias, config, recipe).inside.all(1)
    caught = 1 - float((selected if fault.part == "selection" else weighed).double().mean())
    print(f"\nFAULT {fault.name} {fault.method}: {caught:.3f} of 256 tokens rejected by {fault.part}")
    assert caught >= fault.share
    if fault.part == "weights":
        assert selected.all()


def test_unbiasing_by_subtraction_is_rejected():
    """flashinfer-ai/flashinfer#3875: (s + 12) - 12 is 0 for logits of -16 and -17."""
    config = RoutingConfig(method="DeepSeekV3", experts=2, top_k=2)
    recipe = RoutingRecipe(source="test")
    logits, bias = torch.tensor([[-16.0, -17.0]]), torch.tensor([12.0, 12.0])
    ids = torch.tensor([[0, 1]])
    right = torch.tensor([[0.7310586, 0.26894143]])
    assert judge_weights(right, ids, logits, bias, config, recipe).inside.all()
    assert not judge_weights(torch.zeros(1, 2), ids, logits, bias, config, recipe).inside.any()


def test_softplus_without_log1p_is_rejected():
    """sgl-project/sglang#34459: log(1 + exp(x)) is 0 in FP32 below -16.64."""
    config = RoutingConfig(method="SqrtSoftplus", experts=2, top_k=1, renormalize=False)
    recipe = RoutingRecipe(source="test")
    logits, bias, ids = torch.tensor([[-17.0, -18.0]]), torch.zeros(2), torch.tensor([[0]])
    assert judge_weights(
        torch.tensor([[math.sqrt(math.log1p(math.exp(-17)))]]), ids, logits, bias, config, recipe
    ).inside.all()
    assert not judge_weights(torch.zeros(1, 1), ids, logits, bias, config, recipe).inside.any()


def test_tanh_form_on_tiny_scores_may_return_zero_but_only_where_declared():
    """With every selected score below 2^-24 the quotient 0 / (0 + 1e-20) is what the tanh form gives."""
    config = RoutingConfig(method="DeepSeekV3", experts=2, top_k=2)
    logits, bias, ids = torch.tensor([[-19.0, -20.0]]), torch.zeros(2), torch.tensor([[0, 1]])
    zeros = torch.zeros(1, 2)
    tanh, exp = RoutingRecipe(source="test", sigmoid="tanh"), RoutingRecipe(source="test")
    assert judge_weights(zeros, ids, logits, bias, config, tanh).inside.all()
    assert not judge_weights(zeros, ids, logits, bias, config, exp).inside.any()
