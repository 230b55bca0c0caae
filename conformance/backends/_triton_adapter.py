"""What the three Triton backends share: claims, recipe, and the launches of this project's kernels.

Import it only after ``TRITON_INTERPRET`` is as it should be: Triton decides at decoration whether a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from conformance.backends import _triton_gemm_adapter as gemms
from conformance.backends import _triton_kernels as kernels
from conformance.backends import _triton_layouts as layouts
from conformance.backends import _triton_moe_adapter as experts
from conformance.backends import _triton_routing as routing
from references.backend import Claim, Unsupported
from references.recipes import Recipe

AMAX_FLOOR = 2.0**-40
"""Lower bound of amax under FP32 scales, so that a zero block has a quotient."""
SCALE_FLOOR = 2.0**-9
"""Lower bound of an NVFP4 block scale: the smallest positive E4M3 number."""

ELEMENTS = {
    "e4m3": (448.0, 8, 3),
    "e5m2": (57344.0, 15, 2),
    "e2m1": (6.0, 2, 1),
    "e2m3": (7.5, 2, 3),
    "e3m2": (28.0, 4, 2),
}
"""Largest value, largest exponent and mantissa bits of each element format."""
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SOURCE = "conformance/backends/_triton_kernels.py"
SWEPT: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",), "inputs": ("strided",)}

Parts = dict[str, Tensor]
Out = Mapping[str, Tensor]
Call = Callable[[Out], Parts]


class TritonBackend:
    """This project's Triton kernels, compiled or interpreted.

    name: of the backend. devices: the device types that it claims. max_elements: of a matrix; the interpreter is slow.
    tile_rows: rows a program takes of a block of columns. pace: share of the plan to run. dots: whether ``tl.dot`` of
    FP8 and BF16 can be relied on.
    """

    def __init__(
        self, name: str, *, device: str, max_size: int | None, tile_rows: int, pace: float, dots: bool = True
    ) -> None:
        self.name = name
        self.pace = pace
        self._dots = dots
        self._capability: tuple[int, int] | None = None
        self._device = device
        self._max_size = max_size
        self._tile_rows = tile_rows

    def version(self) -> str:
        """Triton's version."""
        return str(triton.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """Every kernel on the devices of this backend; without FP8 casts (below SM89) no E4M3."""
        if device.split(":")[0] != self._device:
            return []
        if self._device != "cpu":
            self._capability = torch.cuda.get_device_capability(torch.device(device))
        e4m3 = self._capability is None or self._capability >= (8, 9)
        found = [claim for claim in self._all_claims() if e4m3 or not _needs_e4m3(claim)]
        if not self._dots:
            return found
        interpreted = self._max_size is not None
        found += gemms.claims(self._max_size, self._capability)
        if self._device != "cpu":
            found = [replace(claim, options=SWEPT) for claim in found]
        return [*found, *experts.claims(interpreted, self._capability)]

    def _all_claims(self) -> Iterable[Claim]:
        def claims(
            operation: str, variants: Iterable[str], kernel: str, *sizes: str, scale: str | None = None
        ) -> Iterable[Claim]:
            maxima = {} if self._max_size is None else dict.fromkeys(sizes, self._max_size)
            where = {} if scale is None else {"scale": (scale,)}
            source = f"{SOURCE}: {kernel}"
            return [
                Claim(operation=operation, variant=variant, source=source, where=where, maxima=maxima)
                for variant in variants
            ]

        policies = ("ceil", "ceil_clamped", "floor", "ceil_amax", "even", "nearest")
        formats = ("mxfp8", "mxfp4", "nvfp4", "fp8_per_tensor")
        orders = ("interleave_128x4", "mn_major", "mn_major_packed", "k_major")
        yield from claims("ue8m0", policies, "ue8m0_kernel")
        yield from claims("quantize", formats, "quantize_*_kernel", "m", "k")
        for scale in ("fp32", "ceil"):
            yield from claims("quantize", ("deepseek_fp8",), "quantize_e4m3_kernel", "m", "k", scale=scale)
        yield from claims("dequantize", ("deepseek_fp8", *formats), "dequantize_*_kernel", "m", "k")
        yield from claims("scale_layout", orders, "_triton_layouts.py", "rows", "cols")
        yield from routing.claims(self._max_size)
        yield from claims("requantize", ("deepseek_fp8",), "dequantize_e4m3_kernel, quantize_e4m3_kernel", "n", "k")

    def recipe(self, claim: Claim) -> Recipe:
        """IEEE divisions; products in FP32, then the output dtype; NVFP4 takes block scale x global scale first."""
        if claim.operation in gemms.OPERATIONS:
            return gemms.recipe(claim, self._capability)
        if claim.operation == "moe":
            return experts.recipe(claim, self._capability)
        if claim.operation == "routing":
            return routing.recipe()
        nvfp4, fp32_scales = claim.variant == "nvfp4", claim.where.get("scale") == ("fp32",)
        if claim.operation == "quantize":
            return Recipe(
                source=SOURCE,
                amax_floor=AMAX_FLOOR if claim.variant == "fp8_per_tensor" or fp32_scales else 0.0,
                scale_floor=SCALE_FLOOR if nvfp4 else 0.0,
            )
        if claim.operation == "dequantize":
            return Recipe(source=SOURCE, dequant_rounding="scale_first" if nvfp4 else "via_fp32")
        return Recipe(source=SOURCE)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The launches, bound to their inputs."""
        match case.operation:
            case "ue8m0":
                return lambda out: {"scales": _ue8m0(inputs["x"], case.variant, case["from"], out)}
            case "quantize":
                return lambda out: self._quantize(case, inputs, out)
            case "dequantize":
                return lambda out: {"output": self._dequantize(case, inputs, out)}
            case "scale_layout":
                return lambda out: {"scales": _scale_layout(case, inputs["scales"], out)}
            case "gemm" | "grouped_gemm":
                return lambda out: {"output": self._gemm(case, inputs, out)}
            case "moe":
                return lambda out: {"output": _moe(case, inputs, out)}
            case "routing":
                return lambda out: routing.route(case, inputs, out, interpreted=self._device == "cpu")
            case "requantize" if case.variant == "deepseek_fp8":
                return lambda out: self._requantize(inputs["payload"], inputs["scales"], out)
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Out) -> Parts:
        """Launch; the kernels write into ``out`` where its buffers fit, so that an element left out stays poisoned."""
        return prepared(out)

    def _quantize(self, case: Any, inputs: Mapping[str, Tensor], out: Out) -> Parts:
        x = inputs["x"]
        if case.variant == "fp8_per_tensor":
            return self._quantize_tensor(x, inputs.get("scale"), out)
        block = BLOCKS[case["block"]]
        if case.variant in ("mxfp4", "nvfp4"):
            return self._quantize_e2m1(x, block[1], case["scale"], inputs.get("global_scale", x), out)
        return self._quantize_e4m3(x, block, case["scale"], out)

    def _quantize_e4m3(self, x: Tensor, block: tuple[int, int], policy: str, out: Out) -> Parts:
        (rows, group), (m, k) = block, x.shape
        grid = (triton.cdiv(m, rows), triton.cdiv(k, group))
        scales = _buffer(out, "scales", grid, torch.float32 if policy == "fp32" else torch.uint8, x)
        payload = _buffer(out, "payload", (m, k), torch.uint8, x)
        arguments = (x, payload, scales, m, k, *x.stride(), grid[1], AMAX_FLOOR)
        tile = {"POLICY": policy, "TILE_M": self._tile_rows, "GROUP": group}
        if rows == 1:
            kernels.quantize_e4m3_kernel[(triton.cdiv(m, self._tile_rows), grid[1])](*arguments, **tile)
        else:
            kernels.quantize_e4m3_square_kernel[grid](*arguments, BLOCK_M=rows, **tile)
        return {"scales": scales, "payload": payload}

    def _quantize_e2m1(self, x: Tensor, group: int, policy: str, global_scale: Tensor, out: Out) -> Parts:
        m, k = x.shape
        columns = triton.cdiv(k, group)
        scales = _buffer(out, "scales", (m, columns), torch.uint8, x)
        payload = _buffer(out, "payload", (m, k // 2), torch.uint8, x)
        kernels.quantize_e2m1_kernel[(triton.cdiv(m, self._tile_rows), columns)](
            x, payload, scales, global_scale, m, k, *x.stride(), columns, SCALE_FLOOR,
            POLICY=policy, TILE_M=self._tile_rows, GROUP=group,
        )  # fmt: skip
        return {"scales": scales, "payload": payload}

    def _quantize_tensor(self, x: Tensor, scale: Tensor | None, out: Out) -> Parts:
        (m, k), tile = x.shape, {"TILE_M": self._tile_rows, "TILE_K": 128}
        grid = (triton.cdiv(m, tile["TILE_M"]), triton.cdiv(k, tile["TILE_K"]))
        parts: Parts = {}
        if scale is None:
            partial = x.new_empty(grid, dtype=torch.int32)
            scale = parts["scales"] = _buffer(out, "scales", (1, 1), torch.float32, x)
            kernels.tile_amax_kernel[grid](x, partial, m, k, *x.stride(), grid[1], **tile)
            steps = triton.next_power_of_2(triton.cdiv(partial.numel(), 1024))
            kernels.tensor_scale_kernel[(1,)](partial, scale, partial.numel(), AMAX_FLOOR, STEPS=steps, BLOCK=1024)
        parts["payload"] = _buffer(out, "payload", (m, k), torch.uint8, x)
        kernels.quantize_by_scale_kernel[grid](x, scale, parts["payload"], m, k, *x.stride(), **tile)
        return parts

    def _dequantize(self, case: Any, inputs: Mapping[str, Tensor], out: Out) -> Tensor:
        payload, scales = inputs["payload"].contiguous(), inputs["scales"].contiguous()
        m, k = case.integer("m"), case.integer("k")
        output = _buffer(out, "output", (m, k), OUTPUTS[case["out"]], payload)
        if case.variant not in ("mxfp4", "nvfp4"):
            block = (m, k) if case["block"] == "tensor" else BLOCKS[case["block"]]
            return self._dequantize_e4m3(payload, scales, output, block, case["scale"])
        group = BLOCKS[case["block"]][1]
        kernels.dequantize_e2m1_kernel[(triton.cdiv(m, self._tile_rows), triton.cdiv(k, 128))](
            payload, scales, inputs.get("global_scale", scales), output, m, k, triton.cdiv(k, group),
            SCALE=case["scale"], GROUP=group, TILE_M=self._tile_rows, TILE_PAIRS=64,
        )  # fmt: skip
        return output

    def _dequantize_e4m3(
        self, payload: Tensor, scales: Tensor, output: Tensor, block: tuple[int, int], scale: str
    ) -> Tensor:
        m, k = payload.shape
        kernels.dequantize_e4m3_kernel[(triton.cdiv(m, self._tile_rows), triton.cdiv(k, 128))](
            payload, scales, output, m, k, *block, triton.cdiv(k, block[1]),
            SCALE=scale, TILE_M=self._tile_rows, TILE_K=128,
        )  # fmt: skip
        return output

    def _gemm(self, case: Any, inputs: Mapping[str, Tensor], out: Out) -> Tensor:
        shape: tuple[int, ...] = (case.integer("m"), case.integer("n"))
        call = gemms.gemm
        if case.operation == "grouped_gemm":
            call = gemms.grouped_gemm
            shape = (case.integer("groups"), *shape) if case["grouping"] == "masked" else shape
        return call(case, inputs, _buffer(out, "output", shape, OUTPUTS[case["out"]], inputs["a"]))

    def _requantize(self, payload: Tensor, scales: Tensor, out: Out) -> Parts:
        weight = payload.new_empty(payload.shape, dtype=torch.float32)
        self._dequantize_e4m3(payload.contiguous(), scales.contiguous(), weight, (128, 128), "fp32")
        return self._quantize_e4m3(weight, (128, 128), "ceil", out)


def _moe(case: Any, inputs: Mapping[str, Tensor], out: Out) -> Tensor:
    output = _buffer(out, "output", tuple(inputs["x"].shape), OUTPUTS[case["out"]], inputs["x"])
    experts.moe(case, inputs, output)
    return output


def _needs_e4m3(claim: Claim) -> bool:
    return claim.operation not in ("ue8m0", "scale_layout", "routing") and claim.variant != "mxfp4"


def _buffer(out: Out, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    given = out.get(name)
    if given is not None and (tuple(given.shape), given.dtype) == (shape, dtype) and given.is_contiguous():
        return given
    return like.new_empty(shape, dtype=dtype)


def _ue8m0(x: Tensor, policy: str, source: str, out: Out) -> Tensor:
    codes = _buffer(out, "scales", (x.numel(),), torch.uint8, x)
    qmax, emax, mantissa_bits = ELEMENTS.get(source.removeprefix("amax_"), (1.0, 0, 0))
    kernels.ue8m0_kernel[(triton.cdiv(x.numel(), 1024),)](
        x, codes, x.numel(),
        POLICY=policy, FROM_AMAX=source != "scale", QMAX=qmax, EMAX=emax, MANTISSA_BITS=mantissa_bits, BLOCK=1024,
    )  # fmt: skip
    return codes


def _scale_layout(case: Any, scales: Tensor, out: Out) -> Tensor:
    rows, cols = case.integer("rows"), case.integer("cols")
    unpack = case["direction"] == "unpack"
    scales = scales.contiguous()
    padded = triton.cdiv(rows, 4) * 4
    match case.variant:
        case "interleave_128x4":
            size = triton.cdiv(rows, 128) * 128 * triton.cdiv(cols, 4) * 4
            target = _buffer(out, "scales", (rows, cols) if unpack else (size,), torch.uint8, scales)
            layouts.interleave_128x4_kernel[(triton.cdiv(size, 1024),)](
                scales, target, rows, cols, size, UNPACK=unpack, BLOCK=1024
            )
            return target
        case "mn_major_packed":
            words = triton.cdiv(cols, 4)
            kernel = layouts.unpack_mn_major_kernel if unpack else layouts.pack_mn_major_kernel
            shape, dtype = ((rows, cols), torch.uint8) if unpack else ((words, padded), torch.int32)
            target = _buffer(out, "scales", shape, dtype, scales)
            kernel[(words, triton.cdiv(padded, 128))](scales, target, rows, cols, padded, TILE=128)
            return target
    shape = (rows, cols) if unpack else (cols, padded if case.variant == "mn_major" else rows)
    target = _buffer(out, "scales", shape, torch.float32, scales)
    real = (cols, rows) if unpack else (rows, cols)
    # Scales move as words, so that a NaN keeps its payload.
    layouts.transpose_kernel[(triton.cdiv(shape[0], 32), triton.cdiv(shape[1], 32))](
        scales.view(torch.int32), target.view(torch.int32), *real, *shape, scales.shape[1], TILE=32
    )
    return target
