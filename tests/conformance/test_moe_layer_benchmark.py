"""The benchmark of an expert layer at a small size: every row has a time, other libraries' answers are the layer's."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import moe_layer
from references.moe import nominal_moe
from references.recipes import Recipe

SIZES = {"tokens": 12, "experts": 5, "topk": 2, "hidden": 256, "intermediate": 128, "device": "cpu"}


def layer(scale: str) -> moe_layer.Layer:
    return moe_layer.draw(argparse.Namespace(**SIZES, scale=scale))


def test_each_evaluation_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--{key}={value}" for key, value in SIZES.items()]
    assert moe_layer.main([*words, "--no-others"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip() for row in rows] == [
        "FP64 matrix products alone",
        "reference, FP64",
        "reference, FP32",
        "reference with bounds",
    ]
    assert all(float(row[1]) > 0 for row in rows)
    assert float(rows[0][2]) == 1.0
    with pytest.raises(SystemExit) as stopped:
        moe_layer.main(["--experts=2", "--topk=3"])
    assert stopped.value.code == 2


def test_sglangs_reference_gives_the_layer() -> None:
    given = layer("fp32")
    try:
        call = moe_layer.sglang(given)
    except ImportError as missing:
        pytest.skip(str(missing))
    exact = nominal_moe(
        given.x, given.ids, given.weights, given.stored, given.config, Recipe(source="a test", accumulator="fp32_any")
    )
    found = call().to(torch.float64) * given.config.scaling
    # Activations that are not quantised: E4M3 rounds by 2^-5 on average.
    assert float((found - exact).norm() / exact.norm()) < 0.1
