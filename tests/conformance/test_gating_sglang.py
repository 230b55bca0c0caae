"""SGLang's decision to requantise: a stand-in with the faults that public issues tell of, and the installed version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.gating import sglang_dispatch, sglang_gates
from conformance.gating.expected import load
from conformance.gating.model import Observed
from conformance.gating.observed import observe
from conformance.gating.rules import findings
from tests.conformance.gating_stand_ins import ask, installed, site

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and libraries for Linux")


FLAGS = """
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_platform
from sglang.srt.utils import get_device_sm, is_cuda, is_musa

def available():
    try:
        import deep_gemm
    except ImportError:
        return False
    return True

ENABLE_JIT_DEEPGEMM = is_cuda() and envs.SGLANG_ENABLE_JIT_DEEPGEMM.get() and get_device_sm() >= 90 and available()
DEEPGEMM_SCALE_UE8M0 = ENABLE_JIT_DEEPGEMM and (get_platform().is_sm100 or get_device_sm() in (120, 121))
"""
DECISION = """
def should_deepgemm_weight_requant_ue8m0(weight_block_size, output_dtype=None, weight_shape=None, *, grouped_moe=False):
    if not (deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM and deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 and weight_block_size):
        return False
    if get_device_sm() in (120, 121) and not grouped_moe:
        return False
    return output_dtype == torch.bfloat16 and weight_shape[0] % 64 == 0 and weight_shape[1] % 128 == 0
"""
DISPATCH = """
class Fp8GemmRunnerBackend(Enum):
    AUTO = "auto"
    CUTLASS = "cutlass"
    DEEP_GEMM = "deep_gemm"
    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    FLASHINFER_DEEPGEMM = "flashinfer_deepgemm"

def dispatch_w8a8_block_fp8_linear(weight_block_size: Optional[List[int]] = None, ue8m0: bool = False) -> Callable:
    backend = get_fp8_gemm_runner_backend()
    if backend != Fp8GemmRunnerBackend.AUTO:
        return _dispatch_explicit_backend(backend)
    return partial(_dispatch_auto_backend(), act_scale_ue8m0=True)

def _dispatch_explicit_backend(backend):
    if backend.value.startswith("flashinfer"):
        if not (get_platform().is_sm90 if backend.value == "flashinfer_deepgemm" else get_platform().is_sm100):
            raise RuntimeError("not supported on this hardware")
        return flashinfer_gemm_w8a8_block_fp8_linear_with_fallback
    if backend == Fp8GemmRunnerBackend.CUTLASS:
        if not get_platform().is_sm120:
            raise RuntimeError("Deprecated on this hardware. Please switch to DeepGEMM on SM90/SM100.")
        return cutlass_w8a8_block_fp8_linear_with_fallback
    if not deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
        raise RuntimeError("DeepGEMM is off")
    return deepgemm_w8a8_block_fp8_linear_with_fallback

def _dispatch_auto_backend():
    if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
        return deepgemm_w8a8_block_fp8_linear_with_fallback
    return triton_w8a8_block_fp8_linear

def initialize_fp8_gemm_config() -> None:
    global FP8_GEMM_RUNNER_BACKEND
    backend = get_exec().kernel.fp8_gemm_runner_backend
    if backend == "auto" and get_platform().is_sm120:
        backend = "cutlass"
    FP8_GEMM_RUNNER_BACKEND = Fp8GemmRunnerBackend(backend)

def get_fp8_gemm_runner_backend():
    return FP8_GEMM_RUNNER_BACKEND
"""
SGLANG_SMS = (80, 90, 100, 120, 121)


def sglang(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str = FLAGS,
    decision: str = DECISION,
    dispatch: str = DISPATCH,
) -> Observed:
    files = {sglang_gates.FLAGS: flags, sglang_gates.DECISION: decision, sglang_dispatch.FILE: dispatch}
    return ask(site(folder, "sglang", "0.5.23", files), monkeypatch, "sglang", SGLANG_SMS)


def reported(seen: Observed) -> set[tuple[str, tuple[int, ...]]]:
    return {(item.rule, item.sms) for item in findings(seen, load()) if not item.explained}


def test_a_right_decision_agrees_with_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sglang(tmp_path, monkeypatch)
    assert reported(seen) == set()
    admitted = {
        (row.variant, row.sm)
        for row in seen.observations
        if row.answer == "yes" and row.subject == sglang_gates.FUNCTION
    }
    assert admitted == {("dense", 100), ("grouped", 100), ("grouped", 120), ("grouped", 121)}


@pytest.mark.parametrize(
    ("old", "new", "rule", "sms"),
    [
        # PrimeIntellect-ai/prime-rl#3112: power-of-two scales on every device
        ("get_platform().is_sm100 or get_device_sm() in (120, 121)", "True", "expected", (90,)),
        # sgl-project/sglang#39063: grouped weights kept back on SM120 too
        ("in (120, 121) and not grouped_moe", "in (120, 121)", "expected", (120,)),
        # the dense layers of SM120 take FP32 scales
        ("in (120, 121) and not grouped_moe", "== 0", "expected", (120,)),
        # one of the family only
        ("in (120, 121) and not grouped_moe", "== 120 and not grouped_moe", "same-family", (120, 121)),
    ],
)
def test_seeded_faults_of_the_decision_are_reported(
    old: str, new: str, rule: str, sms: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in FLAGS + DECISION
    seen = sglang(tmp_path, monkeypatch, FLAGS.replace(old, new), DECISION.replace(old, new))
    found = {(item.rule, item.sms) for item in findings(seen, load())}
    assert (rule, sms) in found


@pytest.mark.parametrize(
    ("flags", "off"),
    [
        # vllm-project/vllm#28358: the producer asks the architecture, not the flag
        (
            FLAGS + "ENABLE_JIT_DEEPGEMM = DEEPGEMM_SCALE_UE8M0 = get_platform().is_sm100\n",
            {"(DeepGEMM off)", "(flag off)"},
        ),
        # radixark/miles#1338: the format follows what is installed, not what is used
        (FLAGS.replace("and envs.SGLANG_ENABLE_JIT_DEEPGEMM.get() ", ""), {"(flag off)"}),
    ],
)
def test_scales_that_follow_something_else_than_the_flag_are_reported(
    flags: str, off: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sglang(tmp_path, monkeypatch, flags)
    found = [
        item for item in findings(seen, load()) if (item.rule, item.subject) == ("flag-off", sglang_gates.FUNCTION)
    ]
    assert {variant.split(" ", 1)[1] for item in found for variant in item.variants} == off
    assert all(100 in item.sms for item in found)


@pytest.mark.parametrize(
    ("old", "new", "rule", "variant", "sms"),
    [
        # sgl-project/sglang#39065: the dense layers of SM120 sent to DeepGEMM
        ('backend == "auto" and get_platform().is_sm120', "False", "expected", "auto deepgemm", (120,)),
        # the dispatch does not look whether DeepGEMM is off
        ("if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:\n", "if True:\n", "flag-off", "auto deepgemm (flag off)", (90,)),
        # the dense layers of the datacentre architectures sent elsewhere, their weights converted all the same
        (
            "get_platform().is_sm120:\n        backend",
            "True:\n        backend",
            "converted-for-another",
            "dense",
            (100,),
        ),
    ],
)
def test_seeded_faults_of_the_dispatch_are_reported(
    old: str, new: str, rule: str, variant: str, sms: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in DISPATCH
    dispatch = DISPATCH.replace(old, new).replace("if not get_platform().is_sm120:", "if False:")
    found = findings(sglang(tmp_path, monkeypatch, dispatch=dispatch), load())
    assert any(
        item.rule == rule and variant in item.variants and set(sms) <= set(item.sms)
        for item in found
        if not item.explained
    )


def test_advice_is_no_statement_about_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sglang(tmp_path, monkeypatch)
    refused = [row for row in seen.observations if row.variant == "cutlass" and row.answer == "no"]
    assert {row.sm for row in refused} == {80, 90, 100}
    assert "SM90/SM100" in refused[0].detail
    assert not [item for item in findings(seen, load()) if item.rule == "admits-more-than-it-says"]


def test_sglang_that_has_moved_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sglang(tmp_path, monkeypatch, decision="def other(): ...\n")
    assert "has no should_deepgemm_weight_requant_ue8m0" in seen.gaps[0].reason


def test_a_dispatch_that_has_moved_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sglang(tmp_path, monkeypatch, dispatch=DISPATCH.replace("def _dispatch_auto_backend", "def other"))
    assert "fp8_utils.py has no _dispatch_auto_backend" in seen.gaps[0].reason


@installed("sglang", "0.5.23")
def test_the_installed_sglang_answers_everywhere() -> None:
    seen = observe("sglang")
    assert seen.gaps == ()
    assert {row.answer for row in seen.observations} == {"yes", "no"}
    asked = [row.subject for row in seen.observations]
    assert asked.count(sglang_gates.FUNCTION) == 60
    assert asked.count(sglang_dispatch.DISPATCH) == 10 * (3 * len(sglang_dispatch.KERNELS) + 7)
    assert reported(seen) == set()
    chosen = {
        row.sm: row.variant
        for row in seen.observations
        if row.answer == "yes" and row.variant in {f"auto {kernel}" for kernel in sglang_dispatch.KERNELS}
    }
    assert chosen == {
        **dict.fromkeys((80, 86, 89, 110), "auto triton"),
        **dict.fromkeys((90, 100, 103, 107), "auto deepgemm"),
        **dict.fromkeys((120, 121), "auto cutlass"),
    }
