"""The operations: one module each, with the members of ``conformance.operations.base.Operation``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from conformance.operations import (
    dequantize,
    gemm,
    grouped_gemm,
    moe,
    quantize,
    requantize,
    routing,
    scale_layout,
    ue8m0,
)
from conformance.operations.base import Operation

OPERATIONS: Mapping[str, Operation] = {
    module.NAME: cast(Operation, module)
    for module in (ue8m0, quantize, dequantize, scale_layout, requantize, gemm, grouped_gemm, routing, moe)
}
"""name -> operation."""
