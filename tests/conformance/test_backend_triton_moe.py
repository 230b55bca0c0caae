"""The fused expert layer in Triton: interpreted against the judge, its tiles against a plain loop.

Run as a script it answers requests for the tests, a line of JSON each. ``judge`` reads cases, one a line after the
places that get power-of-two scales (``as-asked``, or of ``x`` and ``h`` those that do); ``compile`` makes the kernels
for Hopper.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz.case import Case

ROOT = Path(__file__).resolve().parents[2]
LAYER = (
    "moe %s v=1 experts=%d gate=%s hidden=%d ids=%s intermediate=%d limit=%s out=%s scale=%s scaling=%s tokens=%d "
    "topk=%d values=%s weight=%s seed=%d"
)
FP8 = "deepseek_fp8"
CASES = [
    LAYER % (FP8, 4, "first", 160, "spread", 66, "none", "bf16", "ceil", "1", 3, 2, "normal", "output", 0),
    LAYER % (FP8, 3, "second", 130, "skewed", 140, "7", "fp32", "fp32", "2.5", 70, 2, "scale_ladder", "input", 1),
    LAYER % (FP8, 2, "second", 48, "elsewhere", 18, "none", "fp32", "ceil", "2.5", 9, 2, "zeros", "output", 2),
    LAYER % (FP8, 2, "first", 128, "spread", 128, "7", "fp32", "ceil", "1", 5, 1, "saturated", "output", 3),
    LAYER % ("bf16", 4, "second", 130, "elsewhere", 33, "7", "bf16", "none", "2.5", 5, 4, "outliers", "input", 4),
    LAYER % ("bf16", 1, "first", 1, "spread", 1, "none", "fp32", "none", "1", 1, 1, "cancellation", "output", 5),
]
CEIL = LAYER % (FP8, 2, "first", 256, "spread", 256, "none", "fp32", "ceil", "1", 5, 2, "normal", "output", 900013)


def ask(what: str, lines: Sequence[str] = (), **environment: str) -> list[dict[str, Any]]:
    """The script's answers."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, what],
        input="\n".join(lines),
        env={**given, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_interpreted_layers_pass_and_continuous_scales_fail_where_powers_of_two_were_asked_for() -> None:
    places = ["xh", "h", "x", "-"]
    lines = [*(f"as-asked {case}" for case in CASES), *(f"{place} {CEIL}" for place in places)]
    answers = ask("judge", lines, TRITON_INTERPRET="1")
    assert [answer["case"] for answer in answers] == [*CASES, *[CEIL] * len(places)]
    assert [answer["failures"] for answer in answers[: len(CASES)]] == [[]] * len(CASES)
    both, *dropped = answers[len(CASES) :]
    assert both["failures"] == []
    for answer in dropped:
        assert answer["failures"] == ["output"], answer["place"]
        assert answer["headroom"] > 1.5


@pytest.mark.slow
def test_on_hopper_the_kernels_fit_and_keep_ieee_division(tmp_path: Path) -> None:
    built = ask("compile", TRITON_CACHE_DIR=str(tmp_path))
    assert [answer["kernel"] for answer in built] == ["fc1_kernel", "fc2_kernel"] * 2
    for answer in built:
        assert answer["shared"] <= 227 * 1024
        assert answer["wgmma"]
        assert (answer["div"], answer["ftz"]) == (["div.rn.f32"] * (answer["kernel"] == "fc1_kernel"), False)


@pytest.mark.parametrize("seed", range(6))
def test_tiles_hold_every_pair_once(seed: int) -> None:
    from conformance.backends import _triton_moe_adapter as adapter

    noise = torch.Generator().manual_seed(seed)
    experts = (1, 5, 300)[seed % 3]
    shape = (((200, 3), (1, 1), (64, 8))[seed // 2]) if seed else (0, 2)
    ids = torch.randint(-2 if seed % 2 else 0, experts, shape, generator=noise, dtype=torch.int32)
    pairs, tile_expert, tile_start, ends = adapter.tiles(ids, experts)
    found: dict[int, list[int]] = {}
    for expert, start in zip(tile_expert.tolist(), tile_start.tolist(), strict=True):
        found.setdefault(expert, []).extend(pairs[start : min(start + adapter.TILE_M, int(ends[expert]))].tolist())
    plain: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        if expert >= 0:
            plain.setdefault(expert, []).append(pair)
    assert {expert: numbers for expert, numbers in found.items() if numbers} == plain


def test_the_interpreter_claims_small_layers_and_a_gpu_all() -> None:
    from conformance.backends import _triton_moe_adapter as adapter

    large = Case.parse(CASES[0]).replace(hidden=7168, intermediate=2048, experts=64, tokens=64, topk=8)
    assert all(claim.refusal(large) is not None for claim in adapter.claims(True, None))
    claims = [claim for claim in adapter.claims(False, (9, 0)) if claim.refusal(large) is None]
    assert [adapter.recipe(claim, (9, 0)).accumulator for claim in claims] == ["hopper_fp8"]
    assert list(adapter.claims(False, (8, 9))) == []


def _compile() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from conformance.backends import _triton_moe as kernels
    from conformance.backends import _triton_moe_adapter as adapter

    numbers = {"limit": "fp32", "amax_floor": "fp32", "weights_ptr": "*fp32", "terms_ptr": "*fp32"}
    numbers |= dict.fromkeys(("pairs_ptr", "tile_expert_ptr", "tile_start_ptr", "expert_end_ptr"), "*i32")
    for fp8 in (True, False):
        types = numbers | ({} if fp8 else dict.fromkeys(("x_ptr", "w1_ptr", "h_ptr", "w2_ptr"), "*bf16"))
        for kernel in (kernels.fc1_kernel, kernels.fc2_kernel):
            words: dict[str, Any] = {name: True for name in kernel.arg_names if name.endswith(("UE8M0", "INPUT"))}
            words |= {"FP8": fp8, "TILE_M": adapter.TILE_M}
            signature = {
                name: "constexpr" if name in words else types.get(name, "*u8" if name.endswith("_ptr") else "i32")
                for name in kernel.arg_names
            }
            # Sizes and addresses that let loads run ahead, which takes the most memory.
            aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name in ("hidden", "inner")]
            known = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
            built = triton.compile(
                ASTSource(kernel, signature, constexprs=words, attrs=known),
                target=GPUTarget("cuda", 90, 32),
                options={"num_stages": adapter.STAGES[fp8]},
            )
            ptx = built.asm["ptx"]
            answer = {
                "kernel": kernel.__name__,
                "shared": built.metadata.shared,
                "wgmma": "wgmma.mma_async" in ptx,
                "div": sorted(set(re.findall(r"div\.\w+\.f32", ptx))),
                "ftz": ".ftz" in ptx,
            }
            print(json.dumps(answer), flush=True)


def _judge() -> None:
    from conformance.backends import _triton_moe_adapter as adapter
    from conformance.backends.triton_interpreter_corrected import backends
    from conformance.operations import moe
    from fuzz.inputs import build

    backend = next(iter(backends()))
    claims = list(backend.claims("cpu"))
    for line in sys.stdin:
        place, text = line.strip().split(" ", 1)
        case = Case.parse(text)
        claim = next(claim for claim in claims if claim.refusal(case.replace(hidden=1, intermediate=1)) is None)
        inputs = build(case)
        output = torch.full((case.integer("tokens"), case.integer("hidden")), torch.nan)
        output = output.to(adapter.OUTPUTS[case["out"]])
        asked = None if place == "as-asked" else ("x" in place, "h" in place)
        adapter.moe(case, inputs, output, use_ue8m0=asked)
        verdicts = moe.judge(case, inputs, {"output": output}, backend.recipe(claim))
        failures = [verdict.part for verdict in verdicts if verdict.verdict != "pass"]
        found = {"case": case.text, "place": place, "failures": failures, "headroom": verdicts[0].headroom}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _judge() if sys.argv[1] == "judge" else _compile()
