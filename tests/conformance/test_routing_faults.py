"""Planted faults in a router are caught through the whole command line, and the router without one conforms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.cli import main
from conformance.journal import read_records
from conformance.operations import routing
from fuzz.case import Case
from fuzz.inputs import build

PLUGIN = Path(__file__).parent / "plugins" / "routers.py"
ROUTER = "routing DeepSeekV3 v=1 bias={bias} bias_dtype=fp32 dtype=fp32 experts=64 groups=8 out=fp32 padding=none"
REST = "renormalize=on scaling=2.5 shared=0 stride={stride} tokens=24 topk=6 topk_group=4 values={values} seed={seed}"
CASES = [
    f"{ROUTER} {REST}".format(bias=bias, stride=stride, values=values, seed=seed)
    for seed, (bias, stride, values) in enumerate(
        (
            ("0", "contiguous", "normal"),
            ("0.1", "padded", "near_ties"),
            ("12", "transposed", "normal"),
            ("1e4", "offset", "all_negative"),
            ("0", "contiguous", "ties"),
            ("0.1", "contiguous", "saturated"),
            ("0", "padded", "group_ties"),
            ("12", "contiguous", "nonfinite"),
        )
    )
]
CAUGHT_IN = {
    "biased_weights": {"weights"},
    "without_factor": {"weights"},
    "no_groups": {"selection"},
    "without_bias": {"selection"},
    "bf16_bias": {"selection"},
    "highest_index": {"selection"},
    "duplicate": {"selection", "weights"},
    "swapped": {"weights"},
    "short": {"weights"},
    "contiguous_only": {"selection", "weights"},
    "unwritten": {"selection", "weights"},
    "right": set(),
}


def judged(backend: Any) -> set[str]:
    """The parts that are wrong in some case, judged in this process."""
    found = set()
    for case in map(Case.parse, CASES):
        inputs = build(case)
        specs = routing.outputs(case)
        out = {name: torch.full(spec.shape, 90, dtype=spec.dtype) for name, spec in specs.items()}
        outputs = backend.run(backend.prepare(case, inputs, {}), out)
        verdicts = routing.judge(case, inputs, outputs, backend.recipe(backend.claims("cpu")[0]))
        found |= {verdict.part for verdict in verdicts if verdict.verdict != "pass"}
    return found


@pytest.mark.parametrize("name", CAUGHT_IN)
def test_a_fault_is_caught_in_its_own_parts(name: str) -> None:
    spec = importlib.util.spec_from_file_location("routers", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    offered = {backend.name: backend for backend in module.backends()}
    assert set(offered) == set(CAUGHT_IN)
    assert judged(offered[name]) == CAUGHT_IN[name]


def test_faults_are_caught_through_the_command_line(tmp_path: Path) -> None:
    names = ("biased_weights", "highest_index", "unwritten", "right")
    words = ["run", "--plugin", str(PLUGIN), "--out", str(tmp_path / "out")]
    words += [word for name in names for word in ("--backend", name)]
    words += [word for case in CASES for word in ("--case", case)]
    assert main(words) == 1
    found: dict[str, set[str]] = {name: set() for name in names}
    for record in read_records(tmp_path / "out" / "records.jsonl"):
        assert record.verdict in ("pass", "wrong"), record.message
        if record.verdict == "wrong":
            found[record.backend].add(record.part)
            assert record.backend != "unwritten" or "depends on the output buffer" in record.message
    assert found == {name: CAUGHT_IN[name] for name in names}
