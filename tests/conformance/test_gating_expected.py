"""The file of claims: the one that is shipped, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.gating.expected import ExpectedError, load
from conformance.gating.rules import __doc__ as rules_text
from conformance.gating.rules_truth import __doc__ as truth_text

SUPPORT = """[[support]]
library = "flashinfer"
subject = "R"
variants = ["AxB"]
versions = ">=0.7"
admits = [100]
refuses = [90]
source = "owner/repo#1"
"""
EXPLAINED = """[[explained]]
rule = "expected"
library = "flashinfer"
subject = "R"
sms = [100]
versions = ""
reason = "because"
source = "owner/repo#1"
"""


def test_the_shipped_claims_do_not_contradict_each_other() -> None:
    rows = load().support
    for number, one in enumerate(rows):
        for other in rows[number + 1 :]:
            if (one.library, one.subject) == (other.library, other.subject) and set(one.variants) & set(other.variants):
                assert not one.admits & other.refuses
                assert not one.refuses & other.admits


def test_the_shipped_rows_are_sourced_and_name_rules_that_exist() -> None:
    expected = load()
    rules = set(re.findall(r"^\| `([a-z-]+)` \|", f"{rules_text}\n{truth_text}", re.MULTILINE))
    assert {row.rule for row in expected.explained} <= rules
    assert all(re.search(r"[\w.-]+/[\w.-]+|PTX ISA", row.source) for row in (*expected.support, *expected.explained))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SUPPORT.replace("admits = [100]", "admits = [100, 90]"), "SM90 is both admitted and refused"),
        (SUPPORT.replace("[100]", "[99]"), "no list of architectures"),
        (SUPPORT.replace("[100]", "[true]"), "no list of architectures"),
        (SUPPORT.replace('"flashinfer"', '"flashinfr"'), "is none of"),
        (SUPPORT.replace('">=0.7"', '"newest"'), "no range of versions"),
        (SUPPORT.replace('source = "owner/repo#1"', ""), "no source"),
        (SUPPORT + "suject = 1\n", "unknown key 'suject'"),
        (EXPLAINED.replace('"because"', '" "'), "is no text"),
        (EXPLAINED.replace("explained", "explaned"), "unknown table 'explaned'"),
        ("[support]\n", "no array of tables"),
        ("[[support]\n", "Expected"),
    ],
)
def test_what_is_odd_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(text)
    with pytest.raises(ExpectedError, match=re.escape(message)) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_good_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(SUPPORT + EXPLAINED)
    expected = load(path)
    assert (expected.support[0].admits, expected.support[0].refuses) == ({100}, {90})
    assert expected.explained[0].sms == {100}


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ExpectedError, match="No such file"):
        load(tmp_path / "none.toml")
