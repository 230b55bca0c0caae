"""MXFP8 expert scales that are permuted but not interleaved (flashinfer-ai/flashinfer#4087), as a model on a CPU.

The kernel reads scales from 128x4 tiles of shuffled rows. A preparation that shuffles the rows and forgets the tiles
hands it the right bytes in other places.
"""

import pytest
import torch

from conformance.backends import torch_ops
from conformance.operations import OPERATIONS
from fuzz.case import Case
from references import layouts
from references.weights import row_shuffle_indices

CASE = Case.parse(
    "moe mxfp8 v=1 experts=4 gate=second hidden=128 ids=spread intermediate=128 limit=none out=bf16 scale=ceil "
    "scaling=1 tokens=16 topk=2 values=normal weight=output seed=900013"
)


def as_read(scales: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """An expert's scales ``[rows, columns]`` as the kernel reads them after the preparation."""
    rows, columns = scales.shape
    order = row_shuffle_indices(rows, 128)
    shuffled = scales[order]
    stored = layouts.pack(shuffled, "interleave_128x4") if interleaved else shuffled.flatten()
    read = layouts.unpack(stored, "interleave_128x4", rows, columns)
    return read[torch.argsort(order)]


def verdict_of(case: Case, names: tuple[str, ...], interleaved: bool):
    operation = OPERATIONS["moe"]
    inputs = operation.inputs(case)
    read = {name: torch.stack([as_read(scales, interleaved) for scales in inputs[name]]) for name in names}
    [adapter, _] = torch_ops.backends()
    parts = adapter.run(adapter.prepare(case, {**inputs, **read}, {}), {})
    claim = next(claim for claim in adapter.claims("cpu") if claim.refusal(case) is None)
    return operation.judge(case, inputs, parts, adapter.recipe(claim))[0]


@pytest.mark.parametrize("names", [("w1_scales",), ("w2_scales",), ("w1_scales", "w2_scales")])
@pytest.mark.parametrize("seed", [900013, 900017])
def test_scales_that_are_permuted_only_are_wrong(names, seed):
    case = CASE.replace(seed=seed)
    assert verdict_of(case, names, interleaved=True).verdict == "pass"
    verdict = verdict_of(case, names, interleaved=False)
    assert verdict.verdict == "wrong"
    assert verdict.headroom > 1000
