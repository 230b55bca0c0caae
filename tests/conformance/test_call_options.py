"""Call options: swept, printed beside the case, carried out by the harness; and calls beyond the claims."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conformance import call_options, sweeps
from conformance.cli import main
from conformance.journal import read_records
from conformance.worker_backend import Callee
from conformance.worker_tensors import from_wire
from fuzz.case import MAX_SEED, Case
from fuzz.inputs import build
from references.backend import Claim
from reports.record import Record

PLUGIN = ("--plugin", str(Path(__file__).with_name("plugins") / "options.py"), "--backend", "tactical")
SCALES = [f"ue8m0 nearest v=1 from=scale n=8 values=wide seed={seed}" for seed in range(8)]
PRODUCT = "gemm bf16 v=1 k=3 layout=plain m=5 n=2 out=fp32 scale=none values=normal seed=1"


def ran(out: Path, *words: str) -> tuple[int, list[Record]]:
    code = main(["run", *PLUGIN, "--jobs", "1", "--out", str(out), *words])
    return code, read_records(out / "records.jsonl")


def test_every_option_is_swept_over_a_quarter_of_the_cases(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for text in [*SCALES, PRODUCT] for word in ("--case", text)]
    code, records = ran(tmp_path, *words)
    assert code == 1
    found = {(item.case, item.options): item.verdict for item in records if item.part != "property:tensor"}
    plain = {case: verdict for (case, options), verdict in found.items() if not options}
    assert plain == dict.fromkeys([*SCALES, PRODUCT], "pass")
    swept = {key: verdict for key, verdict in found.items() if key[1]}
    assert swept == {
        **{(case, "tactic=even"): "pass" for case in SCALES[:2]},
        **{(case, "tactic=odd"): "wrong" for case in SCALES[:2]},
        (PRODUCT, "inputs=strided"): "wrong",
    }
    said = capfd.readouterr().out
    assert "tactical 1.0 on cpu with tactic=odd: 2 cases to run" in said
    assert f"nox -s repro -- '{PRODUCT}' --backend tactical --option inputs=strided --plugin" in said
    assert main(["repro", PRODUCT, *PLUGIN, "--option", "inputs=strided"]) == 1
    assert main(["repro", PRODUCT, *PLUGIN]) == 0


def test_a_sweep_is_chosen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--case", SCALES[0])
    assert {item.options for item in ran(tmp_path / "none", *words, "--sweep", "none")[1]} == {""}
    assert {item.options for item in ran(tmp_path / "even", *words, "--sweep", "tactic=even")[1]} == {
        "",
        "tactic=even",
    }
    capfd.readouterr()
    assert main(["run", *PLUGIN, *words, "--sweep", "tactic=lucky", "--out", str(tmp_path / "no")]) == 2
    said = capfd.readouterr().err
    assert said == (
        "conformance: --sweep 'tactic=lucky' is no call option; known: tactic=even, tactic=odd, inputs=strided\n"
    )


def test_calls_beyond_the_claims_are_refused_right_or_ungated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = {n: f"ue8m0 nearest v=1 from=scale n={n} values=wide seed=1" for n in (64, 65, 150, 200)}
    words = [word for text in texts.values() for word in ("--case", text)]
    code, records = ran(tmp_path, *words, "--sweep", "none")
    found = {item.case: (item.part, item.verdict) for item in records}
    assert [found[text] for text in texts.values()] == [
        ("scales", "pass"),
        ("call", "refused"),
        ("scales", "pass"),
        ("scales", "ungated"),
    ]
    assert code == 1
    messages = {item.case: item.message for item in records}
    assert messages[texts[65]].startswith("beyond the claims (n=65 is above 64): ValueError: n is too large (in run, ")
    capfd.readouterr()
    assert main(["repro", texts[200], *PLUGIN]) == 1
    assert "scales: ungated" in capfd.readouterr().out
    assert main(["repro", texts[65], *PLUGIN]) == 0


def test_a_claim_dares_only_what_is_enforced() -> None:
    claim = Claim(
        operation="ue8m0", variant="nearest", source="s", maxima={"n": 4}, where={"from": ("x",)}, enforced=("n",)
    )
    case = Case.parse("ue8m0 nearest v=1 from=scale n=8 values=wide seed=1")
    assert not claim.dares(case)  # another limit, which nobody promises to enforce, is overstepped as well
    free = Claim(operation="ue8m0", variant="nearest", source="s", maxima={"n": 4}, enforced=("n",))
    assert free.dares(case)
    assert not free.dares(case.replace(n=4))
    assert Claim.from_json(free.to_json()) == free


def test_strided_keeps_numbers_and_alignment() -> None:
    for tensor in (
        torch.arange(15, dtype=torch.uint8).view(3, 5),
        torch.arange(24, dtype=torch.float32).view(2, 3, 4),
        torch.arange(6, dtype=torch.int32).view(2, 3),
    ):
        laid = call_options.strided(tensor)
        assert torch.equal(laid, tensor)
        assert laid.stride(-1) == 1
        assert not laid.is_contiguous()
        gap = (laid.stride(-2) - tensor.shape[-1]) * tensor.element_size()
        assert gap == 32
        row = torch.empty(0, dtype=torch.uint8).set_(laid.untyped_storage())[tensor.shape[-1] * tensor.element_size() :]
        assert (row[:32] == 0xFF).all()
    for tensor in (torch.arange(4), torch.zeros(3, 5).T, torch.zeros(0, 4)):
        assert call_options.strided(tensor) is tensor


def test_words_that_are_not_known() -> None:
    assert call_options.own_and_carried({"tactic": "3", "stream": "side"}) == ({"tactic": "3"}, {"stream": "side"})
    with pytest.raises(ValueError, match="graph=twice is none of replay"):
        call_options.own_and_carried({"graph": "twice"})


def test_a_sister_has_the_next_seed() -> None:
    case = Case.parse(PRODUCT)
    assert call_options.sister(case) == case.replace(seed=2)
    assert call_options.sister(case.replace(seed=MAX_SEED)).seed == 0


def test_nothing_is_swept_without_options() -> None:
    assert sweeps.swept_targets([]) == []


def test_a_sixteenth_of_the_cases_is_called_on_refilled_memory() -> None:
    """An implementation that keeps what it saw first at an address answers the sister's question there."""
    seen: dict[int, torch.Tensor] = {}

    def run(prepared: torch.Tensor, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = seen.setdefault(prepared.data_ptr(), prepared.clone())
        return {"scales": (x.view(torch.int32) >> 23).to(torch.uint8)}

    backend = SimpleNamespace(prepare=lambda case, inputs, options: inputs["x"], run=run)
    found = {}
    for seed in range(call_options.REFILLED):
        case = Case.parse(f"ue8m0 floor v=1 from=scale n=8 values=normal seed={seed}")
        callee = Callee("here", {"b": backend}, "cpu")  # type: ignore[dict-item]
        seen.clear()
        reply, outputs = callee.call(case.text, "b", {})
        assert (reply["status"], reply["inputs_changed"]) == ("ok", False)
        asked = call_options.sister(case) if seed == 3 else case
        right = (build(asked)["x"].view(torch.int32) >> 23).to(torch.uint8)
        found[seed] = bool((from_wire(outputs[0]) == right).all())
    assert all(found.values())
    assert call_options.is_refilled(Case.parse(SCALES[3]))


def test_a_sister_that_starts_elsewhere_in_its_storage_is_copied() -> None:
    words = "block=tensor dtype=fp32 k=258 m=17 scale=fp32 stride=offset values=scale_ladder seed=3"
    case = Case.parse(f"quantize fp8_per_tensor v=1 {words}")
    seen: list[torch.Tensor] = []
    backend = SimpleNamespace(
        prepare=lambda case, inputs, options: seen.append(inputs["x"].clone()),
        run=lambda prepared, out: dict(out),
    )
    callee = Callee("here", {"b": backend}, "cpu")  # type: ignore[dict-item]
    assert callee.call(case.text, "b", {})[0]["inputs_changed"] is False
    assert torch.equal(seen[0], build(call_options.sister(case))["x"])
    assert torch.equal(seen[1], build(case)["x"])
