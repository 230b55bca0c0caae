"""The command ``gating``: observe, compare, write, and say so in an exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from conformance import discover, journal
from conformance import ledger as ledgers
from conformance.discover import UsageError
from conformance.gating import against, table
from conformance.gating import expected as claims
from conformance.gating.model import (
    ARCHITECTURES,
    LIBRARIES,
    WITHOUT_NAMES,
    Finding,
    Gap,
    Observed,
    Truth,
    numbers,
)
from conformance.gating.observed import joined, observe
from conformance.gating.result import Result, headline
from conformance.gating.rules import findings, without_subject
from conformance.gating.rules_truth import fake_against_real, from_truth
from conformance.gating.truth import CALLED, called, device_architecture
from conformance.gating.truth_backends import backends_called

AGREE, DISAGREE = 0, 1
FOLDER = "gating"
"""Of a run of every operation that also asks the gates: where their files go, under its own."""
AT_A_TIME = 2
"""Libraries that are asked at a time, each in a child process."""
LONG = ("triton",)
"""Libraries whose answers take so long that their architectures are divided."""
ON_DEVICE = ("flashinfer", "torch")
"""Libraries whose gates are asked by way of torch's device, so that a real one can stand in for the faked one."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for; everything where nothing was. twins: whether a second device of an architecture is asked."""

    libraries: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    sms: tuple[int, ...] = ()
    expected: Path = claims.DEFAULT
    out: Path = Path("out/gating")
    strict: bool = False
    device: str = ""
    against: tuple[str, ...] = ()
    twins: bool = True


def gating(settings: Settings, console: Console) -> int:
    """Run the comparison and return 0 or 1. Raises UsageError."""
    check_libraries("--library", settings.libraries)
    journal.make_writable(settings.out)
    result = survey(settings, console)
    paths = write(result, settings.out)
    _summarise(table.markdown(result))
    _show(result, console)
    for path in paths:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    unseen = settings.strict and (result.gaps or result.unseen_claims or result.unexplained_changes)
    return DISAGREE if result.disagreements or unseen else AGREE


def check_libraries(option: str, names: Sequence[str]) -> None:
    """Raises UsageError for a name that is no library."""
    for name in names:
        if name not in LIBRARIES:
            raise UsageError(f"{option} {name!r} is none of {', '.join(LIBRARIES)}")


def write(result: Result, out: Path) -> list[Path]:
    """The files of `gating`; their paths. Raises UsageError."""
    try:
        return table.write(result, out)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}") from None


def survey(settings: Settings, console: Console) -> Result:
    """Ask, compare and, on a device, call. Raises UsageError."""
    for sm in settings.sms:
        if sm not in ARCHITECTURES:
            raise UsageError(f"--sm {sm} is none of {', '.join(map(str, ARCHITECTURES))}")
    _check_device(settings.device)
    others = [against.parse(text, settings.libraries) for text in settings.against]
    try:
        expected = claims.load(settings.expected)
    except claims.ExpectedError as error:
        raise UsageError(str(error)) from None
    sms = sorted(set(settings.sms)) or ARCHITECTURES
    parts = []
    truths: list[Truth] = []
    more: list[Finding] = []
    everything = LIBRARIES if settings.device else WITHOUT_NAMES
    asked = list(dict.fromkeys(settings.libraries or everything))
    console.print(f"asking {', '.join(asked)} ...", highlight=False)
    observed = _observed(asked, sms, settings.subjects, settings.twins)
    for library, part in zip(asked, observed, strict=True):
        lost = without_subject(part, expected) if part.observations and not settings.subjects else ()
        gaps = (
            Gap(library=library, reason=f"{name}: claims speak of it, {library} {part.version} has none")
            for name in lost
        )
        part = replace(part, gaps=(*part.gaps, *gaps))
        if settings.device:
            part = _called(settings, part, truths, more, console)
        parts.append(part)
    if settings.subjects and not any(part.observations or part.gaps for part in parts):
        raise UsageError(f"--subject {' '.join(settings.subjects)} names nothing")
    between = tuple(change for other in others for change in _between(other, parts, sms, expected, settings, console))
    found = [finding for part in parts for finding in findings(part, expected)]
    called_for = [finding for part in parts for finding in from_truth(part, truths)]
    found += more + [
        claims.explained(finding, part.version, expected)
        for part in parts
        for finding in called_for
        if finding.library == part.library
    ]
    return Result(tuple(parts), expected, tuple(found), tuple(truths), between)


def _observed(asked: Sequence[str], sms: Sequence[int], subjects: tuple[str, ...], twins: bool) -> list[Observed]:
    """Each library's gates; one that takes long is divided among as many children as run at a time, and comes first."""
    jobs = [(library, sms[part::AT_A_TIME]) for library in asked if library in LONG for part in range(AT_A_TIME)]
    jobs = [job for job in jobs if job[1]] + [(library, sms) for library in asked if library not in LONG]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        parts = list(pool.map(lambda job: observe(job[0], job[1], subjects=subjects, twins=twins), jobs))
    return [joined([part for part in parts if part.library == library]) for library in asked]


def _between(
    other: against.Against,
    parts: list[Observed],
    sms: Sequence[int],
    expected: claims.Expected,
    settings: Settings,
    console: Console,
) -> list[Finding]:
    """What changed from another version to the one that was asked; what cannot be asked is a gap of its library."""
    found: list[Finding] = []
    for place, new in enumerate(parts):
        if other.library not in ("", new.library) or not new.version or new.library == "backends":
            continue
        console.print(f"asking {new.library} {other.version or other.python} ...", highlight=False)
        old = observe(new.library, sms, subjects=settings.subjects, python=against.interpreter(other))
        reason = "; ".join(dict.fromkeys(gap.reason for gap in old.gaps))
        if old.observations and against.same_version(old, new):
            reason = f"it is {old.version} too"
        if reason:
            gap = Gap(library=new.library, reason=f"not comparable with {other.version or other.python}: {reason}")
            parts[place] = replace(new, gaps=(*new.gaps, gap))
        elif old.observations:
            found += against.changes(old, new, expected, other.spec)
    return found


def _check_device(device: str) -> None:
    if device:
        here = [name for name in discover.devices() if name != "cpu"]
        if device not in here:
            raise UsageError(f"--device {device!r} is none of {', '.join(here) or 'this machine, which has no GPU'}")


def _called(settings: Settings, part: Observed, truths: list[Truth], more: list[Finding], console: Console) -> Observed:
    """What calls on the device come to, and whether the gates answer there as on the faked one."""
    device, subjects = settings.device, settings.subjects
    console.print(f"calling {part.library} on {device} ...", highlight=False)
    rows: list[Truth] = []
    if part.library == "backends":
        rows = backends_called(device, settings.out / "calls", ledgers.load(ledgers.DEFAULT), subjects, console)
    elif part.library in CALLED and part.version:
        rows = called(part.library, device, subjects=subjects)
        if not rows and not subjects:
            gap = Gap(library=part.library, reason=f"its calls do not start on {device}")
            return replace(part, gaps=(*part.gaps, gap))
    truths += rows
    if part.library in ON_DEVICE and part.version:
        here = sorted({row.sm for row in rows}) or device_architecture(device)
        more += fake_against_real(part, observe(part.library, here, subjects=subjects, real=True)) if here else []
    return part


def _show(result: Result, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for finding in result.findings:
        say(line(finding))
        if not finding.explained:
            say(f"    {finding.repro}")
    for change in result.changes:
        say(line(change, "explained" if change.explained else "changed"))
    for gap in result.gaps:
        say(f"not observed: {gap.library}{f' on SM{gap.sm}' if gap.sm else ''}: {gap.reason}")
    if result.unseen_claims:
        say(f"not observed: {result.unseen_claims} published claims, whose gates cannot tell on this machine")
    say(headline(result))


def line(finding: Finding, mark: str = "") -> str:
    """A finding in a line, without what shows it again."""
    mark = mark or ("known" if finding.explained else "DISAGREE")
    why = finding.explained or finding.source
    said = f"{mark} {finding.rule}: {finding.library} {finding.what} on {numbers(finding.sms)}: {finding.message}"
    return f"{said} [{why}]" if why else said


def _summarise(text: str) -> None:
    """Append to the step summary of GitHub Actions, where there is one."""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


def parse_sms(words: Sequence[str]) -> tuple[int, ...]:
    """``90``, ``sm90`` or ``SM90``. Raises UsageError."""
    numbers = []
    for word in words:
        digits = word.lower().removeprefix("sm")
        if not digits.isdecimal():
            raise UsageError(f"--sm {word!r} is no architecture such as 90 or sm90")
        numbers.append(int(digits))
    return tuple(numbers)
