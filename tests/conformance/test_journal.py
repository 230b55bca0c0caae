from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import journal
from conformance.journal import Journal, JournalError, OutDirectory
from reports.record import Record

RECORD = Record(
    run="r",
    case="ue8m0 ceil v=1 from=scale n=4 values=normal seed=1",
    id="0",
    input_sha256="",
    backend="b",
    version="1",
    interpreter="i",
    device="cpu",
    sm="",
    options="",
    recipe="",
    part="scales",
    verdict="pass",
)
OTHER = replace(RECORD, case=RECORD.case.replace("seed=1", "seed=2"))


def test_records_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    book = Journal(tmp_path)
    book.launching(journal.key_of(RECORD))
    book.write([RECORD, replace(RECORD, part="payload")])
    assert len(journal.read_records(tmp_path / "records.jsonl")) == 2
    assert RECORD.case in (tmp_path / "launched.jsonl").read_text()
    book.close()
    assert not (tmp_path / "launched.jsonl").exists()


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_truncated_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "records.jsonl"
    text = RECORD.to_line() + "\n" + OTHER.to_line() + "\n"
    path.write_text(text[:-cut])
    assert journal.read_records(path) == [RECORD]


def test_a_broken_line_elsewhere_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(RECORD.to_line() + "\n" + "{}\n" + OTHER.to_line() + "\n")
    with pytest.raises(JournalError, match=r"records\.jsonl:2: record: "):
        journal.read_records(path)


def test_the_last_case_may_lack_parts() -> None:
    records = [RECORD, OTHER, replace(OTHER, part="payload")]
    assert journal.whole_cases(records) == [RECORD]
    assert journal.whole_cases([]) == []


def test_kept_records_come_first(tmp_path: Path) -> None:
    book = Journal(tmp_path, [RECORD])
    book.write([OTHER])
    book.close()
    assert journal.read_records(tmp_path / "records.jsonl") == [RECORD, OTHER]


RUN = {"tool": journal.TOOL, "complete": False}


def finished(tmp_path: Path) -> Path:
    out = tmp_path / "a" / "out"
    OutDirectory(out).close()
    journal.write_run(out, {"tool": journal.TOOL, "complete": True})
    (out / "records.jsonl").write_text("")
    (out / "report.md").write_text("old")
    (out / "logs").mkdir()
    (out / "logs" / f"oracle-{os.getpid() + 1}-1.log").write_text("old")
    (out / "logs" / f"oracle-{os.getpid()}-1.log").write_text("new")
    (out / "logs" / "thesis.log").write_text("mine")
    return out


def start(out: Path, *, resume: bool = False) -> None:
    directory = OutDirectory(out)
    directory.clear(RUN, resume=resume)
    directory.close()


def test_nothing_is_removed_before_the_run_starts(tmp_path: Path) -> None:
    out = finished(tmp_path)
    OutDirectory(out).close()
    assert (out / "report.md").exists()
    assert journal.read_run(out)["complete"] is True


def test_a_fresh_run_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    out = finished(tmp_path)
    start(out)
    assert sorted(item.name for item in out.iterdir()) == ["logs", "run.json"]
    assert journal.read_run(out)["complete"] is False


def test_old_logs_go_and_those_of_this_process_stay(tmp_path: Path) -> None:
    out = finished(tmp_path)
    start(out)
    assert sorted(item.name for item in (out / "logs").iterdir()) == [f"oracle-{os.getpid()}-1.log", "thesis.log"]


def test_a_resumed_run_keeps_the_journal_but_no_report(tmp_path: Path) -> None:
    out = finished(tmp_path)
    start(out, resume=True)
    assert sorted(item.name for item in out.iterdir()) == ["logs", "records.jsonl", "run.json"]


def test_left_over_temporary_files_are_removed(tmp_path: Path) -> None:
    out = finished(tmp_path)
    (out / ".report.md.123.tmp").write_text("half")
    start(out, resume=True)
    assert not (out / ".report.md.123.tmp").exists()


@pytest.mark.parametrize("name", ["thesis.tex", ".gitignore", ".thesis.12.tmp"])
def test_foreign_files_are_refused_and_kept(tmp_path: Path, name: str) -> None:
    out = finished(tmp_path)
    (out / name).write_text("mine")
    with pytest.raises(JournalError, match="which no run wrote"):
        OutDirectory(out)
    assert (out / name).read_text() == "mine"
    assert (out / "report.md").exists()


def test_a_folder_with_a_familiar_name_but_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(JournalError, match=r"holds report\.md but no run\.json"):
        OutDirectory(tmp_path)
    assert (tmp_path / "report.md").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"tool": "other"}'])
def test_a_run_json_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(JournalError):
        OutDirectory(tmp_path)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(JournalError, match="--out "):
            OutDirectory(path)


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    out = finished(tmp_path)
    first = OutDirectory(out)
    with pytest.raises(JournalError, match="another run is writing there"):
        OutDirectory(out)
    first.close()
    OutDirectory(out).close()
