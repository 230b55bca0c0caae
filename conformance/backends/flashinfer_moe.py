"""FlashInfer's CUTLASS expert layers: the runners that its unified ``MoELayer`` has for Hopper.

Routing comes as ids and weights (``PackedPrecomputed``). Expert weights come as the views that ``prepare_*_weights``
make (``MoEWeightPack``), built here from codes and scales, since those functions would quantise. W1 has up first.
``flashinfer_moe`` adds a token's experts in a kernel of its own; ``flashinfer_moe_fused`` takes the tactics that add
them in the epilogue of the second product.

Read in FlashInfer 0.7.4 (``csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh``, and below ``nv_internal``):
- ``gemm1``, ``gemm2``: the outputs of both products are stored as BF16. So is silu(gate) * up, but with one scale a
  tensor it becomes E4M3 at once.
- ``finalizeMoeRoutingKernel``: experts times their weights are added in FP32 and rounded once.
- ``sm90_visitor_scatter.hpp``: fused, a weighted product becomes BF16 and is added in BF16, by atomics in any order.
- ``scale_1x128_kernel``: scale 1 / (448 / amax), payload RN(x * (448 / amax)), both quotients approximate.
- ``doActivationKernel``: CUTLASS's ``SiLu``, x * (1 / (1 + exp(-x))); payloads times the given scale's reciprocal.

All is compiled with ``-use_fast_math``. Products of tensor-scaled FP8 run over all of K (``FP8FastAccum``); those of
block-scaled FP8 are promoted every 128 of K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.backends import _flashinfer_modules as modules
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAMES = ("flashinfer_moe", "flashinfer_moe_fused")
SOURCE = "flashinfer/fused_moe/runners.py"
FLAT = "flashinfer/fused_moe/core.py: cutlass_fused_moe"
API = "flashinfer.fused_moe.api"
MODULE = "fused_moe_90"
NAMED = (
    "BackendOptions",
    "ExpertConfig",
    "MoEActivationPack",
    "MoEConfig",
    "MoEWeightPack",
    "QuantConfig",
    "QuantFormat",
    "RoutingConfig",
    "SwiGLU",
)
CEILING = 8192
"""Tokens that a layer is made for (``ExecutionConfig.tune_max_num_tokens``)."""
APPROXIMATE = 2.0**-21
"""Two quotients, each within 2 ulp under ``-use_fast_math``."""
SILU_DIVISION = 2.0**-22
EXP_SLOPE = 1.25 * 2.0**-23
"""``__expf`` is ex2.approx(x * log2 e), quotients are within 2 ulp (CUDA C++ Programming Guide)."""
TACTICS = ("1of4", "2of4", "3of4", "4of4")
"""Where in the list of a product's valid tactics one is taken."""
STREAMS: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",)}

Parts = Mapping[str, Tensor]
Call = Callable[[Parts], dict[str, Tensor]]


@dataclass(frozen=True)
class Format:
    """A format as FlashInfer names it.

    config: of its runner. quant: of weights and activations. multiple: of the sizes. recipe: its own choices.
    flags: of the flat function.
    """

    config: str
    quant: tuple[str, str]
    multiple: int
    recipe: Mapping[str, Any]
    flags: Mapping[str, bool]


FORMATS: Mapping[str, Format] = {
    "bf16": Format("CutlassBf16Config", ("BF16", "BF16"), 8, {"activation_dtype": "bf16"}, {}),
    "deepseek_fp8": Format(
        "CutlassFp8BlockConfig",
        ("DeepSeekFp8", "DeepSeekFp8"),
        128,
        {
            "accumulator": "hopper_fp8",
            "activation_dtype": "bf16",
            "scale_arithmetic": "approximate",
            "scale_error": APPROXIMATE,
            "payload_arithmetic": "approximate",
            "payload_error": APPROXIMATE,
        },
        {"use_deepseek_fp8_block_scale": True},
    ),
    "fp8_per_tensor": Format(
        "CutlassFp8PerTensorConfig",
        ("FP8PerTensor", "FP8PerTensor"),
        16,
        {"accumulator": "hopper_fp8", "promotion": "none", "payload_arithmetic": "reciprocal"},
        {},
    ),
    "w4a16": Format(
        "CutlassW4A16Config", ("MXFP4", "BF16"), 128, {"activation_dtype": "bf16"}, {"use_w4_group_scaling": True}
    ),
}
FUSED = ("bf16", "fp8_per_tensor")
"""Formats whose second product may add experts in its epilogue (``mayHaveFinalizeFused``)."""


class FlashInferMoe:
    """``flashinfer_moe`` and ``flashinfer_moe_fused``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fused = name == "flashinfer_moe_fused"

    def version(self) -> str:
        """flashinfer-python's version."""
        return modules.version()

    def claims(self, device: str) -> Iterable[Claim]:
        """What FlashInfer's own gates admit on SM90, where the module lies ready; other accumulators are not known."""
        if not device.startswith("cuda") or torch.cuda.get_device_capability(torch.device(device)) != (9, 0):
            return []
        if not modules.ready(MODULE):
            return []
        compiled = modules.formats(MODULE)
        return [
            Claim(
                operation="moe",
                variant=name,
                source=f"{SOURCE}: {form.config.removesuffix('Config')}Runner",
                where={
                    "gate": ("second",),
                    "ids": ("spread", "skewed"),
                    "out": ("bf16",),
                    "scaling": ("1",),
                    "weight": ("output",),
                    **({"scale": ("fp32",)} if name == "deepseek_fp8" else {}),
                },
                multiples={"hidden": form.multiple, "intermediate": form.multiple},
                maxima={"tokens": CEILING},
                options=_options(name, self._fused),
            )
            for name, form in FORMATS.items()
            if (not self._fused or name in FUSED)
            and (compiled is None or name in compiled)
            and supported(form.config, 90)
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """As read in the source; see the module."""
        stored: dict[str, Any] = {"fc2_dtype": "bf16"}
        if self._fused:  # atomics in no order, and FlashInfer says so (``use_fused_finalize``)
            stored = {"weighted_dtype": "bf16", "combine_dtype": "bf16", "run_to_run": False}
        return Recipe(
            source=claim.source,
            fc1_dtype="bf16",
            exp_slope=EXP_SLOPE,
            division_error=SILU_DIVISION,
            **stored,
            **FORMATS[claim.variant].recipe,
        )

    def prepare(self, case: Any, inputs: Parts, options: Mapping[str, str]) -> Call:
        """The library's call with its own layouts of weights, bound to its inputs."""
        if case.operation != "moe" or case.variant not in FORMATS or (self._fused and case.variant not in FUSED):
            raise Unsupported(f"no {case.operation} {case.variant}")
        if case["gate"] != "second" or case["weight"] != "output" or case["scaling"] != "1" or case["out"] != "bf16":
            raise Unsupported("up first, weights on the output, no scaling factor, BF16")
        if options.get("front") == "flat":
            return _flat(case, inputs)
        return _layered(case, inputs, options, self._fused)

    def run(self, prepared: Call, out: Parts) -> dict[str, Tensor]:
        """Call it."""
        return prepared(out)


def backends() -> Iterable[FlashInferMoe]:
    """``flashinfer_moe`` and ``flashinfer_moe_fused``. Raises ImportError where nothing is ready."""
    reason = modules.absent(torch.cuda.is_available())
    if reason is not None:
        raise ImportError(reason)
    return [FlashInferMoe("flashinfer_moe"), FlashInferMoe("flashinfer_moe_fused")]


def _options(variant: str, fused: bool) -> dict[str, tuple[str, ...]]:
    """Block-scaled FP8 has no tactics to choose; only the runner itself can be told to add in its epilogue."""
    found = {**STREAMS, "front": ("layer", "flat")} if not fused else dict(STREAMS)
    return found if variant == "deepseek_fp8" else {**found, "tactic": TACTICS}


def supported(config: str, sm: int) -> bool:
    """Whether this release has a runner of CUTLASS's and its gate admits an architecture."""
    found = modules.attribute(API, config)
    return found is not None and bool(found.supported(sm))


def view(variant: str, inputs: Parts) -> dict[str, Tensor]:
    """The prepared weights of a runner, as ``flashinfer/fused_moe/prepare.py`` names them."""
    weights = {"fc1_expert_weights": inputs["w1"], "fc2_expert_weights": inputs["w2"]}
    if variant == "bf16":
        return weights
    first, second = inputs["w1_scales"], inputs["w2_scales"]
    if variant == "w4a16":
        prepare = "flashinfer.fused_moe.prepare"
        fold = modules.attribute(prepare, "interleave_moe_scales_for_sm90_mixed_gemm")
        weave = modules.attribute(prepare, "interleave_moe_weights_for_sm90_mixed_gemm")
        if fold is None or weave is None:
            raise Unsupported("this release has no layout of MXFP4 weights for Hopper")
        woven = {name: weave(weight, "fp4") for name, weight in weights.items()}
        return {**woven, "fc1_expert_scales": fold(first), "fc2_expert_scales": fold(second)}
    weights = {name: weight.view(torch.float8_e4m3fn) for name, weight in weights.items()}
    if variant == "deepseek_fp8":
        return {**weights, "fc1_block_scale": first.contiguous(), "fc2_block_scale": second.contiguous()}
    x_scale, h_scale = inputs["x_scale"].reshape(()), inputs["h_scale"].reshape(())
    return {
        **weights,
        "fc1_dequant_scale": (first.reshape(-1) * x_scale).contiguous(),
        "fc2_act_quant_scale": 1 / h_scale,
        "fc2_dequant_scale": (second.reshape(-1) * h_scale).contiguous(),
        "fc1_act_dequant_scale": x_scale.clone(),
    }


def activations(variant: str, inputs: Parts) -> Tensor:
    """What the caller hands over: BF16, or E4M3 as FlashInfer quantises it, times the given scale's reciprocal."""
    x = inputs["x"]
    if variant != "fp8_per_tensor":
        return x
    return (x.float() * (1 / inputs["x_scale"])).clamp(-448, 448).to(torch.float8_e4m3fn)


def _layered(case: Any, inputs: Parts, options: Mapping[str, str], fused: bool) -> Call:
    form, device = FORMATS[case.variant], inputs["x"].device
    api = _api(form.config)
    weight, activation = (getattr(api.QuantFormat, word) for word in form.quant)
    config = api.MoEConfig(
        routing=api.RoutingConfig(num_experts=case.integer("experts"), top_k=case.integer("topk")),
        quant=api.QuantConfig(weight=weight, activation=activation),
        experts=api.ExpertConfig(intermediate_size=case.integer("intermediate")),
        activation=api.SwiGLU() if case["limit"] == "none" else api.SwiGLU(limit=float(case["limit"])),
        backend=api.BackendOptions(candidates=(api.config(),)),
    )
    layer = api.MoELayer(config, device)
    (runner,) = layer.runners
    packed = api.MoEWeightPack()
    packed.prepare_for(runner.backend_key, view(case.variant, inputs))
    given = api.MoEActivationPack(activations(case.variant, inputs), None, inputs["ids"], inputs["weights"])
    if options.get("front") == "layer":
        return lambda out: {"output": layer(given, packed)}
    bound = runner.pack_inputs(given, packed)
    tactic = chosen(runner, bound, options.get("tactic"), fused)

    def call(out: Parts) -> dict[str, Tensor]:
        bound[0] = out["output"]
        return {"output": runner.forward(bound, tactic=tactic)}

    return call


def _api(config: str) -> SimpleNamespace:
    """The names of the unified interface, and ``config``. Raises `Unsupported` where one is missing."""
    places = dict.fromkeys(NAMED, API) | {"MoELayer": "flashinfer.fused_moe.layer"}
    found = {name: modules.attribute(place, name) for name, place in places.items()}
    found["config"] = modules.attribute(API, config)
    lacking = [name for name, value in found.items() if value is None]
    if lacking:
        raise Unsupported(f"this release has no {lacking[0]}")
    return SimpleNamespace(**found)


def _flat(case: Any, inputs: Parts) -> Call:
    run = modules.attribute("flashinfer.fused_moe.core", "cutlass_fused_moe")
    if run is None:
        raise Unsupported("this release has no cutlass_fused_moe")
    weights = view(case.variant, inputs)
    scales = list(weights.values())[2:]
    if case.variant == "w4a16":
        scales = [scale.view(torch.int32) for scale in scales]
    arguments: dict[str, Any] = {"use_fused_finalize": False, **FORMATS[case.variant].flags}
    if case["limit"] != "none":
        limit = torch.full((case.integer("experts"),), float(case["limit"]), device=inputs["x"].device)
        arguments["swiglu_limit"] = limit
    x = activations(case.variant, inputs)

    def call(out: Parts) -> dict[str, Tensor]:
        run(
            x, inputs["ids"], inputs["weights"], weights["fc1_expert_weights"], weights["fc2_expert_weights"],
            torch.bfloat16, quant_scales=scales, output=out["output"], **arguments,
        )  # fmt: skip
        return {"output": out["output"]}

    return call


def chosen(runner: Any, bound: list[Tensor], word: str | None, fused: bool) -> Any:
    """A pair of tactics for the two products, or -1 for FlashInfer's default.

    word: of `TACTICS`, or None. The second product's tactics are numbered behind the first's: those that add experts
    apart, the same ones adding in the epilogue, then both again with operands swapped, then those of older
    architectures (``getTmaWarpSpecializedConfigs``). Tactics that were left out of a build are passed over.
    """
    if word is None and not fused:
        return -1
    inner = runner._inner
    shown = [bound[1], bound[4], None, bound[5], None]
    lists = []
    for stage in (1, 2):
        inner.gemm_idx_for_tuning = stage
        lists.append([int(tactic) for tactic in inner.get_valid_tactics(shown, None)])
    inner.gemm_idx_for_tuning = None
    counts = inner.fused_moe_runner.get_gemm1_tactic_count(), inner.fused_moe_runner.get_gemm2_tactic_count()
    once = (counts[1] - counts[0]) // 2

    def in_epilogue(tactic: int) -> bool:
        place = (tactic - counts[0]) // once if once else 4
        return place in (1, 3)

    second = [tactic for tactic in lists[1] if in_epilogue(tactic) == fused]
    share = 0 if word is None else TACTICS.index(word) / (len(TACTICS) - 1)
    firsts, seconds = (items[int(share * (len(items) - 1)) :] + items for items in (lists[0], second))
    first = next((tactic for tactic in firsts if runs(runner, bound, (tactic, -1))), -1)
    found = next((tactic for tactic in seconds if runs(runner, bound, (-1, tactic))), -1)
    if fused and found == -1:
        raise Unsupported("this build has no tactic that adds experts in the epilogue")
    return first, found


def runs(runner: Any, bound: list[Tensor], tactic: tuple[int, int]) -> bool:
    """Whether a pair of tactics is part of the build."""
    try:
        runner.forward(bound, tactic=tactic)
    except Exception as error:
        if modules.LEFT_OUT in str(error):
            return False
        raise
    return True
