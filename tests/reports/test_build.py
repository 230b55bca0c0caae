import json
import math
import random
import stat
from pathlib import Path

import pandas as pd
import pytest

from reports import files, frame, markdown
from reports.build import write_all

FILES = {"results.parquet", "results.csv", "report.md", "report.html", "junit.xml", "run.json"}


@pytest.fixture(autouse=True)
def no_step_summary(monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def test_every_file_is_written_and_nothing_else(tmp_path, records, run):
    paths = write_all(tmp_path / "new" / "out", records, run)
    assert set(paths) == FILES
    assert {path.name for path in (tmp_path / "new" / "out").iterdir()} == FILES
    assert all(paths[name].name == name for name in FILES)


def test_the_same_records_in_another_order_give_the_same_bytes(tmp_path, records, run):
    one = write_all(tmp_path / "a", records, run)
    two = write_all(tmp_path / "b", random.Random(1).sample(records, len(records)), run)
    for name in FILES:
        assert one[name].read_bytes() == two[name].read_bytes(), name


def test_an_empty_run_gives_every_file_and_says_so(tmp_path):
    paths = write_all(tmp_path, [], {})
    for name in ("report.md", "report.html", "junit.xml"):
        assert "no case was executed" in paths[name].read_text(encoding="utf-8").lower(), name
    assert len(pd.read_parquet(paths["results.parquet"])) == 0
    assert list(pd.read_csv(paths["results.csv"]).columns) == list(frame.COLUMNS)


def test_an_incomplete_run_is_told_in_every_report(tmp_path, make):
    paths = write_all(tmp_path, [make()], {"complete": False})
    for name in ("report.md", "report.html", "junit.xml"):
        assert "The run stopped before its end" in paths[name].read_text(encoding="utf-8"), name
    assert json.loads(paths["run.json"].read_text())["totals"]["outcome"] == "incomplete"


def test_parquet_holds_every_field_with_its_type(tmp_path, make):
    written = make(
        headroom=math.inf, stage_radii={"b": 2.0, "a": 1.0}, worst_index=[3, 4], bit_equal=None, message="é\n'"
    )
    paths = write_all(tmp_path, [written, make(backend="zeta", headroom=None)], {})
    table = pd.read_parquet(paths["results.parquet"])
    first, second = (table.iloc[index] for index in (0, 1))
    assert list(table.columns) == list(frame.COLUMNS)
    assert first["headroom"] == math.inf
    assert math.isnan(second["headroom"])
    assert dict(first["stage_radii"]) == {"a": 1.0, "b": 2.0}
    assert list(first["worst_index"]) == [3, 4]
    assert second["worst_index"] is None
    assert math.isnan(first["bit_equal"])
    assert first["message"] == "é\n'"
    assert (first["operation"], first["variant"]) == ("quantize", "mxfp8")


def test_csv_can_be_read_back(tmp_path, make):
    nasty = 'a, "quoted"\nline; <b>'
    written = make(message=nasty, headroom=math.inf, worst_index=[1, 2], stage_radii={"x": 0.5})
    table = pd.read_csv(write_all(tmp_path, [written], {})["results.csv"], keep_default_na=False)
    row = table.iloc[0]
    assert row["message"] == nasty
    assert row["headroom"] == math.inf
    assert json.loads(row["worst_index"]) == [1, 2]
    assert json.loads(row["stage_radii"]) == {"x": 0.5}


def test_frame_agrees_with_the_records(records):
    table = frame.frame(records)
    assert len(table) == len(records)
    assert table["verdict"].value_counts().to_dict() == {"pass": 5, "wrong": 3, "unsupported": 2, "crash": 1}


def test_run_json_keeps_the_run_and_adds_the_totals(tmp_path, records, run):
    data = json.loads(write_all(tmp_path, records, run)["run.json"].read_text())
    assert {key: data[key] for key in run} == run
    assert data["totals"] == {
        "outcome": "failed",
        "cases": 5,
        "calls": 8,
        "records": 11,
        "status": {"fail": 2, "known": 1, "pass": 3, "refused": 0, "unsupported": 2},
        "unexplained": {"wrong": 1, "crash": 1},
        "known": {"L1": 1},
    }
    assert write_all(tmp_path / "again", records, data)["run.json"].read_text() == (tmp_path / "run.json").read_text()


def test_lone_surrogates_do_not_stop_a_report(tmp_path, make):
    write_all(tmp_path, [make(verdict="wrong", message="\ud800")], {})


def test_a_step_summary_is_appended_to(tmp_path, records, run, monkeypatch):
    place = tmp_path / "summary.md"
    place.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    paths = write_all(tmp_path / "out", records, run)
    assert place.read_text(encoding="utf-8") == "before\n" + paths["report.md"].read_text(encoding="utf-8")


def test_a_step_summary_that_is_nearly_full_gets_a_cut_report(tmp_path, records, run, monkeypatch):
    place = tmp_path / "summary.md"
    place.write_bytes(b"x" * (markdown.LIMIT - 1500))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    write_all(tmp_path / "out", records, run)
    assert place.stat().st_size <= markdown.LIMIT
    assert b"Truncated: " in place.read_bytes()


def test_a_step_summary_that_cannot_be_written_is_a_warning(tmp_path, records, run, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "missing" / "summary.md"))
    with pytest.warns(UserWarning, match="GITHUB_STEP_SUMMARY"):
        paths = write_all(tmp_path / "out", records, run)
    assert set(paths) == FILES


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    place = tmp_path / "file"
    place.write_text("old")

    def half(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        files.replace(place, half)
    assert [item.name for item in tmp_path.iterdir()] == ["file"]
    assert place.read_text() == "old"


def test_a_written_file_is_an_ordinary_file(tmp_path):
    place = files.replace_text(tmp_path / "deep" / "file", "é\n")
    assert place.read_bytes() == "é\n".encode()
    assert stat.S_ISREG(place.stat().st_mode)
