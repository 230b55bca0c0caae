"""The gates as a section of a report: disagreements first, then what calls came to, then one table a library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from conformance.gating import ptx
from conformance.gating.model import Finding, Observation, Observed, numbers
from conformance.gating.result import MARKS, WORDS, Result, headline, status
from reports.sections import Section, Table
from reports.text import line

ROUTING = " routing "
"""Divides a variant into formats and how they are routed."""
LEGEND = (
    "`yes` admits, `-` refuses, `?` cannot be told on this machine, `raises` neither; ✓ as published, ✗ disagrees, "
    "! disagrees and is explained; no mark: no published claim."
)


def section(result: Result, title: str = "Architecture gating") -> Section:
    """All that a run of `gating` knows, for people."""
    known = [finding for finding in result.findings if finding.explained]
    unseen = bool(result.gaps or result.unseen_claims)
    tables = [
        *_findings("Disagreements", result.disagreements),
        *_findings("Known disagreements", known),
        *_findings("Changed from the other version", result.changes),
        *_truths(result),
        *_not_observed(result),
    ]
    for part in result.observed:
        if part.observations:
            tables += [_library(result, part), *_routing(part), *_facts(part), *_accumulators(part)]
    return Section(
        title=title,
        headline=headline(result),
        tone="bad" if result.disagreements else "warn" if known or unseen else "ok",
        tables=tuple(tables),
        notes=(LEGEND.replace("`", ""),),
    )


def _findings(title: str, findings: Sequence[Finding]) -> list[Table]:
    rows = [
        (
            finding.rule,
            finding.library,
            finding.what,
            numbers(finding.sms),
            finding.message,
            finding.explained or finding.source,
            finding.repro,
        )
        for finding in findings
    ]
    head = ("rule", "library", "what", "where", "disagreement", "source or reason", "shows it again")
    return [Table(title=title, head=head, rows=tuple(rows), code=(2,), lines=(6,))] if rows else []


def _truths(result: Result) -> list[Table]:
    """What calls came to on the device at hand, rows with the same joined."""
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
        (library, subject, ", ".join(variants), sm, gate, outcome, line(detail, 200))
        for (library, subject, sm, gate, outcome, detail), variants in same.items()
    ]
    head = ("library", "subject", "variants (calls)", "device", "gate", "calls came to", "what was said")
    return [Table(title="Truth on the device at hand", head=head, rows=tuple(rows), code=(1,))] if rows else []


def _not_observed(result: Result) -> list[Table]:
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
    subjects: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (library, subject, reason), sms in where.items():
        subjects[library, reason, numbers(sms) or "all"].append(subject)
    rows = [
        (library, ", ".join(filter(None, names)), sms, line(reason, 240))
        for (library, reason, sms), names in subjects.items()
    ]
    head = ("library", "what", "where", "reason")
    return [Table(title="Not observed here", head=head, rows=tuple(rows), folded=True)] if rows else []


def _library(result: Result, part: Observed) -> Table:
    sms = sorted({item.sm for item in part.observations})
    cells: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    answers: dict[tuple[str, str], dict[int, Observation]] = defaultdict(dict)
    for item in part.observations:
        if ROUTING not in item.variant or status(result, part, item) in ("disagree", "known"):
            answers[item.subject, item.variant][item.sm] = item
    for (subject, variant), by_sm in answers.items():
        shown = tuple(_cell(result, part, by_sm.get(sm)) for sm in sms)
        cells[subject, shown].append(variant)
    return Table(
        title=f"{part.library} {part.version}",
        head=("subject", "variants", *(f"SM{sm}" for sm in sms)),
        rows=tuple((subject, ", ".join(variants), *shown) for (subject, shown), variants in cells.items()),
        code=(0,),
        folded=True,
        notes=part.notes,
    )


def _routing(part: Observed) -> list[Table]:
    """How routing may reach a runner, and by which methods it may route itself, where the runner is admitted."""
    words: dict[tuple[str, str, int], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for item in part.observations:
        formats, between, word = item.variant.partition(ROUTING)
        if between and item.answer in ("yes", "no"):
            words[item.subject, formats, item.sm][item.answer == "no"].append(word)
    same: dict[tuple[str, str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (subject, formats, sm), (yes, no) in words.items():
        same[subject, ", ".join(yes), ", ".join(no)][formats].append(sm)
    rows: list[tuple[str, ...]] = []
    for (subject, taken, refused), by_formats in same.items():
        where: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for formats, sms in by_formats.items():
            where[tuple(sms)].append(formats)
        rows += [(subject, ", ".join(names), numbers(sms), taken, refused) for sms, names in where.items()]
    head = ("runner", "formats", "where", "routing that it takes", "that it refuses")
    return [Table(title=f"{part.library}: routing", head=head, rows=tuple(rows), code=(0,), folded=True)] * bool(rows)


def _cell(result: Result, part: Observed, item: Observation | None) -> str:
    return "" if item is None else WORDS[item.answer] + MARKS.get(status(result, part, item), "")


def _facts(part: Observed) -> list[Table]:
    """What compiled code is made of, joined over variants and architectures with the same."""
    found: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for item in part.observations:
        facts = [fact for fact in item.facts if not fact.startswith((ptx.FOLLOWS, ptx.DECLARED))]
        if facts:
            found[item.subject, ", ".join(facts)][item.sm].append(item.variant)
    rows = tuple((subject, numbers(by_sm), facts) for (subject, facts), by_sm in found.items())
    head = ("kernel", "where", "found in its PTX")
    return [Table(title=f"{part.library}: compiled code", head=head, rows=rows, code=(0,), folded=True)] if rows else []


def _accumulators(part: Observed) -> list[Table]:
    """Which accumulator follows from a product's instruction, beside the one that its backend declares."""
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for item in part.observations:
        follows, declared = (
            ", ".join(fact.removeprefix(prefix) for fact in item.facts if fact.startswith(prefix))
            for prefix in (ptx.FOLLOWS, ptx.DECLARED)
        )
        if follows:
            units = ", ".join(fact for fact in item.facts if fact.split(" ")[0] in ptx.UNITS)
            found[item.subject, item.variant, units, follows, declared or "no claim"].append(item.sm)
    rows = tuple((subject, variant, numbers(sms), *rest) for (subject, variant, *rest), sms in found.items())
    head = ("kernel", "of", "where", "instruction", "adds as", "recipe declares")
    title = f"{part.library}: accumulators"
    return [Table(title=title, head=head, rows=rows, code=(0,), folded=True)] if rows else []
