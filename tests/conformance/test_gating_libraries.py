"""Libraries in a child process: stand-ins that moved, are old, crash or err; the installed ones with seeded faults.

The seeded faults are those that public issues tell of (`FAULTS`): each must be reported, by the rule that names it.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.version import Version

from conformance.gating import flashinfer_gates, sglang_gates, triton_gates, vllm_gates
from conformance.gating.child import LibraryError, SlowError, limited
from conformance.gating.expected import Expected, load
from conformance.gating.model import Finding, Observation, Observed
from conformance.gating.observed import observe
from conformance.gating.rules import findings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and libraries for Linux")


def installed(name: str, least: str) -> pytest.MarkDecorator:
    try:
        found = Version(importlib.metadata.version(name)) >= Version(least)
    except importlib.metadata.PackageNotFoundError:
        found = False
    return pytest.mark.skipif(not found, reason=f"{name} {least} or newer is not installed")


def site(folder: Path, distribution: str, version: str, files: Mapping[str, str]) -> Path:
    """A folder for PYTHONPATH with one distribution in it."""
    about = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    for path, text in {about: f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"}.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# --- FlashInfer's shape, in small ------------------------------------------------------------------------------------

API = """
import enum, functools, os, time
from dataclasses import dataclass
import torch

class QuantFormat(enum.Enum):
    A = 0
    B = 1

class RoutingMethodType(enum.Enum):
    Default = 0
    Renormalize = 1

class SwiGLU: pass

def record(*names):
    class Record:
        def __init__(self, **values):
            self.__dict__.update(dict.fromkeys(names), **values)
    return Record

class QuantConfig(record("weight", "activation", "output")):
    @property
    def pair(self):
        return self.weight, self.activation

RoutingConfig = ExpertConfig = ExecutionConfig = BackendOptions = MoEConfig = record()

@functools.cache
def arch():
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor

class Config:
    archs = (90,)
    @classmethod
    def supported(cls, sm):
        return sm in cls.archs

class Runner:
    archs = (90,)
    supported_activation_classes = (SwiGLU,)
    @classmethod
    def supports_quant(cls, quant):
        return quant.pair == (QuantFormat.A, QuantFormat.B) and quant.output is QuantFormat.A
    def __init__(self, config, device):
        assert device.type == "cuda"
    def check_support(self):
        if arch() not in self.archs:
            raise NotImplementedError(f"supports only SM90, got SM{arch()}.")
"""
LAYER = """
from flashinfer.fused_moe.api import *
def pair(name, archs=(90,), **methods):
    config = type(name + "Config", (Config,), {"archs": archs})
    return config, type(name + "Runner", (Runner,), methods)
def crash(self): os.abort()
def slow(self): time.sleep(60)
def odd(self): raise TypeError("unhashable")
def hungry(self): torch.empty(1, device="cuda")
def built(self, config, device): raise ValueError("no SM90 today")
def asks(self): torch.cuda.get_device_properties(0).clock_rate
_BACKEND_RUNNERS = dict([pair("Good"), REST])
"""


def stand_in(folder: Path, rest: str, version: str = "0.7.9", layer: str = LAYER) -> Path:
    files = {
        "flashinfer/__init__.py": "",
        "flashinfer/fused_moe/__init__.py": "",
        "flashinfer/fused_moe/api.py": API,
        "flashinfer/fused_moe/layer.py": layer.replace("REST", rest),
    }
    return site(folder, "flashinfer-python", version, files)


def ask(
    folder: Path, monkeypatch: pytest.MonkeyPatch, library: str = "flashinfer", sms: tuple[int, ...] = (90, 100)
) -> Observed:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return observe(library, sms)


def answers(observed: Observed) -> dict[tuple[str, int], tuple[str, ...]]:
    return {(row.subject, row.sm): tuple(gate.answer for gate in row.gates) for row in observed.observations}


def test_gates_are_asked_on_the_faked_device_whatever_was_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ask(stand_in(tmp_path, "pair('Wide', (90, 100))"), monkeypatch)
    assert seen.version == "0.7.9"
    assert answers(seen) == {
        ("GoodConfig", 90): ("yes", "yes"),
        ("GoodConfig", 100): ("no", "no"),
        ("WideConfig", 90): ("yes", "yes"),
        ("WideConfig", 100): ("yes", "no"),
    }
    assert {row.variant for row in seen.observations} == {"AxB"}
    assert [(item.rule, item.subject, item.sms) for item in findings(seen, Expected())] == [
        ("config-against-runner", "WideConfig", (100,))
    ]


def test_a_runner_that_raises_is_a_row_and_the_others_still_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = ", ".join(
        f"pair({name!r}, {method}={name.lower()})"
        for name, method in {
            "Odd": "check_support",
            "Hungry": "check_support",
            "Asks": "check_support",
            "Built": "__init__",
            "Slow": "check_support",
        }.items()
    )
    seen = ask(stand_in(tmp_path, f"{rest}, pair('Last')"), monkeypatch, sms=(90,))
    assert {subject: gates[1] for (subject, _), gates in answers(seen).items()} == {
        "GoodConfig": "yes",
        "OddConfig": "error",  # MoELayer would not catch it
        "HungryConfig": "unknown",  # wants a device that is there
        "AsksConfig": "unknown",
        "BuiltConfig": "no",
        "SlowConfig": "unknown",
        "LastConfig": "yes",
    }
    assert seen.gaps == ()
    assert [item.rule for item in findings(seen, Expected()) if item.subject == "OddConfig"] == ["gate-raises"]


def test_a_crash_costs_one_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "pair('Crash', (90,), check_support=lambda self: os.abort() if arch() == 100 else None)"
    seen = ask(stand_in(tmp_path, crash), monkeypatch, sms=(90, 100, 103))
    assert [(gap.sm, gap.reason) for gap in seen.gaps] == [(100, "the process was killed by SIGABRT")]
    assert {row.sm for row in seen.observations if row.subject == "CrashConfig"} == {90, 103}


@pytest.mark.parametrize(
    ("version", "layer", "reason"),
    [
        ("0.6.12", LAYER, "flashinfer 0.6.12 is too old"),
        (
            "0.9.0",
            LAYER.replace("_BACKEND_RUNNERS", "_RUNNERS"),
            "has no fused-MoE registry where it was (AttributeError",
        ),
        ("0.9.1", "import nothing_like_it", "has no fused-MoE registry where it was (ModuleNotFoundError"),
    ],
)
def test_a_library_that_is_old_or_has_moved_is_a_gap(
    version: str, layer: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ask(stand_in(tmp_path, "pair('Last')", version, layer), monkeypatch)
    assert seen.observations == ()
    (gap,) = seen.gaps
    assert gap.sm is None
    assert reason in gap.reason


@pytest.mark.parametrize("module", [flashinfer_gates, sglang_gates, triton_gates, vllm_gates])
def test_a_library_that_is_not_there_says_so(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(LibraryError, match="is not installed"):
        module.load()  # type: ignore[attr-defined]


def test_an_interpreter_that_cannot_serve_is_a_gap() -> None:
    seen = observe("flashinfer", (90,), python="/bin/false")
    assert [gap.reason for gap in seen.gaps] == ["the child ended with 1: "]


def test_a_library_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = "import time; time.sleep(600)"
    monkeypatch.setenv("PYTHONPATH", str(stand_in(tmp_path, "", layer=layer)))
    seen = observe("flashinfer", (90,), limit=3)
    assert [gap.reason for gap in seen.gaps] == ["stopped after 3 s"]


def test_a_limit_ends_what_catches_every_exception() -> None:
    def stubborn() -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    with pytest.raises(SlowError), limited(0.05):
        stubborn()


# --- SGLang ----------------------------------------------------------------------------------------------------------

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


# --- the installed FlashInfer ----------------------------------------------------------------------------------------

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
    return observe("flashinfer", FLASHINFER_SMS, subjects=("Trtllm", "PrimsTs", "B12x"), patches=patches)


def unexplained(seen: Observed) -> list[Finding]:
    return [item for item in findings(seen, load()) if not item.explained]


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


# --- Triton ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@installed("triton", "3.6")
def test_an_fp8_gemm_compiles_to_each_kind_of_tensor_core_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which must not reach the child
    seen = observe("triton", (80, 89, 90, 100), subjects=("fp8_gemm",))
    assert seen.gaps == ()
    rows: Mapping[int, Observation] = {row.sm: row for row in seen.observations}
    assert rows[80].answer == "no"
    assert "fp8e4nv" in rows[80].detail
    kinds = {sm: {"wgmma", "tcgen05.mma", "mma.sync"} & set(row.facts) for sm, row in rows.items() if sm > 80}
    assert kinds == {89: {"mma.sync"}, 90: {"wgmma"}, 100: {"tcgen05.mma"}}
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
    seen = observe("triton", (90,), subjects=("ue8m0",), patches=[patch])
    assert unexplained(seen.patched(0)) == []
    (finding,) = unexplained(seen.patched(1))
    assert (finding.rule, finding.subject) == ("expected", "ue8m0_kernel")
    assert "compiled without div.rn (found: div.full" in finding.message
