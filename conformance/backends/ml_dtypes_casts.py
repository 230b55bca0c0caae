"""ml_dtypes: NumPy casts to and from E4M3, E2M1, E8M0 and BF16, on a CPU.

What ml_dtypes offers is the cast, so that is what the claims rest on; amax, scales and divisions are NumPy's. Its
``float8_e4m3fn`` answers NaN on overflow by design (jax-ml/ml_dtypes#400), so values are clipped first, as its users
must. Its ``float8_e8m0fnu`` answers NaN for zero and for negative numbers; the policy ``nearest`` ignores the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("ml_dtypes",)

Array = np.ndarray[Any, Any]
Parts = dict[str, Tensor]
Call = Callable[[], Parts]

AMAX_FLOOR = 2.0**-40
"""Lower bound of the tensor's amax under an FP32 scale, so that a zero tensor has a quotient."""
SCALE_FLOOR = 2.0**-9
"""Lower bound of an NVFP4 block scale: ``finfo(float8_e4m3fn).smallest_subnormal``."""
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
OUTPUTS: dict[str, Any] = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
DOCS = "https://github.com/jax-ml/ml_dtypes#specifications-of-implemented-floating-point-formats"


@dataclass(frozen=True)
class Element:
    """An element format: its ml_dtypes type, largest value, largest exponent and mantissa bits."""

    dtype: Any
    largest: float
    emax: int
    mantissa_bits: int


E4M3 = Element(ml_dtypes.float8_e4m3fn, 448.0, 8, 3)
E2M1 = Element(ml_dtypes.float4_e2m1fn, 6.0, 2, 1)
ELEMENTS = {"mxfp8": E4M3, "mxfp4": E2M1, "nvfp4": E2M1, "deepseek_fp8": E4M3, "fp8_per_tensor": E4M3}


class MlDtypesBackend:
    """ml_dtypes' casts."""

    name = "ml_dtypes"

    def version(self) -> str:
        """ml_dtypes' version."""
        return str(ml_dtypes.__version__)

    def libraries(self) -> dict[str, str]:
        """The NumPy that the casts are registered with."""
        return {"numpy": np.__version__}

    def claims(self, device: str) -> Iterable[Claim]:
        """Casts on the CPU."""
        if device != "cpu":
            return []
        formats = ("mxfp8", "mxfp4", "nvfp4", "fp8_per_tensor")
        return [
            Claim(operation="ue8m0", variant="nearest", source=f"astype(float8_e8m0fnu): {DOCS}"),
            *(
                Claim(operation="quantize", variant=variant, source=f"astype(float8_e4m3fn or float4_e2m1fn): {DOCS}")
                for variant in formats
            ),
            *(
                Claim(operation="dequantize", variant=variant, source=f"astype(float32) of each format: {DOCS}")
                for variant in (*formats, "deepseek_fp8")
            ),
            Claim(
                operation="requantize",
                variant="mxfp4_to_deepseek_fp8",
                source=f"astype(float32) of float4_e2m1fn, astype(float8_e4m3fn): {DOCS}",
            ),
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """NumPy's FP32 divisions and products, one rounding each, then ml_dtypes' cast."""
        source = "conformance/backends/ml_dtypes_casts.py: NumPy float32 arithmetic around astype()"
        nvfp4 = claim.variant == "nvfp4"
        if claim.operation == "quantize":
            return Recipe(
                source=source,
                amax_floor=AMAX_FLOOR if claim.variant == "fp8_per_tensor" else 0.0,
                scale_floor=SCALE_FLOOR if nvfp4 else 0.0,
            )
        if claim.operation == "dequantize":
            return Recipe(source=source, dequant_rounding="scale_first" if nvfp4 else "via_fp32")
        return Recipe(source=source)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The inputs as NumPy arrays, bound to the computation."""
        arrays = {name: _to_numpy(tensor) for name, tensor in inputs.items()}
        match case.operation:
            case "ue8m0":
                return lambda: _parts(scales=arrays["x"].astype(ml_dtypes.float8_e8m0fnu))
            case "quantize":
                return lambda: _quantize(case, arrays)
            case "dequantize":
                return lambda: _dequantize(case, arrays)
            case "requantize" if case.variant == "mxfp4_to_deepseek_fp8":
                return lambda: _requantize(arrays["payload"], arrays["scales"])
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> Parts:
        """Cast."""
        with np.errstate(all="ignore"):
            return prepared()


def backends() -> Iterable[MlDtypesBackend]:
    """``ml_dtypes``."""
    return [MlDtypesBackend()]


def _to_numpy(tensor: Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def _parts(**arrays: Array) -> Parts:
    """Tensors of the canonical dtypes: one-byte types as uint8, BF16 by its bits."""
    parts = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            parts[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            parts[name] = torch.from_numpy(array.view(np.uint8) if array.dtype.itemsize == 1 else array)
    return parts


def _expand(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """A scale for every element."""
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def _block_amax(x: Array, block: tuple[int, int]) -> Array:
    padded = np.pad(np.abs(x), ((0, -x.shape[0] % block[0]), (0, -x.shape[1] % block[1])))
    amax: Array = padded.reshape(padded.shape[0] // block[0], block[0], -1, block[1]).max(axis=(1, 3))
    return amax


def _power_of_two(amax: Array, policy: str, element: Element) -> Array:
    """UE8M0 codes from `numpy.frexp`'s mantissa in [0.5, 1) and exponent."""
    if policy == "ceil":
        amax = amax / np.float32(element.largest)
    mantissa, exponent = np.frexp(amax)
    if policy == "even":
        exponent = exponent - (mantissa + np.float32(2.0 ** -(element.mantissa_bits + 2)) < 1)
    elif policy == "floor":
        exponent = exponent - 1
    else:
        exponent = exponent - (mantissa == 0.5)
    if policy != "ceil":
        exponent = exponent - element.emax
    return np.where(amax == 0, 0, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def _cast(x: Array, element: Element) -> Array:
    return np.clip(x, -element.largest, element.largest).astype(element.dtype)


def _pack(x: Array, element: Element) -> Array:
    codes = _cast(x, element).view(np.uint8)
    return codes if element is E4M3 else codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpack(payload: Array, element: Element) -> Array:
    if element is E2M1:
        payload = np.stack([payload & 15, payload >> 4], axis=-1).reshape(payload.shape[0], -1)
    values: Array = payload.view(element.dtype).astype(np.float32)
    return values


def _block(case: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1]) if case["block"] == "tensor" else BLOCKS[case["block"]]


def _quantize(case: Any, arrays: Mapping[str, Array]) -> Parts:
    x, scale, element = arrays["x"].astype(np.float32), case["scale"], ELEMENTS[case.variant]
    if scale == "static":
        return _parts(payload=_pack(x / arrays["scale"], element))
    block = _block(case, x.shape)
    amax = _block_amax(x, block)
    stored: Array
    scales: Array
    if scale == "fp32":
        stored = scales = np.maximum(amax, np.float32(AMAX_FLOOR)) / np.float32(element.largest)
    elif scale == "e4m3":
        wanted = amax / np.float32(element.largest) / arrays["global_scale"]
        stored = _cast(np.maximum(wanted, np.float32(SCALE_FLOOR)), E4M3)
        scales = stored.astype(np.float32) * arrays["global_scale"]
    else:
        stored = _power_of_two(amax, scale, element)
        scales = stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return _parts(scales=stored, payload=_pack(x / _expand(scales, block, x.shape), element))


def _dequantize(case: Any, arrays: Mapping[str, Array]) -> Parts:
    values, scales = _unpack(arrays["payload"], ELEMENTS[case.variant]), arrays["scales"]
    block = _block(case, values.shape)
    if case["scale"] == "ue8m0":
        scales = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    elif case["scale"] == "e4m3":
        scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * arrays["global_scale"]
    scales = scales.reshape(-(-values.shape[0] // block[0]), -1)
    return _parts(output=(values * _expand(scales, block, values.shape)).astype(OUTPUTS[case["out"]]))


def _requantize(payload: Array, stored: Array) -> Parts:
    """MXFP4 to 128 x 128 E4M3 blocks; `numpy.ldexp` moves each code by the difference of the two exponents."""
    values = _unpack(payload, E2M1)
    largest = stored.reshape(stored.shape[0] // 128, 128, -1, 4).max(axis=(1, 3)).astype(np.int32)
    codes = np.where(largest == 255, 255, np.maximum(largest - 6, 0))
    old = _expand(stored.astype(np.int32), (1, 32), values.shape)
    new = _expand(codes, (128, 128), values.shape)
    moved = np.where((old == 255) | (new == 255), np.float32(np.nan), np.ldexp(values, old - new))
    return _parts(scales=codes.astype(np.uint8), payload=_cast(moved, E4M3))
