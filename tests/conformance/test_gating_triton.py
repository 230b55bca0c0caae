"""Triton's compiler: kinds of tensor-core instruction, its own words, and a kernel that divides approximately."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.gating import triton_gates
from conformance.gating.model import Observation
from conformance.gating.observed import observe
from tests.conformance.gating_stand_ins import installed, unexplained

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and libraries for Linux")


@pytest.mark.slow
@installed("triton", "3.6")
def test_an_fp8_gemm_compiles_to_each_kind_of_tensor_core_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which must not reach the child
    seen = observe("triton", (80, 89, 90, 100), subjects=("triton.fp8_gemm",))
    assert seen.gaps == ()
    rows: Mapping[int, Observation] = {row.sm: row for row in seen.observations}
    assert rows[80].answer == "no"
    assert "fp8e4nv" in rows[80].detail
    assert {sm: row.facts[0] for sm, row in rows.items() if sm > 80} == {
        89: "mma.sync e4m3",
        90: "wgmma e4m3",
        100: "tcgen05.mma f8f6f4",
    }
    assert unexplained(seen) == []


def test_a_compiler_says_why_in_its_own_words() -> None:
    ptxas = "PTXAS error: Internal error\n`ptxas` stderr:\nptxas fatal   : Value 'sm_110a' is not defined\n"
    assert triton_gates._reason(RuntimeError(ptxas)) == "RuntimeError: ptxas fatal   : Value 'sm_110a' is not defined"
    outer = ValueError("at 19:10:\n    tl.dot(a, b)\n    ^")
    outer.__cause__ = ValueError("type fp8e4nv not supported in this architecture")
    assert triton_gates._reason(outer) == "ValueError: type fp8e4nv not supported in this architecture"
    assert triton_gates._reason(RuntimeError("")) == "RuntimeError: "


@pytest.mark.slow
@installed("triton", "3.6")
def test_a_kernel_that_divides_approximately_is_reported(tmp_path: Path) -> None:
    patch = tmp_path / "patch.py"
    patch.write_text(
        "import sys, types\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import rough, conformance.backends._triton_kernels as kernels\n"
        "kernels.ue8m0_kernel = rough.ue8m0_kernel\n"
    )
    (tmp_path / "rough.py").write_text(
        "import triton, triton.language as tl\n"
        "@triton.jit\n"
        "def ue8m0_kernel(x_ptr, codes_ptr, n, POLICY: tl.constexpr, FROM_AMAX: tl.constexpr, QMAX: tl.constexpr,\n"
        "                 EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, BLOCK: tl.constexpr):\n"
        "    at = tl.arange(0, BLOCK)\n"
        "    x = tl.load(x_ptr + at, mask=at < n, other=1.0)\n"
        "    tl.store(codes_ptr + at, tl.exp2(tl.ceil(tl.log2(448.0 / x))).to(tl.uint8), mask=at < n)\n"
    )
    seen = observe("triton", (90,), subjects=("triton.ue8m0",), patches=[patch])
    assert unexplained(seen.patched(0)) == []
    (finding,) = unexplained(seen.patched(1))
    assert (finding.rule, finding.subject) == ("expected", "triton.ue8m0_kernel")
    assert finding.message == "compiled with div.full, ex2.approx"
