"""Mixture of experts: what a correct quantised expert layer may answer, given ids and router weights.

One concept a file: the activation, requantisation of an uncertain intermediate, a GEMM with an uncertain operand, the
pipeline that joins them, the layer without bounds, and what a case's words mean. Contract and derivations: docs/moe.md.
"""

from __future__ import annotations

from references.moe.activation import swiglu
from references.moe.config import MoeConfig, config_of, expert_operands
from references.moe.nominal import nominal_moe
from references.moe.pipeline import STAGES, AdmissibleMoe, admissible_moe
from references.moe.product import Uncertain, product
from references.moe.requantise import requantise
from references.moe.tensor_level import expectation

__all__ = [
    "STAGES",
    "AdmissibleMoe",
    "MoeConfig",
    "Uncertain",
    "admissible_moe",
    "config_of",
    "expectation",
    "expert_operands",
    "nominal_moe",
    "product",
    "requantise",
    "swiglu",
]
