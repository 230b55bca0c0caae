"""FlashInfer's ``mono_moe``: routing, both products, silu and the sum in one kernel, for one shape, up to eight tokens.

It routes by itself, so that a layer with given ids and weights is called once for each of a token's experts: top-1 of
logits that name the expert, under a sigmoid that is exactly one there. Every expert's output is then BF16, and the
weighted sum is torch's in FP32. The scratchpad is kept from call to call, as FlashInfer advises.

Read in FlashInfer 0.7.4, ``csrc/fused_moe/monomoe/src``: amax at least 1e-10, scale RN(amax * RN(1 / 448)), payload
RN(x * (448 / amax)), silu by ``__fdividef`` and ``__expf`` in FP32, ``wgmma`` with FP32 promotion every 128 of K, FP32
additions by atomics. FlashInfer compiles with ``-use_fast_math``, where the quotient is within 2 ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _flashinfer_modules as modules
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("flashinfer_mono",)

SOURCE = "flashinfer/fused_moe/monomoe.py: mono_moe"
MODULE = "monomoe"
SHAPE = {"experts": "256", "hidden": "2048", "intermediate": "512"}
"""The only one (``_check_shapes``)."""
TOKENS = 8
SM90 = (9, 0)
CERTAIN = 128.0
"""A logit whose sigmoid is one: exp(-128) vanishes beside it."""
PAYLOAD_ERROR = 2.0**-21
"""448 / amax within 2 ulp under ``-use_fast_math``, and one product."""
SILU_DIVISION = 2.0**-22
EXP_SLOPE = 1.25 * 2.0**-23
"""``__fdividef`` within 2 ulp; ``__expf`` is ex2.approx(x * log2 e) (CUDA C++ Programming Guide)."""

Parts = Mapping[str, Tensor]
Call = Callable[[Parts], dict[str, Tensor]]


class MonoMoe:
    """``flashinfer_mono``."""

    name = "flashinfer_mono"

    def __init__(self) -> None:
        self._scratchpad: Tensor | None = None

    def version(self) -> str:
        """flashinfer-python's version."""
        return modules.version()

    def claims(self, device: str) -> Iterable[Claim]:
        """One shape on SM90, where the module lies ready."""
        if not device.startswith("cuda") or torch.cuda.get_device_capability(torch.device(device)) != SM90:
            return []
        if not modules.ready(MODULE):
            return []
        where = {key: (size,) for key, size in SHAPE.items()}
        return [
            Claim(
                operation="moe",
                variant="deepseek_fp8",
                source=SOURCE,
                where={
                    **where,
                    "gate": ("first",),
                    "ids": ("spread", "skewed", "elsewhere"),
                    "limit": ("none",),
                    "out": ("bf16",),
                    "scale": ("fp32",),
                    "topk": tuple(map(str, range(1, 9))),
                    "weight": ("output",),
                },
                maxima={"tokens": TOKENS},
                options={"stream": ("side",), "graph": ("replay",), "scratchpad": ("fresh",)},
            )
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """As read in the source; see the module."""
        return Recipe(
            source=claim.source,
            accumulator="hopper_fp8",
            amax_floor=1e-10,
            scale_arithmetic="reciprocal",
            payload_arithmetic="approximate",
            payload_error=PAYLOAD_ERROR,
            fc2_dtype="bf16",
            exp_slope=EXP_SLOPE,
            division_error=SILU_DIVISION,
        )

    def prepare(self, case: Any, inputs: Parts, options: Mapping[str, str]) -> Call:
        """The library's call with its own repacking of weights, bound to its inputs."""
        if case.operation != "moe" or case.variant != "deepseek_fp8":
            raise Unsupported(f"no {case.operation} {case.variant}")
        mono = modules.attribute("flashinfer.fused_moe.monomoe", "mono_moe")
        allocate = modules.attribute("flashinfer.fused_moe.monomoe", "alloc_scratchpad")
        if mono is None or allocate is None:
            raise Unsupported("this release has no mono_moe")
        if self._scratchpad is None or options.get("scratchpad") == "fresh":
            self._scratchpad = allocate(inputs["x"].device)
        scratchpad = self._scratchpad
        x, ids, weights = (inputs[name] for name in ("x", "ids", "weights"))
        first, second = (inputs[name].view(torch.float8_e4m3fn) for name in ("w1", "w2"))
        scales = inputs["w1_scales"], inputs["w2_scales"]
        experts, scaling = case.integer("experts"), float(case["scaling"])

        def call(out: Parts) -> dict[str, Tensor]:
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for slot in range(ids.shape[1]):
                chosen, here = ids[:, slot], ids[:, slot, None] >= 0
                answer = mono(
                    x, logits_of(chosen, experts), first, scales[0], second, scales[1], 1, "sigmoid", False,
                    scratchpad=scratchpad,
                )  # fmt: skip
                total += torch.where(here, weights[:, slot, None] * answer.float(), 0.0)
            return {"output": (total * scaling).to(torch.bfloat16)}

        return call

    def run(self, prepared: Call, out: Parts) -> dict[str, Tensor]:
        """Call it."""
        return prepared(out)


def backends() -> Iterable[MonoMoe]:
    """``flashinfer_mono``. Raises ImportError where no module lies ready."""
    reason = modules.absent(torch.cuda.is_available())
    if reason is not None:
        raise ImportError(reason)
    return [MonoMoe()]


def logits_of(chosen: Tensor, experts: int) -> Tensor:
    """BF16 ``[tokens, experts]``: `CERTAIN` at the expert chosen (the first for -1), its negative elsewhere."""
    number = torch.arange(experts, device=chosen.device)
    return torch.where(number == chosen.clamp(min=0)[:, None], CERTAIN, -CERTAIN).to(torch.bfloat16)
