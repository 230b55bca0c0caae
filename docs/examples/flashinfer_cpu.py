"""What of FlashInfer runs on a CPU without a compiled module, for ``compare --plugin``: see docs/compare.md.

Its test helpers quantise to DeepSeek's FP8 with power-of-two scales (``flashinfer/testing/utils.py``), and a fallback
in torch dequantises FP4 (``flashinfer/quantization/fp4_quantization.py``). A release without one of them claims less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from references.backend import Claim
from references.recipes import Recipe

CASTS = "flashinfer.testing.utils"
FP4 = "flashinfer.quantization.fp4_quantization"
FALLBACK = "_e2m1_and_ufp8sf_scale_to_float_cpu"
WIDTHS = {"nvfp4": (16, 1), "mxfp4": (32, 0)}
"""Format -> elements under a scale, and what the fallback calls the scales' type."""


class FlashInferOnCpu:
    """The functions of the module's docstring."""

    name = "flashinfer_cpu"

    def version(self) -> str:
        """That of the release."""
        return version("flashinfer-python")

    def claims(self, device: str) -> Iterable[Claim]:
        """What the release has."""
        if device != "cpu":
            return
        if hasattr(import_module(CASTS), "per_block_cast_to_fp8"):
            yield Claim(
                operation="quantize",
                variant="deepseek_fp8",
                source=f"{CASTS}: per_token_cast_to_fp8, per_block_cast_to_fp8",
                where={"scale": ("ceil",)},
                multiples={"k": 128},
            )
        if hasattr(import_module(FP4), FALLBACK):
            for variant, (width, _) in WIDTHS.items():
                yield Claim(
                    operation="dequantize",
                    variant=variant,
                    source=f"{FP4}: {FALLBACK}",
                    where={"out": ("fp32",)},
                    multiples={"k": width},
                )

    def recipe(self, claim: Claim) -> Recipe:
        """As read: amax at least 1e-4 and a quotient by 448; products in FP32."""
        return Recipe(source=claim.source, amax_floor=1e-4 if claim.operation == "quantize" else 0.0)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Callable[[], Any]:
        """The call."""
        if case.operation == "quantize":
            cast = "per_token_cast_to_fp8" if case["block"] == "1x128" else "per_block_cast_to_fp8"
            quantise = getattr(import_module(CASTS), cast)
            return lambda: quantise(inputs["x"].contiguous())
        width, kind = WIDTHS[case.variant]
        given = inputs["payload"], inputs["scales"], inputs.get("global_scale")
        return lambda: getattr(import_module(FP4), FALLBACK)(*given, width, kind, False)

    def run(self, prepared: Callable[[], Any], out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of its own; scales are powers of two in FP32, and their exponent fields the codes."""
        found = prepared()
        if isinstance(found, Tensor):
            return {"output": found}
        payload, scales = found
        codes = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        return {"scales": codes, "payload": payload}


def backends() -> list[FlashInferOnCpu]:
    """One."""
    return [FlashInferOnCpu()]
