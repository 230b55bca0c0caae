"""Mutants of every kind of fault, shrunk to few elements; their scripts fail on them and pass on a right answer.

All mutants that are caught: ``python -m benchmarks.mutant_scripts``, docs/results/repro.md.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutant_scripts import Right, capsule_of, exported, outcome
from conformance import capsule as capsules
from conformance.mutant_backends import MutantBackend
from conformance.shrink import LocalProbe, Shrunk, shrink
from fuzz.case import Case
from fuzz.mutants import MUTANTS

CATCHES = {
    "ue8m0-exponent-increment-into-nan": "ue8m0 ceil v=1 from=scale n=1536 values=boundary seed=0",
    "zero-block-0-over-0": "quantize deepseek_fp8 v=1 block=128x128 dtype=bf16 k=258 m=257 scale=fp32 stride=padded"
    " values=zero_blocks seed=10",
    "software-e4m3-saturates-early": "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=158 m=5 scale=floor stride=transposed"
    " values=uniform_bits seed=1",
    "noncontig-input-written-with-input-strides": "quantize deepseek_fp8 v=1 block=128x128 dtype=bf16 k=638 m=5"
    " scale=ceil stride=transposed values=uniform_bits seed=1",
    "e8m0-nan-becomes-inf": "dequantize mxfp8 v=1 block=1x32 k=96 m=2 out=fp32 scale=ue8m0 values=nonfinite seed=5",
    "packed-tail-bytes-uninitialised": "scale_layout mn_major_packed v=1 cols=10 direction=pack rows=257 values=index"
    " seed=0",
    "transposed-scales": "scale_layout k_major v=1 cols=10 direction=pack rows=257 values=index seed=0",
    "fused-norm-amax-in-fp32-not-output-type": "requantize deepseek_fp8 v=1 k=258 n=257 scale=ceil values=codes seed=0",
    "route-group-score-max": "routing DeepSeekV3 v=1 bias=0 bias_dtype=fp32 dtype=fp32 experts=256 groups=8 out=fp32"
    " padding=none renormalize=on scaling=1 shared=0 stride=contiguous tokens=17 topk=8 topk_group=4 values=normal"
    " seed=0",
    "route-topk-order-undefined": "routing Renormalize v=1 dtype=fp32 experts=256 out=fp32 padding=none shared=0"
    " stride=contiguous tokens=17 topk=8 values=normal seed=0",
    "gemm-store-without-n-mask": "gemm bf16 v=1 k=258 layout=plain m=33 n=92 out=bf16 scale=none values=normal seed=0",
    "weight-on-output": "moe fp8_per_tensor v=1 experts=2 gate=first hidden=4 ids=spread intermediate=4 limit=none"
    " out=bf16 scale=fp32 scaling=1 tokens=2 topk=1 values=normal weight=input seed=0",
}
BY_FAMILY = {mutant.family: mutant for mutant in MUTANTS}


def small(family: str) -> tuple[Shrunk, LocalProbe]:
    probe = LocalProbe(MutantBackend(BY_FAMILY[family]))
    found = shrink(Case.parse(CATCHES[family]), probe, seconds=60)
    assert found is not None
    return found, probe


@pytest.mark.parametrize("family", CATCHES)
def test_few_elements_are_left_and_the_script_tells(family: str, tmp_path: Path) -> None:
    mutant = BY_FAMILY[family]
    found, probe = small(family)
    assert found.differing <= 64 or found.note
    assert found.text_case.seed <= 3
    held = capsule_of(mutant, found, probe)
    assert capsules.read(capsules.write(tmp_path, held)) == held
    text = exported(held)
    fails, said = outcome(text, MutantBackend(mutant))
    assert fails, said
    fails, said = outcome(text, Right(mutant))
    assert not fails, said


def test_a_script_is_a_program_that_exits_with_1(tmp_path: Path) -> None:
    found, probe = small("e8m0-nan-becomes-inf")
    path = tmp_path / "out.py"
    path.write_text(exported(capsule_of(BY_FAMILY["e8m0-nan-becomes-inf"], found, probe)))
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": root}, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "output[0, 0]: expected 0x7fc00000 (nan), actual 0x7f800000: WRONG" in done.stdout
    assert done.stdout.endswith("the bug is there (output: wrong)\n")
