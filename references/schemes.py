"""Block schemes: which element and which scales a format has, and over which blocks they are shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from references import ue8m0
from references.elements import E2M1, E4M3FN, Element

ScaleKind = Literal["fp32", "ue8m0", "e4m3", "static"]
Block = tuple[int, int] | None


@dataclass(frozen=True)
class Scheme:
    """A format as it is applied to a matrix.

    format: its name. element: of the payload. block: rows and columns that share a scale, None for the whole tensor.
    scale: how scales are stored, ``static`` for one given FP32 number. policy: how a UE8M0 scale is chosen, None where
    none is (other scales; a tensor that is only read).
    """

    format: str
    element: Element
    block: Block
    scale: ScaleKind
    policy: str | None = None

    @property
    def two_level(self) -> bool:
        """Whether a global scale multiplies the block scales."""
        return self.format == "nvfp4"


_FORMATS: dict[str, tuple[Element, tuple[str, ...], tuple[ScaleKind, ...]]] = {
    "deepseek_fp8": (E4M3FN, ("1x128", "128x128"), ("fp32", "ue8m0")),
    "mxfp8": (E4M3FN, ("1x32",), ("ue8m0",)),
    "mxfp4": (E2M1, ("1x32",), ("ue8m0",)),
    "nvfp4": (E2M1, ("1x16",), ("e4m3",)),
    "fp8_per_tensor": (E4M3FN, ("tensor",), ("fp32", "static")),
}


def scheme(format: str, block: str, scale: str) -> Scheme:  # noqa: A002 - the word of the grammar
    """The scheme that a case's words name.

    block: ``1x32`` and the like, or ``tensor``. scale: ``fp32``, ``e4m3``, ``static``, ``ue8m0`` (stored so, without a
    policy), or a UE8M0 policy such as ``ceil``. Raises ValueError for words that do not belong together.
    """
    if format not in _FORMATS:
        raise ValueError(f"scheme: format {format!r} is none of {', '.join(_FORMATS)}")
    element, blocks, kinds = _FORMATS[format]
    if block not in blocks:
        raise ValueError(f"scheme: {format} has no block {block!r}; known: {', '.join(blocks)}")
    sizes = None if block == "tensor" else (int(block.split("x")[0]), int(block.split("x")[1]))
    policy = scale if scale in ue8m0.AMAX_POLICIES else None
    kind = "ue8m0" if policy else scale
    for known in kinds:
        if kind == known:
            return Scheme(format, element, sizes, known, policy)
    raise ValueError(f"scheme: {format} has no scale {scale!r}; known: {', '.join(kinds)} or a UE8M0 policy")
