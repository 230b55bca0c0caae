from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from conformance import ledger
from conformance.ledger import Ledger, LedgerError
from conformance.messages import Description
from reports.record import Record

WITNESS = "ue8m0 ceil v=1 from=scale n=4 values=boundary seed=1"
ENTRY = f"""
[[entry]]
id = "one-ulp"
backend = "lib"
versions = ">=1.0,<1.3"
libraries = {{ torch = "<2.13" }}
devices = ["cpu", "cuda:*"]
operation = "ue8m0"
variants = ["ceil"]
where = {{ from = ["scale"] }}
part = "scales"
verdict = "wrong"
message = "ulp above"
reason = "log2 in FP32"
issue = "owner/repo#12"
witness = "{WITNESS}"
"""
DESCRIPTION = Description(
    backend="lib",
    version="1.2.0+cpu",
    interpreter="i",
    device="cuda:1",
    device_name="",
    sm="",
    pace=1.0,
    claims=[],
    libraries={"torch": "2.12.1+cpu"},
)
RECORD = Record(
    run="r",
    case=WITNESS.replace("seed=1", "seed=2"),
    id="0",
    input_sha256="",
    backend="lib",
    version="1.2.0+cpu",
    interpreter="i",
    device="cuda:1",
    sm="",
    options="",
    recipe="",
    part="scales",
    verdict="wrong",
    message="one ulp above 2^3",
)
GROUPS = [("ue8m0", "ceil")]


def load(tmp_path: Path, text: str = ENTRY) -> Ledger:
    path = tmp_path / "ledger.toml"
    path.write_text(text)
    return ledger.load(path)


def test_the_ledger_of_the_project_loads() -> None:
    ids = [entry.id for entry in ledger.load(ledger.DEFAULT).entries]
    assert len(ids) == len(set(ids))


def test_the_commented_example_is_a_valid_entry(tmp_path: Path) -> None:
    lines = ledger.DEFAULT.read_text().splitlines()
    start = lines.index("# [[entry]]")
    commented = takewhile(lambda line: line.startswith("# "), lines[start:])
    example = "\n".join(line.removeprefix("# ") for line in commented)
    assert [entry.id for entry in load(tmp_path, example).entries] == ["examplelib-mxfp8-ceil-one-ulp"]


def test_a_record_of_the_class_is_explained(tmp_path: Path) -> None:
    assert load(tmp_path).match(RECORD) == "one-ulp"
    assert load(tmp_path).marked(RECORD).ledger_id == "one-ulp"


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "other"},
        {"version": "1.3"},
        {"version": "not a version"},
        {"device": "xpu:0"},
        {"part": "payload"},
        {"verdict": "flaky"},
        {"verdict": "pass"},
        {"message": "two ulp below"},
        {"case": "ue8m0 ceil v=1 from=amax_e4m3 n=4 values=boundary seed=1"},
        {"case": "ue8m0 floor v=1 from=scale n=4 values=boundary seed=1"},
    ],
)
def test_a_record_outside_the_class_is_not(tmp_path: Path, change: dict[str, Any]) -> None:
    assert load(tmp_path).match(replace(RECORD, **change)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.4"},
        {"backend": "other"},
        {"device": "xpu:0"},
        {"libraries": {"torch": "2.13.0"}},
        {"libraries": {}},
    ],
)
def test_entries_apply_to_their_targets_only(tmp_path: Path, change: dict[str, Any]) -> None:
    book = load(tmp_path)
    assert book.narrowed(DESCRIPTION, GROUPS) == book
    assert book.narrowed(replace(DESCRIPTION, **change), GROUPS) == Ledger()
    assert book.narrowed(DESCRIPTION, [("ue8m0", "floor")]) == Ledger()


@pytest.mark.parametrize(("sm", "known"), [("90", True), ("86", True), ("100", False), ("", False)])
def test_an_entry_speaks_of_its_architectures(tmp_path: Path, sm: str, known: bool) -> None:
    book = load(tmp_path, ENTRY.replace("operation =", 'sm = ["8?", "90"]\noperation =', 1))
    assert (book.match(replace(RECORD, sm=sm)) is not None) == known
    assert (book.narrowed(replace(DESCRIPTION, sm=sm), GROUPS) == book) == known


def test_a_prerelease_is_within_its_range(tmp_path: Path) -> None:
    assert load(tmp_path).match(replace(RECORD, version="1.2rc1")) == "one-ulp"


def test_a_witness_that_fails_as_written_is_no_problem(tmp_path: Path) -> None:
    assert load(tmp_path).problems([replace(RECORD, case=WITNESS)]) == []


@pytest.mark.parametrize(
    ("records", "line"),
    [
        (
            [replace(RECORD, case=WITNESS, verdict="pass")],
            "ledger one-ulp: the witness passes: remove the entry or narrow its versions",
        ),
        (
            [replace(RECORD, case=WITNESS, part="call", verdict="unsupported", message="no claim")],
            "ledger one-ulp: the witness cannot run: no claim",
        ),
        ([], "ledger one-ulp: the witness cannot run: it was not executed"),
        (
            [replace(RECORD, case=WITNESS, part="call", verdict="crash", message="SIGSEGV")],
            "ledger one-ulp: the witness fails in another way: call is crash: SIGSEGV",
        ),
    ],
)
def test_a_witness_that_does_otherwise_is_a_problem(tmp_path: Path, records: list[Record], line: str) -> None:
    assert load(tmp_path).problems(records) == [line]


@pytest.mark.parametrize(
    ("old", "new", "fragment"),
    [
        ("[[entry]]", "[[entries]]", "expected [[entry]] tables only"),
        ("[[entry]]", "entry = 3\n[other]", "expected [[entry]] tables only"),
        ("[[entry]]", "[[entry", "ledger.toml"),
        ('part = "scales"', 'parts = "scales"', "unknown parts; lacks part"),
        ('reason = "log2 in FP32"', 'reason = ""', "reason is not a text"),
        ('">=1.0,<1.3"', '"about 1"', "Invalid specifier"),
        ('"ulp above"', '"ulp ("', "message is not a regular expression"),
        ('"wrong"', '"pass"', "verdict 'pass' is none of"),
        ('"owner/repo#12"', '"see below"', "is not owner/repository#number"),
        ('"ue8m0"', '"gemv"', "unknown operation 'gemv'"),
        ('["ceil"]', '["ceiling"]', "no variant 'ceiling'"),
        ('["ceil"]', '"ceil"', "variants is not a list of texts"),
        ("from = ", "form = ", "has no key form"),
        ("seed=1", "seed=-1", "witness: case:"),
        ("from=scale", "from=amax_e4m3", "not one of the cases that the entry covers"),
    ],
)
def test_anything_odd_is_one_line(tmp_path: Path, old: str, new: str, fragment: str) -> None:
    assert old in ENTRY
    with pytest.raises(LedgerError) as caught:
        load(tmp_path, ENTRY.replace(old, new))
    assert fragment in str(caught.value)
    assert str(caught.value).startswith("ledger: ")
    assert "\n" not in str(caught.value)


def test_ids_are_distinct(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="two entries have the id 'one-ulp'"):
        load(tmp_path, ENTRY + ENTRY)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot read"):
        ledger.load(tmp_path / "none.toml")


def test_an_entry_speaks_of_every_variant_it_names_not_only_its_witness(tmp_path: Path) -> None:
    (entry,) = load(tmp_path).entries
    wider = Ledger((replace(entry, variants=(*entry.variants, "floor")),))
    assert wider.narrowed(DESCRIPTION, [("ue8m0", "floor")]) == wider
