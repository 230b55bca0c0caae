"""What a compiled kernel is made of, read from its PTX: tensor-core instructions, conversions, approximations."""

from __future__ import annotations

import re
from collections.abc import Mapping

FACTS: Mapping[str, str] = {
    "cvt.rn.satfinite.e4m3x2": r"cvt\.rn\.satfinite\.e4m3x2\.f32",
    "cvt.rn.satfinite.e2m1x2": r"cvt\.rn\.satfinite\.e2m1x2",
    "cvt.rp.satfinite.ue8m0x2": r"cvt\.rp\.satfinite\.ue8m0x2",
    "cvt.rn.f16x2.e4m3x2": r"cvt\.rn\.f16x2\.e4m3x2",
    "cvt.rn.f16x2.e2m1x2": r"cvt\.rn\.f16x2\.e2m1x2",
    "cvt.rn.bf16": r"cvt\.rn\.bf16",
    "cvt.rn.f16": r"cvt\.rn\.f16(x2)?\.f32",
    "div.rn": r"div\.rn\.f32",
    "div.full": r"div\.full(\.ftz)?\.f32",
    "sqrt.rn": r"sqrt\.rn\.f32",
    **{f"{name}.approx": rf"\b{name}\.approx" for name in ("div", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh")},
}
"""What is looked for beside tensor-core instructions: what it is called, and a regular expression."""
_WARPGROUP = re.compile(r"\bwgmma\.mma_async\.sync\.aligned\.m\d+n\d+k\d+\.(?P<sum>\w+)\.(?P<a>\w+)\.(?P<b>\w+)")
_WARP = re.compile(
    r"\bmma\.sync\.aligned\.m\d+n\d+k\d+\.\w+\.\w+(?:\.kind::\w+)?(?:\.block_scale)?(?:\.scale_vec::\w+)?"
    r"\.(?P<sum>\w+)\.(?P<a>\w+)\.(?P<b>\w+)"
)
_FIFTH = re.compile(r"\btcgen05\.mma(?:\.ws)?(?:\.sp)?\.cta_group::\d\.kind::(?P<kind>\w+)")
UNITS = ("wgmma", "mma.sync", "tcgen05.mma")
UPCAST = "cvt.rn.f16x2.e4m3x2"
"""The fact of a kernel that converts E4M3 operands to F16."""
FOLLOWS, DECLARED = "adds as ", "declared "
"""Facts about accumulators: what follows from the instruction, and what a backend's recipe says."""
UNKNOWN = "no known model"
THIRTEEN_BITS = "13 bits, 16 products at a time"
"""SM89's unit for FP8; no recipe names it."""
WIDE = ("f16", "bf16", "tf32")
WITHIN: Mapping[str, tuple[str, ...]] = {
    "hopper_fp8": ("hopper_fp8",),
    "hopper_f16": ("hopper_f16", "fp32_any"),
    "f16_upcast": ("f16_upcast", "fp32_any"),
    "fp32_any": ("fp32_any",),
    THIRTEEN_BITS: (),
}
"""Accumulators that a recipe may declare for one that follows: those whose admissible set holds its answers."""


def instructions(ptx: str) -> tuple[str, ...]:
    """The kinds of tensor-core instruction, such as ``wgmma e4m3``, ``mma.sync f16`` or ``tcgen05.mma f8f6f4``."""
    found = [f"wgmma {match['a']}" for match in _WARPGROUP.finditer(ptx)]
    found += [f"mma.sync {match['a']}" for match in _WARP.finditer(ptx)]
    found += [f"tcgen05.mma {match['kind']}" for match in _FIFTH.finditer(ptx)]
    return tuple(dict.fromkeys(found))


def facts(ptx: str) -> tuple[str, ...]:
    """The instructions, then what of `FACTS` is there."""
    return (*instructions(ptx), *(name for name, pattern in FACTS.items() if re.search(pattern, ptx)))


def accumulator(instruction: str, sm: int, *, upcast: bool = False) -> str:
    """The accumulator of `references.accumulators` that an instruction adds with, or `THIRTEEN_BITS` or `UNKNOWN`.

    SM90 is as measured on an H200 (docs/results/h200-tensor-cores.md). Elsewhere what arXiv:2511.10909 (MMA-Sim) found
    equal to the hardware bit for bit: 24 fractional bits of 16-bit operands on SM80, SM86 and SM89, 13 of FP8 operands
    on SM89, 25 and more of all on SM100 and SM12x; 24 are enough for ``fp32_any``. SM103 has SM100's instructions.
    upcast: whether the kernel converts E4M3 operands to F16.
    """
    unit, _, operand = instruction.partition(" ")
    if sm == 90 and unit == "wgmma" and operand == "e4m3":
        return "hopper_fp8"
    if sm == 90 and operand in ("f16", "bf16"):
        return "f16_upcast" if upcast and operand == "f16" else "hopper_f16"
    if sm == 89 and operand == "e4m3":
        return THIRTEEN_BITS
    if sm in (80, 86, 89, 100, 103) and operand in WIDE:
        return "fp32_any"
    if sm in (120, 121) and unit == "mma.sync":
        return "fp32_any"
    return "fp32_any" if sm in (100, 103) and unit == "tcgen05.mma" else UNKNOWN
