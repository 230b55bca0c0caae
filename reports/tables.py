"""The tables that Markdown and HTML share, as rows of clean text; the two only lay them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports import text
from reports.groups import FAIL, KNOWN, PASS, REFUSED, UNSUPPORTED, Call, Group, mean
from reports.record import FAILING, MEANING, PASSING, Record, repro_line
from reports.summary import Known, Summary

RANK = {FAIL: 0, KNOWN: 1, PASS: 2, REFUSED: 3, UNSUPPORTED: 4}
MESSAGE = 600
"""Characters of a message that are shown; results.csv holds all of it."""


@dataclass(frozen=True)
class ResultRow:
    """One operation and variant on one backend and device. worst_kind: why the worst input is shown."""

    status: str
    operation: str
    variant: str
    backend: str
    version: str
    device: str
    cases: int
    passed: int
    known: int
    known_words: str
    failed: int
    failed_words: str
    refused: int
    unclaimed: int
    headroom: float | None
    bit_equal: float | None
    over_fp32: float | None
    seconds: float
    claim: str
    recipe: str
    source: str
    worst: str
    worst_kind: str
    worst_message: str


@dataclass(frozen=True)
class FailureRow:
    """One call that failed. others: the parts that fail beside the one that speaks for the call."""

    repro: str
    headroom: float | None
    index: str
    radii: str
    others: str


@dataclass(frozen=True)
class FailureCause:
    """Calls of a group that fail with the same part, verdict and message, numbers aside.

    message: of the first of them. count: of all, of which ``rows`` are shown.
    """

    part: str
    verdict: str
    message: str
    count: int
    rows: tuple[FailureRow, ...]


@dataclass(frozen=True)
class FailureBlock:
    """The unexplained failures of one group. causes: those shown, the commonest first. hidden: causes not shown."""

    title: str
    count: int
    causes: tuple[FailureCause, ...]
    hidden: int

    @property
    def unseen(self) -> int:
        """How many calls have no row."""
        return self.count - sum(len(cause.rows) for cause in self.causes)


@dataclass(frozen=True)
class KnownRow:
    """One ledger entry. where: the groups it was met in."""

    id: str
    backend: str
    calls: int
    where: str
    reason: str
    issue: str
    address: str
    witness: str
    witness_verdict: str


@dataclass(frozen=True)
class UnclaimedRow:
    """What one backend does not claim of one operation, and the commonest reasons."""

    backend: str
    device: str
    operation: str
    variants: str
    calls: int
    reasons: str


@dataclass(frozen=True)
class BackendRow:
    """One backend on one device. sources: where its claims come from."""

    backend: str
    version: str
    device: str
    interpreter: str
    calls: int
    failed: int
    known: int
    seconds: float
    sources: tuple[str, ...]


def results(summary: Summary) -> list[ResultRow]:
    """The first table: failures first, then known failures, then the rest."""
    return [_result(summary, group) for group in summary.groups]


def _result(summary: Summary, group: Group) -> ResultRow:
    worst = group.worst
    return ResultRow(
        status=group.status,
        operation=group.operation,
        variant=group.variant,
        backend=text.line(group.backend),
        version=text.line(group.version),
        device=_device(group.device, group.sm),
        cases=group.judged,
        passed=group.counts[PASS],
        known=group.counts[KNOWN],
        known_words=text.counts(group.known),
        failed=group.counts[FAIL],
        failed_words=text.counts(group.failing),
        refused=group.counts[REFUSED],
        unclaimed=group.counts[UNSUPPORTED],
        headroom=group.headroom,
        bit_equal=group.bit_equal,
        over_fp32=group.over_fp32,
        seconds=group.seconds,
        claim="; ".join(group.claims),
        recipe=_recipes(group),
        source="; ".join(group.sources),
        worst=repro(worst.lead, summary.plugins) if worst else "",
        worst_kind=_kind(worst) if worst else "",
        worst_message=_told(worst.lead) if worst and worst.status in (FAIL, KNOWN) else "",
    )


def _recipes(group: Group) -> str:
    """The recipes; of several each with the mean share of equal bits in the outputs that were judged under it."""
    if len(group.recipes) < 2:
        return "; ".join(group.recipes)
    shares = {text.line(recipe): found for recipe, found in group.bit_equal_by_recipe.items()}
    told = {
        recipe: f"{recipe} (bits equal {text.share(mean(found))}, {text.plural(len(found), 'output')})"
        for recipe, found in shares.items()
    }
    return "; ".join(told.get(recipe, recipe) for recipe in group.recipes)


def _kind(call: Call) -> str:
    if call.status == FAIL:
        return "first unexplained failure"
    if call.status == KNOWN:
        return f"first known failure ({text.line(call.lead.ledger_id)})"
    if call.headroom is None:
        return "a case that passes" if call.status == PASS else "a case that is refused"
    return "largest headroom" if call.headroom else "a case that passes"


def _told(record: Record) -> str:
    message = text.line(record.message, MESSAGE)
    return f"{text.line(record.part)} {record.verdict}" + (f": {message}" if message else "")


def _device(name: str, sm: str) -> str:
    return text.line(f"{name} sm{sm}" if sm else name)


def repro(record: Record, plugins: Sequence[str]) -> str:
    """The pasteable line of a record, on one line whatever its case holds."""
    return text.line(
        repro_line(
            text.line(record.case),
            text.line(record.backend),
            device=text.line(record.device),
            options=text.line(record.options),
            plugins=tuple(plugins),
        )
    )


def failures(summary: Summary, *, causes: int, rows: int, most: int) -> list[FailureBlock]:
    """The unexplained failures by group and cause.

    causes: shown of each group, fewer where ``most`` in all would not do. rows: shown of each cause.
    """
    found = summary.failures
    each = max(1, min(causes, most // max(1, len(found))))
    blocks = []
    for number, (group, calls) in enumerate(found):
        kinds = _causes(calls)
        shown = kinds[: each if number < most else 0]
        title = f"{group.operation} {group.variant} on {text.line(group.backend)}, {_device(group.device, group.sm)}"
        told = tuple(_cause(kind, rows, summary.plugins) for kind in shown)
        blocks.append(FailureBlock(title, len(calls), told, len(kinds) - len(shown)))
    return blocks


def _causes(calls: Sequence[Call]) -> list[list[Call]]:
    found: dict[tuple[str, str, str], list[Call]] = {}
    for call in calls:
        found.setdefault((call.lead.part, call.lead.verdict, text.alike(call.lead.message)), []).append(call)
    return sorted(found.values(), key=lambda cause: -len(cause))


def _cause(calls: Sequence[Call], rows: int, plugins: Sequence[str]) -> FailureCause:
    lead = calls[0].lead
    message = text.line(lead.message, MESSAGE) or "no message"
    shown = tuple(_failure(call, plugins) for call in calls[:rows])
    return FailureCause(text.line(lead.part), lead.verdict, message, len(calls), shown)


def _failure(call: Call, plugins: Sequence[str]) -> FailureRow:
    lead = call.lead
    others = [f"{text.line(item.part)} {item.verdict}" for item in call.parts if item.failing and item is not lead]
    radii = sorted(lead.stage_radii.items(), key=lambda item: (-item[1], item[0]))
    return FailureRow(
        repro=repro(lead, plugins),
        headroom=lead.headroom,
        index=str(lead.worst_index) if lead.worst_index else "",
        radii=", ".join(f"{text.line(name)} {radius:.3g}" for name, radius in radii),
        others=", ".join(others),
    )


def known(summary: Summary) -> list[KnownRow]:
    """The ledger entries of the run, those that were met first."""
    rows = [_known(entry, summary.plugins) for entry in summary.known]
    return sorted(rows, key=lambda row: (not row.calls, row.id))


def _known(entry: Known, plugins: Sequence[str]) -> KnownRow:
    places = Counter(
        f"{text.line(call.lead.operation)} {text.line(call.lead.variant)} ({text.line(call.lead.device)})"
        for call in entry.calls
    )
    devices = sorted({call.lead.device for call in entry.calls}) or ["cpu"]
    witness = repro_line(entry.witness, entry.backend, device=text.line(devices[0]), plugins=tuple(plugins))
    return KnownRow(
        id=entry.id,
        backend=entry.backend,
        calls=len(entry.calls),
        where=text.counts(places),
        reason=entry.reason or "no reason recorded",
        issue=entry.issue,
        address=text.link(entry.issue),
        witness=witness if entry.witness else "",
        witness_verdict=entry.witness_verdict,
    )


def absent(summary: Summary) -> list[tuple[str, str]]:
    """(what, why) of all that did not run, wholly or in part."""
    return [*summary.not_run, *((f"{name} (in part)", reason) for name, reason in summary.left_out)]


def unclaimed(summary: Summary) -> list[UnclaimedRow]:
    """What was not called because no claim covers it, by backend, device and operation."""
    merged: dict[tuple[str, str, str], list[Group]] = {}
    for group in summary.unclaimed:
        place = (text.line(group.backend), _device(group.device, group.sm), group.operation)
        merged.setdefault(place, []).append(group)
    rows = []
    for (backend, device, operation), groups in sorted(merged.items()):
        reasons: Counter[str] = Counter()
        for group in groups:
            calls = [call for call in group.calls if call.status == UNSUPPORTED]
            reasons.update(text.valueless(call.lead.message) or "no reason recorded" for call in calls)
        common = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        said = [f"{reason} ({text.count(number)})" for reason, number in common[:3]]
        said += [text.plural(len(common) - 3, "more reason")] * (len(common) > 3)
        variants = [f"{group.variant}{'' if not group.judged else ' (in part)'}" for group in groups]
        total = sum(group.counts[UNSUPPORTED] for group in groups)
        rows.append(UnclaimedRow(backend, device, operation, ", ".join(variants), total, "; ".join(said)))
    return rows


def backends(summary: Summary) -> list[BackendRow]:
    """The backends that the run lists or that records speak of, with their recipes' sources."""
    found: dict[tuple[str, str, str], BackendRow] = {}
    listed = summary.run.get("backends")
    for entry in listed if isinstance(listed, list | tuple) else []:
        device = text.device(
            text.line(entry.get("device")), text.line(entry.get("sm")), text.line(entry.get("device_name"))
        )
        key = (text.line(entry.get("backend")), text.line(entry.get("version")), text.line(entry.get("device")))
        found[key] = BackendRow(
            key[0], key[1], device, text.line(entry.get("interpreter")), 0, 0, 0, 0.0, _sources(entry)
        )
    totals: dict[tuple[str, str, str], tuple[int, int, int, float, Record]] = {}
    for group in (*summary.groups, *(group for group in summary.unclaimed if not group.judged)):
        key = (text.line(group.backend), text.line(group.version), text.line(group.device))
        calls, failed, knowns, spent, _ = totals.get(key, (0, 0, 0, 0.0, None))
        counts = (calls + group.judged, failed + group.counts[FAIL], knowns + group.counts[KNOWN])
        totals[key] = (*counts, spent + group.seconds, group.calls[0].lead)
    for key, (calls, failed, knowns, spent, record) in totals.items():
        row = found.get(key)
        device = row.device if row else text.device(key[2], text.line(record.sm))
        interpreter = row.interpreter if row else text.line(record.interpreter)
        sources = row.sources if row else ()
        found[key] = BackendRow(key[0], key[1], device, interpreter, calls, failed, knowns, spent, sources)
    return [found[key] for key in sorted(found)]


def _sources(entry: Any) -> tuple[str, ...]:
    claims = entry.get("claims")
    said: dict[str, list[str]] = {}
    for claim in claims if isinstance(claims, list | tuple) else []:
        source = text.line(claim.get("source"))
        if source:
            said.setdefault(source, []).append(text.line(f"{claim.get('operation')} {claim.get('variant')}"))
    return tuple(f"{source} ({', '.join(sorted(set(names)))})" for source, names in sorted(said.items()))


def facts(summary: Summary) -> list[tuple[str, str]]:
    """The run itself: id, command, seed, times, commit, plan, platform, devices, driver and libraries."""
    run = summary.run
    plan = run.get("plan") if isinstance(run.get("plan"), dict) else {}
    pairs = [(key.replace("_", " "), text.line(run.get(key))) for key in ("run", "command", "seed")]
    pairs += [(key, text.line(run.get(key))) for key in ("started", "ended")]
    pairs += [("complete", "yes" if summary.complete else "NO: stopped before its end")]
    pairs += [("exit code", text.line(run.get("exit_code"))), ("git commit", text.line(run.get("git_commit")))]
    planned = f"{text.plural(summary.planned, 'case')}" if summary.planned is not None else ""
    digest = f"SHA-256 {text.line(plan.get('sha256'))}" if plan and plan.get("sha256") else ""
    pairs += [("plan", ", ".join(word for word in (planned, digest) if word))]
    pairs += [(key, text.line(run.get(key))) for key in ("platform", "python")]
    pairs += [(key, ", ".join(text.strings(run.get(key)))) for key in ("devices", "driver", "libraries", "plugins")]
    return [(key, value) for key, value in pairs if value]


def words() -> list[tuple[str, str, str]]:
    """(verdict, whether it passes, its meaning)."""
    return [(word, "passes" if word in PASSING else "fails", MEANING[word]) for word in (*PASSING, *FAILING)]


NOTES = (
    "Counts are of calls: one case on one backend. A call fails with the verdict of the first of its parts that fails; "
    "it is known where a ledger entry explains every part that fails.",
    "Headroom is the largest distance from the admissible set's centre, in units of its radius: "
    "at most 1 is admissible, 0 is the centre itself, ∞ has no distance (a NaN, a code outside the set).",
    "Bits equal is the mean share of elements that equal the nominal answer bit for bit. It is not demanded unless the "
    "admissible set has one member. Where a backend has several recipes the last column gives each one's.",
    "Error / FP32's is the median of the root mean square error over that of a reference in FP32 arithmetic: about 1 "
    "is as good as that precision gets, below 1 is better.",
)
