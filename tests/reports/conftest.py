"""A factory of records and a small run with one of everything, worked out by hand."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest

from reports.record import Record

Make = Callable[..., Record]

QUANTIZE = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k={k} m=4 scale=ceil stride=contiguous values=normal seed=1"


@pytest.fixture
def make() -> Make:
    def build(case: str = QUANTIZE.format(k=32), **fields: Any) -> Record:
        defaults: dict[str, Any] = {
            "run": "r1",
            "case": case,
            "id": hashlib.sha256(case.encode()).hexdigest()[:16],
            "input_sha256": "00",
            "backend": "alpha",
            "version": "1.0",
            "interpreter": "CPython 3.11",
            "device": "cpu",
            "sm": "",
            "options": "",
            "recipe": "amax_floor=1e-10",
            "part": "scales",
            "verdict": "pass",
            "headroom": 0.0,
            "bit_equal": 1.0,
            "seconds": 0.25,
        }
        return Record(**{**defaults, **fields})

    return build


@pytest.fixture
def records(make: Make) -> list[Record]:
    """alpha: 4 calls of quantize mxfp8 (2 unexplained, 1 known, 1 pass) and 1 of ue8m0; beta: 1 call, 2 not claimed."""
    k = [QUANTIZE.format(k=size) for size in (2, 10, 64, 100)]
    ue8m0 = "ue8m0 ceil v=1 from=scale n=8 values=special seed=3"
    call: dict[str, Any] = {"part": "call", "headroom": None, "bit_equal": None}
    return [
        make(k[0], part="scales", headroom=0.0),
        make(k[0], part="payload", headroom=0.5, bit_equal=0.5),
        make(k[1], part="scales", verdict="wrong", headroom=math.inf, bit_equal=0.75, message="off by one at 7"),
        make(k[1], part="payload", verdict="wrong", headroom=2.5, bit_equal=0.25, message="3 outside"),
        make(k[2], **call, verdict="crash", message="the worker died"),
        make(k[3], part="scales", verdict="wrong", headroom=math.inf, ledger_id="L1", message="log2"),
        make(k[3], part="payload", headroom=0.25),
        make(ue8m0, headroom=0.0),
        make(k[0], backend="beta", device="cuda:0", sm="90", headroom=0.875, part="payload"),
        make(
            k[1],
            backend="beta",
            device="cuda:0",
            sm="90",
            verdict="unsupported",
            message="k=10 is no multiple of 32",
            **call,
        ),
        make(ue8m0, backend="beta", device="cuda:0", sm="90", verdict="unsupported", message="claims no ue8m0", **call),
    ]


@pytest.fixture
def run() -> dict[str, Any]:
    claim = {
        "operation": "quantize",
        "variant": "mxfp8",
        "claim": "k%2=0",
        "recipe": "declared",
        "source": "alpha docs",
    }
    return {
        "run": "r1",
        "command": "nox -s conformance",
        "seed": 7,
        "started": "2026-01-02T03:04:05Z",
        "ended": "2026-01-02T03:05:05Z",
        "complete": True,
        "exit_code": 1,
        "plan": {"cases": 5, "sha256": "abc"},
        "backends": [
            {"backend": "alpha", "version": "1.0", "interpreter": "CPython 3.11", "device": "cpu", "claims": [claim]},
            {"backend": "beta", "version": "1.0", "device": "cuda:0", "device_name": "GPU 9000", "sm": "90"},
        ],
        "not_run": [{"backend": "gamma", "device": "cuda:0", "reason": "no module named gamma"}],
        "ledger": [
            {
                "id": "L1",
                "backend": "alpha",
                "reason": "takes log2",
                "issue": "owner/repo#12",
                "witness": QUANTIZE.format(k=100),
                "witness_verdict": "wrong",
            }
        ],
        "problems": [],
        "plugins": ["extra.py"],
    }
