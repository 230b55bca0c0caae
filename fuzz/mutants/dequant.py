"""Faults in reading payload codes and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.mutants import correct
from fuzz.mutants.base import Inputs, Mutant
from fuzz.mutants.correct import F64, Parts
from references import ue8m0
from references.backend import CaseLike
from references.blocks import expand, scale_values
from references.elements import E4M3FN, E4M3FNUZ, decode


def _with_scales(case: CaseLike, inputs: Inputs, values: Tensor) -> Parts:
    """The answer under other scale values, FP64 grid."""
    kind, found = correct.scheme_of(case), correct.plain_codes(case, inputs)
    return correct.multiply(case, inputs, decode(found, kind.element), expand(values, kind.block, tuple(found.shape)))


def _with_elements(case: CaseLike, inputs: Inputs, elements: Tensor) -> Parts:
    """The answer with other elements, FP64 ``[m, k]``."""
    kind = correct.scheme_of(case)
    values = scale_values(inputs["scales"], kind)
    return correct.multiply(case, inputs, elements, expand(values, kind.block, tuple(elements.shape)))


def _code_0_lost(case: CaseLike, inputs: Inputs) -> Parts:
    values = ue8m0.decode(inputs["scales"])
    return _with_scales(case, inputs, torch.where(inputs["scales"] == 0, 0.0, values))


def _sentinel_after_decode(case: CaseLike, inputs: Inputs) -> Parts:
    values = torch.where(inputs["scales"] == ue8m0.NAN, torch.inf, ue8m0.decode(inputs["scales"]))
    return _with_scales(case, inputs, torch.where(values == 128.0, torch.nan, values))


def _exponent_only(case: CaseLike, inputs: Inputs) -> Parts:
    exponent = ((inputs["scales"].to(torch.int64) & 0x7F) >> 3) - 7
    return _with_scales(case, inputs, torch.ldexp(torch.ones(exponent.shape, dtype=F64), exponent))


def _nan_as_480(case: CaseLike, inputs: Inputs) -> Parts:
    found = inputs["payload"]
    elements = decode(found, E4M3FN)
    elements = torch.where(found == 0x7F, 480.0, torch.where(found == 0xFF, -480.0, elements))
    return _with_elements(case, inputs, elements)


def _read_as_fnuz(case: CaseLike, inputs: Inputs) -> Parts:
    return _with_elements(case, inputs, decode(inputs["payload"], E4M3FNUZ))


def _extent_from_shapes(case: CaseLike, inputs: Inputs) -> Parts:
    found, values = inputs["payload"], scale_values(inputs["scales"], correct.scheme_of(case))
    height, width = (-(-size // count) for size, count in zip(found.shape, values.shape, strict=True))
    rows, cols = torch.arange(found.shape[0]) // height, torch.arange(found.shape[1]) // width
    return correct.multiply(case, inputs, decode(found, E4M3FN), values[rows][:, cols])


MUTANTS = (
    Mutant(
        family="e8m0-code-0-lost",
        area="dequant",
        source="NVIDIA/TransformerEngine#3262",
        description="UE8M0 code 0 decoded by a shift to 0 instead of 2^-127",
        operation="dequantize",
        variants=("mxfp8", "mxfp4", "deepseek_fp8"),
        where={"scale": ("ue8m0",)},
        answer=_code_0_lost,
    ),
    Mutant(
        family="e8m0-nan-sentinel-compared-after-decode",
        area="dequant",
        source="sgl-project/sglang#25519",
        description="NaN test on the decoded scale 128 instead of on code 255",
        operation="dequantize",
        variants=("mxfp8", "mxfp4"),
        answer=_sentinel_after_decode,
    ),
    Mutant(
        family="e4m3-scale-decoded-as-exponent-only",
        area="dequant",
        source="ROCm/rocm-libraries#7439",
        description="E4M3 block scale decoded without its mantissa, its zero and its NaN",
        operation="dequantize",
        variants=("nvfp4",),
        answer=_exponent_only,
    ),
    Mutant(
        family="fp8-nan-decodes-to-480",
        area="dequant",
        source="intel/intel-xpu-backend-for-triton#7029",
        description="E4M3 NaN codes decoded to +-480",
        operation="dequantize",
        variants=("deepseek_fp8", "mxfp8", "fp8_per_tensor"),
        answer=_nan_as_480,
    ),
    Mutant(
        family="ocp-bits-read-as-fnuz",
        area="dequant",
        source="ROCm/AMDMIGraphX#3547",
        description="OCP E4M3 codes read as FNUZ: half the value, -0 as NaN",
        operation="dequantize",
        variants=("deepseek_fp8", "mxfp8", "fp8_per_tensor"),
        answer=_read_as_fnuz,
    ),
    Mutant(
        family="dequant-block-size-derived-from-shapes",
        area="dequant",
        source="NVIDIA/TensorRT-Model-Connect#1115",
        description="block extent taken as ceil(size / scales) instead of 128",
        operation="dequantize",
        variants=("deepseek_fp8",),
        answer=_extent_from_shapes,
    ),
)
