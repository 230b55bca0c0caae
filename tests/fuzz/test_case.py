"""The text form is complete, canonical and strict."""

import hashlib

import pytest

from fuzz.case import Case, CaseError

TEXT = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=96 m=5 scale=ceil stride=contiguous values=scale_ladder seed=7"


def test_text_round_trips():
    case = Case.parse(TEXT)
    assert case.text == TEXT
    assert Case.from_json(case.to_json()) == case
    assert case.integer("k") == 96


def test_id_is_the_head_of_the_sha256_of_the_text():
    assert Case.parse(TEXT).id == hashlib.sha256(TEXT.encode()).hexdigest()[:16]


def test_replace_keeps_the_rest():
    assert Case.parse(TEXT).replace(k=64, seed=9).text == TEXT.replace("k=96", "k=64").replace("seed=7", "seed=9")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("quantize", "quantise", "unknown operation"),
        ("mxfp8", "mxfp9", "no variant"),
        ("v=1", "v=2", "v=1"),
        (" block=1x32", "", "lacks block"),
        ("block=1x32", "block=1x32 depth=3", "takes no depth"),
        ("k=96 m=5", "m=5 k=96", "sorted"),
        ("k=96", "k=0", "k=0"),
        ("k=96", "k=096", "k=096"),
        ("k=96", "k=99999999999", "k=99999999999"),
        ("k=96", "k=1000000 ", "KEY=VALUE"),
        ("k=96", "k=-1", "k=-1"),
        ("k=96 m=5", "k=100000 m=100000", "elements"),
        ("scale=ceil", "scale=up", "scale=up"),
        ("seed=7", "seed=4294967296", "seed=4294967296"),
        ("seed=7", "seed=x", "seed=N"),
        ("seed=7", "seed=7\n", "printable"),
        ("values=scale_ladder", "values=nonfinite", "values=nonfinite"),
    ],
)
def test_anything_else_is_refused_in_one_line(old, new, words):
    with pytest.raises(CaseError, match="case: ") as caught:
        Case.parse(TEXT.replace(old, new))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_of_another_version_is_refused():
    with pytest.raises(CaseError, match="version"):
        Case.from_json({**Case.parse(TEXT).to_json(), "v": 2})
