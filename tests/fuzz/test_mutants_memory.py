"""Mutants of memory and gates that have no file of their own: offsets, replays, logits that nobody asked for."""

from __future__ import annotations

import torch

from conformance.mutant_backends import MutantBackend
from fuzz.case import Case
from fuzz.mutants import MUTANTS, memory, moe

BY_FAMILY = {mutant.family: mutant for mutant in MUTANTS}


def test_an_offset_wraps_in_32_bits() -> None:
    offsets = {
        349526 * 6144: -2147479552,
        61681 * 34816: -2147481600,
        61680 * 34816: 61680 * 34816,
        256 * 8388608: -2147483648,
        7168 * 448000: -1083703296,
    }
    assert memory.narrow(torch.tensor(list(offsets)), 32).tolist() == list(offsets.values())


def test_rows_beyond_the_index_are_lost() -> None:
    words = "block=tensor k=256 m=129 out=fp32 scale=fp32 values=codes seed=0"
    case = Case.parse(f"dequantize fp8_per_tensor v=1 {words}")
    inputs = {"payload": torch.full((129, 256), 0x38, dtype=torch.uint8), "scales": torch.ones(1, 1)}
    found = BY_FAMILY["int32-offset"].answer(case, inputs)["output"]
    assert isinstance(found, torch.Tensor)
    assert found[:128].eq(1).all()  # 2^15 elements
    assert found[128].eq(0).all()


def test_a_replay_finds_the_input_of_the_capture() -> None:
    case = Case.parse(
        "moe bf16 v=1 experts=1 gate=first hidden=1 ids=spread intermediate=1 limit=none out=fp32 scale=none scaling=1 "
        "tokens=1 topk=1 values=normal weight=output seed=0"
    )
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    inputs = {"x": torch.zeros(1, 1, dtype=torch.bfloat16), "ids": torch.zeros(1, 1, dtype=torch.int32)}
    inputs |= {"weights": torch.ones(1, 1), "w1": one.expand(1, 2, 1), "w2": one}
    backend = MutantBackend(BY_FAMILY["cuda-graph-pad-frozen"])

    def call() -> float:
        out = {"output": torch.empty(1, 1)}
        return float(backend.run(backend.prepare(case, inputs, {}), out)["output"])

    assert call() == 0.0
    inputs["x"].fill_(1.0)
    assert call() == 0.0
    inputs["weights"].fill_(2.0)
    assert call() == 0.0
    assert float(moe.layer(case, inputs)["output"]) > 1.4
