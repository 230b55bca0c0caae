"""The extent of a case is that of the tensors it draws."""

import pytest
import torch

from conformance.backends import torch_ops
from conformance.operations import OPERATIONS
from fuzz import moe_inputs
from fuzz.case import Case
from fuzz.extent import LARGE, elements, extent, is_large, outputs
from fuzz.grammar import GRAMMAR
from fuzz.plan import cornerstones

MATRICES = {
    "moe": ("x", "w1", "w2"),
    "gemm": ("a", "b"),
    "grouped_gemm": ("a", "b"),
    "quantize": ("x",),
    "dequantize": ("payload",),
    "requantize": ("payload",),
    "routing": ("logits",),
    "ue8m0": ("x",),
}
PACKED = {"mxfp4", "nvfp4", "w4a8", "w4a16", "mxfp4_to_deepseek_fp8"}


@pytest.mark.parametrize("operation", MATRICES)
def test_it_counts_the_elements_that_are_drawn(operation):
    for variant in GRAMMAR[operation]:
        if variant in PACKED:
            continue
        for case in list(cornerstones((operation, variant)))[:3]:
            inputs = OPERATIONS[operation].inputs(case)
            assert elements(case) == sum(inputs[name].numel() for name in MATRICES[operation]), case


@pytest.mark.parametrize("operation", ["gemm", "grouped_gemm", "moe"])
def test_it_counts_the_output_that_is_asked_for(operation):
    backend = {backend.name: backend for backend in torch_ops.backends()}["torch"]
    claims = [claim for claim in backend.claims("cpu") if claim.operation == operation]
    for claim in claims:
        cases = [case for case in cornerstones((operation, claim.variant)) if claim.refusal(case) is None]
        for case in cases[:6] or pytest.fail(f"{claim} covers no cornerstone"):
            out = backend.run(backend.prepare(case, OPERATIONS[operation].inputs(case), {}), {})
            assert outputs(case) == out["output"].numel(), case
            assert extent(case) == elements(case) + outputs(case)


def test_a_layer_of_a_model_is_large_and_a_planned_case_is_not():
    text = (
        "moe deepseek_fp8 v=1 experts=256 gate=first hidden=2048 ids=spread intermediate=512 limit=none out=bf16 "
        "scale=fp32 scaling=1 tokens=8 topk=8 values=normal weight=output seed=1"
    )
    assert elements(Case.parse(text)) == 3 * 256 * 2048 * 512 + 8 * 2048 > LARGE
    assert is_large(Case.parse(text))
    assert not is_large(Case.parse("scale_layout k_major v=1 cols=8 direction=pack rows=9 values=index seed=0"))


def test_experts_of_a_large_layer_are_those_of_a_small_one(monkeypatch):
    text = (
        "moe nvfp4 v=1 experts=7 gate=first hidden=64 ids=spread intermediate=32 limit=none out=bf16 scale=e4m3 "
        "scaling=1 tokens=3 topk=2 values=normal weight=output seed=1"
    )
    case = Case.parse(text)
    one_by_one = moe_inputs.build_moe(case)
    monkeypatch.setattr(moe_inputs, "is_large", lambda case: True)
    at_once = moe_inputs.build_moe(case)
    assert list(at_once) == list(one_by_one)
    assert all(torch.equal(at_once[name], one_by_one[name]) for name in at_once)
