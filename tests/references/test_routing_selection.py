"""The criteria for admissible selections against brute force over every score vector on a small integer grid."""

from itertools import combinations

import numpy as np
import pytest
import torch

from references.routing import RoutingConfig, ties
from references.routing.scores import Interval
from references.routing.selection import (
    dropped_at_zero_admissible,
    grouped_admissible,
    kept_set_exists,
    ungrouped_admissible,
)

CASES = 120


def boxes(rng, experts, most=4, grid=4096, nonnegative=True):
    """Random integer intervals whose grid has at most ``grid`` points."""
    while True:
        lo = rng.integers(0 if nonnegative else -2, most, experts)
        hi = lo + rng.choice([0, 0, 1, 2], experts)
        if np.prod(hi - lo + 1) <= grid:
            return lo, hi


def vectors(lo, hi):
    """Every integer vector in the box, [vectors, experts]."""
    return np.stack(
        np.meshgrid(*(np.arange(a, b + 1) for a, b in zip(lo, hi, strict=True)), indexing="ij"), -1
    ).reshape(-1, len(lo))


def subsets(experts, k):
    return [np.isin(np.arange(experts), chosen) for chosen in combinations(range(experts), k)]


def interval(lo, hi, rows):
    lo, hi = (torch.tensor(end, dtype=torch.float64).expand(rows, -1) for end in (lo, hi))
    return Interval(lo, lo, hi)


def is_top(values, mask):
    """Whether ``mask`` picks a top-k of each row, ties any way. values: [vectors, n]."""
    inside = np.where(mask, values, np.inf).min(1)
    outside = np.where(mask, -np.inf, values).max(1)
    return inside >= outside


def brute_grouped(c, mask, groups, size, kept, score, fill, order_rule=None):
    """Whether some vector and some kept set give ``mask``; order_rule(kept set) may forbid a set."""
    by_group = c.reshape(len(c), groups, size)
    group = by_group.max(2) if score == "max" else np.sort(by_group, 2)[:, :, -2:].sum(2)
    for chosen in combinations(range(groups), kept):
        if order_rule is not None and not order_rule(set(chosen)):
            continue
        in_kept = np.isin(np.arange(groups), chosen)
        experts = np.repeat(in_kept, size)
        if fill == -np.inf and (mask & ~experts).any():
            continue
        values = np.where(experts, c, fill)
        if (is_top(group, in_kept) & is_top(values, mask)).any():
            return True
    return False


def test_ungrouped_equals_brute_force_for_every_subset():
    rng = np.random.default_rng(1)
    seen = {True: 0, False: 0}
    for _ in range(CASES):
        experts = int(rng.integers(2, 7))
        k = int(rng.integers(1, experts + 1))
        lo, hi = boxes(rng, experts)
        masks = subsets(experts, k)
        actual = ungrouped_admissible(torch.tensor(np.array(masks)), interval(lo, hi, len(masks)))
        c = vectors(lo, hi)
        expected = [bool(is_top(c, mask).any()) for mask in masks]
        assert expected == actual.tolist()
        for verdict in expected:
            seen[verdict] += 1
    assert min(seen.values()) > 100


@pytest.mark.parametrize(("method", "score"), [("DeepSeekV3", "sum2"), ("GroupedTopK", "max")])
@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 2, 1), (3, 2, 2), (4, 2, 2), (4, 2, 3)])
def test_grouped_equals_brute_force_for_every_subset(method, score, shape):
    groups, size, kept = shape
    rng = np.random.default_rng(hash(shape) % 2**32)
    seen = {True: 0, False: 0}
    for _ in range(CASES // 5):
        k = int(rng.integers(1, min(4, kept * size) + 1))
        config = RoutingConfig(method=method, experts=groups * size, top_k=k, n_group=groups, topk_group=kept)
        lo, hi = boxes(rng, groups * size, grid=1024, nonnegative=score == "max")
        masks = subsets(groups * size, k)
        actual = grouped_admissible(torch.tensor(np.array(masks)), interval(lo, hi, len(masks)), config)
        c = vectors(lo, hi)
        expected = [brute_grouped(c, mask, groups, size, kept, score, -np.inf) for mask in masks]
        assert expected == actual.tolist()
        for verdict in expected:
            seen[verdict] += 1
    assert min(seen.values()) > 20


@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 2, 1), (3, 2, 2)])
def test_dropped_at_zero_equals_brute_force_for_every_subset(shape):
    groups, size, kept = shape
    rng = np.random.default_rng(7)
    only_with_zero = 0
    for _ in range(CASES // 3):
        k = int(rng.integers(1, kept * size + 1))
        config = RoutingConfig(method="GroupedTopK", experts=groups * size, top_k=k, n_group=groups, topk_group=kept)
        lo, hi = boxes(rng, groups * size, most=2, grid=512)
        masks = subsets(groups * size, k)
        c, mask_rows = interval(lo, hi, len(masks)), torch.tensor(np.array(masks))
        usual = grouped_admissible(mask_rows, c, config)
        actual = usual | dropped_at_zero_admissible(mask_rows, c, config)
        grid = vectors(lo, hi)
        assert [brute_grouped(grid, mask, groups, size, kept, "max", 0.0) for mask in masks] == actual.tolist()
        only_with_zero += int((actual & ~usual).sum())
    assert only_with_zero > 20


def test_group_tie_rule_equals_brute_force_for_every_subset():
    """Equal keys (and so equal intervals): the lower expert and the lower of two equal groups win."""
    rng = np.random.default_rng(3)
    groups, size, kept = 3, 2, 2
    decided_by_rule = 0
    for _ in range(CASES // 2):
        k = int(rng.integers(1, 4))
        config = RoutingConfig(method="DeepSeekV3", experts=6, top_k=k, n_group=groups, topk_group=kept)
        keys = rng.integers(0, 3, 6)
        low, width = rng.integers(0, 3, 3), rng.choice([0, 1, 2], 3)
        lo, hi = low[keys], (low + width)[keys]
        masks = subsets(6, k)
        rows, key_rows = torch.tensor(np.array(masks)), torch.tensor(keys).expand(len(masks), -1).contiguous()
        barred = ties.overtaken(rows, key_rows).view(-1, groups, size).any(-1)
        same = ties.equal_groups(key_rows.view(-1, groups, size))
        actual = grouped_admissible(rows, interval(lo, hi, len(masks)), config, barred, same)
        c = vectors(lo, hi)
        equal = [
            (h, g)
            for h, g in combinations(range(groups), 2)
            if sorted(keys[2 * h : 2 * h + 2]) == sorted(keys[2 * g : 2 * g + 2])
        ]
        expected = []
        for mask in masks:
            overtaken = [
                i // size for i, j in combinations(range(6), 2) if keys[i] == keys[j] and mask[j] and not mask[i]
            ]

            def rule(chosen, overtaken=overtaken, equal=equal):
                return not chosen & set(overtaken) and all(h in chosen for h, g in equal if g in chosen)

            expected.append(brute_grouped(c, mask, groups, size, kept, "sum2", -np.inf, rule))
        assert expected == actual.tolist()
        free = grouped_admissible(rows, interval(lo, hi, len(masks)), config)
        decided_by_rule += int((free & ~actual).sum())
    assert decided_by_rule > 50


def test_kept_set_search_equals_trying_every_set():
    rng = np.random.default_rng(5)
    found = 0
    for _ in range(400):
        groups = int(rng.integers(1, 6))
        kept = int(rng.integers(1, groups + 1))
        lo = rng.integers(0, 5, groups).astype(float)
        hi = lo + rng.integers(0, 3, groups)
        required, allowed = rng.random(groups) < 0.25, rng.random(groups) < 0.8
        expected = any(
            required[~np.isin(np.arange(groups), chosen)].sum() == 0
            and allowed[list(chosen)].all()
            and hi[list(chosen)].min() >= max([lo[g] for g in range(groups) if g not in chosen], default=-np.inf)
            for chosen in combinations(range(groups), kept)
        )
        rows = (torch.tensor(array)[None] for array in (required, allowed, lo, hi))
        assert expected == bool(kept_set_exists(*rows, kept))
        found += expected
    assert 50 < found < 350


def test_overtaken_by_hand():
    mask = torch.tensor([[True, False, False, True, False]])
    keys = torch.tensor([[9, 4, 4, 4, 4]])
    assert ties.overtaken(mask, keys).tolist() == [[False, True, True, False, False]]


def test_equal_groups_by_hand():
    keys = torch.tensor([[[1, 2], [3, 3], [2, 1]]])
    assert ties.equal_groups(keys).nonzero().tolist() == [[0, 0, 2]]


def test_bit_keys_tell_zeros_and_biases_apart():
    keys = ties.bit_keys(
        torch.tensor([[0.0, -0.0, 1.0, 1.0]]), torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float64)
    )
    assert len(set(keys[0].tolist())) == 4
