"""vLLM's quantiser of activations, run both ways: eagerly by its kernels, and as what is compiled in their place.

Which way is taken depends on how the model is served; what reads the scales is the same. Nothing is launched: only the
dtype and the shape of the scales are looked at.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

from conformance.gating.child import SlowError, limited
from conformance.gating.model import PATHS, Gate

QUANTISER = "vllm.model_executor.layers.quantization.input_quant_fp8"
KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
CLASS, VARIANT = "QuantFP8", "1x128 packed UE8M0"
KERNELS = ("per_token_group_fp8_quant", "per_token_group_fp8_quant_packed")
"""Compiled operators of ``torch.ops._C`` that fill what is given to them."""
ROWS, COLUMNS = 16, 512


def gates(limit: float) -> tuple[Gate, ...]:
    """One gate a way: yes where the scales are packed into int32. Raises where vLLM has moved."""
    import torch

    module: Any = importlib.import_module(QUANTISER)
    group: Any = importlib.import_module(KEYS).GroupShape(1, 128)
    quantiser = getattr(module, CLASS)
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    for name in KERNELS:
        setattr(torch.ops._C, name, lambda *_, **__: None)
    with patch.object(quantiser, "dispatch_forward", lambda *_, **__: None, create=True):
        made = quantiser(static=False, group_shape=group)
    return tuple(_gate(name, ask, x, limit) for name, ask in zip(PATHS, _ways(made), strict=True))


def _ways(made: Any) -> tuple[Any, Any]:
    return made.forward_cuda, made.forward_native


def _gate(name: str, ask: Any, x: Any, limit: float) -> Gate:
    import torch

    from conformance.gating.launches import recorded

    try:
        with limited(limit), recorded("quantize", []):
            scales = ask(x)[1]
    except (Exception, SlowError) as error:
        return Gate(name, "unknown", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    said = f"{str(scales.dtype).removeprefix('torch.')} {'x'.join(map(str, scales.shape))}"
    return Gate(name, "yes" if scales.dtype == torch.int32 else "no", said)
