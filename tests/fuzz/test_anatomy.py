from __future__ import annotations

import pytest
import torch

from fuzz.anatomy import drop, droppable, elements, granule, laid_out, parts, problem
from fuzz.case import Case
from fuzz.grammar import GRAMMAR
from fuzz.hashing import sha256_of
from fuzz.inputs import build
from fuzz.plan import draw_plan

GROUPS = [(operation, variant) for operation, variants in GRAMMAR.items() for variant in variants]


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_the_parts_of_a_case_are_its_inputs(group: tuple[str, str]) -> None:
    cases = [case for case in draw_plan([group], 12, 5) if elements(case) < 2e4]
    assert cases
    for case in cases:
        inputs = build(case)
        assert problem(case, inputs) is None
        total = sum(tensor.numel() * (2 if parts(case)[name].nibbles else 1) for name, tensor in inputs.items())
        assert elements(case) == total
        again = laid_out(case, {name: tensor.contiguous() for name, tensor in inputs.items()})
        assert sha256_of(again) == sha256_of(inputs)
        assert {name: tensor.stride() for name, tensor in again.items()} == {
            name: tensor.stride() for name, tensor in inputs.items()
        }


def test_a_dropped_row_takes_its_scales_along() -> None:
    case = Case.parse("dequantize mxfp8 v=1 block=1x32 k=96 m=3 out=fp32 scale=ue8m0 values=codes seed=0")
    inputs = build(case)
    found = drop(case, inputs, "m", 1, 2)
    assert found is not None
    smaller, left = found
    assert smaller.text == "dequantize mxfp8 v=1 block=1x32 k=96 m=2 out=fp32 scale=ue8m0 values=codes seed=0"
    assert torch.equal(left["payload"], inputs["payload"][[0, 2]])
    assert torch.equal(left["scales"], inputs["scales"][[0, 2]])


def test_columns_go_by_whole_blocks_or_from_the_ragged_end() -> None:
    case = Case.parse("dequantize mxfp8 v=1 block=1x32 k=70 m=2 out=fp32 scale=ue8m0 values=codes seed=0")
    inputs = build(case)
    assert granule(case, "k") == 32
    assert drop(case, inputs, "k", 0, 16) is None
    found = drop(case, inputs, "k", 32, 64)
    assert found is not None
    smaller, left = found
    assert smaller["k"] == "38"
    assert torch.equal(left["payload"], torch.cat([inputs["payload"][:, :32], inputs["payload"][:, 64:]], dim=1))
    assert torch.equal(left["scales"], inputs["scales"][:, [0, 2]])


def test_experts_that_are_used_stay_and_ids_are_renumbered() -> None:
    case = Case.parse(
        "moe mxfp8 v=1 experts=4 gate=first hidden=64 ids=spread intermediate=64 limit=none out=bf16 scale=ceil"
        " scaling=1 tokens=1 topk=1 values=normal weight=output seed=0"
    )
    inputs = build(case)
    inputs["ids"] = torch.tensor([[2]], dtype=torch.int32)
    assert drop(case, inputs, "experts", 2, 3) is None
    found = drop(case, inputs, "experts", 0, 2)
    assert found is not None
    smaller, left = found
    assert smaller["experts"] == "2"
    assert left["ids"].tolist() == [[0]]
    assert torch.equal(left["w1"], inputs["w1"][2:])


def test_gate_and_up_rows_go_together() -> None:
    case = Case.parse(
        "moe bf16 v=1 experts=1 gate=first hidden=4 ids=spread intermediate=3 limit=none out=bf16 scale=none"
        " scaling=1 tokens=1 topk=1 values=normal weight=output seed=0"
    )
    inputs = build(case)
    found = drop(case, inputs, "intermediate", 1, 2)
    assert found is not None
    assert torch.equal(found[1]["w1"], inputs["w1"][:, [0, 2, 3, 5]])
    assert torch.equal(found[1]["w2"], inputs["w2"][:, :, [0, 2]])


def test_masked_counts_follow_the_rows_that_go() -> None:
    case = Case.parse(
        "grouped_gemm bf16 v=1 grouping=masked groups=3 k=4 layout=plain m=4 n=2 out=fp32 scale=none values=normal"
        " seed=0"
    )
    inputs = build(case) | {"masked_m": torch.tensor([0, 2, 4], dtype=torch.int32)}
    found = drop(case, inputs, "m", 1, 3)
    assert found is not None
    assert found[1]["masked_m"].tolist() == [0, 1, 2]
    assert found[1]["a"].shape == (3, 2, 4)


def test_a_group_of_a_router_goes_as_a_whole() -> None:
    case = Case.parse(
        "routing GroupedTopK v=1 dtype=fp32 experts=12 groups=4 out=fp32 padding=none renormalize=on scaling=1 shared=0"
        " stride=contiguous tokens=2 topk=2 topk_group=4 values=normal seed=0"
    )
    inputs = build(case)
    assert droppable(case)[0] == "groups"
    assert drop(case, inputs, "experts", 0, 1) is None
    found = drop(case, inputs, "groups", 1, 3)
    assert found is not None
    assert (found[0]["experts"], found[0]["groups"], found[0]["topk_group"]) == ("6", "2", "2")
    assert torch.equal(found[1]["logits"], inputs["logits"][:, [0, 1, 2, 9, 10, 11]])


def test_what_no_case_can_have_is_said() -> None:
    case = Case.parse(
        "moe bf16 v=1 experts=2 gate=first hidden=4 ids=spread intermediate=3 limit=none out=bf16 scale=none"
        " scaling=1 tokens=1 topk=2 values=normal weight=output seed=0"
    )
    inputs = build(case)
    assert problem(case, {**inputs, "ids": torch.tensor([[1, 1]], dtype=torch.int32)}) == (
        "ids [1, 1] are not distinct experts of 2, or -1"
    )
    assert problem(case, {**inputs, "ids": torch.tensor([[0, 5]], dtype=torch.int32)}) is not None
    assert problem(case, {**inputs, "x": inputs["x"].float()}) == "x is float32 [1, 4], the case has bfloat16 [1, 4]"
    assert str(problem(case, {"x": inputs["x"]})).startswith("the inputs are x, the case has ")
