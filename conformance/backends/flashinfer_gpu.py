"""FlashInfer: its router, its block-scaled GEMM for Hopper, its MXFP8 and FP4 quantisers, its scale layout.

Host functions (``*_host``, ``block_scale_interleave`` on CPU tensors) run without a GPU. Claims follow what the library
documents; they are made only for modules that lie ready (see `_flashinfer_modules`). ``flashinfer_replay`` answers with
the selection that the router records in ``routing_replay_out``, so that an unwritten record, or one that is not what
the kernel used, is wrong on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _flashinfer_modules as modules
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("flashinfer", "flashinfer_replay")

ROUTING = "flashinfer/fused_moe/fused_routing_dsv3.py: fused_topk_deepseek"
GEMM = "flashinfer/gemm/gemm_base.py: fp8_blockscale_gemm_sm90"
QUANT8 = "flashinfer/quantization/fp8_quantization.py"
QUANT4 = "flashinfer/quantization/fp4_quantization.py"
HOST = "csrc/nv_internal/tensorrt_llm/thop"
TANH_ERROR = 2.0**-11
"""``tanhf`` under ``-use_fast_math`` is one ``tanh.approx.f32``, of that relative error (PTX ISA)."""
ROUTED_SMS = (89, 90, 100, 103, 107, 120, 121)
UNWRITTEN = 0x5A5A
"""What the record of a router holds before the call: no expert's id."""
KERNEL_SWEEP: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",)}
DTYPES: Mapping[str, tuple[str, ...]] = {"fp32": ("fp32", "bf16"), "bf16": ("bf16", "fp32"), "fp16": ("fp32", "bf16")}
"""Logits' dtype -> dtypes of the bias that the kernel is instantiated for (``csrc/fused_moe/noAuxTcKernels.cu``)."""

Parts = Mapping[str, Tensor]
Call = Callable[[Parts], dict[str, Tensor]]


class FlashInfer:
    """``flashinfer``: everything. ``flashinfer_replay``: the router by its own record."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._replay = name == "flashinfer_replay"

    def version(self) -> str:
        """flashinfer-python's version."""
        return modules.version()

    def claims(self, device: str) -> Iterable[Claim]:
        """What lies ready for the device."""
        if device.startswith("cuda"):
            major, minor = torch.cuda.get_device_capability(torch.device(device))
            return list(_cuda_claims(major * 10 + minor, self._replay))
        return [] if self._replay else list(_host_claims())

    def recipe(self, claim: Claim) -> Recipe:
        """As read in the sources; see the constants."""
        source = claim.source
        match claim.operation, claim.variant:
            case "routing", _:
                return Recipe(source=source, sigmoid="tanh", tanh_error=TANH_ERROR, group_tie_rule="lowest_index")
            case "gemm", _:
                return Recipe(source=source, accumulator="hopper_fp8", scale_combination="fma_dot_sasb")
            case "quantize", "deepseek_fp8":
                return Recipe(source=source, amax_floor=1e-10)
            case "quantize", _:
                return Recipe(source=source, scale_arithmetic="reciprocal", payload_arithmetic="reciprocal")
            case "dequantize", "mxfp4":
                return Recipe(source=source, zero_sign="any")  # its table has one zero
            case "dequantize", "nvfp4":
                return Recipe(source=source, dequant_rounding="scale_first")
        return Recipe(source=source)

    def prepare(self, case: Any, inputs: Parts, options: Mapping[str, str]) -> Call:
        """The library's call, bound to its inputs."""
        match case.operation, case.variant:
            case "routing", "DeepSeekV3":
                return _route(case, inputs, options, self._replay)
            case "gemm", "deepseek_fp8":
                return _gemm(case, inputs)
            case "quantize", "deepseek_fp8":
                return _quantize_groups(inputs["x"], case["scale"])
            case "quantize", "mxfp8":
                return _quantize_mxfp8(inputs["x"])
            case "dequantize", "mxfp8" | "mxfp4" | "nvfp4":
                return _dequantize(case.variant, inputs)
            case "scale_layout", "interleave_128x4":
                return _interleave(inputs["scales"])
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Parts) -> dict[str, Tensor]:
        """Call it."""
        return prepared(out)


def backends() -> Iterable[FlashInfer]:
    """``flashinfer`` and ``flashinfer_replay``. Raises ImportError where no module lies ready."""
    reason = modules.absent(torch.cuda.is_available())
    if reason is not None:
        raise ImportError(reason)
    return [FlashInfer("flashinfer"), FlashInfer("flashinfer_replay")]


def _cuda_claims(sm: int, replay: bool) -> Iterator[Claim]:
    if sm in ROUTED_SMS and modules.ready("dsv3_fused_routing"):
        yield from _routing_claims()
    if replay:
        return
    if sm == 90 and modules.ready("fp8_blockscale_gemm_90"):
        yield Claim(
            operation="gemm",
            variant="deepseek_fp8",
            source=GEMM,
            where={"out": ("bf16",), "layout": ("mn_major",), "scale": ("fp32",)},
            multiples={"k": 128, "n": 64},
            options=KERNEL_SWEEP,
            enforced=("k",),
        )
    if modules.ready("mxfp8_quantization_sm100"):
        # The documentation names no architecture for backend="cuda".
        yield Claim(
            operation="quantize",
            variant="mxfp8",
            source=f"{QUANT8}: mxfp8_quantize",
            where={"scale": ("ceil",), "dtype": ("bf16", "fp16"), "stride": ("contiguous",)},
            multiples={"k": 32},
        )
    if modules.ready("quantization") and modules.attribute("flashinfer.quantization", "per_token_group_quant_8bit"):
        yield Claim(
            operation="quantize",
            variant="deepseek_fp8",
            source=f"{QUANT8}: per_token_group_quant_8bit(backend='cuda')",
            where={
                "block": ("1x128",),
                "scale": ("fp32",),
                "dtype": ("bf16", "fp16"),
                "stride": ("contiguous", "offset"),
            },
            multiples={"k": 128},
            options=KERNEL_SWEEP,
            enforced=("k", "dtype"),
        )
    if f"fp4_quantization_{sm}" in modules.GENERATORS and modules.ready(f"fp4_quantization_{sm}"):
        yield _interleave_claim()


def _routing_claims() -> Iterator[Claim]:
    """The limits that the docstring of `fused_topk_deepseek` states, group count by group count."""
    for dtype, biases in DTYPES.items():
        where = {
            "dtype": (dtype,),
            "out": (dtype,),
            "bias_dtype": biases,
            "padding": ("none",),
            "renormalize": ("on",),
            "shared": ("0",),
            "stride": ("contiguous",),
        }
        for groups in (1, 2, 3, 4, 8, 16, 32):
            for (experts, topk), kept in _routing_limits(groups).items():
                yield Claim(
                    operation="routing",
                    variant="DeepSeekV3",
                    source=ROUTING,
                    where={**where, "groups": (str(groups),), "topk_group": tuple(map(str, kept))},
                    maxima={"experts": experts, "topk": topk},
                    options={**KERNEL_SWEEP, "pdl": ("off",)},
                    enforced=("topk",),
                )


def _routing_limits(groups: int) -> dict[tuple[int, int], list[int]]:
    """(most experts, largest topk) -> topk_groups; FlashInfer refuses a topk above groups * topk_group."""
    limits: dict[tuple[int, int], list[int]] = {}
    for kept in {*range(1, min(groups, 8) + 1), groups}:
        experts = 384 if groups == 1 else min(256, 32 * groups, 128 * groups // kept)
        limits.setdefault((experts, min(8, groups * kept)), []).append(kept)
    return limits


def _host_claims() -> Iterator[Claim]:
    mx = {"out": ("fp32",)}
    if modules.ready("mxfp8_quantization_sm100"):
        yield Claim(
            operation="quantize",
            variant="mxfp8",
            source=f"{HOST}/fp8Quantize.cpp: mxfp8_quantize_host",
            where={"scale": ("ceil",), "dtype": ("fp32",), "stride": ("contiguous",)},
            multiples={"k": 32},
        )
        yield Claim(
            operation="dequantize",
            variant="mxfp8",
            source=f"{HOST}/fp8Quantize.cpp: mxfp8_dequantize_host",
            where=mx,
            multiples={"k": 32},
        )
    if _fp4_module() is not None:
        yield Claim(
            operation="dequantize",
            variant="mxfp4",
            source=f"{HOST}/fp4Op.cpp: mxfp4_dequantize_host",
            where=mx,
            multiples={"k": 32},
        )
        yield Claim(
            operation="dequantize",
            variant="nvfp4",
            source=f"{HOST}/fp4Op.cpp: E2M1AndUFP8SFScaleToFloatV2",
            where=mx,
            multiples={"k": 16},
        )
        yield _interleave_claim()


def _interleave_claim() -> Claim:
    return Claim(
        operation="scale_layout",
        variant="interleave_128x4",
        source=f"{QUANT4}: block_scale_interleave",
        where={"direction": ("pack",)},
    )


def _fp4_module() -> str | None:
    """The architecture, as FlashInfer names it, of an FP4 module that lies ready; its host functions are the same."""
    return next((sm for sm in ("90", "100") if modules.ready(f"fp4_quantization_{sm}")), None)


def _fp4(device: torch.device) -> Any:
    """FlashInfer's FP4 module. Its public functions ask a CUDA device which one to load, also for CPU tensors."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name: str | None = f"{major}{minor}"
    else:
        name = _fp4_module()
    if name is None:
        raise Unsupported("no module fp4_quantization_* lies ready")
    from flashinfer.quantization.fp4_quantization import get_fp4_quantization_module

    return get_fp4_quantization_module(name)


def _route(case: Any, inputs: Parts, options: Mapping[str, str], replay: bool) -> Call:
    from flashinfer.fused_moe.fused_routing_dsv3 import fused_topk_deepseek

    logits, bias = inputs["logits"], inputs["bias"]
    sizes = [case.integer(key) for key in ("groups", "topk_group", "topk")]
    more: dict[str, Any] = {"launch_with_pdl": options.get("pdl") != "off"}

    def call(out: Parts) -> dict[str, Tensor]:
        ids, weights = out["selection"], out["weights"]
        record = torch.full(ids.shape, UNWRITTEN, dtype=torch.int16, device=ids.device) if replay else None
        recorded = {} if record is None else {"routing_replay_out": record}
        fused_topk_deepseek(logits, bias, *sizes, float(case["scaling"]), weights, ids, **more, **recorded)
        return {"selection": ids if record is None else record.to(torch.int32), "weights": weights}

    return call


def _gemm(case: Any, inputs: Parts) -> Call:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
    a_scales, b_scales = inputs["a_scales"], inputs["b_scales"]

    def call(out: Parts) -> dict[str, Tensor]:
        fp8_blockscale_gemm_sm90(a, b, a_scales, b_scales, out=out["output"])
        return {"output": out["output"]}

    return call


def _quantize_groups(x: Tensor, scale: str) -> Call:
    from flashinfer.quantization import per_token_group_quant_8bit

    if scale != "fp32":
        raise Unsupported(f"scale={scale} is not claimed")

    def call(out: Parts) -> dict[str, Tensor]:
        payload, scales = per_token_group_quant_8bit(x, 128, backend="cuda")
        return {"scales": scales, "payload": payload.view(torch.uint8)}

    return call


def _quantize_mxfp8(x: Tensor) -> Call:
    from flashinfer import mxfp8_quantize

    def call(out: Parts) -> dict[str, Tensor]:
        payload, scales = mxfp8_quantize(x, is_sf_swizzled_layout=False, enable_pdl=False, backend="cuda")
        return {"scales": scales.view(len(x), -1), "payload": payload.view(torch.uint8)}

    return call


def _dequantize(variant: str, inputs: Parts) -> Call:
    payload, scales = inputs["payload"], inputs["scales"]
    if variant == "mxfp8":
        from flashinfer import mxfp8_dequantize_host

        return lambda out: {"output": mxfp8_dequantize_host(payload, scales.flatten(), is_sf_swizzled_layout=False)}
    module = _fp4(payload.device)
    if variant == "mxfp4":
        return lambda out: {"output": module.mxfp4_dequantize_host(payload, scales, 32)}
    convert = module.e2m1_and_ufp8sf_scale_to_float_sm100
    return lambda out: {"output": convert(payload, scales.flatten(), inputs["global_scale"], 16, 1, False)}


def _interleave(scales: Tensor) -> Call:
    module = _fp4(scales.device)
    return lambda out: {"scales": module.block_scale_interleave_sm100(scales)}
