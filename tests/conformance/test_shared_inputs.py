"""Large inputs are drawn once, are the case's own, and belong to whoever reads them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance import inputs_folder, shared_inputs
from conformance.operations import OPERATIONS
from fuzz.case import Case
from fuzz.hashing import sha256_of

TEXTS = (
    "moe nvfp4 v=1 experts=7 gate=first hidden=64 ids=map_any intermediate=32 limit=none out=bf16 scale=e4m3 scaling=1 "
    "tokens=3 topk=2 values=normal weight=output seed=1",
    "quantize deepseek_fp8 v=1 block=1x128 dtype=bf16 k=130 m=5 scale=fp32 stride=padded values=normal seed=2",
    "gemm w4a8 v=1 k=64 layout=plain m=3 n=5 out=bf16 scale=ue8m0 values=normal seed=3",
    "routing DeepSeekV3 v=1 bias=0.1 bias_dtype=bf16 dtype=fp16 experts=8 groups=2 out=bf16 padding=some "
    "renormalize=on scaling=1 shared=0 stride=transposed tokens=4 topk=2 topk_group=1 values=normal seed=4",
    "gemm deepseek_fp8 v=1 k=128 layout=mn_major m=8 n=5 out=bf16 scale=fp32 values=normal seed=6",  # strides (1, 1)
    "grouped_gemm deepseek_fp8 v=1 grouping=masked groups=2 k=128 layout=mn_major m=8 n=5 out=bf16 scale=ue8m0 "
    "values=normal seed=7",
    "grouped_gemm fp8_per_tensor v=1 grouping=contiguous groups=3 k=16 layout=plain m=7 n=16 out=bf16 scale=fp32 "
    "values=normal seed=5",
)
CASE = Case.parse(TEXTS[0])


@pytest.fixture(autouse=True)
def everything_is_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shared_inputs, "SHARED", 0)
    with inputs_folder.shared():
        yield Path(os.environ[inputs_folder.FOLDER])
    assert inputs_folder.FOLDER not in os.environ


def refuse(case: Case) -> dict[str, Tensor]:
    raise AssertionError(f"drawn again: {case}")


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_read_is_what_was_drawn(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(text)
    drawn = OPERATIONS[case.operation].inputs(case)
    shared_inputs.inputs(case, "backend")
    monkeypatch.setattr(shared_inputs, "_drawn", refuse)
    read = shared_inputs.inputs(case, "backend")
    assert list(read) == list(drawn)
    for name, tensor in drawn.items():
        assert (read[name].dtype, read[name].shape, read[name].stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert torch.equal(read[name], tensor)
    assert sha256_of(read) == sha256_of(drawn)


def test_a_reader_changes_its_own_alone_and_sides_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_inputs.inputs(CASE, "backend")
    once = shared_inputs.inputs(CASE, "backend")
    before = once["w1"].clone()
    once["w1"].add_(1)
    assert torch.equal(shared_inputs.inputs(CASE, "backend")["w1"], before)
    monkeypatch.setattr(shared_inputs, "_drawn", refuse)
    with pytest.raises(AssertionError, match="drawn again"):
        shared_inputs.inputs(CASE, "oracle")


def test_those_who_ask_at_once_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    original = shared_inputs._drawn

    def slowly(case: Case) -> dict[str, Tensor]:
        drawn.append(case.text)
        begun.set()
        assert go_on.wait(30)
        return original(case)

    monkeypatch.setattr(shared_inputs, "_drawn", slowly)
    found: list[str] = []
    askers = [
        threading.Thread(target=lambda: found.append(sha256_of(shared_inputs.inputs(CASE, "backend")))) for _ in "12"
    ]
    askers[0].start()
    assert begun.wait(30)
    askers[1].start()
    go_on.set()
    for asker in askers:
        asker.join(30)
    assert len(drawn) == 1
    assert found == [sha256_of(original(CASE))] * 2


def test_nobody_waits_for_the_dead(everything_is_shared: Path) -> None:
    """A process that was killed in the middle of writing leaves a lock that nobody holds, and part of its files."""
    shared_inputs.inputs(CASE, "backend")
    place = next(path for path in (everything_is_shared / "backend").iterdir() if path.is_dir())
    place.rename(place.with_suffix(".part"))
    (place.with_suffix(".part") / shared_inputs.INDEX).unlink()
    assert place.with_suffix(".lock").exists()
    assert sha256_of(shared_inputs.inputs(CASE, "backend")) == sha256_of(OPERATIONS["moe"].inputs(CASE))
    assert place.is_dir()
    assert not place.with_suffix(".part").exists()


@pytest.mark.parametrize("failing", ["open", "mkdir", "write_text", "rename"])
def test_a_full_disk_costs_nothing_but_time(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, failing, full)
    for side in ("backend", "oracle", "backend"):
        assert sha256_of(shared_inputs.inputs(CASE, side)) == sha256_of(OPERATIONS["moe"].inputs(CASE))


def test_without_a_folder_nothing_is_shared() -> None:
    def none(**_: object) -> None:
        raise FileNotFoundError("no usable temporary directory")

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(inputs_folder.FOLDER)
        patch.setattr(tempfile, "TemporaryDirectory", none)
        with inputs_folder.shared():
            assert inputs_folder.FOLDER not in os.environ
        patch.setenv(inputs_folder.FOLDER, "/nowhere")
        assert shared_inputs.inputs(CASE, "backend")


@pytest.mark.parametrize("harm", ["truncated", "no index", "odd index", "a missing tensor", "another tensor"])
def test_files_that_are_odd_are_drawn_anew(harm: str, everything_is_shared: Path) -> None:
    shared_inputs.inputs(CASE, "backend")
    place = next(path for path in (everything_is_shared / "backend").iterdir() if path.is_dir())
    index = place / shared_inputs.INDEX
    match harm:
        case "truncated":
            (place / "1").write_bytes((place / "1").read_bytes()[:-1])
        case "no index":
            index.unlink()
        case "odd index":
            index.write_text("[]")
        case "a missing tensor":
            (place / "0").unlink()
        case "another tensor":
            index.write_text(index.read_text().replace('"x"', '"y"'))
    assert sha256_of(shared_inputs.inputs(CASE, "backend")) == sha256_of(OPERATIONS["moe"].inputs(CASE))


def test_the_oldest_go_first_where_room_is_short(everything_is_shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [CASE.replace(seed=seed) for seed in range(4)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in OPERATIONS["moe"].inputs(CASE).values())
    monkeypatch.setattr(shared_inputs, "MOST_BYTES", 3 * size)  # and their indexes are no tensors: two fit
    for number, case in enumerate(cases):
        shared_inputs.inputs(case, "backend")
        for path in (everything_is_shared / "backend").iterdir():
            if path.stat().st_mtime > 1e6:
                os.utime(path, (number, number))
    large = CASE.replace(experts=64)
    shared_inputs.inputs(large, "backend")  # more than there is room for: nothing goes for it
    drawn: list[Case] = []
    original = shared_inputs._drawn
    monkeypatch.setattr(shared_inputs, "_drawn", lambda case: drawn.append(case) or original(case))
    monkeypatch.setattr(shared_inputs, "_write", lambda found, place: None)
    for case in cases:
        shared_inputs.inputs(case, "backend")
    assert drawn == cases[:2]
    monkeypatch.undo()


def test_what_a_killed_run_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    names = [f"{inputs_folder.PREFIX}{number}-abc" for number in (process.pid, os.getpid(), 1, "no-number", 10**30)]
    for name in names:
        (tmp_path / name / "backend").mkdir(parents=True)
    with inputs_folder.shared():
        left = {path.name for path in tmp_path.iterdir()}
    assert names[0] not in left
    assert set(names[1:]) <= left


def test_small_cases_and_other_commands_draw_for_themselves(everything_is_shared: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_inputs, "SHARED", 10**9)
        shared_inputs.inputs(CASE, "backend")
        assert not list(everything_is_shared.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(inputs_folder.FOLDER)
        shared_inputs.inputs(CASE, "backend")
        assert not list(everything_is_shared.iterdir())
