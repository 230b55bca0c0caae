"""Continuous activation scales where powers of two were asked for, in this project's fused expert layer in Triton.

    python -m benchmarks.moe_scale_policy                     # interpreted, half a minute
    python -m benchmarks.moe_scale_policy --device cuda --seeds 40

The same kernels, with ``use_ue8m0`` at FC1 and FC2 as asked and switched off: at one, at the other, at both. Prints
Markdown: how many outputs are rejected by the judge, under the recipe that the backend declares on the device, and by
common tolerances. Exits with 1 if the judge rejects a right output or accepts a wrong one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch

from benchmarks.planted_moe_faults import TOLERANCES, draw
from conformance.operations import moe
from references.judging import judge_interval
from references.rounding import round_to

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"tokens": 9, "experts": 3, "topk": 2, "hidden": 256, "intermediate": 256},
    "cuda": {"tokens": 130, "experts": 16, "topk": 4, "hidden": 1024, "intermediate": 512},
}
PLACES = {
    "as asked": (True, True),
    "continuous at FC1": (False, True),
    "continuous at FC2": (True, False),
    "continuous at both": (False, False),
}


def backend_on(device: str) -> Any:
    """The Triton backend of a device; on a CPU the interpreted one, which has to be imported before Triton."""
    if device == "cpu":
        from conformance.backends import triton_interpreter_corrected as module
    else:
        from conformance.backends import triton_cuda as module  # type: ignore[no-redef]
    return next(iter(module.backends()))


def rows(device: str, seeds: int) -> dict[str, dict[str, Any]]:
    """Place -> the judge's headrooms, and how many of the outputs each tolerance rejects."""
    backend = backend_on(device)
    claims = list(backend.claims(device))
    from conformance.backends import _triton_moe_adapter as adapter

    kind = device.split(":")[0]
    found: dict[str, dict[str, Any]] = {
        name: {"headroom": [], "rejected": 0, **dict.fromkeys(TOLERANCES, 0)} for name in PLACES
    }
    for seed in range(seeds):
        print(f"seed {seed} of {seeds}", file=sys.stderr, flush=True)
        case, drawn = draw(seed, **SIZES[kind])
        inputs = {name: tensor.to(device) for name, tensor in drawn.items()}
        claim = next(
            claim for claim in claims if claim.refusal(case.replace(hidden=1, intermediate=1, experts=4)) is None
        )
        interval = moe.admissible(case, inputs, backend.recipe(claim)).interval  # the same for every place
        expected = round_to(interval.centre, torch.bfloat16)
        for name, places in PLACES.items():
            output = torch.full_like(inputs["x"], torch.nan)
            adapter.moe(case, inputs, output, use_ue8m0=places)
            judged = judge_interval(output.double(), interval)
            row = found[name]
            row["headroom"].append(float(judged.headroom.max()))
            row["rejected"] += not bool(judged.inside.all())
            for check, accepts in TOLERANCES.items():
                row[check] += not accepts(output.double(), expected)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds is at least 1")
    found = rows(options.device, options.seeds)
    columns = ["this project", *TOLERANCES]
    print(f"| activation scales, rejected of {options.seeds} | {' | '.join(columns)} | median headroom |")
    print(f"|---|{'--:|' * (len(columns) + 1)}")
    for name, row in found.items():
        counts = " | ".join(str(row["rejected" if column == columns[0] else column]) for column in columns)
        print(f"| {name} | {counts} | {statistics.median(row['headroom']):.3g} |")
    wanted = {name: 0 if all(places) else options.seeds for name, places in PLACES.items()}
    return int(any(row["rejected"] != wanted[name] for name, row in found.items()))


if __name__ == "__main__":
    sys.exit(main())
