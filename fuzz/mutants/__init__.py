"""Mutants: faulty implementations that re-create historical bugs, one module an area. See docs/power.md."""

from __future__ import annotations

from fuzz.grammar import GRAMMAR
from fuzz.mutants import (
    correct,
    dequant,
    edges,
    edges_products,
    gemm,
    layout,
    legal,
    maps,
    memory,
    moe,
    probes,
    quant,
    routing,
    ue8m0,
)
from fuzz.mutants.base import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *ue8m0.MUTANTS,
    *quant.MUTANTS,
    *dequant.MUTANTS,
    *layout.MUTANTS,
    *routing.MUTANTS,
    *gemm.MUTANTS,
    *moe.MUTANTS,
    *memory.MUTANTS,
)
"""Every mutant, area by area."""

PROBES: tuple[Mutant, ...] = (*probes.PROBES, *edges.EDGES, *edges_products.EDGES, *maps.MAPS)
"""Neighbours of the reported faults; they do not count."""

CONFORMANT: tuple[Mutant, ...] = tuple(
    correct.conformant(operation, tuple(GRAMMAR[operation]), answer)
    for operation, answer in (
        ("ue8m0", correct.encode_ue8m0),
        ("quantize", correct.quantize),
        ("dequantize", correct.dequantise),
        ("scale_layout", correct.move_scales),
        ("requantize", correct.requantise),
        ("routing", routing.route),
        ("gemm", gemm.gemm),
        ("grouped_gemm", gemm.grouped_gemm),
        ("moe", moe.layer),
    )
)
"""What the mutants are changes of, without any change."""

LEGAL: tuple[Mutant, ...] = legal.LEGAL
"""Further correct implementations, with other recipes."""
