"""Every method against a slow, plain router: one token at a time, mpmath and Fraction, loops over experts."""

from fractions import Fraction
from itertools import combinations

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from references.routing import METHODS, RoutingConfig, RoutingRecipe, judge_selection, judge_weights, nominal
from references.routing.rows import choice_intervals

TOKENS = 24
EXAMPLES = 100
EXACT = 4
"""Tokens of each example that also go through mpmath."""
SEEN: dict[str, list[int]] = {}


def plain_fp32(value):
    """A Fraction rounded to FP32, ties to even."""
    if value == 0:
        return Fraction(0)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return (1 if value > 0 else -1) * round(magnitude / step) * step


def plain_scores(kind, x):
    x = [mpmath.mpf(v) for v in x]
    if kind == "logit":
        return x
    if kind == "softmax":
        e = [mpmath.exp(v - max(x)) for v in x]
        return [v / mpmath.fsum(e) for v in e]
    if kind == "sigmoid":
        return [1 / (1 + mpmath.exp(-v)) for v in x]
    return [mpmath.sqrt(mpmath.log1p(mpmath.exp(v))) for v in x]


def plain_route(x, b, config):
    """Ids by exact scores, the lower index first, and their exact weights."""
    rule = config.rule
    s = plain_scores(rule.choice, x)
    c = s if b is None else [v + mpmath.mpf(w) for v, w in zip(s, b, strict=True)]
    candidates = range(config.experts)
    if config.grouped:
        size = config.group_size
        best = [sorted(c[g * size : (g + 1) * size], reverse=True) for g in range(config.n_group)]
        worth = [v[0] if rule.group_score == "max" else v[0] + v[1] for v in best]
        kept = sorted(range(config.n_group), key=lambda g: (-worth[g], g))[: config.topk_group]
        candidates = [e for e in candidates if e // size in kept]
    ids = sorted(candidates, key=lambda e: (-c[e], e))[: config.top_k]
    return ids, plain_weights(x, ids, config)


def plain_weights(x, ids, config):
    rule = config.rule
    if rule.weight == "softmax_selected":
        return plain_scores("softmax", [x[e] for e in ids])
    s = plain_scores(rule.score, x)
    w = [s[e] for e in ids]
    if config.normalized:
        total = mpmath.fsum(w) + mpmath.mpf(10) ** -20
        w = [v / total for v in w]
    return [v * mpmath.mpf(config.scaling_factor) for v in w]


def plain_admissible(ids, lo, hi, config):
    """The criterion by definition: some kept groups, some scores at the ends that favour this choice; all in loops."""
    chosen = set(ids)
    weakest = min(hi[e] for e in chosen)
    size = config.group_size
    if not config.grouped:
        return all(lo[e] <= weakest for e in range(config.experts) if e not in chosen)

    def worth(values):
        values = sorted(values, reverse=True)
        return values[0] if config.rule.group_score == "max" else plain_fp32(values[0] + values[1])

    for kept in combinations(range(config.n_group), config.topk_group):
        if any(e // size not in kept for e in chosen):
            continue
        inside = {e for g in kept for e in range(g * size, (g + 1) * size)}
        if any(lo[e] > weakest for e in inside - chosen):
            continue
        value = [hi[e] if e in chosen else min(hi[e], weakest) if e in inside else lo[e] for e in range(config.experts)]
        worths = [worth(value[g * size : (g + 1) * size]) for g in range(config.n_group)]
        outside = [worths[g] for g in range(config.n_group) if g not in kept]
        if not outside or min(worths[g] for g in kept) >= max(outside):
            return True
    return False


def plain_tie_broken(ids, x, b, config):
    """A selected expert beats an equal one with a lower index in its group (or row)."""
    bits = [(np.float32(v).tobytes(), b"" if b is None else np.float32(b[e]).tobytes()) for e, v in enumerate(x)]
    size = config.group_size if config.grouped else config.experts
    return any(
        i not in ids and i < j and i // size == j // size and bits[i] == bits[j]
        for j in ids
        for i in range(config.experts)
    )


def draw_token(rng, profile, experts):
    match profile:
        case "normal":
            x = rng.normal(0, 2, experts)
        case "near":
            x = 1 + rng.integers(-2, 3, experts) * 2.0**-22
        case "ties":
            x = rng.integers(-1, 2, experts) * 0.75
        case "negative":
            x = rng.normal(-60, 8, experts)
        case "saturated":
            x = rng.uniform(15, 40, experts)
        case _:
            x = np.full(experts, rng.normal())
    return x.astype(np.float32)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_method_equals_the_plain_router(method):
    rule = METHODS[method]
    counts = SEEN.setdefault(method, [0, 0, 0])
    recipe = RoutingRecipe(source="test")

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        seed=st.integers(0, 2**32 - 1),
        profile=st.sampled_from(["normal", "near", "ties", "negative", "saturated", "equal"]),
        groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 2)]),
        k=st.integers(1, 4),
        renormalize=st.booleans(),
        level=st.sampled_from([0.0, 0.1, 12.0, 1e4, -3.0]),
    )
    def check(seed, profile, groups, k, renormalize, level):
        rng = np.random.default_rng(seed)
        experts = 12
        grouped = rule.group_score != "none"
        config = RoutingConfig(
            method=method,
            experts=experts,
            top_k=min(k, rule.max_top_k),
            n_group=groups[0] if grouped else 1,
            topk_group=groups[1] if grouped else 1,
            renormalize=renormalize if rule.renormalize is None else None,
            scaling_factor=2.5 if rule.scaled else 1.0,
        )
        x = np.stack([draw_token(rng, profile, experts) for _ in range(TOKENS)])
        b = (
            (level + rng.choice([0, 0.01], experts) * rng.normal(size=experts)).astype(np.float32)
            if rule.biased
            else None
        )
        logits, bias = torch.from_numpy(x), None if b is None else torch.from_numpy(b)
        _, c = choice_intervals(logits, bias, config, recipe)
        ids, weights = nominal(logits, bias, config, recipe)
        tried = ids.clone()
        for row in range(TOKENS):  # swap one expert for another, often a rival of like score
            if row % 2:
                order = np.argsort(-c.mid[row].numpy(), kind="stable")
                others = [e for e in order if e not in tried[row].tolist()]
                tried[row, rng.integers(config.top_k)] = int(others[0 if row % 4 == 1 else rng.integers(len(others))])
        verdict = judge_selection(tried, logits, bias, config, recipe).inside.tolist()
        good = judge_selection(ids, logits, bias, config, recipe)
        assert good.inside.all()
        assert (good.headroom == 0).all()
        weighed = judge_weights(weights, ids, logits, bias, config, recipe)
        assert weighed.inside.all()
        assert (weighed.headroom == 0).all()
        plain_ids = []
        for row in range(TOKENS):
            values = x[row].tolist()
            offset = None if b is None else b.tolist()
            lo, hi = ([Fraction(v) for v in end[row].tolist()] for end in (c.lo, c.hi))
            expected = plain_admissible(tried[row].tolist(), lo, hi, config)
            expected &= not plain_tie_broken(tried[row].tolist(), values, offset, config)
            assert expected == verdict[row], (config, values, offset, tried[row])
            counts[0 if expected else 1] += 1
            if row < EXACT:
                plain_ids.append(plain_route(values, offset, config)[0])
                exact = plain_weights(values, ids[row].tolist(), config)
                for slot, weight in enumerate(exact):
                    assert weighed.lo[row, slot].item() <= weight <= weighed.hi[row, slot].item() or (
                        abs(weight - weighed.nominal[row, slot].item()) <= abs(weight) * 2.0**-24 + 2.0**-150
                    )
                    error = abs(weight - weights[row, slot].item())
                    assert error <= abs(weight) * mpmath.mpf(2) ** -24 * (1 + 2.0**-20) + mpmath.mpf(2) ** -150
                    counts[2] += 1
        assert judge_selection(torch.tensor(plain_ids), logits[:EXACT], bias, config, recipe).inside.all()

    with mpmath.workdps(40):
        check()
    print(f"\nPLAIN {method}: {counts[0]} admissible and {counts[1]} other selections, {counts[2]} weights agree")
    assert min(counts) > 100
