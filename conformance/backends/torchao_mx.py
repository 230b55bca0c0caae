"""torchao's MX and NVFP4 casts (``torchao.prototype.mx_formats``), eager, on any device.

Read in torchao 0.18:
- ``to_mx`` takes FP32 or BF16, contiguous, columns in whole blocks. FLOOR, CEIL and EVEN read amax's bits; RCEIL takes
  ``ceil(log2(amax / qmax))`` in FP32 (``mx_tensor.py: _to_mx_rceil``). FLOOR, CEIL and EVEN divide by the scale, but by
  no less than 2^-126; RCEIL multiplies by the reciprocal, which it takes as 1.0 where the code is 0.
- ``nvfp4_quantize`` clamps a block scale to at least E4M3's smallest normal number and scales elements by
  (1 / global scale) / block scale, in three roundings (``nvfp4_tensor.py``).
- ``to_dtype`` multiplies in the output dtype; ``NVFP4Tensor.dequantize`` multiplies the two scales first.
- On CUDA, ``tensor / number`` is a product with the number's reciprocal
  (pytorch: ``aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from references.backend import Claim, Unsupported
from references.recipes import Recipe

try:
    import torchao
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked
except ImportError as error:
    raise ImportError(f"torchao >= 0.18 with prototype.mx_formats is needed: {error}") from error

NAMES = ("torchao",)

Parts = dict[str, Tensor]
Call = Callable[[], Parts]

MODES = {
    "ceil": ScaleCalculationMode.RCEIL,
    "floor": ScaleCalculationMode.FLOOR,
    "ceil_amax": ScaleCalculationMode.CEIL,
    "even": ScaleCalculationMode.EVEN,
}
ELEMENTS: dict[str, Any] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float4_e2m1fn_x2,
    "e2m3": DTYPE_FP6_E2M3,
    "e3m2": DTYPE_FP6_E3M2,
    "mxfp8": torch.float8_e4m3fn,
    "mxfp4": torch.float4_e2m1fn_x2,
}
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MX = "torchao/prototype/mx_formats/mx_tensor.py"
NVFP4 = "torchao/prototype/mx_formats/nvfp4_tensor.py"
BLOCKED = "torchao/prototype/mx_formats/utils.py: to_blocked, from_blocked"
NVFP4_ON_CUDA = f"{NVFP4}: nvfp4_quantize; amax / 6 is amax * RN(1 / 6) on CUDA"

E4M3_TINY = 2.0**-6
NVFP4_PAYLOAD_ERROR = 2.0**-22 + 2.0**-40
"""Three roundings, 1 / g, (1 / g) / s and x times that, and the judge's own of s * g: (1 + 2^-24)^4 - 1, rounded up."""


class TorchaoBackend:
    """torchao's prototype MX formats."""

    name = "torchao"

    def version(self) -> str:
        """torchao's version."""
        return str(torchao.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """The same on every device, but for a division on CUDA (see the recipe)."""
        dtypes, contiguous = {"dtype": ("fp32", "bf16")}, {"stride": ("contiguous",)}
        for policy in MODES:
            where = {"from": tuple(f"amax_{name}" for name in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2"))}
            yield Claim(operation="ue8m0", variant=policy, source=f"{MX}: to_mx, {MODES[policy]}", where=where)
        for variant in ("mxfp8", "mxfp4"):
            yield Claim(
                operation="quantize",
                variant=variant,
                source=f"{MX}: to_mx",
                where={**dtypes, **contiguous},
                multiples={"k": 32},
            )
            # FP16 is no dtype of an MXTensor, and its scales would overflow (a TODO in get_fp_scale).
            yield Claim(
                operation="dequantize",
                variant=variant,
                source=f"{MX}: to_dtype",
                where={"out": ("fp32", "bf16")},
                multiples={"k": 32},
            )
        yield Claim(
            operation="quantize",
            variant="nvfp4",
            source=NVFP4_ON_CUDA if device.startswith("cuda") else f"{NVFP4}: nvfp4_quantize",
            where={**dtypes, **contiguous},
            multiples={"k": 16},
        )
        yield Claim(
            operation="dequantize", variant="nvfp4", source=f"{NVFP4}: NVFP4Tensor.dequantize", multiples={"k": 16}
        )
        yield Claim(operation="scale_layout", variant="interleave_128x4", source=BLOCKED)

    def recipe(self, claim: Claim) -> Recipe:
        """As read in the source; see the module."""
        if claim.operation == "quantize" and claim.variant == "nvfp4":
            return Recipe(
                source=claim.source,
                scale_arithmetic="reciprocal" if claim.source == NVFP4_ON_CUDA else "divide",
                scale_floor=E4M3_TINY,
                payload_arithmetic="approximate",
                payload_error=NVFP4_PAYLOAD_ERROR,
            )
        if claim.operation == "dequantize" and claim.variant == "nvfp4":
            return Recipe(source=claim.source, dequant_rounding="scale_first")
        return Recipe(source=claim.source)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The library's call, bound to its inputs."""
        match case.operation:
            case "ue8m0":
                return _ue8m0(inputs["x"], case.variant, case["from"])
            case "quantize" if case.variant == "nvfp4":
                return _quantize_nvfp4(inputs["x"], inputs["global_scale"])
            case "quantize":
                return _quantize_mx(inputs["x"], case.variant, case["scale"])
            case "dequantize" if case.variant == "nvfp4":
                return _dequantize_nvfp4(inputs, OUTPUTS[case["out"]])
            case "dequantize":
                return _dequantize_mx(inputs, case.variant, OUTPUTS[case["out"]])
            case "scale_layout":
                return _scale_layout(inputs["scales"], case.integer("rows"), case.integer("cols"), case["direction"])
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> Parts:
        """Call it."""
        return prepared()


def backends() -> Iterable[TorchaoBackend]:
    """``torchao``."""
    return [TorchaoBackend()]


def _ue8m0(x: Tensor, policy: str, source: str) -> Call:
    # Blocks of two, the second element zero: E2M1 comes in pairs.
    blocks = torch.stack([x, torch.zeros_like(x)], dim=-1)
    element = ELEMENTS[source.removeprefix("amax_")]

    def call() -> Parts:
        scales, _ = to_mx(blocks, element, 2, MODES[policy])
        return {"scales": scales.view(torch.uint8).reshape(x.shape)}

    return call


def _quantize_mx(x: Tensor, variant: str, policy: str) -> Call:
    def call() -> Parts:
        scales, payload = to_mx(x, ELEMENTS[variant], 32, MODES[policy])
        return {"scales": scales.view(torch.uint8), "payload": payload.view(torch.uint8)}

    return call


def _quantize_nvfp4(x: Tensor, global_scale: Tensor) -> Call:
    def call() -> Parts:
        scales, payload = nvfp4_quantize(x, per_tensor_scale=global_scale.reshape(()))
        return {"scales": scales.view(torch.uint8), "payload": payload.view(torch.uint8)}

    return call


def _dequantize_mx(inputs: Mapping[str, Tensor], variant: str, out: torch.dtype) -> Call:
    payload, scales = inputs["payload"], inputs["scales"].view(torch.float8_e8m0fnu)
    if variant == "mxfp8":
        payload = payload.view(torch.float8_e4m3fn)
    return lambda: {"output": to_dtype(payload, scales, ELEMENTS[variant], 32, out)}


def _dequantize_nvfp4(inputs: Mapping[str, Tensor], out: torch.dtype) -> Call:
    scales = inputs["scales"].view(torch.float8_e4m3fn)
    global_scale = inputs["global_scale"].reshape(())
    tensor = NVFP4Tensor(inputs["payload"], scales, 16, out, global_scale)
    return lambda: {"output": tensor.dequantize(out)}


def _scale_layout(scales: Tensor, rows: int, cols: int, direction: str) -> Call:
    if direction == "pack":
        return lambda: {"scales": to_blocked(scales)}
    return lambda: {"scales": from_blocked(scales, rows, cols).contiguous()}
