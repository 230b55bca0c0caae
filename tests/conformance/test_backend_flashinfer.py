"""FlashInfer's adapter: its claims, and the record of the router's selection. Compiled modules are stood in for."""

import sys
from types import ModuleType

import pytest
import torch

from conformance.backends import _flashinfer_modules as modules
from conformance.backends import flashinfer_gpu
from conformance.operations import OPERATIONS
from fuzz.case import Case

CASE = Case.parse(
    "routing DeepSeekV3 v=1 bias=0.1 bias_dtype=fp32 dtype=fp32 experts=64 groups=8 out=fp32 padding=none "
    "renormalize=on scaling=2.5 shared=0 stride=contiguous tokens=9 topk=4 topk_group=4 values=normal seed=1"
)


@pytest.fixture
def claims(monkeypatch):
    monkeypatch.setattr(modules, "ready", lambda name: True)
    monkeypatch.setattr(modules, "attribute", lambda module, name: print)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return {
        name: list(flashinfer_gpu.FlashInfer(name).claims("cuda:0")) for name in ("flashinfer", "flashinfer_replay")
    }


def covered(claims, case: Case) -> bool:
    return any(claim.refusal(case) is None for claim in claims)


@pytest.mark.parametrize(
    ("changes", "claimed"),
    [
        ({}, True),
        ({"experts": 256, "topk": 8}, True),  # DeepSeek-V3
        ({"experts": 384, "groups": 1, "topk_group": 1, "topk": 1}, True),
        (
            {"experts": 384, "groups": 1, "topk_group": 1, "topk": 2},
            False,
        ),  # topk_group * n_group >= topk is documented
        ({"experts": 64, "topk_group": 8}, True),  # 8 experts a group, 64 in the kept ones
        ({"experts": 256, "topk_group": 8}, False),  # 256 experts in the kept groups, 128 are documented
        ({"experts": 512, "groups": 8}, False),  # 64 experts a group
        ({"experts": 385, "groups": 1, "topk_group": 1}, False),
        ({"topk": 9}, False),
        ({"out": "bf16"}, False),  # weights have the logits' dtype
        ({"renormalize": "off"}, False),
        ({"stride": "transposed"}, False),
    ],
)
def test_the_routers_claims_are_the_documented_limits(claims, changes, claimed):
    assert covered(claims["flashinfer"], CASE.replace(**changes)) is claimed
    assert covered(claims["flashinfer_replay"], CASE.replace(**changes)) is claimed


def test_a_ninth_expert_is_dared(claims):
    assert any(claim.dares(CASE.replace(topk=9)) for claim in claims["flashinfer"])


def test_replay_claims_nothing_but_routing(claims):
    assert {claim.operation for claim in claims["flashinfer_replay"]} == {"routing"}
    assert {claim.operation for claim in claims["flashinfer"]} == {"routing", "gemm", "quantize", "scale_layout"}


def answer_of_a_router(monkeypatch, backend: str, records: bool):
    """The verdicts on a router that selects rightly, and records what it selects or not."""

    def fused_topk_deepseek(
        logits, bias, n_group, topk_group, topk, factor, values, indices, launch_with_pdl=True, routing_replay_out=None
    ):
        scores = torch.sigmoid(logits)
        choice = (scores + bias).view(len(logits), n_group, -1)
        best = choice.topk(2)[0].sum(-1).topk(topk_group)[1]
        kept = torch.full_like(choice, float("-inf"))
        kept = kept.scatter(1, best[..., None].expand(-1, -1, choice.shape[-1]), 0.0) + choice
        ids = kept.flatten(1).topk(topk)[1]
        weights = scores.gather(1, ids)
        values.copy_(weights / weights.sum(-1, keepdim=True) * factor)
        indices.copy_(ids)
        if routing_replay_out is not None and records:
            routing_replay_out.copy_(ids)

    for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.fused_routing_dsv3"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.fused_moe.fused_routing_dsv3"].fused_topk_deepseek = fused_topk_deepseek
    operation = OPERATIONS["routing"]
    inputs = operation.inputs(CASE)
    out = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in operation.outputs(CASE).items()}
    adapter = flashinfer_gpu.FlashInfer(backend)
    parts = adapter.run(adapter.prepare(CASE, inputs, {}), out)
    claim = next(iter(flashinfer_gpu._routing_claims()))
    return {part.part: part.verdict for part in operation.judge(CASE, inputs, parts, adapter.recipe(claim))}


@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer_replay"])
def test_a_right_router_passes(monkeypatch, backend):
    assert set(answer_of_a_router(monkeypatch, backend, records=True).values()) == {"pass"}


def test_an_unwritten_record_is_wrong_though_the_selection_is_right(monkeypatch):
    assert set(answer_of_a_router(monkeypatch, "flashinfer", records=False).values()) == {"pass"}
    assert answer_of_a_router(monkeypatch, "flashinfer_replay", records=False)["selection"] == "wrong"


def test_without_a_compiled_module_the_reason_names_the_command(monkeypatch, tmp_path):
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(modules, "version", lambda: "0.7.4")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    assert modules.absent(cuda=True).endswith("python -m conformance.flashinfer_modules build")
    prebuilt = package / "data" / "aot" / "quantization"
    prebuilt.mkdir(parents=True)
    (prebuilt / "quantization.so").write_bytes(b"")
    assert modules.absent(cuda=False) is None


def test_every_process_that_asks_for_flashinfer_has_libcuda_s_symbols(monkeypatch):
    loaded = []
    monkeypatch.setattr(modules.ctypes, "CDLL", lambda name, mode: loaded.append((name, mode)))
    assert modules.attribute("conformance.backends.no_such_module", "f") is None
    assert loaded == [("libcuda.so.1", modules.ctypes.RTLD_GLOBAL)]


def test_without_a_driver_there_is_no_libcuda_and_nothing_is_said(monkeypatch):
    def missing(name, mode):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(modules.ctypes, "CDLL", missing)
    assert modules.attribute("json", "dumps") is not None
