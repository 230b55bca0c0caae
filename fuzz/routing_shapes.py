"""The sizes of a router: tables of those in use, and how any numbers are made to fit together.

Groups have to divide the experts and the kept ones have to hold top-k, so the sizes of a router are chosen together.
Only the standard library is imported.
"""

from __future__ import annotations

from fuzz.grammar import MAX_EXPERTS, ROUTERS

Shape = tuple[int, int, int, int]

SHAPES: tuple[Shape, ...] = (
    (1, 1, 1, 1),
    (256, 8, 4, 8),  # DeepSeek-V3
    (8, 1, 1, 2),  # Mixtral
    (384, 1, 1, 8),  # Kimi K2
    (160, 8, 3, 6),  # DeepSeek-V2
    (72, 3, 2, 32),
    (128, 1, 1, 8),  # Qwen3
    (512, 16, 5, 10),
    (60, 4, 1, 4),
    (16, 8, 5, 10),  # groups of two
    (64, 1, 1, 6),  # DeepSeek-V2-Lite
    (7, 1, 1, 7),
    (512, 32, 32, 22),
    (16, 16, 4, 4),  # groups of one
    (9, 3, 2, 5),
    (2, 1, 1, 1),
    (33, 11, 10, 30),
)
"""Experts, groups, kept groups and top-k, models among them."""
TOKENS = (17, 1, 5, 2, 33, 64, 3, 128, 300, 1500, 4100)


def fitted(method: str, shape: Shape, tokens: int, room: int) -> dict[str, str]:
    """The size keys of a case, as near to the numbers as the grammar allows.

    room: elements of the logits at most (one expert and one token are always had).
    """
    router = ROUTERS[method]
    experts, groups, kept, topk = shape
    experts = max(1, min(experts, MAX_EXPERTS, room))
    sizes = {"experts": experts, "tokens": max(1, min(tokens, room // experts))}
    places = experts
    if router.grouped:
        groups = next(count for count in range(max(1, min(groups, experts)), 0, -1) if experts % count == 0)
        kept = max(1, min(kept, groups))
        if router.pair and kept < groups and groups == experts:
            kept = groups
        sizes |= {"groups": groups, "topk_group": kept}
        places = experts // groups * kept
    sizes["topk"] = max(1, min(topk, router.max_topk, places))
    return {key: str(size) for key, size in sizes.items()}


def corner(method: str, index: int, room: int) -> dict[str, str]:
    """The sizes of a plan's cornerstone number ``index``: the shapes and the tokens in turn, large ones first."""
    shape = SHAPES[(index + 1) % len(SHAPES)]
    return fitted(method, shape, TOKENS[index % len(TOKENS)], room)
