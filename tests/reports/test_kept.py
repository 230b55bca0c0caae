from __future__ import annotations

from reports import html, markdown
from reports.kept import kept
from reports.summary import summarise

ITEM = {
    "case": "ue8m0 ceil v=1 from=scale n=9 values=normal seed=5",
    "shrunk": "ue8m0 ceil v=1 from=scale n=1 values=normal seed=0",
    "backend": "lib",
    "device": "cpu",
    "part": "scales",
    "verdict": "wrong",
    "calls": 3,
    "differing": 1,
    "elements": 1,
    "capsule": "capsules/0123456789abcdef.json",
    "repro": "nox -s repro -- 'out/capsules/0123456789abcdef.json' --backend lib",
    "note": "",
}


def test_a_kept_failure_is_linked_in_both_reports() -> None:
    summary = summarise([], {"failures": [ITEM]})
    page = markdown.render(summary)
    assert "## Failures, made smaller" in page
    assert "[capsule](capsules/0123456789abcdef.json)" in page
    assert "`ue8m0 ceil v=1 from=scale n=1 values=normal seed=0`" in page
    assert '<a href="capsules/0123456789abcdef.json">capsule</a>' in html.render(summary)


def test_a_foreign_link_is_no_link() -> None:
    (row,) = kept({"failures": [{**ITEM, "capsule": "javascript:alert(1)"}]})
    assert row.link == ""
    assert "javascript" not in html.render(summarise([], {"failures": [{**ITEM, "capsule": "javascript:alert(1)"}]}))


def test_failures_without_a_capsule_say_why_or_nothing() -> None:
    assert kept({"failures": [{**ITEM, "capsule": "", "note": ""}]}) == []
    (row,) = kept({"failures": [{**ITEM, "capsule": "", "note": "does not fail when it is called again by itself"}]})
    assert (row.link, row.note) == ("", "does not fail when it is called again by itself")


def test_a_run_that_lists_nothing_has_no_section() -> None:
    assert kept({"failures": "x"}) == []
    assert "made smaller" not in markdown.render(summarise([], {}))
