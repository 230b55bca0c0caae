"""DeepGEMM: block-scaled FP8 and BF16 GEMMs on CUDA, its scale transforms, and its casts in plain torch.

Released as ``sgl-deep-gemm`` and ``deep_gemm``. Scales are FP32 on SM90, where UE8M0 ones travel as powers of two. The
casts of ``deep_gemm/utils/math.py`` need no CUDA; where the library itself does not load, that file is loaded alone.
Call options: ``dims``, which sizes a kernel is compiled for (``compiled_dims``); ``sms``, on how many multiprocessors
it is scheduled (``set_num_sms``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _lone_module
from references.backend import NORMAL_VALUES, Claim, Unsupported
from references.recipes import Recipe

NAMES = ("deep_gemm",)

DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm")
GEMM_SOURCE = "deepseek-ai/DeepGEMM, csrc/apis/gemm.hpp"
CAST_SOURCE = "deepseek-ai/DeepGEMM, deep_gemm/utils/math.py"
LAYOUT_SOURCE = "deepseek-ai/DeepGEMM, csrc/utils/layout.hpp"
SM90 = 9
ROW_BYTES = 16
"""TMA wants rows of 16 bytes: 16 FP8 or 8 BF16 numbers."""
GROUPED_BF16_K = 64
MASKED_M = 128
"""Tiles store whole blocks of rows: those of a shorter slab run into the next one (docs/findings/029)."""
LAYOUT_COLUMNS = 512
AMAX_FLOOR = 1e-4
"""``clamp(1e-4)`` of a block's amax in every cast."""
GEMMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (("fp8_gemm_nt",), ("bf16_gemm_nt",)),
    "contiguous_128": (("m_grouped_fp8_gemm_nt_contiguous",), ("m_grouped_bf16_gemm_nt_contiguous",)),
    "masked": (
        ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"),
        ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"),
    ),
}
"""What versions of the library call its FP8 and its BF16 kernels."""
SWEPT: Mapping[str, tuple[str, ...]] = {
    "dims": ("nk",),
    "sms": ("66",),
    "stream": ("side",),
    "graph": ("replay",),
}

Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def _library() -> tuple[ModuleType | None, ModuleType, str]:
    """The library where it loads, its casts, and the version. Raises ImportError."""
    installed = None
    for distribution in DISTRIBUTIONS:
        try:
            installed = distribution, version(distribution)
            break
        except PackageNotFoundError:
            continue
    if installed is None:
        raise ImportError(f"none of {', '.join(DISTRIBUTIONS)} is installed")
    if torch.cuda.is_available():
        try:
            whole = importlib.import_module("deep_gemm")
        except Exception as error:  # whatever a missing CUDA library raises
            raise ImportError(f"{installed[0]} {installed[1]} does not load: {error!r}") from error
        return whole, importlib.import_module("deep_gemm.utils.math"), installed[1]
    return None, _lone_module.load(installed[0], "deep_gemm/utils/math.py"), installed[1]


LIBRARY, CASTS, VERSION = _library()


class DeepGemm:
    """Kernels on SM90, casts anywhere."""

    name = "deep_gemm"

    def __init__(self) -> None:
        self._on_gpu = False

    def version(self) -> str:
        """The distribution's version."""
        return VERSION

    def claims(self, device: str) -> Iterable[Claim]:
        """Casts; on SM90 kernels and layouts as well."""
        self._on_gpu = device.startswith("cuda")
        return [*_cast_claims(), *(_kernel_claims(LIBRARY) if LIBRARY is not None and _is_sm90(device) else ())]

    def recipe(self, claim: Claim) -> Recipe:
        """Kernels: the exact models of SM90. Casts: x * (1 / scale) with the amax at least 1e-4."""
        if claim.operation in ("gemm", "grouped_gemm"):
            if claim.variant == "bf16" and claim.where["values"] == NORMAL_VALUES:
                return Recipe(source=GEMM_SOURCE, accumulator="hopper_f16", promotion="none")
            if claim.variant == "bf16":
                return Recipe(source=GEMM_SOURCE)  # the model misses sums below 2^-126
            return Recipe(
                source=f"{GEMM_SOURCE}; measured on an H200",
                accumulator="hopper_fp8",
                scale_combination="fma_dot_sasb",
            )
        if claim.operation == "scale_layout":
            return Recipe(source=LAYOUT_SOURCE, padding="any")
        if claim.operation == "dequantize":
            return Recipe(source=CAST_SOURCE, dequant_rounding="via_fp32", zero_sign="any")
        if claim.operation == "ue8m0":
            return Recipe(source=CAST_SOURCE)
        return Recipe(
            source=f"{CAST_SOURCE}; torch divides by a number on CUDA by multiplying by its reciprocal",
            scale_arithmetic="reciprocal" if self._on_gpu else "divide",
            payload_arithmetic="reciprocal",
            amax_floor=AMAX_FLOOR,
            zero_sign="any" if claim.variant == "mxfp4" else "keep",
        )

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The call, bound to its inputs; scales are brought into the library's order here."""
        match case.operation:
            case "gemm":
                return _gemm(case, inputs, options)
            case "grouped_gemm":
                return _grouped_gemm(case, inputs, options)
            case "scale_layout":
                return _scale_layout(case, inputs["scales"])
            case "quantize":
                return _quantize(case, inputs["x"])
            case "dequantize" if case.variant == "mxfp4":
                return _dequantize(case, inputs)
            case "ue8m0" if case.variant == "ceil_clamped":
                return lambda out: {"scales": _codes(CASTS.ceil_to_ue8m0(inputs["x"]))}
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it; kernels write the output buffer."""
        return prepared(out)


def backends() -> Iterable[DeepGemm]:
    """``deep_gemm``."""
    return [DeepGemm()]


def _is_sm90(device: str) -> bool:
    return device.startswith("cuda") and torch.cuda.get_device_capability(torch.device(device))[0] == SM90


def _kernel_claims(library: ModuleType) -> Iterable[Claim]:
    """Of the kernels that this version has."""
    for layout, names in GEMMS.items():
        operation = "gemm" if layout == "gemm" else "grouped_gemm"
        grouping = {} if layout == "gemm" else {"grouping": (layout,)}
        slabs = {"m": MASKED_M} if layout == "masked" else {}
        fp8, bf16 = (next((name for name in found if hasattr(library, name)), None) for found in names)
        if fp8 is not None:
            # FP32 outputs need 1x128 scales on both sides.
            yield Claim(
                operation=operation,
                variant="deepseek_fp8",
                source=f"{GEMM_SOURCE}: {fp8}",
                where={"out": ("bf16",), **grouping},
                multiples={"k": ROW_BYTES, "n": ROW_BYTES // 2, **slabs},
                options=SWEPT,
                enforced=("k", "n", "out"),
            )
        if bf16 is not None:
            for values in (NORMAL_VALUES, ("subnormal",)):
                yield Claim(
                    operation=operation,
                    variant="bf16",
                    source=f"{GEMM_SOURCE}: {bf16}",
                    where={"values": values, **(grouping and {"out": ("bf16",), **grouping})},
                    multiples={"k": GROUPED_BF16_K if grouping else ROW_BYTES // 2, "n": ROW_BYTES // 2, **slabs},
                    options=SWEPT,
                    enforced=("k", "n"),
                )
    for variant, name in (
        ("mn_major", "get_mn_major_tma_aligned_tensor"),
        ("mn_major_packed", "get_mn_major_tma_aligned_packed_ue8m0_tensor"),
    ):
        if hasattr(library, name):
            yield Claim(
                operation="scale_layout",
                variant=variant,
                source=f"{LAYOUT_SOURCE}: {name}",
                where={"direction": ("pack",)},
                maxima={"cols": LAYOUT_COLUMNS},
                enforced=("cols",),
                options={"stream": ("side",), "graph": ("replay",)},
            )


def _cast_claims() -> Iterable[Claim]:
    for name, block in (("per_token_cast_to_fp8", "1x128"), ("per_block_cast_to_fp8", "128x128")):
        if hasattr(CASTS, name):
            yield Claim(
                operation="quantize",
                variant="deepseek_fp8",
                source=f"{CAST_SOURCE}: {name}",
                where={"block": (block,)},
            )
    if hasattr(CASTS, "per_token_cast_to_fp4"):
        yield Claim(
            operation="quantize",
            variant="mxfp4",
            source=f"{CAST_SOURCE}: per_token_cast_to_fp4",
            where={"scale": ("ceil",)},
        )
    if hasattr(CASTS, "cast_back_from_fp4"):
        yield Claim(
            operation="dequantize",
            variant="mxfp4",
            source=f"{CAST_SOURCE}: cast_back_from_fp4",
            where={"out": ("fp32",)},
        )
    yield Claim(
        operation="ue8m0",
        variant="ceil_clamped",
        source=f"{CAST_SOURCE}: ceil_to_ue8m0",
        where={"from": ("scale",)},
    )


def _kernel(layout: str, case: Any) -> Callable[..., Any]:
    names = GEMMS[layout][case.variant == "bf16"] if case.variant in ("deepseek_fp8", "bf16") else ()
    kernels: list[Callable[..., Any]] = [getattr(LIBRARY, name) for name in names if hasattr(LIBRARY, name)]
    if not kernels:
        raise Unsupported(f"no {case.operation} {case.variant}")
    return kernels[0]


def _gemm(case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
    kernel, dims = _kernel("gemm", case), options.get("dims", "")
    a, b = _operands(case, inputs)

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with scheduled(options.get("sms")):
            kernel(a, b, out["output"], compiled_dims=dims)
        return {"output": out["output"]}

    return call


def _grouped_gemm(case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
    if case["grouping"] not in GEMMS:
        raise Unsupported(f"grouping={case['grouping']} is no layout of DeepGEMM's")
    kernel, dims = _kernel(case["grouping"], case), options.get("dims", "")
    a, b = _operands(case, inputs)
    masked = case["grouping"] == "masked"
    rows = (inputs["masked_m"], case.integer("m")) if masked else (inputs["m_indices"],)

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with scheduled(options.get("sms")):
            kernel(a, b, out["output"], *rows, compiled_dims=dims)
        return {"output": out["output"]}

    return call


@contextmanager
def scheduled(sms: str | None) -> Iterator[None]:
    """Within it kernels are scheduled on so many multiprocessors; None leaves it alone."""
    if sms is None:
        yield
        return
    library: Any = LIBRARY
    before = library.get_num_sms()
    library.set_num_sms(int(sms))
    try:
        yield
    finally:
        library.set_num_sms(before)


def _operands(case: Any, inputs: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """(codes, scales) of both sides, or BF16 tensors."""
    if case.variant == "bf16":
        return inputs["a"], inputs["b"]
    a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
    scales = inputs["a_scales"]
    if case["layout"] == "mn_major":
        if scales.dtype == torch.int32:
            if _is_sm90(str(scales.device)):
                scales = _unpacked(scales, case.integer("m"), -(-case.integer("k") // 128))
        else:
            scales = scales.transpose(-1, -2)[..., : case.integer("m"), :]
    return (a, _fp32(scales)), (b, _fp32(inputs["b_scales"]))


def _fp32(scales: Tensor) -> Tensor:
    """UE8M0 codes as FP32 powers of two; everything else as it is."""
    if scales.dtype != torch.uint8:
        return scales
    bits = scales.to(torch.int32) << 23
    odd = (scales == 0) | (scales == 255)  # 2^-127 is subnormal, 255 a NaN
    return torch.where(odd, bits | 0x00400000, bits).view(torch.float32)


def _codes(scales: Tensor) -> Tensor:
    """Powers of two in FP32 as UE8M0 codes."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def _unpacked(packed: Tensor, rows: int, cols: int) -> Tensor:
    """UE8M0 codes packed into int32 by columns, ``[..., ceil(cols / 4), rows]``, as codes ``[..., rows, cols]``."""
    codes = packed.contiguous().view(torch.uint8).view(*packed.shape, 4)
    return codes.transpose(-3, -2).flatten(-2)[..., :rows, :cols]


def _scale_layout(case: Any, scales: Tensor) -> Call:
    if case["direction"] != "pack" or case.variant not in ("mn_major", "mn_major_packed"):
        raise Unsupported(f"no {case.variant} {case['direction']}")
    library: Any = LIBRARY
    packed = case.variant == "mn_major_packed"
    convert = (
        library.get_mn_major_tma_aligned_packed_ue8m0_tensor if packed else library.get_mn_major_tma_aligned_tensor
    )

    # What is packed are exponent fields, and the kernel traps where anything but a sign and an exponent is set.
    floats = (scales.to(torch.int32) << 23).view(torch.float32) if packed else scales

    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = convert(floats)  # [rows, columns] by columns, rows padded in the strides, but for the last column
        rows, cols = case.integer("rows"), found.shape[1]
        aligned = -(-rows // 4) * 4
        if rows > 1 and (found.stride(0) != 1 or (cols > 1 and found.stride(1) != aligned)):
            raise RuntimeError(f"strides {found.stride()} of a shape {tuple(found.shape)} are not MN-major")
        whole = found.new_zeros(cols, aligned)
        whole[:, :rows] = found.t()
        return {"scales": whole}

    return call


def _quantize(case: Any, x: Tensor) -> Call:
    ue8m0 = case["scale"] == "ceil"
    if case.variant == "mxfp4":
        if not ue8m0:
            raise Unsupported(f"scale={case['scale']} is no policy of DeepGEMM's")

        def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
            payload, scales = CASTS.per_token_cast_to_fp4(x, True, gran_k=32)
            return {"scales": _codes(scales), "payload": payload.view(torch.uint8)}

        return call
    if case.variant != "deepseek_fp8":
        raise Unsupported(f"no quantize {case.variant}")
    cast = CASTS.per_token_cast_to_fp8 if case["block"] == "1x128" else CASTS.per_block_cast_to_fp8

    def call_fp8(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        payload, scales = cast(x, ue8m0)
        return {"scales": _codes(scales) if ue8m0 else scales, "payload": payload.view(torch.uint8)}

    return call_fp8


def _dequantize(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    def call(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"output": CASTS.cast_back_from_fp4(inputs["payload"], _fp32(inputs["scales"]), gran_k=32)}

    return call
