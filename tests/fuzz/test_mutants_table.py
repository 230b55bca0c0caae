"""What holds for every mutant: named, sourced, pure, and nothing but a function of its case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import fuzz.mutants
from fuzz.case import Case
from fuzz.grammar import GRAMMAR
from fuzz.hashing import sha256_of
from fuzz.inputs import build
from fuzz.mutants import CONFORMANT, MUTANTS
from fuzz.mutants.base import AREAS, Inputs, Mutant, Part, Partial, Racing, Trap
from fuzz.plan import cornerstones

EACH = pytest.mark.parametrize("mutant", [*MUTANTS, *CONFORMANT], ids=lambda mutant: mutant.family)


def tensors(part: Part) -> tuple[torch.Tensor, ...]:
    if isinstance(part, Racing):
        return part.outcomes
    return (part.values, part.written) if isinstance(part, Partial) else (part,)


def answered(mutant: Mutant, case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    try:
        parts = mutant.answer(case, inputs)
    except Trap:
        return {}
    return {f"{name}.{i}": t for name, part in parts.items() for i, t in enumerate(tensors(part))}


def test_families_are_distinct_and_sourced() -> None:
    families = [mutant.family for mutant in MUTANTS]
    assert len(set(families)) == len(families)
    for mutant in MUTANTS:
        assert re.fullmatch(r"[a-z0-9-]+", mutant.family)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", mutant.source), mutant.family
        assert mutant.area in AREAS
        assert mutant.description
        assert set(mutant.variants) <= set(GRAMMAR[mutant.operation])


@EACH
def test_an_answer_depends_on_case_and_inputs_alone(mutant: Mutant) -> None:
    first = [case for variant in mutant.variants for case in cornerstones((mutant.operation, variant), 512)[:2]]
    for case in first:
        if any(case[key] not in values for key, values in mutant.where.items()):
            continue
        inputs = build(case)
        before = sha256_of(inputs)
        answers = [answered(mutant, case, inputs) for _ in range(2)]
        assert sha256_of(inputs) == before
        assert sha256_of(answers[0]) == sha256_of(answers[1])


def test_mutants_import_references_and_torch_alone() -> None:
    allowed = {"__future__", "collections", "dataclasses", "itertools", "typing", "torch", "references", "fuzz"}
    for path in Path(fuzz.mutants.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                assert node.module.split(".")[0] in allowed, path
                if node.module.startswith("fuzz"):
                    assert node.module in ("fuzz", "fuzz.grammar") or node.module.startswith("fuzz.mutants"), path
            elif isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= allowed, path
