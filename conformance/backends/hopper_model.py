"""GEMMs with the exact arithmetic of an NVIDIA Hopper GPU (SM90), on any device.

No library stands behind these backends: they are what a machine without that GPU compares against, and they show that
what the references say of Hopper is one answer. Their recipes name the model, so they are held to every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from references.backend import Claim, Unsupported
from references.gemm_formats import Operand, operand, plain_scales, sides
from references.gemm_models import exact_rows
from references.recipes import Recipe

NAMES = ("hopper_model", "hopper_model_sglang", "hopper_model_mma")

SOURCE = "references/tensor_cores.py: measured on an H200"
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_SIDE, MAX_K = 8192, 1024
"""Of a product; a larger one takes the model seconds and shows nothing new."""

Call = Callable[[], dict[str, Tensor]]


class HopperModel:
    """A model GEMM.

    name: of the backend. recipes: format -> the model that answers for it.
    """

    pace = 0.8

    def __init__(self, name: str, recipes: Mapping[str, Recipe]) -> None:
        self.name = name
        self._recipes = recipes

    def version(self) -> str:
        """The model's own version."""
        return "1"

    def claims(self, device: str) -> Iterable[Claim]:
        """The formats that have a recipe."""
        return [
            Claim(
                operation="gemm",
                variant=variant,
                source=recipe.source,
                maxima={"m": MAX_SIDE, "n": MAX_SIDE, "k": MAX_K},
            )
            for variant, recipe in self._recipes.items()
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """The model, which treats every row alike."""
        return replace(self._recipes[claim.variant], permutation_invariant=True, batch_invariant=True)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """Decode the operands."""
        if case.variant not in self._recipes:
            raise Unsupported(f"no {case.operation} {case.variant}")
        recipe = self._recipes[case.variant]
        found: list[Operand] = []
        for name, rows, side in zip("ab", ("m", "n"), sides(case.variant, case["scale"]), strict=True):
            scales = inputs.get(f"{name}_scales")
            if scales is not None:
                shape = case.integer(rows), case.integer("k")
                scales = plain_scales(scales, side, case["layout"], shape, activation=name == "a")
            found.append(operand(inputs[name], scales, side))
        a, b = found
        return lambda: {"output": exact_rows(a, b, recipe).to(torch.float32).to(OUTPUTS[case["out"]])}

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Evaluate the model."""
        return prepared()


def backends() -> Iterable[HopperModel]:
    """``wgmma`` as DeepGEMM, cuBLASLt and FlashInfer combine its dots, as SGLang's Triton kernel does, ``mma.sync``."""
    plain = Recipe(source=SOURCE, accumulator="hopper_f16", promotion="none")
    return [
        HopperModel(
            "hopper_model",
            {
                "deepseek_fp8": Recipe(source=SOURCE, accumulator="hopper_fp8", scale_combination="fma_dot_sasb"),
                "fp8_per_tensor": Recipe(
                    source=SOURCE, accumulator="hopper_fp8", scale_combination="fma_dot_sasb", promotion="none"
                ),
                "bf16": plain,
                "fp16": plain,
            },
        ),
        HopperModel(
            "hopper_model_sglang",
            {"deepseek_fp8": Recipe(source=SOURCE, accumulator="hopper_fp8", scale_combination="fma_dot_sa_sb")},
        ),
        HopperModel(
            "hopper_model_mma",
            {"deepseek_fp8": Recipe(source=SOURCE, accumulator="f16_upcast", scale_combination="fma_dot_sa_sb")},
        ),
    ]
