"""Recorded selections: kept by a run, read back strictly, judged and fed to the expert layers of other backends."""

import json

import pytest
import torch

from conformance import tensor_file
from conformance.backends.torch_ops import TorchBackend
from conformance.cli import main
from conformance.discover import UsageError
from conformance.messages import JudgeReply
from conformance.replay import replay_recorded
from conformance.replay_run import judged
from conformance.selection_file import Recording, read, recording, write
from conformance.shrink import LocalProbe
from conformance.worker_tensors import to_wire
from fuzz.case import Case
from references.recipes import Recipe

ROUTER = Case.parse(
    "routing Renormalize v=1 dtype=fp32 experts=12 out=fp32 padding=none shared=0 stride=contiguous tokens=5 topk=2 "
    "values=normal seed=4"
)


def kept(case=ROUTER):
    probe = LocalProbe(TorchBackend("torch", "fp32"))
    found = probe.examine(case)
    return recording(found.records[0], Recipe(source="test").to_json(), found.replies[0].outputs, found.records)


def bare(path, **tensors):
    path.write_bytes(tensor_file.dump([to_wire(name, tensor) for name, tensor in tensors.items()]))
    return path


def layers(**change):
    return {"l": LocalProbe(TorchBackend("torch", "fp32"))}


def test_what_is_written_is_read_back(tmp_path):
    whole = kept()
    path = write(tmp_path, whole)
    assert path == tmp_path / f"{ROUTER.id}-torch-cpu.json"
    assert read(path) == [whole]
    assert read(tmp_path) == read(path.with_suffix(".safetensors")) == [whole]
    run = tmp_path / "run"
    write(run / "selections", whole)
    assert read(run) == [whole]


def test_all_forms_are_kept(tmp_path):
    for number, out in enumerate(("packed", "local", "bf16")):
        whole = kept(ROUTER.replace(out=out, seed=number))
        write(tmp_path / out, whole)
        names = {wire.name for wire in read(tmp_path / out)[0].outputs}
        assert names == {"packed": {"packed"}, "local": {"selection", "weights", "local"}}.get(
            out, {"selection", "weights"}
        )


def test_a_twin_is_not_part_of_a_recording():
    case = ROUTER.replace(seed=7)
    assert any(
        wire.name.startswith("twin:")
        for wire in LocalProbe(TorchBackend("torch", "fp32")).examine(case).replies[0].outputs
    )
    assert {wire.name for wire in kept(case).outputs} == {"selection", "weights"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "no recorded selection"),
        ({"version": 2}, "no recorded selection"),
        ({"case": "routing"}, "case: expected"),
        ({"case": "ue8m0 ceil v=1 from=scale n=4 values=normal seed=7"}, "ue8m0 is no routing case"),
        ({"case": 3}, "no line of text"),
        ({"backend": "a\nb"}, "no line of text"),
        ({"records": [["selection", "nice", "", ""]]}, "not what they should be"),
        ({"records": {}}, "not what they should be"),
        ({"recipe": {"source": "x", "import": "os"}}, "import"),
        ({"sha256": "0" * 64}, "not the tensors"),
    ],
)
def test_a_file_that_is_odd_is_refused_in_one_line(tmp_path, change, message):
    path = write(tmp_path, kept())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_missing_truncated_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no recorded selections"):
        read(tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none.safetensors")
    path = write(tmp_path, kept())
    path.with_suffix(".safetensors").unlink()
    with pytest.raises(UsageError, match="No such file"):
        read(path)
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    with pytest.raises(UsageError, match="truncated"):
        read(tmp_path / "cut.safetensors")
    with pytest.raises(UsageError, match="holds x, expected selection and weights"):
        read(bare(tmp_path / "odd.safetensors", x=torch.ones(2)))


def test_a_recording_is_judged_and_fed():
    found = replay_recorded([kept(), kept(ROUTER.replace(seed=5))], lambda item: [], layers(), ("bf16",))
    assert set(found) == {("torch on cpu", ""), ("torch on cpu", "l")}
    assert found["torch on cpu", ""].selections == {"pass": 2}
    assert found["torch on cpu", "l"].outputs == {"pass": 2}


def test_two_verdicts():
    def halved(prepared, out):
        return {"output": prepared()["output"] / 2}

    wrong = TorchBackend("torch", "fp32")
    wrong.run = halved
    bad = [("wrong", "selection wrong: not_top_k"), ("wrong", "weights wrong: more")]
    found = replay_recorded([kept()], lambda item: bad, {"l": LocalProbe(wrong)}, ("bf16",))
    assert found["torch on cpu", ""].selections == {"wrong": 1}
    assert found["torch on cpu", ""].failing == [f"torch on cpu: '{ROUTER}': selection wrong: not_top_k"]
    assert found["torch on cpu", "l"].outputs == {"wrong": 1}
    known = replay_recorded([kept()], lambda item: [("known", "x")], layers(), ("bf16",))["torch on cpu", ""]
    assert (known.selections, known.failing) == ({"known": 1}, [])


def test_an_unwritten_record_stays_one():
    note = "depends on the output buffer's previous contents: 1 of it is unwritten"
    item = Recording(name="n", outputs=(), records=(("selection", "wrong", "", note), ("weights", "pass", "", "")))
    reply = JudgeReply(input_sha256="", parts=[{"part": "selection", "verdict": "pass", "message": ""}])
    assert judged(item, reply) == [("wrong", f"selection wrong: {note}")]
    again = JudgeReply(input_sha256="", parts=[{"part": "weights", "verdict": "wrong", "message": "outside"}])
    assert judged(item, again)[1:] == [("wrong", "weights wrong: outside")]
    marked = Recording(name="n", outputs=(), records=(("selection", "wrong", "some-entry", note),))
    assert judged(marked, reply) == [("known", f"selection wrong: {note}")]
    with pytest.raises(UsageError, match="recorded on other inputs"):
        judged(Recording(name="n", outputs=(), input_sha256="1" * 64), reply)


def test_a_selection_of_somebodys_model(tmp_path):
    ids = torch.tensor([[0, 3], [2, 1], [-1, 5]], dtype=torch.int16)
    path = bare(tmp_path / "mine.safetensors", selection=ids, weights=torch.full((3, 2), 0.5))
    found = replay_recorded(read(path), lambda item: [], layers(), ("mxfp8",), experts=6)
    assert found["mine.safetensors", ""].selections == {"pass": 1}
    assert found["mine.safetensors", "l"].outputs == {"pass": 1}
    few = replay_recorded(read(path), lambda item: [], layers(), ("mxfp8",), experts=4)["mine.safetensors", ""]
    assert few.selections == {"wrong": 1}
    assert few.failing == ["mine.safetensors: mine.safetensors: 1 of 3 tokens have ids outside 0..3, first 2: [-1, 5]"]
    twice = bare(tmp_path / "twice.safetensors", selection=ids * 0, weights=torch.ones(3, 2))
    assert "an expert twice" in str(replay_recorded(read(twice), lambda item: [], {}, ("bf16",), experts=6))
    with pytest.raises(UsageError, match="say with --experts"):
        replay_recorded(read(path), lambda item: [], layers(), ("mxfp8",))
    shapes = bare(tmp_path / "shapes.safetensors", selection=ids, weights=torch.ones(2, 2))
    with pytest.raises(UsageError, match="no ids and numbers of one shape"):
        replay_recorded(read(shapes), lambda item: [], layers(), ("bf16",), experts=6)


def test_a_run_keeps_what_routers_answer_and_replay_takes_it(tmp_path, capsys):
    case = str(ROUTER)
    words = ["run", "--backend", "torch", "--case", case, "--corpus", "none", "--sweep", "none", "--keep-selections"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert [path.suffix for path in sorted((tmp_path / "run" / "selections").iterdir())] == [".json", ".safetensors"]
    capsys.readouterr()
    taken = ["replay", "--selections", str(tmp_path / "run"), "--backend", "torch", "--format", "bf16"]
    assert main([*taken, "--out", str(tmp_path / "replay")]) == 0
    table = (tmp_path / "replay" / "replay.md").read_text()
    assert "| torch on cpu | 1 pass |  |  |" in table
    assert "|  |  | torch on cpu | 1 pass |" in table
    assert main([*taken, "--router", "nobody", "--out", str(tmp_path / "replay")]) == 2
    assert "none of 1 recorded selections is of these routers and methods" in capsys.readouterr().err
