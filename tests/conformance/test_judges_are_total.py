"""Whatever a backend answers, the judge has a verdict: it never raises, and garbage never passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.operations import OPERATIONS
from conformance.operations.base import OutputSpec
from fuzz.grammar import GRAMMAR
from fuzz.plan import draw_plan
from references.recipes import Recipe

GROUPS = [(operation, variant) for operation, variants in GRAMMAR.items() for variant in variants]
RECIPE = Recipe(source="a test")


def filled(spec: OutputSpec, byte: int | None) -> Tensor:
    """An output of one repeated byte, or of random bytes."""
    size = torch.empty(spec.shape, dtype=spec.dtype).nbytes
    if byte is None:
        raw = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    else:
        raw = torch.full((size,), byte, dtype=torch.uint8)
    return raw.view(spec.dtype).view(spec.shape)


@pytest.mark.parametrize(("operation", "variant"), GROUPS, ids=map("-".join, GROUPS))
def test_every_answer_has_a_verdict(operation: str, variant: str) -> None:
    judged = passed = 0
    for case in draw_plan([(operation, variant)], 2, 3, max_elements=512):
        inputs = OPERATIONS[operation].inputs(case)
        specs = OPERATIONS[operation].outputs(case)
        for byte in (0x00, 0xFF, 0x5A, None):
            outputs = {name: filled(spec, byte) for name, spec in specs.items()}
            verdicts = OPERATIONS[operation].judge(case, inputs, outputs, RECIPE)
            assert {verdict.part for verdict in verdicts} >= set(specs)
            assert {verdict.verdict for verdict in verdicts} <= {"pass", "wrong"}
            judged += 1
            passed += all(verdict.verdict == "pass" for verdict in verdicts)
    assert passed < judged / 2, "garbage passes"
