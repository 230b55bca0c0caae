"""Routing replay: a selection is judged once, the expert layer on that selection; unwritten records are found."""

import json
import shlex

import torch

from conformance.backends.torch_ops import TorchBackend
from conformance.cli import main
from conformance.replay import Pair, inputs_of, markdown, pairs, recorded, replay
from conformance.shrink import LocalProbe
from conformance.worker_tensors import to_wire
from fuzz.case import Case
from fuzz.grammar import ROUTERS
from references.routing.forms import pack


class Changed(TorchBackend):
    """torch with one operation's answers changed."""

    def __init__(self, operation, change):
        super().__init__("torch", "fp32")
        self._operation, self._change = operation, change

    def prepare(self, case, inputs, options):
        call = super().prepare(case, inputs, options)
        return call, case.operation == self._operation

    def run(self, prepared, out):
        call, changed = prepared
        parts = call()
        return self._change(parts, out) if changed else parts


def same(parts, out):
    return parts


def some(count=3, methods=("DeepSeekV3", "Renormalize")):
    return [pair for pair in pairs(methods, ("mxfp8", "bf16"), count, 5) if pair.router["out"] != "packed"]


def outcomes(router, layer, every=None):
    found = replay({"r": LocalProbe(router)}, {"l": LocalProbe(layer)}, some() if every is None else every)
    return found["r", ""], found["r", "l"]


def test_correct_ones_pass_both():
    router, layer = outcomes(Changed("routing", same), Changed("moe", same))
    assert set(router.selections) == {"pass"}
    assert set(layer.outputs) == {"pass"}
    assert router.selections["pass"] == layer.outputs["pass"] == len(some())


def test_a_wrong_selection_is_reported_once():
    def wrong(parts, out):
        ids = parts["selection"].clone()
        ids[:, 0] = (ids[:, 0] + 1) % 4
        return {**parts, "selection": ids}

    router, layer = outcomes(Changed("routing", wrong), Changed("moe", same))
    assert router.selections["wrong"] > 0
    assert "selection wrong" in router.failing[0]
    assert set(layer.outputs) == {"pass"}


def test_a_wrong_layer_is_not_blamed_on_the_selection():
    def doubled(parts, out):
        return {"output": 2 * parts["output"]}

    router, layer = outcomes(Changed("routing", same), Changed("moe", doubled))
    assert set(router.selections) == {"pass"}
    assert layer.outputs["wrong"] > 0
    assert "l on the selection of r for 'routing " in layer.failing[0]


def test_a_record_that_is_never_written_is_found():
    def unwritten(parts, out):
        out["weights"].copy_(parts["weights"])
        return {"selection": out["selection"], "weights": out["weights"]}

    router, layer = outcomes(Changed("routing", unwritten), Changed("moe", same))
    assert set(router.selections) == {"wrong"}
    assert "previous contents" in router.failing[0]
    assert set(layer.outputs) == {"pass"}  # on nothing but experts that are elsewhere


def test_a_tie_that_is_broken_another_way_changes_the_layers_answer_and_no_verdict():
    router = Case.parse(
        "routing Renormalize v=1 dtype=fp32 experts=8 out=fp32 padding=none shared=0 stride=contiguous tokens=5 topk=2 "
        "values=all_equal seed=3"
    )
    layer = Case.parse(
        "moe bf16 v=1 experts=8 gate=first hidden=64 ids=spread intermediate=34 limit=none out=fp32 scale=none "
        "scaling=1 tokens=5 topk=2 values=normal weight=output seed=3"
    )
    seen = []

    def last(parts, out):
        ids = torch.tensor([[6, 7]], dtype=torch.int32).repeat(5, 1)
        return {**parts, "selection": ids}

    def noted(parts, out):
        seen.append(parts["output"])
        return parts

    for change in (same, last):
        mine, its = outcomes(Changed("routing", change), Changed("moe", noted), [Pair(router, layer, False)])
        assert set(mine.selections) == {"pass"}
        assert set(its.outputs) == {"pass"}
    assert not torch.allclose(seen[0], seen[-1])


def pair_of(**words):
    (pair, *_) = [pair for pair in some() if not pair.halved]
    router = pair.router.replace(**words)
    layer = pair.layer.replace(tokens=router["tokens"], topk=router["topk"], experts=router["experts"])
    return Pair(router, layer, False)


def test_what_a_layer_cannot_take_is_elsewhere():
    pair = pair_of(tokens=4, topk=2, experts=8, shared=0, groups=1, topk_group=1, out="fp32")
    ids = torch.tensor([[7, 8], [3, 3], [-1, 0], [1, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 2.0], [torch.nan, 2.0**30]])
    outputs = [to_wire("selection", ids), to_wire("weights", weights)]
    found, used = recorded(pair, outputs)
    assert found.tolist() == [[7, -1], [3, -1], [-1, 0], [-1, -1]]
    assert used.tolist() == [[0.5, 0.5], [0.25, 0.75], [1.0, 2.0], [0.0, 0.0]]
    halved, _ = recorded(Pair(pair.router, pair.layer, True), outputs)
    assert halved.tolist() == [[-1, -1], [-1, -1], [-1, 0], [-1, -1]]
    wires = {wire.name: wire for wire in inputs_of(pair.layer, found, used)}
    assert wires["ids"] == to_wire("ids", found)
    assert recorded(pair, [to_wire("selection", ids)]) is None
    assert recorded(pair, [to_wire("selection", ids[:2]), to_wire("weights", weights)]) is None


def test_packed_answers_and_shared_experts():
    pair = pair_of(tokens=1, topk=2, experts=8, shared=1, groups=1, topk_group=1, out="packed")
    packed = pack(torch.tensor([[5, 0, 8]], dtype=torch.int32), torch.tensor([[0.5, 0.25, 1.0]]))
    found, used = recorded(pair, [to_wire("packed", packed)])
    assert found.tolist() == [[5, 0]]
    assert used.tolist() == [[0.5, 0.25]]


def test_every_method_has_pairs_of_small_sizes_and_every_second_is_halved():
    every = list(pairs(tuple(ROUTERS), ("bf16",), 4, 0))
    assert len(every) == 4 * len(ROUTERS)
    assert sum(pair.halved for pair in every) == len(every) // 2
    assert all(pair.layer["ids"] == "elsewhere" for pair in every if pair.halved)
    assert max(pair.router.integer("experts") for pair in every) <= 64


def test_the_table_has_a_row_for_each_router_and_layer():
    router, layer = outcomes(Changed("routing", same), Changed("moe", same), some(1))
    lines = markdown({("r", ""): router, ("r", "l"): layer}).splitlines()
    assert lines[2] == f"| r | {len(some(1))} pass |  |  |"
    assert lines[3].startswith("|  |  | l | ")


def test_the_command(tmp_path, capsys):
    given = [
        "replay",
        "--router",
        "torch",
        "--backend",
        "torch",
        "--method",
        "Llama4",
        "--cases",
        "2",
        "--format",
        "bf16",
    ]
    assert main([*given, "--out", str(tmp_path)]) == 0
    assert "| torch on cpu | 2 pass |" in (tmp_path / "replay.md").read_text()
    capsys.readouterr()
    assert main(["replay", "--method", "Nothing", "--out", str(tmp_path)]) == 2
    assert "unknown method 'Nothing'" in capsys.readouterr().err


def test_a_failing_layer_leaves_a_capsule(tmp_path, capsys):
    plugin = tmp_path / "halving.py"
    plugin.write_text(
        "from conformance.backends.torch_ops import TorchBackend\n\n\n"
        "class Halving(TorchBackend):\n"
        "    def claims(self, device):\n"
        "        return [item for item in super().claims(device) if item.operation == 'moe']\n\n"
        "    def run(self, prepared, out):\n"
        "        return {'output': prepared()['output'] / 2}\n\n\n"
        "def backends():\n"
        "    return [Halving('halving', 'fp32')]\n"
    )
    words = ["--router", "torch", "--backend", "halving", "--method", "Sigmoid", "--format", "bf16", "--cases", "3"]
    assert main(["replay", *words, "--plugin", str(plugin), "--out", str(tmp_path / "out")]) == 1
    held = next((tmp_path / "out").glob("*.json"))
    assert json.loads(held.read_text())["backend"] == "halving"
    line = f"nox -s repro -- '{held}' --backend halving --plugin {plugin}"
    assert line in capsys.readouterr().out.replace("\n", "")
    assert main(shlex.split(line.removeprefix("nox -s ").replace("--", "", 1))) == 1
