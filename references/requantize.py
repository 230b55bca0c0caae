"""Stored weights brought to other scales: FP32 block scales to UE8M0, and MXFP4 to DeepSeek FP8.

``deepseek_fp8``: dequantise with the stored scale to ``recipe.via``, take each 128x128 block's amax, its ceil scale,
quantise again (SGLang goes through BF16, vLLM through FP32). BF16 is reached through FP32, the dtype in which every
implementation multiplies. ``mxfp4_to_deepseek_fp8``: a block's new scale is the largest of its stored scales / 2^6, so
that no code of at most 6 can overflow 448; no choice is open.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references import ue8m0
from references.admissible import Codes, admissible_payload, admissible_scales
from references.blocks import F32, F64, Quantized, block_amax, dequantize, expand, quantize
from references.elements import E4M3FN, encode, ordinal
from references.packing import unpack_fp4
from references.recipes import Recipe
from references.rounding import round_to
from references.schemes import scheme

STORED = scheme("deepseek_fp8", "128x128", "fp32")
TARGET = scheme("deepseek_fp8", "128x128", "ceil")
MXFP4 = scheme("mxfp4", "1x32", "ue8m0")
HEADROOM = 6
"""Exponents between the largest stored MXFP4 scale of a block and its new scale: 6 * 2^6 = 384 is within 448."""


def intermediate(payload: Tensor, scales: Tensor, recipe: Recipe) -> Tensor:
    """The dequantised weight ``[n, k]``, FP32 (holding BF16 values where ``recipe.via`` is bf16).

    payload: E4M3 codes uint8 ``[n, k]``. scales: float32, one a 128x128 block.
    """
    values = round_to(dequantize(payload, scales, STORED), F32)
    if recipe.via == "bf16":
        values = round_to(values, torch.bfloat16)
    return values.to(F32)


def requantize_deepseek(payload: Tensor, scales: Tensor, recipe: Recipe) -> Quantized:
    """The nominal answer: UE8M0 scales uint8 per 128x128, payload uint8 ``[n, k]``."""
    return quantize(intermediate(payload, scales, recipe), TARGET, recipe)


def admissible_deepseek_scales(payload: Tensor, scales: Tensor, recipe: Recipe) -> Codes:
    """The admissible new scales."""
    found = admissible_scales(intermediate(payload, scales, recipe), TARGET, recipe)
    assert isinstance(found, Codes)
    return found


def admissible_deepseek_payload(payload: Tensor, scales: Tensor, new_scales: Tensor, recipe: Recipe) -> Codes:
    """The admissible new payload under the new scales that were returned, UE8M0 codes uint8."""
    return admissible_payload(intermediate(payload, scales, recipe), ue8m0.decode(new_scales), TARGET, recipe)


def mxfp4_to_deepseek_fp8(payload: Tensor, scales: Tensor) -> Quantized:
    """The answer, exactly: UE8M0 scales uint8 per 128x128, E4M3 payload uint8 ``[n, k]``.

    payload: packed E2M1 uint8 ``[n, k/2]``. scales: UE8M0 codes uint8, one for 1x32. A new scale below code 0 is code
    0; a NaN scale makes the whole new block NaN.
    """
    codes = unpack_fp4(payload)
    largest = block_amax(scales.to(F32), (128, 128 // 32)).to(torch.int32)
    new_scales = torch.where(largest == ue8m0.NAN, largest, (largest - HEADROOM).clamp(min=0)).to(torch.uint8)
    return Quantized(_mxfp4_payload(codes, scales, new_scales), new_scales)


def _mxfp4_payload(codes: Tensor, scales: Tensor, new_scales: Tensor) -> Tensor:
    divisors = expand(ue8m0.decode(new_scales), TARGET.block, tuple(codes.shape))
    return encode(dequantize(codes, scales, MXFP4, dtype=F64) / divisors, E4M3FN)


def admissible_mxfp4_scales(payload: Tensor, scales: Tensor) -> Codes:
    """The one admissible set of new scales."""
    answer = mxfp4_to_deepseek_fp8(payload, scales).scales
    assert answer is not None
    only = answer.to(torch.int16)
    return Codes(only, only, only, nan=ue8m0.NAN)


def admissible_mxfp4_payload(payload: Tensor, scales: Tensor, new_scales: Tensor) -> Codes:
    """The one admissible payload under the new scales that were returned."""
    codes = _mxfp4_payload(unpack_fp4(payload), scales, new_scales)
    only = ordinal(codes, E4M3FN)
    return Codes(only, only, only, negative=(codes & E4M3FN.sign) != 0)
