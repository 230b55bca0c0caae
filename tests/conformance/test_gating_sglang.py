"""SGLang's decision to requantise: a stand-in with the faults that public issues tell of, and the installed version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.gating import sglang_gates
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
SGLANG_SMS = (80, 90, 100, 120, 121)


def sglang(folder: Path, monkeypatch: pytest.MonkeyPatch, flags: str = FLAGS, decision: str = DECISION) -> Observed:
    files = {sglang_gates.FLAGS: flags, sglang_gates.DECISION: decision}
    return ask(site(folder, "sglang", "0.5.23", files), monkeypatch, "sglang", SGLANG_SMS)


def reported(seen: Observed) -> set[tuple[str, tuple[int, ...]]]:
    return {(item.rule, item.sms) for item in findings(seen, load()) if not item.explained}


def test_a_right_decision_agrees_with_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sglang(tmp_path, monkeypatch)
    assert reported(seen) == set()
    admitted = {(row.variant, row.sm) for row in seen.observations if row.answer == "yes"}
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
    found = [item for item in findings(seen, load()) if item.rule == "flag-off"]
    assert {variant.split(" ", 1)[1] for item in found for variant in item.variants} == off
    assert all(100 in item.sms for item in found)


def test_sglang_that_has_moved_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sglang(tmp_path, monkeypatch, decision="def other(): ...\n")
    assert "has no should_deepgemm_weight_requant_ue8m0" in seen.gaps[0].reason


@installed("sglang", "0.5.23")
def test_the_installed_sglang_answers_everywhere() -> None:
    seen = observe("sglang")
    assert seen.gaps == ()
    assert {row.answer for row in seen.observations} == {"yes", "no"}
    assert len(seen.observations) == 60
    assert reported(seen) == set()
