"""The modules of vLLM that its Triton kernels need, and what they are told about the rest of it.

Loaded from the installed distribution, or from the folder that ``CONFORMANCE_VLLM`` names (one that holds ``vllm``,
such as an unpacked wheel or a checkout). Everything that is not listed in `REAL` is a stand-in. vLLM's compiled
operators (``torch.ops._C``) are not used: the quantisation module is told that the platform has none, so that it takes
its own Triton kernels; those around the expert kernel are torch (`_vllm_ops`).
"""

from __future__ import annotations

import logging
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from conformance.backends._library import Library
from conformance.backends._vllm_ops import OPERATORS

QUANT = "vllm.model_executor.layers.quantization.utils.fp8_utils"
MXFP8 = "vllm.model_executor.layers.quantization.utils.mxfp8_utils"
DEEP_GEMM = "vllm.utils.deep_gemm"
FUSED_MOE = "vllm.model_executor.layers.fused_moe.fused_moe"
MOE_UTILS = "vllm.model_executor.layers.fused_moe.utils"
DSV4 = "vllm.model_executor.layers.fused_moe.router.dsv4_topk"
GROUPED = "vllm.model_executor.layers.fused_moe.router.grouped_topk_router"

REAL = (
    QUANT,
    MXFP8,
    DEEP_GEMM,
    FUSED_MOE,
    MOE_UTILS,
    "vllm.model_executor.layers.fused_moe.moe_align_block_size",
    "vllm.model_executor.layers.fused_moe.activation",
    DSV4,
    GROUPED,
    "vllm.utils.math_utils",
)


@cache
def library() -> Library:
    """vLLM. Raises ImportError where there is none."""
    return Library("vllm", "vllm", "CONFORMANCE_VLLM", REAL, _given())


def _given() -> dict[str, dict[str, Any]]:
    cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if cuda else (0, 0)
    number = 10 * capability[0] + capability[1]
    platform = SimpleNamespace(
        is_cuda=lambda: cuda,
        is_cuda_alike=lambda: False,  # it has no compiled operators
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cpu=lambda: not cuda,
        is_fp8_fnuz=lambda: False,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability=lambda wanted: number == wanted,
        has_device_capability=lambda wanted: number >= wanted,
        is_arch_support_pdl=lambda: capability[0] >= 9,
        simple_compile_backend="eager",
    )
    flags = SimpleNamespace(
        VLLM_BATCH_INVARIANT=False,
        VLLM_USE_FUSED_MOE_GROUPED_TOPK=False,
        VLLM_TUNED_CONFIG_FOLDER=None,
        VLLM_TRITON_USE_TD=None,
    )
    limit = torch.finfo(torch.float8_e4m3fn)
    return {
        "vllm": {"envs": flags, "_custom_ops": OPERATORS},
        "vllm.envs": dict(vars(flags)),
        "vllm.logger": {"init_logger": _logger, "logger": _logger("vllm")},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "get_fp8_min_max": lambda: (limit.min, limit.max)
        },
        "vllm.model_executor.layers.fused_moe": {"get_config": lambda: None},
        "vllm.model_executor.layers.fused_moe.config": {
            "_get_config_dtype_str": lambda dtype, use_fp8_w8a8=False, **_: "fp8_w8a8" if use_fp8_w8a8 else None
        },
        "vllm.model_executor.layers.fused_moe.modular_kernel": {
            "FusedMoEExpertsModular": SimpleNamespace(adjust_N_for_activation=lambda n, kind: n // 2)
        },
        "vllm.utils.platform_utils": {
            "get_device_name_as_file_name": lambda: torch.cuda.get_device_name().replace(" ", "_") if cuda else "cpu"
        },
        "vllm.model_executor.custom_op": {"CustomOp": _Registry},
        "vllm.model_executor.utils": {"maybe_disable_graph_partition": lambda _: {}},
    }


def _logger(name: str) -> logging.Logger:
    """A logger that also knows vLLM's ``warning_once`` and its like, which say nothing here."""
    found = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(found, f"{level}_once", lambda *_, **__: None)
    return found


class _Registry:
    """Stands for ``CustomOp``, whose ``register`` decorates classes."""

    @staticmethod
    def register(name: str) -> Any:
        """A decorator that changes nothing."""
        return lambda registered: registered
