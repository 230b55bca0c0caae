"""What must hold between gates, with a table of claims (`expected`) and without one.

| rule | a finding is |
|---|---|
| `expected` | an answer against a published claim, or compiled code that is not what the claim names |
| `config-against-runner` | a runner that admits what its config refuses; a config that admits where no format is |
| `admits-more-than-it-says` | an architecture that is admitted though the refusals elsewhere name a list without it |
| `same-family` | SM120 against SM121: one instruction set, so one answer |
| `gate-raises` | a gate that raises something that no caller takes as a refusal |
| `depends-on-the-device` | two devices of one architecture that differ in size and name only are not answered alike |
| `depends-on-shape` | a gate that refuses the architecture at one size and admits it at another |
| `paths-differ` | an operator that has one format of scales where it runs eagerly, and another where it is compiled |
| `flag-off` | scales converted for a library that is switched off or not installed |
| `converted-for-another` | weights converted for DeepGEMM where the dispatch takes another kernel |
| `accumulator` | a product whose recipe declares another accumulator than its tensor-core instruction has |
| `explained-no-longer` | a row of known disagreements that explains nothing that was seen |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from conformance.gating import ptx
from conformance.gating.expected import Expected, Support, explained, holds
from conformance.gating.model import ARCHITECTURES, PATHS, SHAPE, Finding, Observation, Observed, numbers

FAMILIES = ((120, 121),)
"""Architectures with one instruction set. SM103 differs from SM100 in its block-scaled FP4 instructions."""
ON_A_DEVICE = ("answers-wrongly", "admits-but-fails", "refuses-uncleanly", "works-though-refused", "fake-against-real")
"""Rules of ``rules_truth.py``: what they find is seen on one architecture only."""
OFF = " off)"
"""Ends the variants that are observed with the library switched off."""
_NAMED = re.compile(
    r"(?P<from>>=? ?|above |newer than )?\bsm_?(?P<sm>\d{2,3})(?P<all>x\b)?(?P<up>\+| ?and (?:above|newer)| or newer)?"
    r"(?P<family>[- ]family)?|\b(?P<bare>\d{2,3})(?=[,)])",
    re.IGNORECASE,
)

_ADVICE = re.compile(r"\b(please|switch to)\b[^.]*", re.IGNORECASE)
"""What to use in place of what is refused, and where: no statement about this."""

Rows = Sequence[Observation]
Wrong = dict[tuple[str, str, str], dict[str, list[int]]]
"""(Subject, message, source) -> variant -> architectures."""


def findings(observed: Observed, expected: Expected) -> list[Finding]:
    """Every disagreement of one library, the explained ones with their reasons."""
    found = list(against_claims(observed, expected))
    for rule in WITHOUT_CLAIMS:
        found += rule(observed.observations)
    found += other_device(observed)
    known = [explained(finding, observed.version, expected) for finding in found]
    return known + list(explained_no_longer(observed, expected, found))


def against_claims(observed: Observed, expected: Expected) -> Iterator[Finding]:
    """`expected`: one finding for each subject, kind of disagreement and source."""
    wrong = _wrong()
    for item in observed.observations:
        for row in expected.support:
            if not row.covers(item, observed.version) or item.answer in ("unknown", "error"):
                continue
            message = ""
            if (item.answer == "yes") != (item.sm in row.admits):
                message = _CONTRARY[item.answer] + (f" ({item.detail})" if item.detail else "")
            elif item.answer == "yes":
                message = _code(item, row)
            if message:
                wrong[item.subject, message, row.source][item.variant].append(item.sm)
    offered: dict[str, set[str]] = defaultdict(set)
    for item in observed.observations:
        offered[item.subject].add(item.variant)
    asked = {item.sm for item in observed.observations}
    for row in expected.support:
        if row.library != observed.library or row.subject not in offered or not holds(row.versions, observed.version):
            continue
        for variant in set(row.variants) - offered[row.subject]:
            if row.admits & asked:
                wrong[row.subject, "does not offer it on any architecture", row.source][variant] += row.admits & asked
    yield from _joined("expected", observed.library, wrong)


def without_subject(observed: Observed, expected: Expected) -> list[str]:
    """Subjects of claims about this version that the library does not have, or no longer under that name."""
    subjects = {item.subject for item in observed.observations}
    rows = (row for row in expected.support if row.library == observed.library)
    return list(
        dict.fromkeys(
            row.subject for row in rows if holds(row.versions, observed.version) and row.subject not in subjects
        )
    )


_CONTRARY = {"yes": "admits where the source says it refuses", "no": "refuses where the source says it admits"}


def _code(item: Observation, row: Support) -> str:
    """What the compiled code lacks, or has too much, by a claim."""
    if missing := [fact for fact in row.facts if fact not in item.facts]:
        return f"compiled without {', '.join(missing)} (found: {', '.join(item.facts) or 'nothing'})"
    if extra := [fact for fact in row.without if fact in item.facts]:
        return f"compiled with {', '.join(extra)}"
    return ""


def config_against_runner(rows: Rows) -> Iterator[Finding]:
    """`config-against-runner`, per subject."""
    for subject, items in _by_subject(rows).items():
        by_sm: dict[int, list[Observation]] = defaultdict(list)
        for item in items:
            by_sm[item.sm].append(item)
        wide: dict[tuple[str, ...], list[int]] = defaultdict(list)
        closed: list[int] = []
        for sm, here in by_sm.items():
            config = here[0].gate("config")
            admitted = tuple(item.variant for item in here if item.gate("runner") == "yes")
            if config == "no" and admitted:
                wide[admitted].append(sm)
            if config == "yes" and {item.gate("runner") for item in here} == {"no"}:
                closed.append(sm)
        for variants, sms in wide.items():
            message = f"the runner admits {', '.join(variants)} where its config refuses"
            yield _finding("config-against-runner", items[0].library, subject, (), sms, message)
        if closed:
            message = "the config admits where the runner refuses every format"
            yield _finding("config-against-runner", items[0].library, subject, (), closed, message)


def admits_more_than_it_says(rows: Rows) -> Iterator[Finding]:
    """`admits-more-than-it-says`, per subject.

    The list is all that a variant's refusals name, apart from the device that each of them speaks of.
    """
    variants: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for row in rows:
        variants[row.subject, row.variant].append(row)
    wrong = _wrong()
    for (subject, variant), items in variants.items():
        named = {
            sm
            for item in items
            for gate in item.gates
            if gate.answer == "no"
            for sm in _named(gate.detail)
            if sm != item.sm
        }
        more = {item.sm for item in items if item.answer == "yes"} - named
        if named and more:
            message = f"admitted, though its refusals name only {numbers(named)}"
            wrong[subject, message, ""][variant] += sorted(more)
    for finding in _joined("admits-more-than-it-says", _library(rows), wrong):
        yield replace(finding, everywhere=True)


def same_family(rows: Rows) -> Iterator[Finding]:
    """`same-family`, per subject and pair of answers."""
    pairs: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for item in rows:
        if item.answer in ("yes", "no"):
            pairs[item.subject, item.variant][item.sm] = item.answer
    wrong = _wrong()
    for (subject, variant), answers in pairs.items():
        for family in FAMILIES:
            seen = {sm: answers[sm] for sm in family if sm in answers}
            if len(set(seen.values())) > 1:
                message = ", ".join(f"SM{sm} {answer}" for sm, answer in seen.items())
                wrong[subject, message, ""][variant] += seen
    yield from _joined("same-family", _library(rows), wrong)


def gate_raises(rows: Rows) -> Iterator[Finding]:
    """`gate-raises`, per subject and message."""
    wrong = _wrong()
    for item in rows:
        for gate in item.gates:
            if gate.answer == "error":
                wrong[item.subject, f"{gate.name}: {gate.detail}", ""][item.variant].append(item.sm)
    yield from _joined("gate-raises", _library(rows), wrong)


def other_device(observed: Observed) -> Iterator[Finding]:
    """`depends-on-the-device`: two devices of one architecture, told apart by what a kernel does not depend on."""
    answers = {(item.subject, item.variant, item.sm): item for item in observed.observations}
    wrong = _wrong()
    for item in observed.twins:
        first = answers[item.subject, item.variant, item.sm]
        if {first.answer, item.answer} != {"yes", "no"}:
            continue
        why = item.detail or first.detail
        message = (
            f"{first.answer} on one device, {item.answer} on a smaller one of the architecture{f': {why}' * bool(why)}"
        )
        wrong[item.subject, message, ""][item.variant].append(item.sm)
    yield from _joined("depends-on-the-device", observed.library, wrong)


def depends_on_shape(rows: Rows) -> Iterator[Finding]:
    """`depends-on-shape`: a refusal of the architecture at some sizes, where others are admitted."""
    wrong = _wrong()
    for item in rows:
        for gate in item.gates:
            if gate.name == SHAPE and gate.answer == "no":
                wrong[item.subject, f"admits one shape and refuses another: {gate.detail}", ""][item.variant].append(
                    item.sm
                )
    yield from _joined("depends-on-shape", _library(rows), wrong)


def paths_differ(rows: Rows) -> Iterator[Finding]:
    """`paths-differ`: what runs eagerly against what runs compiled."""
    wrong = _wrong()
    for item in rows:
        eager, compiled = (next((gate for gate in item.gates if gate.name == name), None) for name in PATHS)
        if eager and compiled and {eager.answer, compiled.answer} == {"yes", "no"}:
            message = f"eager: {eager.detail}; compiled: {compiled.detail}"
            wrong[item.subject, message, ""][item.variant].append(item.sm)
    yield from _joined("paths-differ", _library(rows), wrong)


def flag_off(rows: Rows) -> Iterator[Finding]:
    """`flag-off`, per subject."""
    wrong = _wrong()
    for item in rows:
        other = item.subject == _DISPATCHES and not item.variant.startswith("auto deepgemm")
        if item.variant.endswith(OFF) and item.answer == "yes" and not other:
            wrong[item.subject, "yes, though the library is off", ""][item.variant].append(item.sm)
    yield from _joined("flag-off", _library(rows), wrong)


def converted_for_another(rows: Rows) -> Iterator[Finding]:
    """`converted-for-another`: SGLang's requantisation of dense weights against its dispatch of dense layers."""
    answers = {(item.subject, item.variant, item.sm): item for item in rows}
    wrong = _wrong()
    for (subject, variant, sm), item in answers.items():
        kind, _, ending = variant.partition(" ")
        if subject != _CONVERTS or kind != "dense" or item.answer != "yes":
            continue
        taken = [
            other.variant
            for other in rows
            if (other.subject, other.sm, other.answer) == (_DISPATCHES, sm, "yes")
            and other.variant.startswith("auto ")
            and other.variant.partition(" ")[2].partition(" ")[2] == ending
        ]
        if taken and not taken[0].startswith("auto deepgemm"):
            message = f"converts to UE8M0 for DeepGEMM where {_DISPATCHES} takes {taken[0].split(' ')[1]}"
            wrong[subject, message, ""][variant].append(sm)
    yield from _joined("converted-for-another", _library(rows), wrong)


_CONVERTS, _DISPATCHES = "should_deepgemm_weight_requant_ue8m0", "dispatch_w8a8_block_fp8_linear"


def accumulator(rows: Rows) -> Iterator[Finding]:
    """`accumulator`, per subject: what follows from the compiled instruction against what the backend declares."""
    wrong = _wrong()
    for item in rows:
        said = {
            prefix: [fact.removeprefix(prefix) for fact in item.facts if fact.startswith(prefix)] for prefix in _TWO
        }
        for follows in said[ptx.FOLLOWS]:
            for declared in said[ptx.DECLARED]:
                if declared not in ptx.WITHIN.get(follows, (declared,)):
                    message = f"compiles to {item.facts[0]}, which adds as {follows}; its recipe declares {declared}"
                    wrong[item.subject, message, ""][item.variant].append(item.sm)
    yield from _joined("accumulator", _library(rows), wrong)


_TWO = (ptx.FOLLOWS, ptx.DECLARED)

WITHOUT_CLAIMS: tuple[Callable[[Rows], Iterator[Finding]], ...] = (
    config_against_runner,
    admits_more_than_it_says,
    same_family,
    gate_raises,
    depends_on_shape,
    paths_differ,
    flag_off,
    converted_for_another,
    accumulator,
)


def explained_no_longer(observed: Observed, expected: Expected, found: Sequence[Finding]) -> Iterator[Finding]:
    """`explained-no-longer`: for rows of this version whose subject answered on every architecture."""
    for row in expected.explained:
        if row.library != observed.library or not holds(row.versions, observed.version) or row.rule in ON_A_DEVICE:
            continue
        about = [item for item in observed.observations if item.subject == row.subject]
        if not {item.sm for item in about}.issuperset(ARCHITECTURES):
            continue
        if any(item.answer == "unknown" for item in about if item.sm in row.sms):
            continue
        named = {sm for finding in found if row.explains(finding, observed.version) for sm in finding.sms}
        if gone := row.sms - named:
            message = f"the row for {row.rule} explains nothing here any more; take it out, or narrow it"
            yield _finding("explained-no-longer", row.library, row.subject, (), gone, message, row.source)


def _finding(
    rule: str,
    library: str,
    subject: str,
    variants: Iterable[str],
    sms: Iterable[int],
    message: str,
    source: str = "",
) -> Finding:
    return Finding(
        rule=rule,
        library=library,
        subject=subject,
        variants=tuple(variant for variant in variants if variant),
        sms=tuple(sorted(set(sms))),
        message=message,
        source=source,
        everywhere=rule in ("admits-more-than-it-says", "explained-no-longer"),
    )


def _wrong() -> Wrong:
    return defaultdict(lambda: defaultdict(list))


def _joined(rule: str, library: str, wrong: Wrong) -> Iterator[Finding]:
    """Findings of one message on the same architectures are one."""
    for (subject, message, source), by_variant in wrong.items():
        same: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for variant, where in by_variant.items():
            same[tuple(where)].append(variant)
        for sms, variants in same.items():
            yield _finding(rule, library, subject, variants, sms, message, source)


def _library(rows: Rows) -> str:
    return rows[0].library if rows else ""


def _named(text: str) -> set[int]:
    """Every architecture that a refusal names: one, a family (``sm_10x``, ``SM100-family``), or all from one on."""
    named: set[int] = set()
    for found in _NAMED.finditer(_ADVICE.sub("", text)):
        number = int(found["sm"] or found["bare"])
        if found["from"] or found["up"]:
            named |= {sm for sm in ARCHITECTURES if sm >= number}
        elif found["all"]:
            named |= {sm for sm in ARCHITECTURES if sm // 10 == number}
        elif found["family"]:
            named |= {sm for sm in ARCHITECTURES if sm // 10 == number // 10}
        else:
            named.add(number)
    return named


def _by_subject(rows: Rows) -> dict[str, list[Observation]]:
    groups: dict[str, list[Observation]] = defaultdict(list)
    for row in rows:
        groups[row.subject].append(row)
    return dict(groups)
