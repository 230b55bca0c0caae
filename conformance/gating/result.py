"""What a run of `gating` knows, and one row an answer of it, disagreements first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from conformance.gating.expected import Expected
from conformance.gating.model import Finding, Gap, Observation, Observed, Truth

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
