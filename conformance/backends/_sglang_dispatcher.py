"""SGLang's map from the experts of all ranks to those of one, cut out of its dispatcher's file.

``StandardDispatcher.dispatch`` calls it between router and layer. The rest of the file imports FlashInfer and the
parallel groups of a server; the function needs torch alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = "sglang/srt/layers/moe/token_dispatcher/standard.py"
NAME = "_map_topk_ids_to_local_experts"
SOURCE = f"{FILE}: {NAME}"

ToLocal = Callable[[Tensor, Tensor], Tensor]
"""ids, and a map with an entry for each expert of all ranks, to ids of this rank, -1 for experts that are elsewhere."""


def to_local(folder: Path) -> ToLocal | None:
    """The function of the SGLang below ``folder``; None where it has no such function of its own."""
    path = folder / FILE
    if not path.is_file():
        return None
    found = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if getattr(node, "name", "") == NAME]
    if not found:
        return None
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(found, []), str(path), "exec"), names)
    function: ToLocal = names[NAME]
    return function
