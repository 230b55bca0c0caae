from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fuzz.anatomy import parts
from fuzz.case import Case
from fuzz.inputs import build
from fuzz.shrink_case import Budget, shrink_case
from fuzz.shrink_inputs import differing, from_bits, reduce_inputs, to_bits

DEQUANTIZE = Case.parse("dequantize mxfp4 v=1 block=1x32 k=192 m=9 out=bf16 scale=ue8m0 values=codes seed=77")


def test_a_case_shrinks_to_the_least_that_fails() -> None:
    tries: list[Case] = []

    def fails(case: Case) -> bool:
        tries.append(case)
        return case.integer("k") >= 70 and case["out"] == "bf16"

    found = shrink_case(DEQUANTIZE, fails, Budget(500, 60))
    assert found.text == "dequantize mxfp4 v=1 block=1x32 k=70 m=1 out=bf16 scale=ue8m0 values=zeros seed=0"
    assert len(tries) < 60


def test_a_case_that_fails_only_as_it_is_stays() -> None:
    assert shrink_case(DEQUANTIZE, lambda case: False, Budget(500, 60)) == DEQUANTIZE


def test_nothing_is_tried_beyond_the_budget() -> None:
    tries: list[Case] = []
    shrink_case(DEQUANTIZE, lambda case: bool(tries.append(case)), Budget(3, 60))
    assert len(tries) == 3


def test_bits_of_packed_elements_go_there_and_back() -> None:
    payload, part = build(DEQUANTIZE)["payload"], parts(DEQUANTIZE)["payload"]
    bits = to_bits(payload, part)
    assert bits.shape == (9 * 192,)
    assert bits[:2].tolist() == [int(payload[0, 0]) & 15, int(payload[0, 0]) >> 4]
    assert torch.equal(from_bits(bits, part, (9, 96)), payload)


def test_inputs_shrink_to_the_two_elements_that_matter() -> None:
    """Fails where some row has a code 7 (6.0) under a scale code above 130."""

    def fails(case: Case, inputs: Mapping[str, Tensor]) -> bool:
        codes = to_bits(inputs["payload"], parts(case)["payload"]).reshape(case.integer("m"), -1)
        scales = inputs["scales"].repeat_interleave(32, dim=1)[:, : codes.shape[1]].numpy()
        return bool(((codes == 7) & (scales > 130)).any())

    inputs = build(DEQUANTIZE)
    inputs["scales"][4, 3] = 140
    inputs["payload"][4, 50] = 0x7F
    assert fails(DEQUANTIZE, inputs)
    found = reduce_inputs(DEQUANTIZE, inputs, fails, Budget(2000, 60))
    assert found.case["m"] == "1"
    assert found.case.integer("k") <= 32
    assert found.case["out"] == "fp32"
    assert found.case.seed == 0
    assert found.differing == 2
    assert found.by_input == {"payload": 1, "scales": 1}
    assert fails(found.case, found.inputs)


def test_a_value_comes_as_near_to_the_simplest_as_it_may() -> None:
    case = Case.parse("ue8m0 ceil v=1 from=scale n=50 values=normal seed=3")

    def fails(case: Case, inputs: Mapping[str, Tensor]) -> bool:
        return bool((inputs["x"].abs() > 1.5).any())

    inputs = build(case)
    inputs["x"][17] = -3.7
    found = reduce_inputs(case, inputs, fails, Budget(500, 60))
    assert found.inputs["x"].tolist() == [2.0]


def test_of_two_simplest_values_the_nearer_one_counts() -> None:
    case = Case.parse("scale_layout k_major v=1 cols=3 direction=pack rows=2 values=index seed=0")
    inputs = {"scales": torch.ones(2, 3)}
    assert differing(case, {"scales": torch.zeros(2, 3)}) == {"scales": 0}
    assert differing(case, inputs) == {"scales": 6}
