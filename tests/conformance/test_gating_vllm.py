"""vLLM's gates: a stand-in of its shape, and with it the faults that public issues tell of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.gating.expected import load
from conformance.gating.model import Finding, Observed
from conformance.gating.observed import observe
from conformance.gating.rules import findings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and a library for Linux")

LAYERS = "vllm/model_executor/layers"
FILES: Mapping[str, str] = {
    "vllm-0.33.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n",
    "vllm/__init__.py": "",
    "vllm/platforms/__init__.py": "_current_platform = None\ndef current(): return _current_platform\n",
    "vllm/platforms/interface.py": "import enum\nclass PlatformEnum(enum.Enum):\n    CUDA = 0\n",
    "vllm/platforms/cuda.py": """
import functools, torch
class NonNvmlCudaPlatform:
    @classmethod
    @functools.cache
    def capability(cls):
        return torch.cuda.get_device_capability()
    def family(self, number):
        return 10 * self.capability()[0] == number
    def support_deep_gemm(self):
        return self.capability() == (9, 0) or self.family(100)
""",
    "vllm/model_executor/__init__.py": "",
    f"{LAYERS}/__init__.py": "",
    f"{LAYERS}/quantization/__init__.py": "",
    f"{LAYERS}/quantization/utils/__init__.py": "",
    f"{LAYERS}/quantization/utils/quant_utils.py": "\n".join(
        f"{name} = {name!r}"
        for name in [
            "kFp8StaticTensorSym",
            "kFp8StaticChannelSym",
            "kFp8DynamicTokenSym",
            "kFp8Static128BlockSym",
            "kFp8Dynamic128Sym",
            "kMxfp8Static",
            "kMxfp8Dynamic",
            "kNvfp4Static",
            "kNvfp4Dynamic",
            "kMxfp4Static",
        ]
    )
    + "\nimport typing\nGroupShape = typing.NamedTuple('GroupShape', [('row', int), ('col', int)])\n",
    f"{LAYERS}/quantization/input_quant_fp8.py": """
import torch
from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT
class QuantFP8:
    def __init__(self, static, group_shape):
        self.packed = DeepGemmQuantScaleFMT.from_oracle() is DeepGemmQuantScaleFMT.UE8M0
        self.dispatch_forward()
    def forward_cuda(self, x):
        if self.packed:
            scales = torch.empty(x.shape[0], x.shape[1] // 512, dtype=torch.int32)
            torch.ops._C.per_token_group_fp8_quant_packed(x, scales)
            return x, scales
        return x, torch.empty(x.shape[0], x.shape[1] // 128)
    def forward_native(self, x):
        scales = torch.zeros(x.shape[0], x.shape[1] // 128, dtype=torch.uint8)
        return x, scales.view(torch.int32) if self.packed else scales.float()
""",
    f"{LAYERS}/fused_moe/__init__.py": "",
    f"{LAYERS}/fused_moe/config.py": """
import enum
class RoutingMethodType(enum.Enum):
    Default = 0
    Renormalize = 1
""",
    f"{LAYERS}/fused_moe/modular_kernel.py": """
import abc
class FusedMoEExperts(abc.ABC):
    @staticmethod
    @abc.abstractmethod
    def _supports_current_device(): ...
    @staticmethod
    def is_monolithic(): return False
""",
    f"{LAYERS}/fused_moe/experts/__init__.py": "",
    f"{LAYERS}/fused_moe/experts/cpu_moe.py": "raise RuntimeError('not for this device')",
    f"{LAYERS}/fused_moe/experts/lost.py": "import nothing_like_it",
    f"{LAYERS}/fused_moe/experts/trtllm_fp8_moe.py": """
from vllm.platforms import current
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.utils.flashinfer import has_flashinfer
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
class Base(FusedMoEExperts): pass
class TrtLlmFp8ExpertsMonolithic(Base):
    @staticmethod
    def _supports_current_device():
        return current().family(100) and has_flashinfer()
    @staticmethod
    def is_monolithic(): return True
    @staticmethod
    def _supports_quant_scheme(weight, activation):
        return weight in ("kFp8StaticTensorSym", "kFp8Static128BlockSym", "kMxfp8Static")
    @staticmethod
    def _supports_routing_method(method, weight, activation):
        return method is RoutingMethodType.Renormalize
""",
    "vllm/model_executor/kernels/__init__.py": "",
    "vllm/model_executor/kernels/linear/__init__.py": """
import torch
from vllm.platforms.interface import PlatformEnum
class TorchMxFp8LinearKernel:
    @classmethod
    def is_supported(cls, capability): return capability >= 100, "requires >=sm_100"
class CutlassKernel:
    @classmethod
    def is_supported(cls, capability): return torch.ops._C.cutlass_scaled_mm_supports_fp8(capability), "compiled"
class MinimumKernel:
    @classmethod
    def get_min_capability(cls): return 90
class B12xKernel:
    @classmethod
    def is_supported(cls, capability): return False, "Install it with `pip install vllm[b12x]`"
_POSSIBLE_MXFP8_KERNELS = {PlatformEnum.CUDA: [TorchMxFp8LinearKernel, B12xKernel]}
_POSSIBLE_KERNELS = {PlatformEnum.CUDA: [MinimumKernel, CutlassKernel]}
""",
    "vllm/utils/__init__.py": "",
    "vllm/utils/flashinfer.py": "def has_flashinfer(): return False\n",
    "vllm/utils/deep_gemm.py": """
import enum, functools, os
from vllm.platforms import current
def has_deep_gemm(): return False
@functools.cache
def is_deep_gemm_supported():
    return current().support_deep_gemm() and os.environ["VLLM_USE_DEEP_GEMM"] == "1" and has_deep_gemm()
class DeepGemmQuantScaleFMT(enum.Enum):
    FLOAT32 = 0
    FLOAT32_CEIL_UE8M0 = 1
    UE8M0 = 2
    @classmethod
    def from_oracle(cls):
        if not is_deep_gemm_supported():
            return cls.FLOAT32
        return cls.UE8M0 if current().family(100) else cls.FLOAT32_CEIL_UE8M0
""",
}
SMS = (90, 100, 103, 120, 121)


FAULTS: Mapping[str, tuple[str, str, str, str, int]] = {
    # fault: text, what it becomes, rule, start of the subject, an architecture of the finding
    "family check admits what is not built for it (vllm-project/vllm#54600, sgl-project/sglang#30059)": (
        "current().family(100) and",
        "current().capability()[0] in (9, 10, 12) and",
        "expected",
        "TrtLlm",
        121,
    ),
    "routing method ignored (vllm-project/vllm#33620, #33613)": (
        "method is RoutingMethodType.Renormalize",
        "True",
        "expected",
        "TrtLlm",
        100,
    ),
    "format follows the architecture, not the flag (vllm-project/vllm#28358)": (
        "if not is_deep_gemm_supported():",
        "if not current().family(100):",
        "flag-off",
        "DeepGemmQuant",
        100,
    ),
    "format follows what is installed (radixark/miles#1338, vllm-project/vime#133)": (
        ' and os.environ["VLLM_USE_DEEP_GEMM"] == "1"',
        "",
        "flag-off",
        "DeepGemmQuant",
        100,
    ),
    "power-of-two scales on every device (PrimeIntellect-ai/prime-rl#3112)": (
        "cls.UE8M0 if current().family(100) else cls.FLOAT32_CEIL_UE8M0",
        "cls.UE8M0",
        "expected",
        "DeepGemm",
        90,
    ),
    "compiled path without packed scales (local-inference-lab/vllm#188)": (
        "scales.view(torch.int32) if self.packed else scales.float()",
        "scales.float()",
        "paths-differ",
        "QuantFP8",
        100,
    ),
    "one of the family": (
        "current().family(100) and",
        "current().capability() in ((10, 0), (12, 0)) and",
        "same-family",
        "TrtLlm",
        121,
    ),
    "sm103 lost": ("current().family(100) and", "current().capability() == (10, 0) and", "expected", "TrtLlm", 103),
    "gate raises": ("return current().family(100) and", "raise KeyError; return", "gate-raises", "TrtLlm", 90),
}


def write(folder: Path, old: str = "", new: str = "") -> None:
    """The stand-in with a text replaced."""
    assert not old or any(old in text for text in FILES.values())
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new) if old else text)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """The stand-in as it is, then with each fault: the modules that ask are imported after the patch."""
    folder = tmp_path_factory.mktemp("vllm")
    write(folder)
    patches = []
    for number, (old, new, *_) in enumerate(FAULTS.values()):
        faulty = folder / f"faulty-{number}"
        write(faulty, old, new)
        patches.append(folder / f"{number}.py")
        patches[-1].write_text(f"import vllm\nvllm.__path__.insert(0, {str(faulty / 'vllm')!r})\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        return observe("vllm", SMS, patches=patches)


def unexplained(seen: Observed) -> list[Finding]:
    known = [row for row in load().explained if row.library == "vllm"]
    assert known
    return [item for item in findings(seen, load()) if not item.explained]


def test_the_shape_of_vllm_is_asked_everywhere(seen: Observed) -> None:
    seen = seen.patched(0)
    assert (seen.version, seen.gaps) == ("0.33.0", ())
    answers = {(row.subject, row.variant, row.sm): row.answer for row in seen.observations}
    block = ("TrtLlmFp8ExpertsMonolithic", "DeepSeekFp8xDeepSeekFp8")
    assert [answers[*block, sm] for sm in SMS] == ["no", "yes", "yes", "no", "no"]
    assert answers[block[0], f"{block[1]} Default", 100] == "no"
    assert answers[block[0], f"{block[1]} Renormalize", 100] == "yes"
    assert answers["MinimumKernel", "linear mixed", 90] == "yes"
    assert answers["CutlassKernel", "linear mixed", 90] == "unknown"  # compiled code does not load here
    assert answers["B12xKernel", "linear MXFP8", 120] == "unknown"
    assert answers["lost", "", 90] == "unknown"
    assert not any(subject.startswith("cpu") for subject, _, _ in answers)
    assert [answers["DeepGemmQuantScaleFMT", "UE8M0", sm] for sm in SMS] == ["no", "yes", "yes", "no", "no"]
    packed = {row.sm: row.gates for row in seen.observations if row.variant == "1x128 packed UE8M0"}
    assert [(gate.name, gate.detail) for gate in packed[100]] == [
        ("eager", "int32 16x1"),
        ("compiled", "int32 16x1"),
    ]
    assert [gate.detail for gate in packed[90]] == ["float32 16x4"] * 2
    assert unexplained(seen) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_public_issues_are_reported(fault: str, seen: Observed) -> None:
    *_, rule, subject, sm = FAULTS[fault]
    # The compiled path of the released version has its fault, which is known.
    found = [
        item
        for item in findings(seen.patched(1 + list(FAULTS).index(fault)), load())
        if not item.explained or item.rule == "paths-differ"
    ]
    assert any(item.rule == rule and item.subject.startswith(subject) and sm in item.sms for item in found), found


def test_a_vllm_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import nothing_like_it")
    about = tmp_path / "vllm-0.33.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (gap,) = observe("vllm", (90,)).gaps
    assert gap.reason == "vllm 0.33.0 cannot be asked: ModuleNotFoundError: No module named 'nothing_like_it'"
