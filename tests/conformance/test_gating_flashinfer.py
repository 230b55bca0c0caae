"""The installed FlashInfer, with the faults that public issues tell of put in: each is reported by its rule."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from conformance.gating.model import Observed
from conformance.gating.observed import observe
from tests.conformance.gating_stand_ins import installed, unexplained

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and libraries for Linux")


PATCH = "import flashinfer.fused_moe.api as api, flashinfer.fused_moe.runners as runners\n"
WIDE = "classmethod(lambda cls, arch: arch >= 100)"
FAULTS: Mapping[str, tuple[str, str, str, int]] = {
    # fault: patch, rule, subject, an architecture of the finding
    "config-of-every-arch-from-100 (flashinfer-ai/flashinfer#3670)": (
        f"api.TrtllmFp4Config.supported = {WIDE}",
        "config-against-runner",
        "TrtllmFp4Config",
        120,
    ),
    "config-and-runner-from-100 (flashinfer-ai/flashinfer#3670)": (
        f"api.TrtllmFp4Config.supported = {WIDE}\n"
        "runners.TrtllmFp4RoutedRunner._check_support = runners.MoERunner._check_support",
        "expected",
        "TrtllmFp4Config",
        120,
    ),
    "no-filter-before-the-cubins (flashinfer-ai/flashinfer#4177)": (
        "runners.TrtllmBf16RoutedRunner._check_support = runners.MoERunner._check_support",
        "config-against-runner",
        "TrtllmBf16Config",
        120,
    ),
    "list-extended-without-kernels (NVIDIA/TensorRT-LLM#11997)": (
        "api._TRTLLM_ROUTED_FP8_ARCHS = (100, 103, 107, 120, 121)",
        "expected",
        "TrtllmFp8BlockConfig",
        120,
    ),
    "whole-major-version (vllm-project/vllm#54600)": (
        "api.PrimsTsConfig.supported = classmethod(lambda cls, arch: arch // 10 in (9, 10, 12))",
        "config-against-runner",
        "PrimsTsConfig",
        121,
    ),
    "sm103-lost": (
        "api._TRTLLM_ROUTED_FP8_ARCHS = (100, 107)",
        "expected",
        "TrtllmFp8PerTensorConfig",
        103,
    ),
    "one-of-the-family": (
        "api.B12xNvfp4Config.supported = classmethod(lambda cls, arch: arch == 120)",
        "same-family",
        "B12xNvfp4Config",
        121,
    ),
    "sm100-instructions-at-production-sizes (NVIDIA/TransformerEngine#2956)": (
        "admit = runners.B12xNvfp4Runner._check_support\n"
        "def check(self):\n"
        "    if self.config.experts.intermediate_size % 128 == 0:\n"
        "        raise NotImplementedError('the fused kernel uses SM100-only instructions, got SM120')\n"
        "    admit(self)\n"
        "runners.B12xNvfp4Runner._check_support = check",
        "depends-on-shape",
        "B12xNvfp4Config",
        120,
    ),
    "smaller-device-refused": (
        "admit = runners.B12xNvfp4Runner._check_support\n"
        "def check(self):\n"
        "    import torch\n"
        "    if torch.cuda.get_device_properties(0).multi_processor_count < 100:\n"
        "        raise NotImplementedError('not on this architecture')\n"
        "    admit(self)\n"
        "runners.B12xNvfp4Runner._check_support = check",
        "depends-on-the-device",
        "B12xNvfp4Config",
        120,
    ),
    "config-raises": (
        "def supported(arch): raise KeyError(arch)\napi.TrtllmFp4Config.supported = staticmethod(supported)",
        "gate-raises",
        "TrtllmFp4Config",
        90,
    ),
}
FLASHINFER_SMS = (90, 103, 120, 121)


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """The installed version as it is, then with each fault, on some architectures."""
    folder = tmp_path_factory.mktemp("faults")
    patches = []
    for number, (text, *_) in enumerate(FAULTS.values()):
        patches.append(folder / f"{number}.py")
        patches[-1].write_text(PATCH + text + "\n")
    return observe("flashinfer", FLASHINFER_SMS, subjects=("Trtllm", "PrimsTs", "B12x"), patches=patches, twins=True)


@pytest.mark.slow
@installed("flashinfer-python", "0.7.2")
def test_the_installed_flashinfer_agrees(flashinfer: Observed) -> None:
    seen = flashinfer.patched(0)
    assert seen.gaps == ()
    assert {row.sm for row in seen.observations} == set(FLASHINFER_SMS)
    assert unexplained(seen) == []
    block = {row.sm: row.answer for row in seen.observations if row.subject == "TrtllmFp8BlockConfig"}
    assert block == {90: "no", 103: "yes", 120: "no", 121: "no"}


@pytest.mark.slow
@installed("flashinfer-python", "0.7.2")
@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_of_flashinfer_are_reported(fault: str, flashinfer: Observed) -> None:
    _, rule, subject, sm = FAULTS[fault]
    seen = flashinfer.patched(1 + list(FAULTS).index(fault))
    assert seen.observations
    assert seen.gaps == ()
    found = unexplained(seen)
    assert any((item.rule, item.subject) == (rule, subject) and sm in item.sms for item in found)
    assert all(item.subject.startswith("Trtllm" if "Trtllm" in subject else subject) for item in found)
