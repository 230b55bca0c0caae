"""What a run says: its outcome, its counts, and its first lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reports import text
from reports.frame import order
from reports.groups import FAIL, KNOWN, PASS, REFUSED, STATUSES, UNSUPPORTED, Call, Group, calls_by_group
from reports.record import FAILING, Record
from reports.sections import Section, sections


@dataclass(frozen=True)
class Known:
    """A ledger entry with the calls that it explains. Texts are clean; empty where the run does not say."""

    id: str
    backend: str
    reason: str
    issue: str
    witness: str
    witness_verdict: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Summary:
    """A run, summarised. groups: failing ones first, then known failures, then the rest; `judged` ones only.

    unclaimed: all groups with unsupported calls, judged or not. problems: one line each, each turns the run red.
    not_run, left_out: (what, why), wholly and in part. cases: distinct ones that were called. reached: those and the
    ones that nobody claims. planned: as the run says. sections: what the run took over from elsewhere.
    """

    run: Mapping[str, Any]
    records: Sequence[Record]
    groups: tuple[Group, ...]
    unclaimed: tuple[Group, ...]
    known: tuple[Known, ...]
    problems: tuple[str, ...]
    not_run: tuple[tuple[str, str], ...]
    left_out: tuple[tuple[str, str], ...]
    counts: Counter[str]
    failing: Counter[str]
    cases: int
    reached: int
    planned: int | None
    complete: bool
    models: Mapping[str, str] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()

    @property
    def executed(self) -> int:
        """Calls that were made."""
        return sum(self.counts[status] for status in STATUSES if status != UNSUPPORTED)

    @property
    def outcome(self) -> str:
        """``failed``, ``empty``, ``incomplete`` or ``conformant``: the first that applies. An exit code counts last."""
        if self.counts[FAIL] or self.problems:
            return "failed"
        if not self.executed:
            return "empty"
        if not self.complete:
            return "incomplete"
        return "conformant" if self.run.get("exit_code") in (None, 0) else "failed"

    @property
    def failures(self) -> list[tuple[Group, list[Call]]]:
        """The groups with unexplained failures, with these."""
        pairs = [(group, [call for call in group.calls if call.status == FAIL]) for group in self.groups]
        return [pair for pair in pairs if pair[1]]

    @property
    def plugins(self) -> tuple[str, ...]:
        """As the repro line repeats them."""
        return tuple(text.strings(self.run.get("plugins")))

    def totals(self) -> dict[str, Any]:
        """Plain data for run.json: outcome, cases, calls, records, a count for each status and failing verdict."""
        return {
            "outcome": self.outcome,
            "cases": self.cases,
            "calls": sum(self.counts.values()),
            "records": len(self.records),
            "status": {status: self.counts[status] for status in STATUSES},
            "unexplained": {verdict: self.failing[verdict] for verdict in FAILING if self.failing[verdict]},
            "known": {entry.id: len(entry.calls) for entry in self.known},
        }


def summarise(records: Iterable[Record], run: Mapping[str, Any]) -> Summary:
    """The summary of a run. Keys that the run lacks are left out of what is said."""
    ordered = order(records)
    entries = _mappings(run.get("backends"))
    every = [_group(calls, entries) for calls in calls_by_group(ordered)]
    calls = [call for group in every for call in group.calls]
    judged = sorted((group for group in every if group.judged), key=lambda group: STATUSES.index(group.status))
    plan = run.get("plan")
    planned = plan.get("cases") if isinstance(plan, Mapping) else None
    known = _known(calls, _mappings(run.get("ledger")))
    return Summary(
        run=run,
        records=ordered,
        groups=tuple(judged),
        unclaimed=tuple(group for group in every if group.counts[UNSUPPORTED]),
        known=known,
        problems=_problems(run, known),
        not_run=tuple(sorted(_not_run(run))),
        left_out=tuple(sorted(_left_out(run))),
        counts=Counter(call.status for call in calls),
        failing=Counter(call.lead.verdict for call in calls if call.status == FAIL),
        cases=len({call.lead.case for call in calls if call.status != UNSUPPORTED}),
        reached=len({call.parts[0].case for call in calls}),
        planned=planned if isinstance(planned, int) else None,
        complete=bool(run.get("complete", True)),
        models={text.line(entry.get("device")): text.line(entry.get("device_name")) for entry in entries},
        sections=sections(run),
    )


def headline(records: Iterable[Record], run: Mapping[str, Any]) -> list[str]:
    """The first lines of plain text: the outcome, what ran where, what is known to fail and why, what did not run."""
    return lines(summarise(records, run))


def lines(summary: Summary) -> list[str]:
    """`headline` of a summary that is there already."""
    said = [verdict_line(summary)]
    if not summary.complete:
        said.append(stop_line(summary))
    said += [f"Problem: {problem}" for problem in summary.problems]
    tally = [f"{text.count(summary.counts[PASS])} passed"]
    tally += [f"{text.count(summary.counts[REFUSED])} refused cleanly"] * bool(summary.counts[REFUSED])
    tally += [f"{text.count(summary.counts[KNOWN])} failed as known"] * bool(summary.counts[KNOWN])
    tally += [f"{text.count(summary.counts[FAIL])} failed unexplained"] * bool(summary.counts[FAIL])
    said.append(
        f"Ran {text.plural(summary.cases, 'case')} in {text.plural(summary.executed, 'call')}: {', '.join(tally)}."
    )
    if summary.counts[UNSUPPORTED]:
        said[-1] += f" {text.plural(summary.counts[UNSUPPORTED], 'call was', 'calls were')} not made: not claimed."
    said += [f"On {item}" for item in ran_on(summary)]
    said += [f"{section.title}: {section.headline}" for section in summary.sections]
    for entry in summary.known:
        said.append(known_line(entry))
    for name, reason in summary.not_run:
        said.append(f"Did not run: {name}: {reason}")
    for name, reason in summary.left_out:
        said.append(f"Ran in part: {name}: {reason}")
    return said


def verdict_line(summary: Summary) -> str:
    """The outcome in a line."""
    failures, problems = summary.counts[FAIL], len(summary.problems)
    if summary.outcome == "empty":
        return "NOTHING RAN: no case was executed"
    if summary.outcome == "incomplete":
        return "INCOMPLETE: no unexplained failure so far"
    if summary.outcome == "conformant":
        return f"CONFORMANT: no unexplained failure in {text.plural(summary.executed, 'call')}"
    said = [f"{text.plural(failures, 'unexplained failure')} ({text.counts(summary.failing)})"] * bool(failures)
    said += [text.plural(problems, "problem")] * bool(problems)
    return f"NOT CONFORMANT: {' and '.join(said) or 'exit code ' + text.line(summary.run.get('exit_code'))}"


def stop_line(summary: Summary) -> str:
    """Why and how far before its end an incomplete run stopped."""
    why = text.line(summary.run.get("stopped"))
    pairs = summary.run.get("pairs")
    if isinstance(pairs, Mapping) and isinstance(pairs.get("planned"), int) and isinstance(pairs.get("settled"), int):
        far = f"{text.count(pairs['settled'])} of {text.count(pairs['planned'])} (case, backend) pairs were settled"
    elif summary.planned is not None and summary.reached <= summary.planned:  # witnesses are in no plan
        far = f"{text.count(summary.reached)} of {text.plural(summary.planned, 'planned case')} were reached"
    else:
        far = f"{text.plural(summary.reached, 'case')} were reached"
    return f"The run stopped before its end{f' ({why})' if why else ''}: {far}; nothing is said of the others."


def known_line(entry: Known) -> str:
    """A known failure in a line: ledger id, how often, why, where it is reported."""
    issue = f" ({entry.issue})" if entry.issue else ""
    reason = entry.reason or "no reason recorded"
    return f"Known to fail: {entry.id}: {text.plural(len(entry.calls), 'call')} of {entry.backend}: {reason}{issue}"


def ran_on(summary: Summary) -> list[str]:
    """The devices that were used, each with its backends and their versions."""
    found: dict[str, dict[str, None]] = {}
    for group in sorted(summary.groups, key=lambda group: (group.device, group.backend, group.version)):
        device = text.device(text.line(group.device), text.line(group.sm), summary.models.get(group.device, ""))
        found.setdefault(device, {})[f"{text.line(group.backend)} {text.line(group.version)}".strip()] = None
    return [f"{device}: {', '.join(names)}" for device, names in found.items()]


def _group(calls: Sequence[Call], entries: Sequence[Mapping[str, Any]]) -> Group:
    first = calls[0].parts[0]
    listed = [
        claim
        for entry in entries
        if entry.get("backend") == first.backend and entry.get("device") in (first.device, None)
        for claim in _mappings(entry.get("claims"))
        if (claim.get("operation"), claim.get("variant")) == (first.operation, first.variant)
    ]
    recipes = {text.line(item.recipe) for call in calls if call.status != UNSUPPORTED for item in call.parts}
    return Group(
        operation=text.line(first.operation),
        variant=text.line(first.variant),
        backend=first.backend,
        version=first.version,
        device=first.device,
        sm=first.sm,
        calls=tuple(calls),
        claims=_distinct(claim.get("claim") for claim in listed),
        recipes=tuple(sorted(recipes - {""})) or _distinct(claim.get("recipe") for claim in listed),
        sources=_distinct(claim.get("source") for claim in listed),
    )


def _distinct(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(sorted({text.line(value) for value in values} - {""}))


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def _known(calls: Sequence[Call], ledger: Sequence[Mapping[str, Any]]) -> tuple[Known, ...]:
    matched: dict[str, list[Call]] = {}
    for call in calls:
        if call.status == KNOWN:
            matched.setdefault(call.lead.ledger_id, []).append(call)
    entries: dict[str, Mapping[str, Any]] = {str(entry.get("id")): entry for entry in ledger}
    found = []
    for name in sorted(set(matched) | set(entries)):
        entry, its = entries.get(name, {}), matched.get(name, [])
        backends = _distinct(call.lead.backend for call in its)
        found.append(
            Known(
                id=text.line(name),
                backend=text.line(entry.get("backend")) or ", ".join(backends),
                reason=text.line(entry.get("reason")),
                issue=text.line(entry.get("issue")),
                witness=text.line(entry.get("witness")),
                witness_verdict=text.line(entry.get("witness_verdict")),
                calls=tuple(its),
            )
        )
    return tuple(found)


def _problems(run: Mapping[str, Any], known: Sequence[Known]) -> tuple[str, ...]:
    said = text.strings(run.get("problems"))
    for entry in known:
        if entry.witness_verdict == "pass" and not any(entry.id in problem for problem in said):
            said.append(f"the witness of ledger entry {entry.id} passes: the entry is out of date")
    return tuple(said)


def _place(entry: Mapping[str, Any]) -> str:
    return " on ".join(text.line(entry[key]) for key in ("backend", "device") if entry.get(key)) or "something"


def _not_run(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in _mappings(run.get("not_run")):
        yield _place(entry), text.line(entry.get("reason")) or "no reason recorded"


def _left_out(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in _mappings(run.get("left_out")):
        if isinstance(entry.get("cases"), int) and entry["cases"]:
            yield (
                _place(entry),
                f"{text.plural(entry['cases'], 'case')} of the plan left out, beyond its share",
            )
