import math

import pytest

from reports import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "∞"),
        (0.0, "0"),
        (1e-9, "<0.001"),
        (0.5, "0.500"),
        (0.9999, "0.999"),
        (math.nextafter(1, 0), "0.999"),
        (1.0, "1"),
        (math.nextafter(1, 2), "1.01"),
        (1.25, "1.25"),
        (42.0, "42.0"),
        (999.5, "1000"),
        (12345.0, "1.2e4"),
    ],
)
def test_headroom_never_rounds_across_one(value, shown):
    assert text.headroom(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (1.0, "100 %"), (0.999999, "99.99 %"), (0.5, "50.00 %"), (1e-7, "<0.01 %"), (0.0, "0.00 %")],
)
def test_only_everything_is_100_percent(value, shown):
    assert text.share(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.04, "0.0 s"), (9.96, "10.0 s"), (75, "75 s"), (725, "12 min 5 s"), (7380, "2 h 3 min")]
)
def test_seconds(value, shown):
    assert text.seconds(value) == shown


def test_counts_name_the_most_frequent_first_and_no_zeros():
    assert text.counts({"wrong": 2, "crash": 1000, "hang": 0, "error": 2}) == "1,000 crash, 2 error, 2 wrong"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\tb\r\n c", "a b c"),
        ("\x1b[31mred", "\ufffd[31mred"),
        ("\u202egnp", "\ufffdgnp"),
        ("\ud800", "\ufffd"),
        (None, ""),
        (7, "7"),
        ({"b": 1, "a": [2]}, '{"a": [2], "b": 1}'),
    ],
)
def test_a_line_is_one_printable_line(value, shown):
    assert text.line(value) == shown


def test_a_cut_shows():
    assert text.line("abcdef", 4) == "abc…"
    assert text.line("abcd", 4) == "abcd"


@pytest.mark.parametrize(
    ("issue", "address"),
    [
        ("owner/repo#12", "https://github.com/owner/repo/issues/12"),
        ("https://example.org/x?y=1", "https://example.org/x?y=1"),
        ("javascript:alert(1)", ""),
        ('https://a" onclick=x', ""),
        ("see owner/repo#12", ""),
    ],
)
def test_link(issue, address):
    assert text.link(issue) == address


def test_alike_forgets_numbers_only():
    assert text.alike("3 of 4,096 outside: [3, 17] is 0x7F, not 1.5e-3") == text.alike(
        "7 of 12 outside: [0, 2] is 0x01, not 2"
    )
    assert text.alike("3 outside; first at [1]: 0x7f (nan)") == text.alike("4 outside; first at [2]: -0.5")
    assert text.alike("is 2^-149") == text.alike("is 2^127")
    assert text.alike("scales 3") != text.alike("payload 3")


def test_strings_takes_what_a_run_may_say():
    assert text.strings(None) == text.strings("") == []
    assert text.strings({"b": "2", "a": 1}) == ["a 1", "b 2"]
    assert text.strings(["x", 1]) == ["x", "1"]
    assert text.strings("x") == ["x"]


def test_device():
    assert text.device("cpu") == "cpu"
    assert text.device("cuda:0", "90", "GPU") == "cuda:0 (GPU, sm90)"
    assert text.device("cpu", "", "cpu") == "cpu"
