"""A judge whose device has no memory left."""

import pytest
import torch

from conformance import worker_oracle
from conformance.worker_memory import release
from conformance.worker_oracle import Oracle
from conformance.worker_tensors import to_wire

CASE = "ue8m0 ceil v=1 from=scale n=4 values=normal seed=0"
WIRES = [to_wire("scales", torch.tensor([1, 2, 3, 4], dtype=torch.uint8))]


def full(error):
    def move(tensor, device):
        assert device == "cuda:0"
        raise error

    return move


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory\nmore"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4GiB"),
    ],
)
def test_the_cpu_judges_where_the_device_is_full(monkeypatch, error):
    expected = Oracle("cpu").judge(CASE, {"source": "test"}, WIRES)
    monkeypatch.setattr(worker_oracle, "move", full(error))
    found = Oracle("cuda:0").judge(CASE, {"source": "test"}, WIRES)
    assert found == expected
    assert found["parts"][0]["verdict"] == "wrong"


def test_another_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(worker_oracle, "move", full(RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Oracle("cuda:0").judge(CASE, {"source": "test"}, WIRES)


def test_memory_goes_back_where_enough_lies_idle(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**28)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * 2**28)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    release("cuda:0")
    assert not emptied
    release("cuda:0", kept=2**28 - 1)
    assert emptied == [True]
    release("cpu", kept=0)
    assert emptied == [True]
