"""The modules of SGLang that its kernels need, and what they are told about the rest of it.

Loaded from the installed distribution, or from the folder that ``CONFORMANCE_SGLANG`` names (one that holds
``sglang``, such as an unpacked wheel or the ``python`` folder of a checkout). Everything that is not listed in `REAL`
is a stand-in. The ahead-of-time kernels of ``sgl_kernel`` are not used: where SGLang calls one, the kernel of SGLang's
own that stands for it is named below (its JIT alignment of experts, its Triton sum over experts).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from conformance.backends._library import Library

QUANT = "sglang.kernels.ops.quantization"
GEMM = "sglang.kernels.ops.gemm.fp8_kernel"
MOE = "sglang.kernels.ops.moe"
WEIGHTS = "sglang.srt.layers.quantization.fp8_utils"
RUNNER = "sglang.srt.layers.moe.moe_runner.triton_utils"
GATE = f"{MOE}.moe_fused_gate"

REAL = (
    "sglang.kernels.jit",
    "sglang.kernels.jit.utils",
    "sglang.kernels.jit.utils.",
    "sglang.kernels.kernel_api_logging",
    "sglang.kernels.ops.activation.activation",
    GEMM,
    f"{MOE}.fused_moe_triton_kernels",
    f"{MOE}.moe_align",
    f"{MOE}.moe_align_small_numel",
    GATE,
    f"{MOE}.moe_route_radix",
    f"{QUANT}.fp8_kernel",
    f"{QUANT}.fp8_utils",
    f"{QUANT}.mxfp8_quant",
    f"{QUANT}.per_tensor_quant_fp8",
    f"{QUANT}.per_token_group_quant",
    f"{QUANT}.per_token_group_quant_8bit_v2",
    "sglang.srt.environ",
    WEIGHTS,
    RUNNER,
    f"{RUNNER}.",
)


@cache
def library() -> Library:
    """SGLang. Raises ImportError where there is none, or not the one library that these modules need."""
    if importlib.util.find_spec("msgspec") is None:
        raise ImportError("SGLang's kernels need msgspec, which is not installed")
    if not hasattr(logging.Logger, "warning_once"):  # Transformers adds it, which SGLang imports before its kernels
        setattr(logging.Logger, "warning_once", logging.Logger.warning)  # noqa: B010 - no attribute that mypy knows
    return Library("sglang", "sglang", "CONFORMANCE_SGLANG", REAL, _given())


def _given() -> dict[str, dict[str, Any]]:
    platform = _platform()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    machine = SimpleNamespace(
        is_sm90=capability[0] == 9,
        is_sm100=capability[0] == 10,
        is_sm110=capability[0] == 11,
        is_sm120=capability[0] == 12,
        is_blackwell=capability[0] in (10, 12),
    )
    execution = SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    return {
        "sglang.srt.utils": platform,
        "sglang.srt.utils.common": platform,
        "sglang.srt.utils.custom_op": {"register_custom_op": _as_written},
        "sglang.srt.utils.patch_torch": {"register_fake_if_exists": _as_written},
        "sglang.srt.runtime_context": {
            "get_platform": lambda: machine,
            "get_exec": lambda: execution,
            "get_parallel": lambda: SimpleNamespace(tp_group=None),
        },
        "sglang.srt.layers.moe.utils": {"get_moe_padding_size": lambda *_: 0},
        "sglang.srt.layers.dp_attention": {"is_allocation_symmetric": lambda: False},
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
        "sglang.srt.distributed.device_communicators.pynccl_allocator": {
            "use_symmetric_memory": lambda *_, **__: nullcontext()
        },
        "sglang.kernels.ops.moe": {"moe_align_block_size": _align},
        "sgl_kernel": {"moe_sum_reduce": _sum_reduce},
    }


def _platform() -> dict[str, Callable[..., Any]]:
    """What ``sglang.srt.utils`` says of the machine: CUDA where torch has it, no other accelerator."""
    cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if cuda else (0, 0)
    no = dict.fromkeys(
        ("is_hip", "is_musa", "is_xpu", "is_npu", "cpu_has_amx_support", "is_gfx1250_supported", "get_bool_env_var"),
        lambda *_: False,
    )
    return {
        **no,
        "is_cuda": lambda: cuda,
        "is_cpu": lambda: not cuda,
        "log_info_on_rank0": lambda *_: None,
        "get_device_capability": lambda *_: capability,
        "is_sm90_supported": lambda *_: capability[0] == 9,
        "ceil_align": lambda size, step: -(-size // step) * step,
        "ceil_div": lambda size, step: -(-size // step),
        "get_device_name": lambda *_: torch.cuda.get_device_name() if cuda else "cpu",
        "get_cuda_version": lambda: tuple(int(word) for word in (torch.version.cuda or "0.0").split(".")[:2]),
    }


def _as_written(*arguments: Any, **_: Any) -> Any:
    """Stands for the decorators that register an operator with torch: the function stays as it is written."""
    if arguments and callable(arguments[0]):
        return arguments[0]
    return lambda function: function


def _align(*arguments: Any) -> None:
    """``sgl_kernel.moe_align_block_size`` by SGLang's JIT kernel of the same name; the last flag is not its own."""
    align = library().function("moe_align_block_size", f"{MOE}.moe_align")
    *arguments_of_jit, ignore_invalid_expert = arguments
    if ignore_invalid_expert:
        raise ValueError("moe_align_block_size: ignore_invalid_expert is not among the JIT kernel's options")
    align(*arguments_of_jit)


def _sum_reduce(*arguments: Any) -> None:
    """``sgl_kernel.moe_sum_reduce`` by SGLang's Triton kernel."""
    library().function("moe_sum_reduce_triton", f"{MOE}.fused_moe_triton_kernels")(*arguments)
