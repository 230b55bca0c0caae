"""JAX: XLA's casts to and from E4M3, E2M1, E8M0, BF16 and FP16, and ``jax.nn.scaled_matmul``, on a CPU or a GPU.

What is under test is the cast, so amax, scales and divisions are NumPy's, one FP32 operation each. As with ml_dtypes
values are clipped first: XLA's ``float8_e4m3fn`` answers NaN on overflow by design. On a CPU XLA treats subnormal FP32
numbers as zero. ``scaled_matmul`` says that it computes in FP32; on a GPU XLA takes TF32 for it, whatever precision is
asked for (docs/findings/028-jax-scaled-matmul-tf32.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import lax
from torch import Tensor

from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("jax",)

Array = np.ndarray[Any, Any]
Parts = dict[str, Tensor]

AMAX_FLOOR = 2.0**-40
"""Lower bound of an amax under an FP32 scale, so that a zero block has a quotient."""
SCALE_FLOOR = 2.0**-9
"""Lower bound of an NVFP4 block scale: the smallest E4M3 number."""
CASTS = "https://docs.jax.dev/en/latest/_autosummary/jax.lax.convert_element_type.html"
PRODUCT = "https://docs.jax.dev/en/latest/_autosummary/jax.nn.scaled_matmul.html"
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
TYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
ELEMENTS = {"deepseek_fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1", "fp8_per_tensor": "e4m3"}
QUANTISED = {
    "deepseek_fp8": ("fp32",),
    "mxfp8": ("ceil",),
    "mxfp4": ("ceil",),
    "nvfp4": ("e4m3",),
    "fp8_per_tensor": ("fp32", "static"),
}
LEAST_ROOM = 64


class Jax:
    """``jax``."""

    name = "jax"

    def __init__(self) -> None:
        self._platform = "cpu"

    def version(self) -> str:
        """JAX's version."""
        return str(jax.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """On a CPU, and on the first GPU where JAX has one."""
        self._platform = device.split(":")[0].replace("cuda", "gpu")
        if device not in ("cpu", "cuda:0") or not _devices(self._platform):
            return []
        return [
            Claim(operation="ue8m0", variant="nearest", source=f"astype(float8_e8m0fnu): {CASTS}"),
            *(
                Claim(
                    operation="quantize",
                    variant=variant,
                    source=f"astype of each format: {CASTS}",
                    where={"scale": QUANTISED[variant]},
                )
                for variant in ELEMENTS
            ),
            *(
                Claim(operation="dequantize", variant=variant, source=f"astype of each format: {CASTS}")
                for variant in ELEMENTS
            ),
            *(Claim(operation="gemm", variant=variant, source=PRODUCT) for variant in ("mxfp8", "deepseek_fp8")),
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """NumPy's FP32 operations around the casts; products in FP32 of any order."""
        subnormals: Any = "flush" if self._platform == "cpu" else "keep"
        if claim.operation == "gemm":
            return Recipe(source=PRODUCT, subnormals=subnormals)
        source = "conformance/backends/jax_casts.py: NumPy float32 arithmetic around lax.convert_element_type"
        nvfp4 = claim.variant == "nvfp4"
        if claim.operation == "dequantize":
            rounding: Any = "scale_first" if nvfp4 else "via_fp32"
            return Recipe(source=source, dequant_rounding=rounding, subnormals=subnormals)
        if claim.operation == "quantize":
            fp32 = "fp32" in claim.where["scale"]
            return Recipe(
                source=source, amax_floor=AMAX_FLOOR if fp32 else 0.0, scale_floor=SCALE_FLOOR if nvfp4 else 0.0
            )
        return Recipe(source=source)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Callable[[], Parts]:
        """The inputs as NumPy arrays, bound to the computation."""
        device = _devices(platform(inputs))[0]
        arrays = {name: _to_numpy(tensor) for name, tensor in inputs.items()}
        match case.operation:
            case "ue8m0" if case.variant == "nearest":
                return lambda: _parts(scales=_cast(arrays["x"], "ue8m0", device))
            case "quantize":
                return lambda: _quantize(case, arrays, device)
            case "dequantize":
                return lambda: _dequantize(case, arrays, device)
            case "gemm" if case.variant in ("mxfp8", "deepseek_fp8"):
                return lambda: _gemm(case, arrays, device)
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Callable[[], Parts], out: Mapping[str, Tensor]) -> Parts:
        """Run it."""
        with np.errstate(all="ignore"):
            return prepared()


def platform(inputs: Mapping[str, Tensor]) -> str:
    """Where JAX computes: where the inputs are."""
    return "gpu" if any(tensor.device.type == "cuda" for tensor in inputs.values()) else "cpu"


def backends() -> Iterable[Jax]:
    """``jax``."""
    return [Jax()]


@lru_cache(None)
def _devices(platform: str) -> tuple[Any, ...]:
    try:
        return tuple(jax.devices(platform))
    except RuntimeError:
        return ()


@lru_cache(None)
def _converter(name: str) -> Any:
    return jax.jit(lambda x: lax.convert_element_type(x, TYPES[name]))


def _cast(x: Array, name: str, device: Any) -> Array:
    """Cast on the device; padded to a power of two, so that few sizes are compiled."""
    flat = x.reshape(-1)
    room = max(LEAST_ROOM, 1 << (len(flat) - 1).bit_length()) if len(flat) else LEAST_ROOM
    padded = np.zeros(room, dtype=flat.dtype)
    padded[: len(flat)] = flat
    found = np.asarray(_converter(name)(jax.device_put(padded, device)))
    return found[: len(flat)].reshape(x.shape)


def _encode(x: Array, element: str, device: Any) -> Array:
    """Codes, one a byte."""
    largest = np.float32(LARGEST[element])
    codes: Array = _cast(np.clip(x, -largest, largest), element, device).view(np.uint8)
    return codes


def _to_numpy(tensor: Tensor) -> Array:
    plain = tensor.cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def _parts(**arrays: Array) -> Parts:
    """Tensors on the CPU: one-byte types as uint8, BF16 by its bits."""
    parts = {}
    for name, array in arrays.items():
        array = np.array(array, order="C")
        if array.dtype == ml_dtypes.bfloat16:
            parts[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            parts[name] = torch.from_numpy(array.view(np.uint8) if array.dtype.itemsize == 1 else array)
    return parts


def _block(case: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1]) if case["block"] == "tensor" else BLOCKS[case["block"]]


def _spread(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """A scale for every element."""
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def _amax(x: Array, block: tuple[int, int]) -> Array:
    padded = np.pad(np.abs(x), ((0, -x.shape[0] % block[0]), (0, -x.shape[1] % block[1])))
    amax: Array = padded.reshape(padded.shape[0] // block[0], block[0], -1, block[1]).max(axis=(1, 3))
    return amax


def _ceil(quotient: Array) -> Array:
    """UE8M0 codes of the smallest powers of two that are not below, by `numpy.frexp`."""
    mantissa, exponent = np.frexp(quotient)
    exponent = exponent - (mantissa == 0.5)
    return np.where(quotient == 0, 0, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def _quantize(case: Any, arrays: Mapping[str, Array], device: Any) -> Parts:
    element, x = ELEMENTS[case.variant], arrays["x"].astype(np.float32)
    block, parts = _block(case, x.shape), {}
    match case["scale"]:
        case "static":
            scales = arrays["scale"].reshape(1, 1)
        case "fp32":
            amax = np.maximum(_amax(x, block), np.float32(AMAX_FLOOR))
            parts["scales"] = scales = amax / np.float32(LARGEST[element])
        case "ceil":
            parts["scales"] = codes = _ceil(_amax(x, block) / np.float32(LARGEST[element]))
            scales = np.ldexp(np.float32(1.0), codes.astype(np.int32) - 127)
        case "e4m3":
            wanted = _amax(x, block) / np.float32(LARGEST[element]) / arrays["global_scale"]
            parts["scales"] = _encode(np.maximum(wanted, np.float32(SCALE_FLOOR)), "e4m3", device)
            scales = parts["scales"].view(TYPES["e4m3"]).astype(np.float32) * arrays["global_scale"]
        case word:
            raise Unsupported(f"no quantize {case.variant} with scale={word}")
    payload = _encode(x / _spread(scales, block, x.shape), element, device)
    return _parts(**parts, payload=payload[:, ::2] | (payload[:, 1::2] << 4) if element == "e2m1" else payload)


def _dequantize(case: Any, arrays: Mapping[str, Array], device: Any) -> Parts:
    element, payload, scales = ELEMENTS[case.variant], arrays["payload"], arrays["scales"]
    if element == "e2m1":
        payload = np.stack([payload & 15, payload >> 4], axis=-1).reshape(payload.shape[0], -1)
    values = _cast(payload.view(TYPES[element]), "fp32", device)
    if case["scale"] == "ue8m0":
        scales = _cast(scales.view(TYPES["ue8m0"]), "fp32", device)
    elif case["scale"] == "e4m3":
        scales = _cast(scales.view(TYPES["e4m3"]), "fp32", device) * arrays["global_scale"]
    block = _block(case, values.shape)
    scales = scales.reshape(-(-values.shape[0] // block[0]), -1)
    product = values * _spread(scales, block, values.shape)
    return _parts(output=product if case["out"] == "fp32" else _cast(product, case["out"], device))


def _gemm(case: Any, arrays: Mapping[str, Array], device: Any) -> Parts:
    """``scaled_matmul`` of one batch; 128x128 scales are repeated for every row, a ragged K is padded with zeros."""
    m, n, k = (case.integer(key) for key in "mnk")
    width = 32 if case.variant == "mxfp8" else 128
    blocks = -(-k // width)
    operands, grids = [], []
    for name, rows in (("a", m), ("b", n)):
        codes = np.pad(arrays[name], ((0, 0), (0, blocks * width - k)))
        grid = _plain(arrays[f"{name}_scales"], case, name, rows, blocks)
        if grid.dtype == np.uint8:
            grid = grid.view(TYPES["ue8m0"])
        if case.variant == "deepseek_fp8" and name == "b":
            grid = grid.repeat(128, 0)[:rows]
        operands.append(jax.device_put(codes.view(TYPES["e4m3"])[None], device))
        grids.append(jax.device_put(np.ascontiguousarray(grid)[None], device))
    kind = jnp.float32 if case["out"] == "fp32" else jnp.bfloat16
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        product = jax.nn.scaled_matmul(*operands, *grids, preferred_element_type=jnp.float32)[0]
    return _parts(output=np.asarray(product.astype(kind)))


def _plain(stored: Array, case: Any, name: str, rows: int, cols: int) -> Array:
    """The grid of scales, ``[rows, cols]`` (in blocks of rows for 128x128 scales)."""
    if case["layout"] == "interleave_128x4":
        tiles = stored.reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4)
        return tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0] * 128, -1)[:rows, :cols]
    if case["layout"] == "mn_major" and name == "a":
        if stored.dtype == np.int32:
            codes = stored.view(np.uint8).reshape(*stored.shape, 4)
            return codes.transpose(1, 0, 2).reshape(stored.shape[1], -1)[:rows, :cols]
        return stored.T[:rows]
    return stored
