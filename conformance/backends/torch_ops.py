"""torch's own casts and element-wise operators, used as a reader of its documentation would use them.

Everything that has a choice is written out in a line: amax by `torch.amax`, powers of two by `torch.frexp`, payloads by
an FP32 division and ``.to(torch.float8_e4m3fn)``. Nothing is clamped before that cast, since the contract saturates and
torch's cast does so from 2.13 on (pytorch/pytorch#178817); older releases answer NaN above 464.

torch has no cast to or from ``float4_e2m1fn_x2`` ("copy_kernel" not implemented), so no E2M1 format is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.backends import _torch_gemm as gemm
from conformance.backends import _torch_layouts as layouts
from conformance.backends import _torch_moe as moe
from conformance.backends import _torch_routing as routing
from references.backend import Claim, Unsupported
from references.recipes import Recipe, Via

NAMES = ("torch", "torch_bf16")

E4M3_MAX = 448.0
E4M3_EMAX = 8
E4M3_MANTISSA_BITS = 3
AMAX_FLOOR = 1e-12
"""Lower bound of a block's amax under FP32 scales: torchao's ``EPS`` (torchao/float8/float8_utils.py)."""

OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
POLICIES = ("ceil", "floor", "ceil_amax", "even")
CASTS = "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch-dtype"

Parts = dict[str, Tensor]
Call = Callable[[], Parts]


class TorchBackend:
    """Plain torch operators on any device.

    name: ``torch`` claims everything and requantises through FP32; ``torch_bf16`` requantises through BF16 only.
    """

    def __init__(self, name: str, via: Via) -> None:
        self.name = name
        self._via = via

    def version(self) -> str:
        """torch's version."""
        return str(torch.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """The same on every device."""
        requantize = Claim(operation="requantize", variant="deepseek_fp8", source="torch.Tensor.to, torch.frexp")
        if self._via == "bf16":
            return [requantize]
        return [
            # torch has one cast to UE8M0, whichever policy a checkpoint asks for.
            *(
                Claim(
                    operation="ue8m0",
                    variant=policy,
                    source=f"Tensor.to(torch.float8_e8m0fnu): {CASTS}",
                    where={"from": ("scale",)},
                )
                for policy in ("nearest", "ceil", "floor")
            ),
            *(
                Claim(
                    operation="quantize",
                    variant=variant,
                    source=f"Tensor.to(torch.float8_e4m3fn): {CASTS}",
                    where=where,
                )
                for variant, where in (
                    ("deepseek_fp8", {"scale": ("fp32",)}),
                    ("deepseek_fp8", {"scale": ("ceil",)}),
                    ("mxfp8", {}),
                    ("fp8_per_tensor", {}),
                )
            ),
            *(
                Claim(operation="dequantize", variant=variant, source=f"Tensor.to from float8 dtypes: {CASTS}")
                for variant in ("deepseek_fp8", "mxfp8", "fp8_per_tensor")
            ),
            *(
                Claim(operation="scale_layout", variant=layout, source="torch.nn.functional.pad, Tensor.permute")
                for layout in ("interleave_128x4", "mn_major", "mn_major_packed", "k_major")
            ),
            requantize,
            *gemm.claims(),
            *routing.claims(),
            *moe.claims(),
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """IEEE divisions throughout; dequantised values are rounded to FP32 first."""
        source = "conformance/backends/torch_ops.py: each step is one torch operator"
        if claim.operation == "dequantize":
            return Recipe(source=source, dequant_rounding="via_fp32")
        if claim.operation in gemm.OPERATIONS:
            return gemm.recipe(claim, source)
        if claim.operation == "routing":
            return routing.recipe(claim, source)
        if claim.operation == "moe":
            return moe.recipe(claim, source)
        if claim.operation == "requantize":
            return Recipe(source=source, via=self._via)
        if claim.variant == "fp8_per_tensor" or claim.where.get("scale") == ("fp32",):
            return Recipe(source=source, amax_floor=AMAX_FLOOR)
        return Recipe(source=source)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The computation, bound to its inputs."""
        match case.operation:
            case "ue8m0":
                return lambda: {"scales": inputs["x"].to(torch.float8_e8m0fnu).view(torch.uint8)}
            case "quantize":
                return _quantize(case, inputs)
            case "dequantize":
                return _dequantize(case, inputs)
            case "scale_layout":
                return _scale_layout(case, inputs["scales"])
            case "requantize":
                return lambda: _requantize(inputs["payload"], inputs["scales"], self._via)
            case "gemm":
                return lambda: {"output": gemm.gemm(case, inputs)}
            case "grouped_gemm":
                return lambda: {"output": gemm.grouped_gemm(case, inputs)}
            case "routing":
                return lambda: routing.route(case, inputs)
            case "moe":
                return lambda: {"output": moe.moe(case, inputs)}
        raise Unsupported(f"no {case.operation}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> Parts:
        """Run it."""
        return prepared()


def backends() -> Iterable[TorchBackend]:
    """``torch`` and ``torch_bf16``."""
    return [TorchBackend("torch", "fp32"), TorchBackend("torch_bf16", "bf16")]


def _to_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """``[m, k]`` to ``[row blocks, block rows, column blocks, block columns]``, padded with zeros."""
    (rows, cols), (m, k) = block, x.shape
    padded = F.pad(x, (0, -k % cols, 0, -m % rows))
    return padded.view(-(-m // rows), rows, -(-k // cols), cols)


def _from_blocks(blocks: Tensor, m: int, k: int) -> Tensor:
    """The inverse of `_to_blocks`."""
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)[:m, :k].contiguous()


def _to_e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _from_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _from_ue8m0(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e8m0fnu).to(torch.float32)


def _over_largest(amax: Tensor) -> Tensor:
    """amax / 448. By a tensor: on CUDA, torch divides by a Python number through its reciprocal."""
    return amax / torch.full_like(amax, E4M3_MAX)


def _power_of_two(amax: Tensor, policy: str) -> Tensor:
    """UE8M0 codes of the scales of E4M3 blocks. `torch.frexp` splits into a mantissa in [0.5, 1) and an exponent."""
    if policy == "ceil":
        amax = _over_largest(amax)
    mantissa, exponent = torch.frexp(amax)
    match policy:
        case "ceil":
            exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
        case "ceil_amax":
            exponent = torch.where(mantissa > 0.5, exponent, exponent - 1) - E4M3_EMAX
        case "floor":
            exponent = exponent - 1 - E4M3_EMAX
        case "even":
            # A binade starts at mantissa 0.5, so half an element ulp is 2^-(mantissa bits + 2) there.
            up = mantissa + 2.0 ** -(E4M3_MANTISSA_BITS + 2) >= 1
            exponent = torch.where(up, exponent, exponent - 1) - E4M3_EMAX
    codes = exponent.clamp(-127, 127) + 127
    codes = torch.where(amax == 0, 0, codes)
    codes = torch.where(amax.isinf(), 254, codes)
    return torch.where(amax.isnan(), 255, codes).to(torch.uint8)


def _quantize(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    x, scale = inputs["x"], case["scale"]
    if scale == "static":
        return lambda: {"payload": _to_e4m3(x.float() / inputs["scale"])}
    block = (x.shape[0], x.shape[1]) if case["block"] == "tensor" else BLOCKS[case["block"]]

    def call() -> Parts:
        blocks = _to_blocks(x, block)
        amax = blocks.abs().amax(dim=(1, 3)).float()
        if scale == "fp32":
            stored = scales = _over_largest(amax.clamp(min=AMAX_FLOOR))
        else:
            stored = _power_of_two(amax, scale)
            scales = _from_ue8m0(stored)
        payload = _to_e4m3(blocks.float() / scales[:, None, :, None])
        return {"scales": stored, "payload": _from_blocks(payload, *x.shape)}

    return call


def _dequantize(case: Any, inputs: Mapping[str, Tensor]) -> Call:
    payload, stored, out = inputs["payload"], inputs["scales"], OUTPUTS[case["out"]]
    block = (payload.shape[0], payload.shape[1]) if case["block"] == "tensor" else BLOCKS[case["block"]]

    def call() -> Parts:
        scales = _from_ue8m0(stored) if case["scale"] == "ue8m0" else stored
        scales = scales.reshape(-(-payload.shape[0] // block[0]), -1)
        product = _from_e4m3(_to_blocks(payload, block)) * scales[:, None, :, None]
        return {"output": _from_blocks(product, *payload.shape).to(out)}

    return call


def _requantize(payload: Tensor, scales: Tensor, via: Via) -> Parts:
    weight = _from_e4m3(_to_blocks(payload, (128, 128))) * scales[:, None, :, None]
    weight = weight.to(OUTPUTS[via]).float()
    codes = _power_of_two(weight.abs().amax(dim=(1, 3)), "ceil")
    requantized = _to_e4m3(weight / _from_ue8m0(codes)[:, None, :, None])
    return {"scales": codes, "payload": _from_blocks(requantized, *payload.shape)}


def _scale_layout(case: Any, scales: Tensor) -> Call:
    rows, cols = case.integer("rows"), case.integer("cols")
    moves = {
        "interleave_128x4": (layouts.interleave, layouts.deinterleave),
        "mn_major": (layouts.to_mn_major, layouts.from_mn_major),
        "mn_major_packed": (layouts.to_mn_major_packed, layouts.from_mn_major_packed),
        "k_major": (lambda plain, *_: plain.t().contiguous(), lambda packed, *_: packed.t().contiguous()),
    }
    move = moves[case.variant][case["direction"] == "unpack"]
    return lambda: {"scales": move(scales, rows, cols)}
