"""Maps from the experts of all ranks to those of one, as expert parallelism hands them to a router or an expert layer.

An entry is the number that an expert has here, -1 where the expert is elsewhere. ``linear`` ranks hold runs of
consecutive experts, ``round_robin`` ranks every `RANKS`-th, and under ``shuffled`` a rank holds any of them in any
order, as a load balancer places them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuzz.grammar import RANKS
from fuzz.philox import key_of, words

KINDS = ("linear", "round_robin", "shuffled")


def expert_map(text: str, experts: int, kind: str, shared: int = 0) -> Tensor:
    """int32 ``[experts + shared]`` of a rank that follows from the text, the experts spread as evenly as they go.

    shared: experts that every rank holds, behind its own. Raises ValueError for an unknown kind.
    """
    key = key_of(text, "expert_map")
    rank = int(words(key, 0, 1)[0] % RANKS)
    numbers = np.arange(experts)
    match kind:
        case "linear":
            mine = numbers[experts * rank // RANKS : experts * (rank + 1) // RANKS]
        case "round_robin":
            mine = numbers[rank::RANKS]
        case "shuffled":
            drawn = np.argsort(words(key, 1, experts), kind="stable")
            mine = drawn[experts * rank // RANKS : experts * (rank + 1) // RANKS]
        case _:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    found: npt.NDArray[np.int32] = np.full(experts + shared, -1, dtype=np.int32)
    found[mine] = np.arange(len(mine))
    found[experts:] = len(mine) + np.arange(shared)
    return torch.from_numpy(found)


def drawn_kind(text: str, kinds: tuple[str, ...] = KINDS) -> str:
    """The kind that a case's text draws."""
    return kinds[int(words(key_of(text, "expert_map kind"), 0, 1)[0] % len(kinds))]
