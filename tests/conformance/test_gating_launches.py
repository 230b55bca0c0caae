"""Launches taken down, and what is read from PTX: on kernels and lines written here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from conformance.gating import ptx
from conformance.gating.expected import Expected
from conformance.gating.model import Gate, Observation, Observed
from conformance.gating.rules import findings

triton = pytest.importorskip("triton")
from conformance.gating import launches  # noqa: E402 - needs Triton when it is used

KERNELS = """
import triton, triton.language as tl

@triton.jit
def copy(x_ptr, y_ptr, n, scale, flag, BLOCK: tl.constexpr, EVEN: tl.constexpr, NONE=None):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * scale)

@triton.jit
def product(a_ptr, b_ptr, c_ptr, k, BLOCK_SIZE_M: tl.constexpr, EVEN_K: tl.constexpr):
    tl.store(c_ptr, tl.sum(tl.dot(tl.load(a_ptr), tl.load(b_ptr))))

@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, n)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> object:
    path: Path = tmp_path_factory.mktemp("kernels") / "gating_test_kernels.py"
    path.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location("gating_test_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gating_test_kernels"] = module
    spec.loader.exec_module(module)
    return module


def test_a_launch_is_taken_down_with_the_types_and_constants_that_triton_would_see(kernels) -> None:
    found: list[launches.Launch] = []
    x = torch.zeros(64, dtype=torch.bfloat16)
    with launches.recorded("quantize", found):
        kernels.copy[(4,)](x, x.view(torch.uint8)[1:], 32, 0.5, True, BLOCK=64, EVEN=False, num_warps=8)
        kernels.copy[(4,)](x.float(), x, 1, 2**40, flag=False, BLOCK=64, EVEN=True)
    first, second = found
    assert list(first.signature.items()) == [
        ("x_ptr", "*bf16"),
        ("y_ptr", "*u8"),
        ("n", "i32"),
        ("scale", "fp32"),
        ("flag", "i1"),
        ("BLOCK", "constexpr"),
        ("EVEN", "constexpr"),
        ("NONE", "constexpr"),
    ]
    assert first.constants == {"BLOCK": 64, "EVEN": False, "NONE": None}
    assert set(first.attributes) == {(0,), (2,)}  # not the pointer that is a byte off, not the number
    assert first.options == {"num_warps": 8}
    assert second.signature["n"] == "constexpr"  # 1 is a constant
    assert second.signature["scale"] == "i64"
    assert second.name == "copy"


def test_an_autotuner_takes_its_first_configuration(kernels) -> None:
    found: list[launches.Launch] = []
    with launches.recorded("gemm", found):
        kernels.tuned[(1,)](torch.zeros(4), 7)
    (launch,) = found
    assert launch.constants["BLOCK"] == 64
    assert launch.options["num_warps"] == 2


def test_launches_that_differ_in_sizes_only_are_of_one_kind(kernels) -> None:
    found: list[launches.Launch] = []
    codes, wide = torch.zeros(64, dtype=torch.uint8), torch.zeros(64)
    with launches.recorded("gemm", found):
        for k, rows, even, out in ((32, 64, True, wide), (48, 64, True, wide.bfloat16())):
            kernels.product[(1,)](codes, codes, out, k, BLOCK_SIZE_M=rows, EVEN_K=even)
        kernels.product[(1,)](codes, codes, wide, 32, BLOCK_SIZE_M=16, EVEN_K=True)
        kernels.product[(1,)](codes, codes, wide, 32, BLOCK_SIZE_M=64, EVEN_K=False)
        kernels.product[(1,)](wide.bfloat16(), wide.bfloat16(), wide, 32, BLOCK_SIZE_M=64, EVEN_K=True)
        kernels.copy[(1,)](wide, wide, 8, 1.0, True, BLOCK=64, EVEN=True)
        kernels.copy[(1,)](wide, wide, 9, 1.0, True, BLOCK=64, EVEN=False)
    kinds = [launch.kind for launch in found]
    assert kinds[0] == kinds[1]  # another K, another output
    assert len(set(kinds)) == 6  # rows, whole blocks, operands and switches are other kinds


LINES = {
    "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2, p, 1, 1;": "wgmma e4m3",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1;": "wgmma bf16",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1}, {%r1}, {%r2}, {%f1};": "mma.sync e4m3",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};": "mma.sync f16",
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32 {": "mma.sync e4m3",
    "@%p1 tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;": "tcgen05.mma f8f6f4",
}


@pytest.mark.parametrize("line", LINES)
def test_instructions_are_read_from_ptx(line: str) -> None:
    assert ptx.instructions(f"ret;\n\t{line}\n\t{line}\n") == (LINES[line],)


def test_conversions_and_approximations_are_read_from_ptx() -> None:
    text = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;\ndiv.full.f32 %f3, %f1, %f2;\nex2.approx.ftz.f32 %f4, %f3;"
    assert ptx.facts(text) == ("cvt.rn.satfinite.e4m3x2", "div.full", "ex2.approx")
    assert ptx.facts("div.rn.f32 %f1, %f2, %f3;") == ("div.rn",)


@pytest.mark.parametrize(
    ("instruction", "sm", "upcast", "follows"),
    [
        ("wgmma e4m3", 90, False, "hopper_fp8"),
        ("wgmma bf16", 90, False, "hopper_f16"),
        ("mma.sync f16", 90, True, "f16_upcast"),
        ("mma.sync bf16", 90, True, "hopper_f16"),  # something else was converted
        ("mma.sync e4m3", 89, False, ptx.THIRTEEN_BITS),
        ("mma.sync bf16", 80, False, "fp32_any"),
        ("mma.sync e4m3", 120, False, "fp32_any"),
        ("tcgen05.mma f8f6f4", 100, False, "fp32_any"),
        ("mma.sync f16", 103, True, "fp32_any"),
        ("tcgen05.mma f8f6f4", 107, False, ptx.UNKNOWN),
        ("tcgen05.mma f16", 110, False, ptx.UNKNOWN),
        ("mma.sync e4m3", 90, False, ptx.UNKNOWN),
    ],
)
def test_the_accumulator_follows_from_the_instruction(instruction: str, sm: int, upcast: bool, follows: str) -> None:
    assert ptx.accumulator(instruction, sm, upcast=upcast) == follows


@pytest.mark.parametrize(
    ("follows", "declared", "wrong"),
    [
        ("hopper_fp8", "hopper_fp8", False),
        ("hopper_fp8", "fp32_any", True),
        ("hopper_f16", "fp32_any", False),  # its answers lie within
        ("hopper_f16", "fp32_rn", True),
        ("f16_upcast", "hopper_fp8", True),
        ("fp32_any", "hopper_fp8", True),
        (ptx.THIRTEEN_BITS, "fp32_any", True),
        (ptx.UNKNOWN, "fp32_any", False),  # nothing is known that speaks against it
    ],
)
def test_a_recipe_that_declares_another_accumulator_is_a_finding(follows: str, declared: str, wrong: bool) -> None:
    facts = ("wgmma e4m3", ptx.FOLLOWS + follows, ptx.DECLARED + declared)
    row = Observation(
        library="triton", subject="k", variant="gemm x", sm=90, gates=(Gate("compile", "yes"),), facts=facts
    )
    found = findings(Observed(library="triton", version="3.9.0", observations=(row,)), Expected())
    assert [item.rule for item in found] == ["accumulator"] * wrong
