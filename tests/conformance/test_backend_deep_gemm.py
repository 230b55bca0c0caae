"""DeepGEMM's adapter without DeepGEMM: its kernels and casts are stood in for by plain torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.backends import _lone_module
from conformance.operations import OPERATIONS
from conformance.operations.checks import canonical, check_outputs
from fuzz.case import Case
from fuzz.plan import cornerstones
from references.backend import Claim, Unsupported
from references.recipes import Recipe

NAME = "conformance.backends.deep_gemm"
LOOSE = Recipe(source="test")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(_lone_module, "load", lambda distribution, file: SimpleNamespace())
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.delattr(importlib.import_module("conformance.backends"), "deep_gemm", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found: ModuleType = importlib.import_module(NAME)
    monkeypatch.setattr(found, "_is_sm90", lambda device: True)
    monkeypatch.setattr(found, "LIBRARY", LIBRARY)
    yield found
    sys.modules.pop(NAME, None)


def product(a: Any, b: Any) -> Tensor:
    """FP32, of (codes, scales) or of BF16 matrices."""
    if isinstance(a, Tensor):
        return a.float() @ b.float().T
    left, right = (codes.float() for codes, _ in (a, b))
    assert a[1].dtype == b[1].dtype == torch.float32
    (m, k), n = left.shape, right.shape[0]
    assert a[1].shape == (m, -(-k // 128))
    spread = b[1].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (left * a[1].repeat_interleave(128, 1)[:, :k]) @ (right * spread).T


def part(operand: Any, index: Any) -> Any:
    return operand[index] if isinstance(operand, Tensor) else tuple(item[index] for item in operand)


def dense(a: Any, b: Any, d: Tensor, compiled_dims: str) -> None:
    d.copy_(product(a, b))


def contiguous(a: Any, b: Any, d: Tensor, rows: Tensor, compiled_dims: str) -> None:
    for group in range(int(rows.max()) + 1):
        if bool((rows == group).any()):
            d[rows == group] = product(part(a, rows == group), part(b, group)).to(d.dtype)


def masked(a: Any, b: Any, d: Tensor, counts: Tensor, expected: int, compiled_dims: str) -> None:
    assert expected == d.shape[1]
    for group, count in enumerate(counts.tolist()):
        d[group, :count] = part_rows(a, b, group, count).to(d.dtype)


def part_rows(a: Any, b: Any, group: int, count: int) -> Tensor:
    slab = part(a, group)
    return product(part(slab, slice(0, count)), part(b, group))


def by_columns(scales: Tensor, fill: int = 0) -> Tensor:
    rows, cols = scales.shape
    aligned = -(-rows // 4) * 4
    storage = torch.full((max(1, aligned * (cols - 1) + rows),), fill, dtype=scales.dtype)
    return storage.as_strided((rows, cols), (1, aligned)).copy_(scales)


def packed_by_columns(scales: Tensor) -> Tensor:
    bits = scales.view(torch.int32)
    assert not bool((bits & 0x007FFFFF).any())  # the kernel traps
    codes = torch.nn.functional.pad((bits >> 23).to(torch.uint8), (0, -scales.shape[1] % 4))
    return by_columns(codes.contiguous().view(torch.int32))


LIBRARY = SimpleNamespace(
    fp8_gemm_nt=dense,
    bf16_gemm_nt=dense,
    m_grouped_fp8_gemm_nt_contiguous=contiguous,
    m_grouped_bf16_gemm_nt_contiguous=contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked=masked,
    m_grouped_bf16_gemm_nt_masked=masked,
    get_mn_major_tma_aligned_tensor=by_columns,
    get_mn_major_tma_aligned_packed_ue8m0_tensor=packed_by_columns,
)


def cases_of(claim: Claim) -> list[Case]:
    from conformance.planning import bend

    fixed = cornerstones((claim.operation, claim.variant))
    bent = (bend(case, claim, number, 0) for number, case in enumerate(fixed))
    return list(dict.fromkeys(case for case in bent if case is not None))[:12]


def test_every_kernel_and_layout_is_called_as_it_has_to_be(module: Any) -> None:
    (backend,) = module.backends()
    claims = [claim for claim in backend.claims("cuda:0") if claim.operation != "ue8m0"]
    assert len(claims) == 11
    for claim in claims:
        cases = cases_of(claim)
        assert len(cases) > 4, claim
        for case in cases:
            operation = OPERATIONS[case.operation]
            inputs, specs = operation.inputs(case), operation.outputs(case)
            out = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
            parts = backend.run(backend.prepare(case, inputs, {"dims": "nk"}), out)
            assert not check_outputs(specs, parts)
            answer = {name: canonical(spec, parts[name]) for name, spec in specs.items()}
            recipe = LOOSE if "gemm" in case.operation else backend.recipe(claim)
            for verdict in operation.judge(case, inputs, answer, recipe):
                assert verdict.verdict == "pass", (case.text, verdict.message)


def test_recipes_name_the_exact_models(module: Any) -> None:
    (backend,) = module.backends()
    found = {
        (claim.operation, claim.variant, claim.where.get("values") == ("subnormal",)): backend.recipe(claim).text()
        for claim in backend.claims("cuda:0")
        if "gemm" in claim.operation
    }
    assert found["gemm", "deepseek_fp8", False] == "accumulator=hopper_fp8 scale_combination=fma_dot_sasb"
    assert found["grouped_gemm", "bf16", False] == "accumulator=hopper_f16 promotion=none"
    assert found["gemm", "bf16", True] == "default"


def test_what_is_not_there_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (backend,) = module.backends()
    monkeypatch.setattr(module, "LIBRARY", SimpleNamespace())
    assert [claim for claim in backend.claims("cuda:0") if "gemm" in claim.operation] == []
    case = cornerstones(("gemm", "bf16"))[0]
    with pytest.raises(Unsupported, match="no gemm bf16"):
        backend.prepare(case, OPERATIONS["gemm"].inputs(case), {})


def test_codes_of_ue8m0_as_floats(module: Any) -> None:
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    floats = module._fp32(codes)
    assert floats[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert bool(floats[4].isnan())
    assert torch.equal(module._codes(floats), codes)


def test_kernels_are_scheduled_as_asked_and_no_longer_than_that(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [132]
    monkeypatch.setattr(module.LIBRARY, "get_num_sms", lambda: asked[-1], raising=False)
    monkeypatch.setattr(module.LIBRARY, "set_num_sms", asked.append, raising=False)
    with module.scheduled(None):
        assert asked == [132]
    with module.scheduled("66"):
        assert asked == [132, 66]
    with pytest.raises(RuntimeError, match="a kernel"), module.scheduled("66"):
        raise RuntimeError("a kernel")
    assert asked == [132, 66, 132, 66, 132]
