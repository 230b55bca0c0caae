"""A sticky CUDA error of one backend leaves every other result intact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance.cli import main
from conformance.journal import read_records

PLUGINS = Path(__file__).with_name("plugins")
CASES = [f"ue8m0 nearest v=1 from=scale n=64 values=wide seed={seed}" for seed in range(6)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_illegal_access_costs_its_own_cases_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [
        word for name in ("good", "illegal") for word in ("--plugin", str(PLUGINS / f"{name}.py"), "--backend", name)
    ]
    words += [word for case in CASES for word in ("--case", case)]
    assert main(["run", *words, "--device", "cuda:0", "--jobs", "2", "--deadline", "120s", "--out", str(out)]) == 1
    records = read_records(out / "records.jsonl")
    found = {(item.backend, item.case): item for item in records}
    for seed, case in enumerate(CASES):
        assert (found["good", case].part, found["good", case].verdict) == ("scales", "pass")
        mine = found["illegal", case]
        if seed % 3:
            assert (mine.part, mine.verdict) == ("scales", "pass")
        else:
            assert (mine.part, mine.verdict) == ("call", "crash")
            assert "illegal memory access" in mine.message
