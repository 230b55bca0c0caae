"""report.html and report.md."""

import random
import re
from html.parser import HTMLParser

import pytest

from reports import figures, html, markdown, tables
from reports.summary import summarise

HOSTILE = "<script>alert(1)</script> <img src=x onerror=alert(2)> \"'> | `code` [a](javascript:x) </details> {{ 7*7 }}"
VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Tags in order, text, and a check that every tag is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.words, self.open, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page(records, run):
    return Page(html.render(summarise(records, run)))


def cells(row):
    """The cells of a Markdown table row, as GitHub splits them."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def markdown_table(text, heading):
    rows = text.split(f"## {heading}\n\n", 1)[1].split("\n\n", 1)[0].splitlines()
    assert {len(cells(row)) for row in rows} == {len(cells(rows[0]))}
    return [dict(zip(cells(rows[0]), cells(row), strict=True)) for row in rows[2:]]


def test_the_page_is_well_formed_and_says_what_matters(records, run):
    text = page(records, run).text
    for wanted in (
        "Not conformant 2 unexplained failures (1 crash, 1 wrong)",
        "GPU 9000, sm90",
        "takes log2",
        "no module named gamma",
        "off by one at 7",
        "also payload wrong",
        "k=… is no multiple of 32 (1)",
        "alpha docs (quantize mxfp8)",
        "an answer outside the claims, and wrong",
    ):
        assert wanted in text, wanted


def test_the_page_loads_nothing(records, run):
    found = page(records, run)
    assert not {"link", "img", "iframe", "object", "base"} & set(found.tags)
    addresses = [value for _, key, value in found.attributes if key in ("src", "href") and not value.startswith("#")]
    assert addresses == ["https://github.com/owner/repo/issues/12"]
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'") in (
        found.attributes
    )
    assert "url(" not in html.render(summarise(records, run))


def test_every_picture_has_a_text(records, run):
    found = page(records, run)
    labels = [value for tag, key, value in found.attributes if tag == "svg" and key == "aria-label"]
    assert len(labels) == found.tags.count("svg") >= 2
    assert all(labels)


@pytest.mark.parametrize(
    "place", ["message", "part", "recipe", "options", "backend", "version", "device", "sm", "ledger_id"]
)
def test_hostile_records_stay_text_in_the_page(make, place):
    records = [make(verdict="wrong", headroom=2.0, **{place: HOSTILE}), make(verdict="unsupported", message=HOSTILE)]
    found = page(records, {})
    assert found.tags.count("script") == 1
    assert "img" not in found.tags
    assert not [key for _, key, _ in found.attributes if key.startswith("on")]
    assert "49" not in found.text


def test_a_hostile_case_stays_text(make):
    case = f"quantize mxfp8 v=1 {HOSTILE} k=1<script> m=2 seed=0"
    records = [make(case, verdict="wrong"), make("<b>x</b> <i>y</i> v=1 k=4 m=9 seed=0", verdict="wrong")]
    found = page(records, {})
    assert found.tags.count("script") == 1
    assert not {"img", "i"} & (set(found.tags) - {"i"})
    markdown.render(summarise(records, {}))


def test_a_hostile_run_stays_text(make, run):
    for key in ("run", "command", "started", "git_commit", "platform", "python", "seed", "driver", "libraries"):
        run[key] = HOSTILE
    run["problems"] = [HOSTILE]
    run["plugins"] = [HOSTILE]
    run["not_run"] = [{"backend": HOSTILE, "reason": HOSTILE}]
    run["ledger"] = [dict.fromkeys(("id", "backend", "reason", "issue", "witness", "witness_verdict"), HOSTILE)]
    run["backends"] = [{"backend": HOSTILE, "device": HOSTILE, "claims": [{"operation": HOSTILE, "source": HOSTILE}]}]
    found = page([make()], run)
    assert found.tags.count("script") == 1
    assert "img" not in found.tags
    assert not [value for _, key, value in found.attributes if key == "href" and not value.startswith("#")]


@pytest.mark.parametrize("issue", ["javascript:alert(1)", "data:text/html,x", "//evil", "owner/repo#12x", "http://a b"])
def test_only_issues_become_links(make, run, issue):
    run["ledger"][0]["issue"] = issue
    assert not [value for _, key, value in page([make()], run).attributes if key == "href" and value[0] != "#"]


def test_the_results_table_has_the_numbers(records, run):
    rows = {(row.operation, row.backend): row for row in tables.results(summarise(records, run))}
    row = rows["quantize", "alpha"]
    assert (row.cases, row.passed, row.known, row.failed, row.unclaimed) == (4, 1, 1, 2, 0)
    assert row.failed_words == "1 crash, 1 wrong"
    assert row.worst.startswith("nox -s repro -- 'quantize mxfp8 v=1 block=1x32 dtype=bf16 k=10 ")
    assert row.worst.endswith("--backend alpha --plugin extra.py")
    assert row.worst_kind == "first unexplained failure"
    beta = rows["quantize", "beta"]
    assert (beta.cases, beta.unclaimed, beta.device, beta.headroom) == (1, 1, "cuda:0 sm90", 0.875)
    assert " --device cuda:0 " in beta.worst


def test_columns_without_a_number_are_left_out(make, run):
    plain = html.render(summarise([make()], run))
    full = html.render(summarise([make(error=2.0, fp32_error=1.0), make("x y v=1 seed=1", verdict="unsupported")], run))
    for word in (">error / FP32's<", "Error / FP32"):
        assert word not in plain
        assert word in full


def test_the_markdown_tables_have_the_same_numbers(records, run):
    text = markdown.render(summarise(records, run))
    first, *_ = rows = markdown_table(text, "Results")
    assert len(rows) == 3
    assert (first[""], first["cases"], first["pass"], first["known"]) == ("❌ fail", "4", "1", "1 wrong")
    assert (first["unexplained"], first["worst headroom"]) == ("**1 crash, 1 wrong**", "∞")
    assert first["bits equal"] == "75.00 %"
    (known,) = markdown_table(text, "Known failures")
    assert known["issue"] == "[owner/repo#12](https://github.com/owner/repo/issues/12)"
    assert markdown_table(text, "Did not run") == [{"what": "gamma on cuda:0", "why": "no module named gamma"}]


def test_markdown_tables_keep_their_shape_whatever_they_hold(make, run):
    run["not_run"] = [{"backend": f"a|b\n{HOSTILE}", "reason": HOSTILE}]
    text = markdown.render(summarise([make(verdict="wrong", message=HOSTILE, recipe=HOSTILE, backend=HOSTILE)], run))
    markdown_table(text, "Results")
    markdown_table(text, "Did not run")
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert not re.search(r"(?<!\\)<(?!/?(?:details|summary)>)", outside_code)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a_b __c__", r"a_b \_\_c\_\_"),
        ("*x* <b> [y](z) a|b", r"\*x\* \<b\> \[y\](z) a\|b"),
        ("a & b\nc", "a &amp; b c"),
        ("$x$ ~y~", r"\$x\$ \~y\~"),
    ],
)
def test_plain_text_in_markdown(text, shown):
    assert markdown.plain(text) == shown


@pytest.mark.parametrize(("text", "shown"), [("x|y", r"`x\|y`"), ("a`b``c", "``` a`b``c ```"), ("", "")])
def test_code_in_markdown(text, shown):
    assert markdown.code(text) == shown


def test_a_long_report_is_cut_and_says_so(records, run):
    summary = summarise(records, run)
    whole = markdown.render(summary)
    size = len(whole.encode())
    assert "Truncated" not in whole
    assert markdown.render(summary, size) == whole
    for limit in range(600, size, 97):
        short = markdown.render(summary, limit)
        assert len(short.encode()) <= limit
        left, total = re.search(r"Truncated: ([\d,]+) of ([\d,]+) lines", short).groups()
        kept = int(total.replace(",", "")) - int(left.replace(",", ""))
        assert short.splitlines()[:kept] == whole.splitlines()[:kept]
        assert short.count("<details>") == short.count("</details>")


@pytest.fixture
def many(make):
    """300 groups of 60 calls, all failing, for five reasons."""
    draw = random.Random(3)
    return [
        make(
            f"gemm f{group} v=1 k={k} m=8 seed=1",
            part="output",
            verdict="wrong",
            headroom=1 + draw.random(),
            message=f"reason {'abcde'[k % 5]}: {draw.randrange(99)} outside " + "x" * 700,
        )
        for group in range(300)
        for k in range(1, 61)
    ]


def test_thousands_of_failures_stay_small(many):
    summary = summarise(many, {})
    assert len(markdown.render(summary).encode()) < 2**20
    assert len(html.render(summary)) < 2_000_000


def test_what_is_hidden_is_counted(many):
    summary = summarise(many, {})
    for limits in ({"causes": 10, "rows": 5, "most": 2000}, {"causes": 3, "rows": 2, "most": 100}):
        blocks = tables.failures(summary, **limits)
        assert len(blocks) == 300
        assert sum(len(block.causes) for block in blocks) <= limits["most"]
        for block in blocks:
            assert block.count == 60
            assert len(block.causes) + block.hidden == 5
            assert all(len(cause.rows) <= limits["rows"] for cause in block.causes)
            assert block.unseen == 60 - sum(len(cause.rows) for cause in block.causes)


def test_failures_are_told_by_cause_the_commonest_first(make):
    def fail(k, message):
        return make(f"gemm f v=1 k={k} m=8 seed=1", verdict="wrong", message=message)

    records = [fail(1, "rare"), fail(2, "7 of 32 outside"), fail(3, "9 of 64 outside"), fail(4, "0x7F")]
    (block,) = tables.failures(summarise(records, {}), causes=2, rows=1, most=9)
    assert [(cause.message, cause.count) for cause in block.causes] == [("7 of 32 outside", 2), ("rare", 1)]
    assert (block.hidden, block.unseen) == (1, 2)


def test_unclaimed_calls_are_merged_by_reason(make):
    reasons = ["k=33 is no multiple of 128", "k=34 is no multiple of 128", "dtype=fp16 is none of bf16, fp32"]
    records = [make(f"gemm f v=1 k={k} seed=1", verdict="unsupported", message=text) for k, text in enumerate(reasons)]
    (row,) = tables.unclaimed(summarise(records, {}))
    assert row.calls == 3
    assert row.reasons == "k=… is no multiple of 128 (2); dtype=… is none of bf16, fp32 (1)"


def test_a_histogram_counts_every_judged_call(make):
    values = [0.0, 0.04, 0.05, 0.999, 1.0, 1.001, float("inf"), None]
    records = [
        make(f"gemm f v=1 k={k} m=1 seed=1", headroom=value, verdict="pass" if value is None or value <= 1 else "wrong")
        for k, value in enumerate(values, 1)
    ]
    (picture,), exact, left_out = figures.histograms(summarise(records, {}))
    found = dict(re.findall(r"<title>headroom ([^:]*): ([^<]*)</title>", picture.svg))
    assert found == {
        "0 to 0.05": "2 pass",
        "0.05 to 0.1": "1 pass",
        "0.95 to 1": "2 pass",
        "above 1": "1 fail",
        "infinite": "1 fail",
    }
    assert picture.note == "7 calls; largest that passes 1; 2 above 1; 1 without a headroom"
    assert (exact, left_out) == ([], 0)


def test_exact_answers_need_no_histogram(make):
    assert figures.histograms(summarise([make(headroom=0.0)], {})) == ([], ["quantize · alpha · cpu (1)"], 0)


def test_a_map_counts_by_powers_of_two(make):
    shapes = [(1, 64, "pass"), (2, 100, "wrong"), (3, 127, "pass"), (4, 128, "pass")]
    records = [make(f"quantize f v=1 k={k} m={m} seed=1", verdict=verdict) for m, k, verdict in shapes]
    (picture,), left_out = figures.maps(summarise(records, {}))
    told = [title.split(";")[0] for title in re.findall(r"<title>([^<]*)</title>", picture.svg)]
    assert told == [
        "m 1, k 64 to 127: 1 passed",
        "m 2 to 3, k 64 to 127: 1 passed, 1 unexplained",
        "m 4 to 7, k 128 to 255: 1 passed",
    ]
    assert picture.note == "3 passed, 1 unexplained; most at m 2 to 3, k 64 to 127"
    assert left_out == 0


def test_pictures_beyond_the_limit_are_counted(make):
    records = [make(f"op{op} f v=1 k={k} m=1 seed=1", headroom=0.5) for op in range(figures.MOST + 3) for k in (1, 2)]
    summary = summarise(records, {})
    assert figures.histograms(summary)[2] == figures.maps(summary)[1] == 3
    assert "3 more histograms left out" in Page(html.render(summary)).text
