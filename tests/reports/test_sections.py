"""Sections that a run takes over: in both reports, cleaned, and never in the way of the rest."""

from __future__ import annotations

import pytest

from reports import html, markdown
from reports.sections import Section, Table, sections
from reports.summary import lines, summarise

GATES = Section(
    title="Gates",
    headline="DISAGREE: 1 of 3",
    tone="bad",
    tables=(
        Table(
            title="Disagreements",
            head=("rule", "what", "again"),
            rows=(("expected", "Runner|x", "python -m it --sm 90"),),
            code=(1,),
            lines=(2,),
        ),
        Table(title="lib 1.0", head=("subject", "SM90"), rows=(("Runner", "yes"),), folded=True, notes=("as asked",)),
    ),
    notes=("yes admits",),
)


def test_a_section_is_in_every_report(make, run):
    run["sections"] = [GATES.to_json()]
    summary = summarise([make()], run)
    assert "Gates: DISAGREE: 1 of 3" in lines(summary)
    page = markdown.render(summary)
    assert "\n## Gates\n\nDISAGREE: 1 of 3\n\n### Disagreements\n\n| rule | what | again |\n" in page
    assert "\n| expected | `Runner\\|x` | `python -m it --sm 90` |\n" in page
    assert "<summary>lib 1.0</summary>\n\nas asked.  \n\n| subject | SM90 |\n" in page
    assert page.index("## Gates") < page.index("## Backends")
    text = html.render(summary)
    assert '<a href="#section-1">Gates</a>' in text
    assert "<code>python -m it --sm 90</code>" in text
    assert "<td>yes</td>" in text


def test_a_section_of_its_own_page_folds_nothing():
    assert "<details>" not in "\n".join(markdown.section_lines(GATES, level=1))


def test_plain_data_is_read_back(run):
    run["sections"] = [GATES.to_json()]
    assert sections(run) == (GATES,)


@pytest.mark.parametrize(
    "listed", [None, 3, "x", [3], [{}], [{"tables": 3}], [{"tables": [3, {"rows": [[1]], "head": ["a", "b"]}]}]]
)
def test_what_is_no_section_stops_no_report(make, run, listed):
    run["sections"] = listed
    summary = summarise([make()], run)
    assert html.render(summary)
    assert markdown.render(summary)


def test_hostile_sections_stay_text(make):
    evil = '<script>alert(1)</script><img src=x onerror=y>{{ 7*7 }}"'
    table = Table(title=evil, head=(evil,) * 2, rows=((evil, evil),), code=(0,), lines=(1,), folded=True, notes=(evil,))
    shown = Section(title=evil, headline=evil, tone=evil, tables=(table,), notes=(evil,))
    summary = summarise([make()], {"sections": [shown.to_json()]})
    page = html.render(summary)
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert "49" not in page.split("<main>")[1].split("</main>")[0].replace("&#34;", "")
