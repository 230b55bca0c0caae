"""CUDA's own conversions, ``__nv_cvt_*`` of ``cuda_fp8.h`` and ``cuda_fp4.h``, compiled by NVRTC.

The headers offer casts, so that is what the claims rest on; amax, divisions and products are torch's, in FP32. UE8M0
has two roundings there, toward +inf (``ceil``) and toward zero (``floor``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.backends import _cuda_nvrtc as cuda
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("cuda",)

SOURCE = "https://docs.nvidia.com/cuda/cuda-math-api/"
ELEMENTS = {"deepseek_fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1", "fp8_per_tensor": "e4m3"}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = {
    "deepseek_fp8": ("fp32", "ceil"),
    "mxfp8": ("ceil",),
    "mxfp4": ("ceil",),
    "nvfp4": ("e4m3",),
    "fp8_per_tensor": ("fp32", "static"),
}
SCALE_FLOOR = 2.0**-9
"""Lower bound of an NVFP4 block scale: the smallest E4M3 number."""
SWEPT: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",), "inputs": ("strided",)}
HEADERS = cuda.headers()

Parts = dict[str, Tensor]
Call = Callable[[], Parts]


class CudaHeaders:
    """``cuda``."""

    name = "cuda"

    def version(self) -> str:
        """Of the headers."""
        return cuda.version(HEADERS)

    def claims(self, device: str) -> Iterable[Claim]:
        """On any CUDA device: older ones get the headers' emulation."""
        if not device.startswith("cuda"):
            return []
        ue8m0 = f"{SOURCE}: __nv_cvt_float_to_e8m0"
        return [
            Claim(operation="ue8m0", variant="ceil", source=ue8m0, options=SWEPT),
            Claim(operation="ue8m0", variant="floor", source=ue8m0, where={"from": ("scale",)}, options=SWEPT),
            *(
                Claim(
                    operation="quantize",
                    variant=variant,
                    source=f"{SOURCE}: __nv_cvt_float_to_{'fp4' if element == 'e2m1' else 'fp8'}",
                    where={"scale": SCALES[variant]},
                    options=SWEPT,
                )
                for variant, element in ELEMENTS.items()
            ),
            *(
                Claim(
                    operation="dequantize",
                    variant=variant,
                    source=f"{SOURCE}: __nv_cvt_{'fp4' if element == 'e2m1' else 'fp8'}_to_halfraw",
                    options=SWEPT,
                )
                for variant, element in ELEMENTS.items()
            ),
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """IEEE divisions and products around the conversions."""
        source = "conformance/backends/cuda_headers.py: one FP32 operation a step"
        if claim.operation == "dequantize":
            return Recipe(source=source, dequant_rounding="scale_first" if claim.variant == "nvfp4" else "via_fp32")
        return Recipe(source=source, scale_floor=SCALE_FLOOR if claim.variant == "nvfp4" else 0.0)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The computation, bound to its inputs."""
        match case.operation:
            case "ue8m0" if case.variant in ("ceil", "floor"):
                return lambda: _ue8m0(case, inputs["x"])
            case "quantize":
                return lambda: _quantize(case, inputs)
            case "dequantize":
                return lambda: _dequantize(case, inputs)
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> Parts:
        """Run it."""
        return prepared()


def backends() -> Iterable[CudaHeaders]:
    """``cuda``."""
    return [CudaHeaders()]


def _ue8m0(case: Any, x: Tensor) -> Parts:
    if case["from"] != "scale":
        x = _divided(x, LARGEST[case["from"].removeprefix("amax_")])
    return {"scales": cuda.to_e8m0(x, up=case.variant == "ceil")}


def _quantize(case: Any, inputs: Mapping[str, Tensor]) -> Parts:
    element, x = ELEMENTS[case.variant], inputs["x"].float()
    block = _block(case)
    parts: Parts = {}
    if case["scale"] == "static":
        scales = inputs["scale"].view(1, 1)
    else:
        quotient = _divided(_amax(x, block), LARGEST[element])
        match case["scale"]:
            case "fp32":
                parts["scales"] = scales = quotient
            case "ceil":
                parts["scales"] = cuda.to_e8m0(quotient, up=True)
                scales = cuda.from_e8m0(parts["scales"])
            case "e4m3":
                quotient = (quotient / inputs["global_scale"]).clamp(min=SCALE_FLOOR)
                parts["scales"] = cuda.to_codes(quotient, "e4m3")
                scales = cuda.from_codes(parts["scales"], "e4m3") * inputs["global_scale"]
            case word:
                raise Unsupported(f"no quantize {case.variant} with scale={word}")
    spread = _spread(scales, block, x)
    codes = cuda.to_codes(torch.where(spread == 0, torch.copysign(torch.zeros_like(x), x), x / spread), element)
    return parts | {"payload": _packed(codes) if element == "e2m1" else codes}


def _dequantize(case: Any, inputs: Mapping[str, Tensor]) -> Parts:
    element, payload = ELEMENTS[case.variant], inputs["payload"]
    if element == "e2m1":
        payload = torch.stack((payload & 15, payload >> 4), dim=-1).flatten(-2)
    values = cuda.from_codes(payload, element)
    scales = inputs["scales"]
    match case["scale"]:
        case "ue8m0":
            scales = cuda.from_e8m0(scales)
        case "e4m3":
            scales = cuda.from_codes(scales, "e4m3") * inputs["global_scale"]
    return {"output": (values * _spread(scales, _block(case), values)).to(OUTPUTS[case["out"]])}


def _divided(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, rounded once: torch multiplies by the reciprocal where the divisor is a number on CUDA."""
    return x / torch.full((), divisor, device=x.device)


def _block(case: Any) -> tuple[int, int]:
    if case["block"] == "tensor":
        return case.integer("m"), case.integer("k")
    height, width = case["block"].split("x")
    return int(height), int(width)


def _amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block, ``[block rows, block columns]``."""
    padded = F.pad(x.abs(), (0, -x.shape[1] % block[1], 0, -x.shape[0] % block[0]))
    return padded.view(padded.shape[0] // block[0], block[0], -1, block[1]).amax(dim=(1, 3))


def _spread(scales: Tensor, block: tuple[int, int], like: Tensor) -> Tensor:
    """A scale for every element."""
    rows = torch.arange(like.shape[0], device=like.device) // block[0]
    cols = torch.arange(like.shape[1], device=like.device) // block[1]
    return scales[rows[:, None], cols[None, :]]


def _packed(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, the first in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
