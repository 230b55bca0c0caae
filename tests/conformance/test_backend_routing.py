"""Routers of libraries: torch by hand, SGLang and vLLM where installed, and how one file of a library is loaded."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.backends import _lone_module as lone
from conformance.backends import _sglang_dispatcher as dispatcher
from conformance.backends import _torch_routing as plain
from conformance.backends.torch_ops import TorchBackend
from conformance.operations import routing
from conformance.planning import bend
from fuzz.case import Case
from fuzz.inputs import build
from fuzz.plan import draw_plan
from references.backend import Backend
from references.routing import METHODS

TORCH = TorchBackend("torch", "fp32")


def failures(backend: Any, per_method: int, seed: int) -> Iterable[tuple[Case, str, tuple[str, ...]]]:
    """Case, part and classes of every wrong verdict among cases bent to each of the backend's claims."""
    claims = [claim for claim in backend.claims("cpu") if claim.operation == "routing"]
    plan = draw_plan(sorted({("routing", claim.variant) for claim in claims}), per_method, seed, 2**11)
    for claim in claims:
        covered = 0
        for number, case in enumerate(plan):
            bent = bend(case, claim, number, 1) if case.variant == claim.variant else None
            if bent is None:
                continue
            covered += 1
            inputs = build(bent)
            outputs = backend.run(backend.prepare(bent, inputs, {}), {})
            for verdict in routing.judge(bent, inputs, outputs, backend.recipe(claim)):
                if verdict.verdict != "pass":
                    yield bent, verdict.part, verdict.classes
        assert covered >= per_method // 2, claim.text()


def test_torch_routes_every_method() -> None:
    assert tuple(METHODS) == plain.METHODS
    assert list(failures(TORCH, 10, 5)) == []


def test_torch_by_hand() -> None:
    case = Case.parse(
        "routing DeepSeekV3 v=1 bias=12 bias_dtype=fp32 dtype=fp32 experts=4 groups=2 out=fp32 padding=none "
        "renormalize=on scaling=2.5 shared=1 stride=contiguous tokens=1 topk=2 topk_group=1 values=normal seed=0"
    )
    ln3 = 1.0986123
    inputs = {"logits": torch.tensor([[0.0, ln3, ln3, -ln3]]), "bias": torch.tensor([0.0, 0.0, 0.0, 12.0])}
    found = plain.route(case, inputs)
    assert found["selection"].tolist() == [[3, 2, 4]]
    assert torch.allclose(found["weights"], torch.tensor([[0.625, 1.875, 1.0]]), rtol=1e-6)
    packed = plain.route(case.replace(out="packed", padding="some", tokens=2), {**inputs, "logits": torch.zeros(2, 4)})
    assert packed["packed"].tolist()[0] == [3 << 16 | 0x3FA0, 2 << 16 | 0x3FA0, 4 << 16 | 0x3F80]  # 1.25, 1.25, 1
    assert (packed["packed"][1] >> 16).tolist() == [-1, -1, -1]


def test_sglang_routes_as_its_ledger_entry_says() -> None:
    if _missing("sglang"):
        pytest.skip("SGLang is not installed")
    from conformance.backends import sglang_torch

    (backend,) = sglang_torch.backends()
    assert isinstance(backend, Backend)
    assert backend.version() == importlib.metadata.version("sglang")
    for case, part, classes in failures(backend, 6, 5):
        known = case.variant in ("MiniMax2", "SqrtSoftplus") and case["shared"] == "1"
        assert known, case.text
        assert (part, classes) == ("weights", ("shared",))


def test_sglang_s_dispatcher_numbers_the_experts_of_a_rank() -> None:
    if _missing("sglang"):
        pytest.skip("SGLang is not installed")
    from conformance.backends import sglang_torch

    (backend,) = sglang_torch.backends()
    claim = next(item for item in backend.claims("cpu") if item.variant == "Sigmoid")
    assert claim.where["out"] == ("fp32", "local")
    assert "token_dispatcher/standard.py: _map_topk_ids_to_local_experts" in claim.source
    case = Case.parse(
        "routing Sigmoid v=1 dtype=fp32 experts=4 out=local padding=some shared=0 stride=contiguous tokens=2 topk=2 "
        "values=normal seed=0"
    )
    # Experts 3 and 0 are here, and the map ends with one of them; the second token is padding.
    inputs = {
        "logits": torch.tensor([[1.0, 2.0, 0.0, 3.0]] * 2),
        "expert_map": torch.tensor([1, -1, -1, 0], dtype=torch.int32),
    }
    found = backend.run(backend.prepare(case, inputs, {}), {})
    assert found["selection"].tolist() == [[3, 1], [-1, -1]]
    assert found["local"].tolist() == [[0, -1], [-1, -1]]


def test_a_dispatcher_without_the_map_has_none(tmp_path: Path) -> None:
    assert dispatcher.to_local(tmp_path) is None
    path = tmp_path / dispatcher.FILE
    path.parent.mkdir(parents=True)
    path.write_text("import nothing_of_the_kind\ndef other(): pass\n")
    assert dispatcher.to_local(tmp_path) is None
    path.write_text(f"import nothing_of_the_kind\ndef {dispatcher.NAME}(ids, mapping): return torch.neg(ids)\n")
    found = dispatcher.to_local(tmp_path)
    assert found is not None
    assert found(torch.tensor([2]), torch.tensor([0])).tolist() == [-2]


def test_vllm_routes_as_its_ledger_entries_say() -> None:
    if _missing("vllm"):
        pytest.skip("vLLM is not installed")
    from conformance.backends import vllm_torch

    (backend,) = vllm_torch.backends()
    assert isinstance(backend, Backend)
    for case, part, _ in failures(backend, 6, 5):
        assert case.variant in ("Default", "Renormalize"), case.text
        assert part == "weights"


def _missing(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution ``lonelib`` 1.2, whose package does not import."""
    (tmp_path / "lonelib-1.2.dist-info").mkdir()
    (tmp_path / "lonelib-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lonelib\nVersion: 1.2\n")
    (tmp_path / "lonelib" / "deep").mkdir(parents=True)
    (tmp_path / "lonelib" / "__init__.py").write_text("raise RuntimeError('needs a server')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "lonelib" / "deep"


def test_one_file_runs_although_its_package_does_not(library: Path) -> None:
    (library / "work.py").write_text(
        "from __future__ import annotations\n"
        "import math\n"
        "from dataclasses import dataclass\n"
        "from lonelib.config import Base, is_cuda, settings\n"
        "import lonelib.far.away\n"
        "@dataclass\n"
        "class Point(Base):\n    x: int = 3\n"
        "FLAG = settings.debug.get()\n"
        "def work(x): return math.sqrt(x), bool(is_cuda()), FLAG, Point().x\n"
    )
    module = lone.load("lonelib", "lonelib/deep/work.py")
    assert lone.version("lonelib") == "1.2"
    assert lone.function(module, "work")(4.0) == (2.0, False, None, 3)
    assert not [name for name in sys.modules if name.split(".")[0] == "lonelib"]
    with pytest.raises(ImportError, match="has no is_cuda"):
        lone.function(module, "is_cuda")
    with pytest.raises(RuntimeError, match="needs a server"):
        import lonelib  # noqa: F401


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_the_kind\n", "does not run alone: ModuleNotFoundError"),
        ("raise ValueError('new layout')\n", "does not run alone: ValueError.*new layout"),
        (None, "lonelib 1.2 has no lonelib/deep/work.py"),
    ],
)
def test_a_file_that_does_not_run_is_one_reason(library: Path, source: str | None, message: str) -> None:
    if source is not None:
        (library / "work.py").write_text(source)
    with pytest.raises(ImportError, match=message):
        lone.load("lonelib", "lonelib/deep/work.py")
    assert not [name for name in sys.modules if name.split(".")[0] == "lonelib"]


def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(ImportError, match="nolib_at_all is not installed"):
        lone.load("nolib_at_all", "nolib_at_all/x.py")
