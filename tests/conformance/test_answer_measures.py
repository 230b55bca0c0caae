"""What a judge says of an answer beside its verdict: its error, its hash, and its selections."""

import json
import math

import pytest
import torch

from conformance.operations.judging import distance, root_mean_square
from conformance.operations.routing import fingerprints
from conformance.worker_oracle import Oracle
from conformance.worker_tensors import to_wire
from reports.record import Record, RecordError

FIELDS = {
    "run": "r",
    "case": "ue8m0 ceil v=1 from=scale n=3 values=normal seed=0",
    "id": "0" * 16,
    "input_sha256": "",
    "backend": "b",
    "version": "1",
    "interpreter": "",
    "device": "cpu",
    "sm": "",
    "options": "",
    "recipe": "",
    "part": "scales",
    "verdict": "pass",
}


def judged(case, **outputs):
    wires = [to_wire(name, tensor) for name, tensor in outputs.items()]
    return Oracle("cpu").judge(case, {"source": "test"}, wires)["parts"]


def test_root_mean_square_by_hand():
    assert root_mean_square(torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)) == 2.5
    assert root_mean_square(torch.zeros(3, dtype=torch.float64)) == 0.0
    assert root_mean_square(torch.zeros(0, dtype=torch.float64)) == 0.0


def test_root_mean_square_of_numbers_whose_squares_do_not_fit():
    for size in (2.0**-600, 2.0**600):
        assert root_mean_square(torch.full((4,), size, dtype=torch.float64)) == size


def test_distance_counts_lost_finiteness_and_nothing_where_nothing_finite_is_due():
    exact = torch.tensor([1.0, 1.0, 1.0, torch.inf, torch.nan])
    actual = torch.tensor([1.5, torch.nan, torch.inf, torch.inf, 3.0])
    assert distance(actual, exact).tolist() == [0.5, math.inf, math.inf, 0.0, 0.0]


def test_error_of_codes_is_in_codes():
    case = "ue8m0 ceil v=1 from=scale n=4 values=zeros seed=0".replace("zeros", "special")
    right = torch.tensor([0, 0, 0, 0], dtype=torch.uint8)
    part = judged(case, scales=right)[0]
    [exact] = judged(case, scales=right + 1)
    assert part["error"] != exact["error"]
    assert part["output_sha256"] != exact["output_sha256"]


def test_error_of_a_product_is_its_distance_from_the_exact_sum():
    case = "dequantize mxfp8 v=1 block=1x32 k=2 m=1 out=fp32 scale=ue8m0 values=zeros seed=0"
    [zero] = judged(case, output=torch.zeros(1, 2))
    assert (zero["verdict"], zero["error"]) == ("pass", 0.0)
    [off] = judged(case, output=torch.tensor([[3.0, 4.0]]))
    assert (off["verdict"], off["error"]) == ("wrong", math.sqrt(12.5))


def test_the_hash_is_of_the_bits_whatever_the_dtype_that_carries_them():
    case = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=2 m=1 scale=ceil stride=contiguous values=zeros seed=0"
    scales, payload = torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.uint8)
    plain = judged(case, scales=scales, payload=payload)
    typed = judged(case, scales=scales.view(torch.float8_e8m0fnu), payload=payload.view(torch.float8_e4m3fn))
    assert [part["output_sha256"] for part in plain] == [part["output_sha256"] for part in typed]
    assert len({part["output_sha256"] for part in plain}) == 2


def test_fingerprints_tell_sets_apart_and_not_orders():
    ids = torch.tensor([[3, 1], [1, 3], [1, 2], [-1, -1]], dtype=torch.int32)
    words = [fingerprints(ids)[8 * i : 8 * i + 8] for i in range(4)]
    assert words[0] == words[1]
    assert len(set(words)) == 3


def test_fingerprints_of_every_pair_of_experts_differ():
    pairs = torch.combinations(torch.arange(256, dtype=torch.int32), 2)
    text = fingerprints(pairs)
    assert len({text[i : i + 8] for i in range(0, len(text), 8)}) == len(pairs)


def test_lines_of_schema_1_are_read():
    record = Record(**FIELDS, error=math.inf, output_sha256="ab", selection="00000000")
    assert Record.from_line(record.to_line()) == record
    old = json.loads(record.to_line())
    for name in ("error", "output_sha256", "selection"):
        del old[name]
    read = Record.from_line(json.dumps({**old, "schema": 1}))
    assert read == Record(**FIELDS)
    with pytest.raises(RecordError, match="keys differ"):
        Record.from_line(json.dumps({**old, "schema": 2}))
