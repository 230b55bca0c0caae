"""junit.xml: one suite for each backend and device, one test case for each operation and variant.

Known failures and what is not claimed appear as skipped, as pytest does with expected failures. The counts are
properties of the suite, because the common schema has none on a test case.
"""

from __future__ import annotations

from itertools import groupby
from xml.etree import ElementTree as ET

from reports import text
from reports.groups import FAIL, KNOWN, STATUSES, UNSUPPORTED, Call, Group
from reports.summary import Summary, stop_line, verdict_line
from reports.tables import repro

SHOWN = 20
"""Failures of a group that are listed with their repro lines."""


def render(summary: Summary) -> str:
    """The document with an XML declaration, to be written as UTF-8."""
    suites = [_run_suite(summary)]
    groups = [*summary.groups, *(group for group in summary.unclaimed if not group.judged)]
    groups.sort(key=lambda group: (_place(group), group.operation, group.variant))
    for place, found in groupby(groups, key=_place):
        suites.append(_backend_suite(place, list(found), summary))
    root = ET.Element("testsuites", name="blockscale-conformance")
    for key in ("tests", "failures", "errors"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    root.extend(suites)
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _place(group: Group) -> tuple[str, str, str]:
    return (text.line(group.backend), text.line(group.version), text.line(group.device))


def _suite(name: str, cases: list[ET.Element], summary: Summary, time: float, properties: dict[str, str]) -> ET.Element:
    suite = ET.Element("testsuite", name=name, tests=str(len(cases)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{time:.3f}")
    if summary.run.get("started"):
        suite.set("timestamp", text.line(summary.run["started"]))
    if properties:
        holder = ET.SubElement(suite, "properties")
        for key, value in properties.items():
            ET.SubElement(holder, "property", name=key, value=value)
    suite.extend(cases)
    return suite


def _run_suite(summary: Summary) -> ET.Element:
    """What is no verdict on a backend: completeness, problems, and what did not run."""
    run = ET.Element("testcase", classname="run", name="complete", time="0.000")
    if not summary.complete:
        # A budget that ran out was asked for.
        kind = "skipped" if summary.run.get("stopped") == "budget" else "failure"
        _tell(run, kind, "incomplete", stop_line(summary), "")
    elif summary.outcome == "empty":
        _tell(run, "failure", "empty", "no case was executed", "")
    elif summary.outcome == "failed" and not summary.counts[FAIL] and not summary.problems:
        _tell(run, "failure", "exit_code", verdict_line(summary), "")
    cases = [run]
    for number, problem in enumerate(summary.problems, 1):
        case = ET.Element("testcase", classname="run", name=f"problem {number}", time="0.000")
        _tell(case, "failure", "problem", problem, "")
        cases.append(case)
    for name, reason in summary.not_run:
        case = ET.Element("testcase", classname="run", name=f"{name} available", time="0.000")
        _tell(case, "skipped", "not_run", reason, "")
        cases.append(case)
    keys = ("run", "command", "seed", "git_commit", "platform", "python")
    properties = {key: text.line(summary.run[key]) for key in keys if summary.run.get(key) not in (None, "")}
    return _suite("run", cases, summary, 0.0, properties)


def _backend_suite(place: tuple[str, str, str], groups: list[Group], summary: Summary) -> ET.Element:
    backend, version, device = place
    properties = {"backend": backend, "version": version, "device": device}
    for group in groups:
        for status in STATUSES:
            if group.counts[status]:
                properties[f"{group.operation} {group.variant}.{status}"] = str(group.counts[status])
        if group.headroom is not None:
            properties[f"{group.operation} {group.variant}.headroom"] = f"{group.headroom:.6g}"
    cases = [_case(group, f"{backend}.{device}", summary) for group in groups]
    name = f"{backend} {version} {device}".replace("  ", " ")
    return _suite(name, cases, summary, sum(group.seconds for group in groups), properties)


def _case(group: Group, classname: str, summary: Summary) -> ET.Element:
    name = f"{group.operation} {group.variant}"
    case = ET.Element("testcase", classname=classname, name=name, time=f"{group.seconds:.3f}")
    if group.counts[FAIL]:
        calls = [call for call in group.calls if call.status == FAIL]
        message = (
            f"{text.plural(len(calls), 'unexplained failure')} ({text.counts(group.failing)}) in {group.judged} calls"
        )
        _tell(case, "failure", calls[0].lead.verdict, message, _listed(calls, summary))
    elif group.counts[KNOWN]:
        calls = [call for call in group.calls if call.status == KNOWN]
        reasons = {entry.id: entry.reason for entry in summary.known}
        ids = sorted({text.line(call.lead.ledger_id) for call in calls})
        why = "; ".join(f"{name}: {reasons.get(name) or 'no reason recorded'}" for name in ids)
        message = f"{text.plural(len(calls), 'known failure')} in {group.judged} calls: {why}"
        _tell(case, "skipped", "known", message, _listed(calls, summary))
    elif not group.judged:
        reason = text.line(next((call.lead.message for call in group.calls if call.lead.message), "no reason recorded"))
        unmade = text.plural(group.counts[UNSUPPORTED], "call")
        _tell(case, "skipped", "unsupported", f"not claimed ({unmade}): {reason}", "")
    return case


def _listed(calls: list[Call], summary: Summary) -> str:
    said = []
    for call in calls[:SHOWN]:
        lead = call.lead
        said.append(f"{text.line(lead.part)} {lead.verdict}: {text.line(lead.message, 1000)}")
        said.append(f"    {repro(lead, summary.plugins)}")
    if len(calls) > SHOWN:
        said.append(f"... and {text.count(len(calls) - SHOWN)} more; all are in results.csv")
    return "\n".join(said)


def _tell(case: ET.Element, tag: str, kind: str, message: str, body: str) -> None:
    child = ET.SubElement(case, tag, type=kind, message=text.line(message, 2000))
    child.text = body or None
