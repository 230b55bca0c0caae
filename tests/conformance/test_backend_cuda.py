"""The adapter around CUDA's conversions without CUDA: their kernels are stood in for by ml_dtypes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.operations import OPERATIONS
from conformance.operations.checks import canonical, check_outputs
from fuzz.plan import cornerstones
from references.backend import Unsupported

TYPES = {0: (ml_dtypes.float8_e4m3fn, 448.0), 1: (ml_dtypes.float8_e5m2, 57344.0), 2: (ml_dtypes.float4_e2m1fn, 6.0)}
NAMES = ("conformance.backends._cuda_nvrtc", "conformance.backends.cuda_headers")


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module ``cuda_headers``, bound to headers of CUDA 13.1 that hold nothing, and to `launch` below."""
    include = tmp_path / "include"
    include.mkdir()
    for name in ("cuda_fp8.h", "cuda_fp4.h"):
        (include / name).touch()
    (include / "cuda.h").write_text("#define CUDA_VERSION 13010\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("driver", "nvrtc"):
        monkeypatch.setattr(sys.modules["cuda.bindings"], name, None, raising=False)
    package = importlib.import_module("conformance.backends")
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(package, name.rpartition(".")[2], raising=False)
    module = importlib.import_module(NAMES[1])
    monkeypatch.setattr(module.cuda, "launch", launch)
    yield module
    for name in NAMES:
        sys.modules.pop(name, None)


def launch(name: str, source: Tensor, out: Tensor, *numbers: int) -> Tensor:
    assert source.is_contiguous()
    x = source.numpy()
    with np.errstate(all="ignore"):
        if name == "to_e8m0":
            mantissa, exponent = np.frexp(np.abs(x))
            up = (exponent - (mantissa == 0.5)) if numbers[0] else exponent - 1
            code = np.where(x == 0, 0, np.where(np.isinf(x), 254, np.clip(up + 127, 0, 254)))
            found = np.where(np.isnan(x), 255, code).astype(np.uint8)
        elif name == "from_e8m0":
            found = x.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        elif name == "to_codes":
            kind, largest = TYPES[numbers[0]]
            found = np.clip(x, -largest, largest).astype(kind).view(np.uint8)
        else:
            found = x.view(TYPES[numbers[0]][0]).astype(np.float32)
    return out.copy_(torch.from_numpy(np.ascontiguousarray(found)))


def test_every_claim_conforms(cuda: Any) -> None:
    (backend,) = cuda.backends()
    assert backend.version() == "13.1"
    claims = list(backend.claims("cuda:0"))
    assert len(claims) == 12
    for claim in claims:
        cases = [case for case in cornerstones((claim.operation, claim.variant)) if claim.refusal(case) is None]
        assert len(cases) > 4
        for case in cases:
            operation = OPERATIONS[case.operation]
            inputs, specs = operation.inputs(case), operation.outputs(case)
            parts = backend.run(backend.prepare(case, inputs, {}), {})
            assert not check_outputs(specs, parts)
            answer = {name: canonical(spec, parts[name]) for name, spec in specs.items()}
            recipe = backend.recipe(claim).only(operation.open_choices(case.variant))
            for verdict in operation.judge(case, inputs, answer, recipe):
                assert verdict.verdict == "pass", (case.text, verdict.message)


def test_nothing_is_claimed_on_a_cpu_and_other_operations_are_refused(cuda: Any) -> None:
    (backend,) = cuda.backends()
    assert list(backend.claims("cpu")) == []
    case = cornerstones(("scale_layout", "mn_major"))[0]
    with pytest.raises(Unsupported, match="no scale_layout mn_major"):
        backend.prepare(case, {}, {})


def test_without_headers_the_import_says_so(cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include" / "cuda_fp4.h").unlink()
    monkeypatch.setattr(cuda.cuda.shutil, "which", lambda name: None)
    monkeypatch.setattr(cuda.cuda.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        cuda.cuda, "Path", lambda *parts: Path(*(str(part).replace("/usr/local", "/nowhere") for part in parts))
    )
    with pytest.raises(ImportError, match="no folder with cuda_fp8"):
        cuda.cuda.headers()
