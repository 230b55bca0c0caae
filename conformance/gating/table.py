"""The gates as tables: one row an answer for machines, one row a runner for people, disagreements first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.gating.expected import Expected
from conformance.gating.model import Finding, Gap, Observation, Observed, Truth, numbers
from reports.markdown import code, plain
from reports.markdown import table as lines_of

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "status",
    "library",
    "version",
    "subject",
    "variant",
    "sm",
    "expected",
    "observed",
    "compiled",
    "true",
    "gates",
    "facts",
    "detail",
    "source",
    "repro",
)
STATUS = ("disagree", "known", "not observed", "agree", "no claim")
"""In the order of the table."""
MARKS = {"disagree": " ✗", "known": " !", "agree": " ✓"}
WORDS = {"yes": "yes", "no": "-", "unknown": "?", "error": "raises"}


@dataclass(frozen=True)
class Result:
    """All that a run of `gating` knows."""

    observed: tuple[Observed, ...]
    expected: Expected
    findings: tuple[Finding, ...]
    truths: tuple[Truth, ...] = ()
    changes: tuple[Finding, ...] = ()

    @property
    def disagreements(self) -> list[Finding]:
        """Findings that nothing explains."""
        return [finding for finding in self.findings if not finding.explained]

    @property
    def unexplained_changes(self) -> int:
        """How many changes from another version no published claim explains."""
        return sum(not change.explained for change in self.changes)

    @property
    def gaps(self) -> list[Gap]:
        """Libraries and architectures that could not be observed."""
        return [gap for part in self.observed for gap in part.gaps]

    @property
    def unseen_claims(self) -> int:
        """How many claims of installed libraries meet a gate that cannot tell on this machine."""
        return sum(
            item.answer == "unknown" and any(row.covers(item, part.version) for row in self.expected.support)
            for part in self.observed
            for item in part.observations
        )


def frame(result: Result) -> pd.DataFrame:
    """One row for each subject, variant and architecture, and one for each gap; sorted by status."""
    import pandas as pd

    rows = [_row(result, part, item) for part in result.observed for item in part.observations]
    for part in result.observed:
        rows += [
            dict.fromkeys(COLUMNS, "")
            | {
                "status": "not observed",
                "library": gap.library,
                "version": part.version,
                "sm": gap.sm or "",
                "observed": "unknown",
                "detail": gap.reason,
            }
            for gap in part.gaps
        ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    order = table["status"].map({status: place for place, status in enumerate(STATUS)})
    return table.iloc[order.argsort(kind="stable")].reset_index(drop=True)


def _row(result: Result, part: Observed, item: Observation) -> dict[str, object]:
    claims = [row for row in result.expected.support if row.covers(item, part.version)]
    expected = "" if not claims else "yes" if item.sm in claims[0].admits else "no"
    compiled = item.gate("compile") is not None
    repro = f"python -m conformance gating --library {item.library} --subject {item.subject} --sm {item.sm}"
    return {
        "status": status(result, part, item),
        "library": item.library,
        "version": part.version,
        "subject": item.subject,
        "variant": item.variant,
        "sm": item.sm,
        "expected": expected,
        "observed": "" if compiled else item.answer,
        "compiled": item.answer if compiled else "",
        "true": _true(result, item),
        "gates": ", ".join(f"{gate.name} {gate.answer}" for gate in item.gates),
        "facts": ", ".join(item.facts),
        "detail": item.detail,
        "source": "; ".join(row.source for row in claims),
        "repro": repro,
    }


def _true(result: Result, item: Observation) -> str:
    """What calls of this came to on the device at hand; empty where nothing was called."""
    key = (item.library, item.subject, item.variant, item.sm)
    return next(
        (truth.outcome for truth in result.truths if (truth.library, truth.subject, truth.variant, truth.sm) == key),
        "",
    )


def status(result: Result, part: Observed, item: Observation) -> str:
    """The status of one answer, one of `STATUS`."""
    about = [
        finding
        for finding in result.findings
        if (finding.library, finding.subject) == (item.library, item.subject)
        and (not finding.variants or item.variant in finding.variants)
        and item.sm in finding.sms
    ]
    if any(not finding.explained for finding in about):
        return "disagree"
    if about:
        return "known"
    if item.answer == "unknown":
        return "not observed"
    return "agree" if any(row.covers(item, part.version) for row in result.expected.support) else "no claim"


def headline(result: Result) -> str:
    """One line that says how it ended."""
    bad, known = len(result.disagreements), len(result.findings) - len(result.disagreements)
    answers = sum(len(part.observations) for part in result.observed)
    said = "AGREE" if not bad else "DISAGREE"
    return (
        f"{said}: {answers} answers, {bad} disagreements, {known} known, "
        f"{len(result.gaps)} libraries or architectures not observed"
    )


def markdown(result: Result) -> str:
    """The whole report: disagreements with their repro lines, what was not observed, then a table for each library."""
    lines = ["# Architecture gating", "", headline(result), ""]
    for title, findings in (
        ("Disagreements", result.disagreements),
        ("Known disagreements", [finding for finding in result.findings if finding.explained]),
        ("Changed from the other version", result.changes),
    ):
        if findings:
            lines += [f"## {title}", "", *_findings(findings), ""]
    lines += _truths(result)
    lines += _not_observed(result)
    for part in result.observed:
        if part.observations:
            lines += _library(result, part)
    lines += [
        "`yes` admits, `-` refuses, `?` cannot be told on this machine, `raises` neither; ✓ as published, ✗ disagrees, "
        "! disagrees and is explained; no mark: no published claim.",
        "",
    ]
    return "\n".join(lines)


def _findings(findings: Sequence[Finding]) -> list[str]:
    rows = []
    for finding in findings:
        why = finding.explained or finding.source
        rows.append(
            [
                plain(finding.rule),
                code(finding.what),
                numbers(finding.sms),
                plain(finding.message),
                plain(why),
                code(finding.repro),
            ]
        )
    return lines_of(("rule", "what", "where", "disagreement", "source or reason", "shows it again"), rows)


def _truths(result: Result) -> list[str]:
    """What calls came to on the device at hand, rows with the same joined."""
    if not result.truths:
        return []
    answers = {
        (item.library, item.subject, item.variant, item.sm): item.answer
        for part in result.observed
        for item in part.observations
    }
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for truth in result.truths:
        gate = WORDS.get(answers.get((truth.library, truth.subject, truth.variant, truth.sm), "unknown"), "?")
        key = (truth.library, truth.subject, f"SM{truth.sm}", gate, truth.outcome, truth.detail)
        same[key].append(f"{truth.variant} ({truth.calls})")
    rows = [
        [plain(library), code(subject), plain(", ".join(variants)), sm, gate, outcome, plain(detail, 200)]
        for (library, subject, sm, gate, outcome, detail), variants in same.items()
    ]
    head = ("library", "subject", "variants (calls)", "device", "gate", "calls came to", "what was said")
    return ["## Truth on the device at hand", "", *lines_of(head, rows), ""]


def _not_observed(result: Result) -> list[str]:
    """Gaps, and gates that cannot tell, joined where they say the same but for the architecture."""
    where: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for part in result.observed:
        for gap in part.gaps:
            where[gap.library, "", gap.reason] += [gap.sm] if gap.sm else []
        for item in part.observations:
            if item.answer == "unknown":
                where[item.library, item.subject, item.detail.replace(f"SM{item.sm}", "the architecture")].append(
                    item.sm
                )
    if not where:
        return []
    subjects: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (library, subject, reason), sms in where.items():
        subjects[library, reason, numbers(sms) or "all"].append(subject)
    rows = [
        [plain(library), plain(", ".join(filter(None, names))), sms, plain(reason, 240)]
        for (library, reason, sms), names in subjects.items()
    ]
    return ["## Not observed here", "", *lines_of(("library", "what", "where", "reason"), rows), ""]


def _library(result: Result, part: Observed) -> list[str]:
    sms = sorted({item.sm for item in part.observations})
    cells: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    facts: dict[tuple[str, tuple[str, ...]], set[str]] = defaultdict(set)
    answers: dict[tuple[str, str], dict[int, Observation]] = defaultdict(dict)
    for item in part.observations:
        answers[item.subject, item.variant][item.sm] = item
    for (subject, variant), by_sm in answers.items():
        shown = tuple(_cell(result, part, by_sm.get(sm)) for sm in sms)
        cells[subject, shown].append(variant)
        facts[subject, shown] |= {fact for item in by_sm.values() for fact in item.facts}
    head = ["subject", "variants", *(f"SM{sm}" for sm in sms)]
    rows = [[code(subject), plain(", ".join(variants)), *shown] for (subject, shown), variants in cells.items()]
    notes = [f"{plain(note)}.  " for note in part.notes]
    return [f"## {plain(part.library)} {plain(part.version)}", "", *notes, "", *lines_of(head, rows), "", *_facts(part)]


def _cell(result: Result, part: Observed, item: Observation | None) -> str:
    return "" if item is None else WORDS[item.answer] + MARKS.get(status(result, part, item), "")


def _facts(part: Observed) -> list[str]:
    """What compiled code is made of, joined over architectures with the same."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for item in part.observations:
        if item.facts:
            found[item.subject, item.facts].append(item.sm)
    if not found:
        return []
    rows = [[code(subject), numbers(sms), plain(", ".join(facts))] for (subject, facts), sms in found.items()]
    return [*lines_of(("kernel", "where", "found in its PTX"), rows), ""]


def html(result: Result) -> str:
    """One self-contained page."""
    table = frame(result)
    bad = table[table["status"].isin(["disagree", "known", "not observed"])]
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
        "td,th{border:1px solid #8888;padding:.2em .5em;text-align:left;vertical-align:top}"
    )
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Architecture gating</title><style>{style}</style></head>',
        "<body>",
        f"<h1>Architecture gating</h1><p>{escape(headline(result))}</p>",
        *(
            f"<p><b>{escape(item.rule)}</b> {escape(item.what)} on {numbers(item.sms)}: "
            f"{escape(item.message)}. {escape(item.explained)} <code>{escape(item.repro)}</code></p>"
            for item in (*result.findings, *result.changes)
        ),
        "<h2>Disagreements, known disagreements, not observed</h2>",
        bad.to_html(index=False, escape=True),
        "<h2>Everything</h2>",
        table.to_html(index=False, escape=True),
        "</body></html>",
    ]
    return "\n".join(parts)


def write(result: Result, out: Path) -> list[Path]:
    """Write gating.md, gating.csv and gating.html; their paths. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"gating.{ending}" for ending in ("md", "csv", "html")]
    paths[0].write_text(markdown(result), encoding="utf-8")
    frame(result).to_csv(paths[1], index=False)
    paths[2].write_text(html(result), encoding="utf-8")
    return paths
