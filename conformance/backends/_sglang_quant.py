"""SGLang's quantisation kernels: what they claim, how they compute, how they are called.

Read in SGLang 0.5.23, ``kernels/ops/quantization``:
- Triton, row-major (``_per_token_group_quant_8bit``): amax at least 1e-10; scale amax / 448; payload x * (1 / scale).
- Triton, column-major (``..._colmajor``): the same amax; under ``scale_ue8m0`` exp2(ceil(log2(scale))); payload
  x / scale.
- JIT (``per_token_group_quant``): scale amax * RN(1 / 448), under ``scale_ue8m0`` its exponent field + (mantissa != 0);
  payload x * (448 / amax), or x * 2^-k. Built with ``--use_fast_math``, so that subnormal FP32 numbers are zeros.
- Triton ``to_mxfp8``: amax at least 1e-30; ceil(log2(amax / 448)) clamped to codes 0..254; payload x / scale.
- Triton ``static_quant_fp8``: payload x * (1 / scale).
- torch ``requant_weight_ue8m0`` (``srt/layers/quantization/fp8_utils.py``): through BF16; amax at least 1e-4; the
  exponent field of amax / 448 + (mantissa != 0), where torch multiplies by the reciprocal on CUDA.

``/`` in Triton is ``div.full.f32``, within 2 ulp; so is a fast-math division (PTX ISA, div). Exponentials of integers
are exact, and so are quotients by powers of two (seen on an H200).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends._sglang_modules import QUANT, WEIGHTS, library
from references.backend import Claim, Unsupported
from references.recipes import Recipe

AMAX_FLOOR = 1e-10
WEIGHT_FLOOR = 1e-4
MXFP8_FLOOR = 1e-30
FULL = 2.0**-22
"""div.full.f32 and div.approx.f32: 2 ulp."""
RECIPROCAL_ERROR = FULL + 2.0**-24 + 2.0**-40
"""x * (1 / s): the quotient's error, the product's rounding, and their product."""
AMAX_ERROR = FULL + 3 * 2.0**-24 + 2.0**-40
"""x * (448 / amax) against x / RN(amax * RN(1 / 448)): the quotient, the product, and two roundings of the scale."""
TRITON, JIT = "triton", "jit"
ROWS, COLUMNS = "_per_token_group_quant_8bit", "_per_token_group_quant_8bit_colmajor"

FINITE = ("codes", "random_codes", "scale_ladder", "extreme_scales", "zeros", "nonfinite", "subnormal")

Parts = dict[str, Tensor]
Call = Callable[[Mapping[str, Tensor]], Parts]


def claims(kind: str) -> Iterable[Claim]:
    """The claims of the Triton or of the JIT kernels."""
    contiguous = {"stride": ("contiguous",)}
    group = {"block": ("1x128",), **contiguous}

    def claim(variant: str, source: str, where: Mapping[str, tuple[str, ...]], k: int = 1) -> Claim:
        return Claim(
            operation="quantize",
            variant=variant,
            source=f"sglang/kernels/ops/quantization/{source}",
            where=where,
            multiples={"k": k},
            options={"stream": ("side",), "graph": ("replay",)},
        )

    if kind == TRITON:
        yield claim("deepseek_fp8", f"fp8_kernel.py: {ROWS}", {**group, "scale": ("fp32",)}, 128)
        yield claim("deepseek_fp8", f"fp8_kernel.py: {COLUMNS}", {**group, "scale": ("ceil",)}, 128)
        yield claim("mxfp8", "mxfp8_quant.py: to_mxfp8", {"scale": ("ceil",)}, 32)
        yield claim("fp8_per_tensor", "fp8_kernel.py: static_quant_fp8", {"scale": ("static",), **contiguous})
        return
    yield claim("deepseek_fp8", "per_token_group_quant.py", {**group, "scale": ("fp32",)}, 128)
    yield claim("deepseek_fp8", "per_token_group_quant.py", {**group, "scale": ("ceil",)}, 128)
    yield claim("mxfp8", "per_token_group_quant.py", {"scale": ("ceil",), **contiguous}, 32)
    yield claim("fp8_per_tensor", "per_tensor_quant_fp8.py", {"scale": ("fp32",), **contiguous})
    yield claim("fp8_per_tensor", "per_tensor_quant_fp8.py", {"scale": ("static",), **contiguous})


def weight_claims() -> Iterable[Claim]:
    """Requantisation of stored weights, in torch on any device."""
    source = "sglang/srt/layers/quantization/fp8_utils.py: block_quant_dequant, quant_weight_ue8m0"
    # The exponent of an infinite scale is read as it is, so that weights that overflow have no place.
    finite = {"values": FINITE}
    return [Claim(operation="requantize", variant="deepseek_fp8", source=source, where=finite)]


def weight_recipe(claim: Claim, device: str) -> Recipe:
    """As read in the source; see the module."""
    return Recipe(
        source=claim.source,
        via="bf16",
        amax_floor=WEIGHT_FLOOR,
        scale_arithmetic="reciprocal" if device.startswith("cuda") else "divide",
    )


def requantise(inputs: Mapping[str, Tensor]) -> Call:
    """What `requant_weight_ue8m0` does before DeepGEMM packs the scales."""
    dequantise = library().function("block_quant_dequant", WEIGHTS)
    quantise = library().function("quant_weight_ue8m0", WEIGHTS)
    payload, scales, block = inputs["payload"].view(torch.float8_e4m3fn), inputs["scales"], [128, 128]

    def call(out: Mapping[str, Tensor]) -> Parts:
        weight, found = quantise(dequantise(payload, scales, block, torch.bfloat16), block)
        return _parts(weight, codes_of(found))

    return call


def recipe(claim: Claim, kind: str) -> Recipe:
    """As read in the source; see the module."""
    power_of_two = claim.where.get("scale") == ("ceil",)
    if claim.variant == "fp8_per_tensor":
        return Recipe(
            source=claim.source,
            payload_arithmetic="approximate" if kind == TRITON else "reciprocal",
            payload_error=RECIPROCAL_ERROR if kind == TRITON else 0.0,
        )
    if kind == JIT:
        return Recipe(
            source=claim.source,
            amax_floor=AMAX_FLOOR,
            scale_arithmetic="reciprocal",
            payload_arithmetic="divide" if power_of_two else "approximate",
            payload_error=0.0 if power_of_two else AMAX_ERROR,
            subnormals="flush",
        )
    return Recipe(
        source=claim.source,
        amax_floor=MXFP8_FLOOR if claim.variant == "mxfp8" else AMAX_FLOOR,
        scale_arithmetic="approximate",
        scale_error=FULL,
        payload_arithmetic="divide" if power_of_two else "approximate",
        payload_error=0.0 if power_of_two else RECIPROCAL_ERROR,
    )


def prepare(case: Any, inputs: Mapping[str, Tensor], kind: str) -> Call:
    """The library's call, bound to its inputs. Raises `Unsupported`."""
    x, scale = inputs["x"], case["scale"]
    match case.variant, scale:
        case "deepseek_fp8", "fp32" | "ceil" if case["block"] == "1x128":
            return _grouped(x, 128, scale, kind)
        case "mxfp8", "ceil":
            return _mxfp8(x) if kind == TRITON else _grouped(x, 32, scale, kind)
        case "fp8_per_tensor", "static":
            given = inputs["scale"]
            return _static_triton(x, given) if kind == TRITON else _per_tensor(x, given)
        case "fp8_per_tensor", "fp32" if kind == JIT:
            return _per_tensor(x, None)
    raise Unsupported(f"no kernel for quantize {case.variant} scale={scale}")


def codes_of(scales: Tensor) -> Tensor:
    """UE8M0 codes of FP32 powers of two and NaN; scales that are neither are left as they are, for the judge to see.

    While a CUDA graph is captured nobody may look at them: then such scales get a code that is far off.
    """
    bits = scales.clone(memory_format=torch.contiguous_format).view(torch.int32)
    power_of_two = ((bits & 0x7FFFFF) == 0) & (bits > 0) & (bits < 0x7F800000)
    legal = power_of_two | scales.isnan()
    if not _is_captured(scales) and not legal.all():
        return scales
    codes = torch.where(power_of_two, bits >> 23, 255)
    return torch.where(legal, codes, (bits >> 23) & 0xFF ^ 0x80).to(torch.uint8)


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def unpacked(words: Tensor, columns: int) -> Tensor:
    """Bytes of int32 words `[rows, ceil(columns / 4)]`, low byte first."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[:, :columns]


def _grouped(x: Tensor, group: int, scale: str, kind: str) -> Call:
    if kind == TRITON:
        quantise = library().function("_per_token_group_quant_8bit_raw", f"{QUANT}.fp8_kernel")
        return (lambda out: _parts(*quantise(x, group))) if scale == "fp32" else _column_major(x, group)
    quantise = library().function("per_token_group_quant", f"{QUANT}.per_token_group_quant")
    columns = x.shape[1] // group

    def call(out: Mapping[str, Tensor]) -> Parts:
        payload, scales = quantise(x, group_size=group, scale_ue8m0=scale == "ceil")
        return _parts(payload, unpacked(scales, columns) if scale == "ceil" else scales)

    return call


def _column_major(x: Tensor, group: int) -> Call:
    """The kernel itself: its wrapper goes on to DeepGEMM's packed layout, which SM90 does not have."""
    module = library().load(f"{QUANT}.fp8_kernel")
    (m, k), limit = x.shape, 448.0

    def call(out: Mapping[str, Tensor]) -> Parts:
        payload = out["payload"].view(torch.float8_e4m3fn)
        scales = torch.full((k // group, m), torch.nan, device=x.device).t()
        with library().active():
            module._per_token_group_quant_8bit_colmajor[(x.numel() // group,)](
                x, payload, scales, group, k, scales.stride(1), AMAX_FLOOR,
                bit8_min=-limit, bit8_max=limit, BLOCK=group, SCALE_UE8M0=True, num_warps=1, num_stages=1,
            )  # fmt: skip
        return _parts(payload, codes_of(scales))

    return call


def _mxfp8(x: Tensor) -> Call:
    quantise = library().function("to_mxfp8", f"{QUANT}.mxfp8_quant")
    return lambda out: _parts(*quantise(x))


def _static_triton(x: Tensor, scale: Tensor) -> Call:
    quantise = library().function("static_quant_fp8", f"{QUANT}.fp8_kernel")
    return lambda out: {"payload": quantise(x, scale)[0]}


def _per_tensor(x: Tensor, scale: Tensor | None) -> Call:
    quantise = library().function("per_tensor_quant_fp8", f"{QUANT}.per_tensor_quant_fp8")

    def call(out: Mapping[str, Tensor]) -> Parts:
        payload = out["payload"].view(torch.float8_e4m3fn)
        found = x.new_zeros(1, dtype=torch.float32) if scale is None else scale
        quantise(x, payload, found, is_static=scale is not None)
        return {"payload": payload} if scale is not None else {"payload": payload, "scales": found.view(1, 1)}

    return call


def _parts(payload: Tensor, scales: Tensor) -> Parts:
    return {"scales": scales, "payload": payload}
