"""What the text of a ``moe`` case says of its expert layer, and its stored weights as operands (keys: docs/moe.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from references.backend import CaseLike
from references.gemm_formats import Side, Stored, sides
from references.routing.forms import to_local
from references.schemes import Scheme, scheme

OUTPUTS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """An expert layer.

    format: as of a GEMM. scale: ``fp32``, ``e4m3``, ``none`` or a UE8M0 policy, of activations at FC1 and FC2.
    gate_first: whether the gate rows come first in W1. limit: clamps gate and up, None for none. scaling: the routed
    scaling factor. weight_on_input: whether router weights multiply FC1's sums instead of the output.
    """

    format: str
    scale: str
    gate_first: bool
    limit: float | None
    scaling: float
    weight_on_input: bool
    dtype: torch.dtype

    @property
    def sides(self) -> tuple[Side, Side]:
        """How activations and weights are stored."""
        return sides(self.format, "ue8m0" if self.scale in ("ceil", "floor", "ceil_amax", "even") else self.scale)

    @property
    def scheme(self) -> Scheme | None:
        """How activations are quantised; None where they are BF16."""
        match self.format:
            case "deepseek_fp8":
                return scheme("deepseek_fp8", "1x128", self.scale)
            case "mxfp8" | "w4a8":
                return scheme("mxfp8", "1x32", self.scale)
            case "nvfp4":
                return scheme("nvfp4", "1x16", "e4m3")
            case "fp8_per_tensor":
                return scheme("fp8_per_tensor", "tensor", "static")
            case "bf16" | "w4a16":
                return None
        raise ValueError(f"moe: unknown format {self.format!r}")


def config_of(case: CaseLike) -> MoeConfig:
    """The expert layer of a case."""
    return MoeConfig(
        format=case.variant,
        scale=case["scale"],
        gate_first=case["gate"] == "first",
        limit=None if case["limit"] == "none" else float(case["limit"]),
        scaling=float(case["scaling"]),
        weight_on_input=case["weight"] == "input",
        dtype=OUTPUTS[case["out"]],
    )


def local_ids(inputs: Mapping[str, Tensor]) -> Tensor:
    """Each token's experts as numbered here, -1 where they are elsewhere: ``ids``, or what a map makes of them."""
    return to_local(inputs["ids"], inputs["expert_map"]) if "expert_map" in inputs else inputs["ids"]


def activation_scales(inputs: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The given scale of the input and of the intermediate: static ones, global ones, or none."""
    first, second = (inputs.get(f"{name}_scale", inputs.get(f"{name}_global_scale")) for name in "xh")
    return first, second


def expert_operands(config: MoeConfig, inputs: Mapping[str, Tensor]) -> Callable[[int], tuple[Stored, Stored]]:
    """expert -> its W1 ``[2 * intermediate, hidden]`` and W2 ``[hidden, intermediate]``."""
    side = config.sides[1]

    def stored(expert: int) -> tuple[Stored, Stored]:
        found = []
        for name in ("w1", "w2"):
            scales, outer = inputs.get(f"{name}_scales"), inputs.get(f"{name}_global_scale")
            found.append(
                Stored(
                    inputs[name][expert],
                    None if scales is None else scales[expert],
                    side,
                    None if outer is None else outer[expert : expert + 1],
                )
            )
        return found[0], found[1]

    return stored
