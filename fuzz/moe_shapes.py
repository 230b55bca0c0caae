"""The sizes of an expert layer in a plan: small, ragged against every block, chosen together.

Only the standard library is imported.
"""

from __future__ import annotations

EVEN = ("w4a8", "w4a16", "nvfp4")
"""Formats whose weights are stored two to a byte."""
SHAPES: tuple[tuple[int, int, int, int], ...] = (
    (1, 1, 1, 1),
    (4, 2, 160, 66),
    (2, 1, 258, 130),  # more than two blocks of 128 at FC1, more than one at FC2
    (5, 5, 32, 32),
    (3, 2, 128, 128),
    (1, 1, 34, 300),
    (12, 10, 48, 18),
    (5, 1, 130, 34),
    (2, 2, 512, 16),
    (4, 1, 64, 20),
    (1, 1, 200, 136),  # as many blocks of 128 one way as the other
    (136, 1, 8, 8),  # more experts than 7 bits number
)
"""Experts, top-k, hidden and intermediate size."""
TOKENS = (1, 5, 17, 3, 2, 9, 33, 130)
COUNT = len(SHAPES) * len(TOKENS)


def sizes(variant: str, index: int, room: int) -> dict[str, str]:
    """The size keys of case number ``index``: the shapes in turn, the tokens at another pace; the simplest is 0.

    room: elements of all experts' W2 at most (the smallest layer is always had).
    """
    experts, topk, hidden, inner = SHAPES[index % len(SHAPES)]
    tokens = TOKENS[(index + index // len(SHAPES)) % len(TOKENS)]
    step = 2 if variant in EVEN else 1
    experts = max(1, min(experts, room // step**2))
    hidden = max(step, min(hidden, room // (experts * step)) // step * step)
    inner = max(step, min(inner, room // (experts * hidden)) // step * step)
    found = {"experts": experts, "topk": min(topk, experts), "hidden": hidden, "intermediate": inner, "tokens": tokens}
    return {key: str(size) for key, size in found.items()}
