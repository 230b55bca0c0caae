"""torch's own scaled matrix product, ``torch._scaled_mm``, with one scale a tensor: oneDNN on a CPU, cuBLASLt on a GPU.

On SM90 cuBLASLt runs on the FP8 tensor cores: with ``use_fast_accum`` one 13-bit sum over all of K, without it sums of
128 that are added in FP32. Elsewhere FP32 is taken for the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from references.backend import Claim, Unsupported
from references.recipes import Promotion, Recipe

NAMES = ("torch_scaled_mm", "torch_scaled_mm_fast", "torch_scaled_mm_rows")

OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_mm.html"
CAPABILITIES = (9, 10)
"""Major compute capabilities whose FP8 accumulator is known."""
GPU_MULTIPLES = {"k": 16, "n": 16}
"""cuBLASLt asks for rows of 16 bytes."""
GPU_MAX_K = 4096
K_PARTS = 16
"""cuBLASLt's other products come in parts from K = 4096 on; all of these came in one."""
SWEPT: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",), "inputs": ("strided",)}

if not hasattr(torch, "_scaled_mm"):
    raise ImportError("torch has no _scaled_mm")

Call = Callable[[], dict[str, Tensor]]


class ScaledMM:
    """``torch._scaled_mm``. fast: with ``use_fast_accum``, which means something on a GPU only. rows: with the tensor's
    scale for every row, which CUTLASS multiplies on a GPU."""

    def __init__(self, name: str, *, fast: bool, rows: bool = False) -> None:
        self.name = name
        self._fast = fast
        self._rows = rows
        self._major: int | None = None

    def version(self) -> str:
        """torch's version."""
        return str(torch.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """``fp8_per_tensor``."""
        on_gpu = device.startswith("cuda")
        if on_gpu:
            self._major = torch.cuda.get_device_capability(torch.device(device))[0]
        if (on_gpu and self._major not in CAPABILITIES) or (not on_gpu and (self._fast or self._rows)):
            return []
        multiples = GPU_MULTIPLES if on_gpu else {}
        # Longer sums have not been measured.
        maxima = {"k": GPU_MAX_K} if on_gpu and not self._rows else {}
        return [
            Claim(
                operation="gemm",
                variant="fp8_per_tensor",
                source=SOURCE,
                where={"out": ("bf16",)} if self._rows else {},
                multiples=multiples,
                maxima=maxima,
                options=SWEPT if on_gpu else {},
            )
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """13 bits on SM90, scales at the end. oneDNN multiplies in BF16 units on x86, which flush subnormal numbers."""
        if self._major == 9:
            promotion: Promotion = "none" if self._fast else "every_128"
            recipe = Recipe(source="measured on an H200", accumulator="hopper_fp8", promotion=promotion)
            return recipe if self._rows else replace(recipe, scale_combination="fma_dot_sasb", k_parts=K_PARTS)
        return Recipe(source=SOURCE, subnormals="keep" if self._major else "flush")

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """Views of the operands; B is passed as the transpose of a row-major matrix."""
        if case.variant != "fp8_per_tensor":
            raise Unsupported(f"no {case.operation} {case.variant}")
        a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
        scale_a, scale_b = (inputs[f"{name}_scales"].view(()) for name in "ab")
        if self._rows:
            scale_a, scale_b = scale_a.repeat(case.integer("m"), 1), scale_b.repeat(1, case.integer("n"))
        out, fast = OUTPUTS[case["out"]], self._fast

        def call() -> dict[str, Tensor]:
            return {"output": torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out, use_fast_accum=fast)}

        return call

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it."""
        return prepared()


def backends() -> Iterable[ScaledMM]:
    """Without and with fast accumulation, and by rows."""
    return [
        ScaledMM("torch_scaled_mm", fast=False),
        ScaledMM("torch_scaled_mm_fast", fast=True),
        ScaledMM("torch_scaled_mm_rows", fast=False, rows=True),
    ]
