import shlex
from xml.etree import ElementTree as ET

from reports import junit
from reports.record import repro_line
from reports.summary import summarise

# What the schema of Jenkins' xUnit plugin, which pytest tests against, allows.
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase", "system-out", "system-err"},
    "properties": {"property"},
    "property": set(),
    "testcase": {"skipped", "failure", "system-out", "system-err"},
    "skipped": set(),
    "failure": set(),
}
ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname"},
    "properties": set(),
    "property": {"name", "value"},
    "testcase": {"name", "time", "classname"},
    "skipped": {"type", "message"},
    "failure": {"type", "message"},
}
REQUIRED = {"testsuite": {"name", "tests", "failures", "errors"}, "testcase": {"name"}, "property": {"name", "value"}}


def parse(records, run):
    root = ET.fromstring(junit.render(summarise(records, run)))
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN[element.tag]
        assert REQUIRED.get(element.tag, set()) <= set(element.attrib) <= ATTRIBUTES[element.tag]
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.get("tests")) == len(cases)
        for key, tag in (("failures", "failure"), ("skipped", "skipped")):
            assert int(suite.get(key)) == sum(case.find(tag) is not None for case in cases)
    for key in ("tests", "failures", "errors"):
        assert int(root.get(key)) == sum(int(suite.get(key)) for suite in root)
    return root


def case(root, classname, name):
    (found,) = [
        item for item in root.iter("testcase") if (item.get("classname"), item.get("name")) == (classname, name)
    ]
    return found


def test_suites_are_backends_and_cases_are_operations(records, run):
    root = parse(records, run)
    assert [suite.get("name") for suite in root] == ["run", "alpha 1.0 cpu", "beta 1.0 cuda:0"]
    assert case(root, "alpha.cpu", "ue8m0 ceil").find("*") is None
    assert (root.get("tests"), root.get("failures")) == ("6", "1")


def test_a_failure_lists_its_repro_lines(records, run):
    failure = case(parse(records, run), "alpha.cpu", "quantize mxfp8").find("failure")
    assert failure.get("message") == "2 unexplained failures (1 crash, 1 wrong) in 4 calls"
    assert failure.get("type") == "wrong"
    assert failure.text.count("nox -s repro -- 'quantize mxfp8 v=1 ") == 2
    assert "--backend alpha --plugin extra.py" in failure.text


def test_only_the_first_failures_are_listed(make):
    records = [make(f"ue8m0 ceil v=1 n={n} seed=0", verdict="wrong") for n in range(1, 31)]
    text = case(parse(records, {}), "alpha.cpu", "ue8m0 ceil").find("failure").text
    assert text.count("nox -s repro") == junit.SHOWN == 20
    assert "and 10 more" in text


def test_known_failures_are_skipped_with_the_reason(make, run):
    root = parse([make(), make(options="graph=1", verdict="wrong", ledger_id="L1")], run)
    skipped = case(root, "alpha.cpu", "quantize mxfp8").find("skipped")
    assert skipped.get("message") == "1 known failure in 2 calls: L1: takes log2"


def test_unclaimed_groups_are_skipped_with_the_reason(records, run):
    skipped = case(parse(records, run), "beta.cuda:0", "ue8m0 ceil").find("skipped")
    assert skipped.get("message") == "not claimed (1 call): claims no ue8m0"


def test_counts_are_properties(records, run):
    suite = parse(records, run)[1]
    found = {item.get("name"): item.get("value") for item in suite.iter("property")}
    assert found["quantize mxfp8.fail"] == "2"
    assert found["quantize mxfp8.known"] == "1"
    assert found["quantize mxfp8.headroom"] == "inf"


def test_problems_and_missing_devices_are_cases_of_the_run(make, run):
    run["problems"] = ["ledger L1: the witness passes"]
    root = parse([make()], run)
    assert case(root, "run", "problem 1").find("failure").get("message") == "ledger L1: the witness passes"
    assert case(root, "run", "gamma on cuda:0 available").find("skipped").get("message") == "no module named gamma"


def test_an_incomplete_run_fails_unless_its_budget_ran_out(make):
    for stopped, tag in (("interrupted", "failure"), ("", "failure"), ("budget", "skipped")):
        root = parse([make()], {"complete": False, "stopped": stopped})
        assert case(root, "run", "complete").find(tag) is not None


def test_a_harness_failure_is_a_failure(make):
    assert case(parse([make()], {"exit_code": 3}), "run", "complete").find("failure") is not None


def test_an_empty_run_fails():
    assert parse([], {}).get("failures") == "1"


def test_hostile_text_stays_text(make):
    message = "<script>alert(1)</script> ]]> \x00\x1b[0m \ud800 & \"'"
    root = parse([make(verdict="wrong", message=message, backend="a<b>&c")], {})
    failure = case(root, "a<b>&c.cpu", "quantize mxfp8").find("failure")
    assert "<script>alert(1)</script> ]]>" in failure.text
    assert "\x1b" not in failure.text


def test_a_repro_line_survives_the_shell():
    case, plugin = "/tmp/it's here/a b.json", "my kernels/x; y.py"
    line = repro_line(case, "b", device="cuda:1", options="graph=replay", plugins=(plugin, "mod.name"))
    words = ["repro", "--", case, "--backend", "b", "--device", "cuda:1", "--option", "graph=replay"]
    assert shlex.split(line) == ["nox", "-s", *words, "--plugin", plugin, "--plugin", "mod.name"]
    assert repro_line("a b seed=0", "b") == "nox -s repro -- 'a b seed=0' --backend b"
