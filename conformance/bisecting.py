"""The first bad release: one failure on one backend, over the releases of a package between a good and a bad one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from rich.console import Console

from conformance import environments, repro, sides
from conformance.discover import UsageError
from conformance.environments import Release
from conformance.examine import Examiner
from conformance.oracles import HarnessError
from conformance.process import WorkerFailed
from conformance.subjects import Subject
from conformance.target import Target
from conformance.targets import Fleet
from fuzz.case import Case
from reports.record import Record

GOOD, BAD = "good", "bad"
PACKAGES = {
    "deep_gemm": "sgl-deep-gemm",
    "flashinfer": "flashinfer-python",
    "jax": "jax",
    "ml_dtypes": "ml-dtypes",
    "sglang": "sglang",
    "torch": "torch",
    "torchao": "torchao",
    "triton": "triton",
    "vllm": "vllm",
}
"""What a backend's name begins with -> the distribution that it tests."""
Try = Callable[[Version], str]
"""``good``, ``bad``, or why the release says nothing."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to bisect. of: the failure, as ``repro`` is asked for it. good, bad: versions, or ``NAME==VERSION``.

    folder: of the environments. dependencies: install what releases ask for.
    """

    of: repro.Request
    good: str
    bad: str
    folder: Path = environments.FOLDER
    dependencies: bool = True


@dataclass(frozen=True)
class Found:
    """first_bad: the oldest release that is known to fail, all older ones up to the last good one said nothing.

    last_good: the newest one that is known to be right before it. between: those in between that said nothing.
    """

    last_good: Version
    first_bad: Version
    between: tuple[Version, ...]


def search(versions: Sequence[Version], attempt: Try) -> Found:
    """Bisect versions, oldest first; the ends are tried first. Raises `UsageError` where they are not as said.

    A release that says nothing is passed over in favour of its neighbours, as long as there are any.
    """
    known: dict[int, str] = {}

    def ask(index: int) -> str:
        if index not in known:
            known[index] = attempt(versions[index])
        return known[index]

    low, high = 0, len(versions) - 1
    for index, wanted in ((low, GOOD), (high, BAD)):
        said = ask(index)
        if said != wanted:
            fails = {GOOD: "passes", BAD: "fails"}.get(said, f"says nothing: {said}")
            raise UsageError(f"--bisect: {versions[index]} was to be {wanted}, but {fails}")
    while True:
        inner = sorted(range(low + 1, high), key=lambda index: abs(2 * index - low - high))
        told = next((index for index in inner if ask(index) in (GOOD, BAD)), None)
        if told is None:
            return Found(versions[low], versions[high], tuple(versions[low + 1 : high]))
        low, high = (told, high) if known[told] == GOOD else (low, told)


def package(backend: str, good: str, bad: str) -> tuple[str, Version, Version]:
    """The distribution and both ends. Raises `UsageError`.

    Where neither end names it, it follows from the backend's name (`PACKAGES`).
    """
    ends = []
    names = set()
    for text in (good, bad):
        release = Release.parse(text)
        if release is not None:
            names.add(release.name)
        try:
            ends.append(release.version if release else Version(text))
        except InvalidVersion:
            raise UsageError(f"--bisect: {text!r} is neither a version nor NAME==VERSION") from None
    if len(names) > 1:
        raise UsageError(f"--bisect: {' and '.join(sorted(names))} are two packages")
    if not names:
        names = {name for start, name in PACKAGES.items() if f"{backend}_".startswith(f"{start}_")}
    if len(names) != 1:
        raise UsageError(f"--bisect: of which package? write GOOD as NAME=={ends[0]}")
    return names.pop(), ends[0], ends[1]


def bisect(request: Request, console: Console) -> int:
    """Name the first bad release; exit code 0. Raises `UsageError`, or `HarnessError`."""
    subject = repro.single(request.of)
    name, good, bad = package(subject.backend, request.good, request.bad)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def attempt(version: Version) -> str:
        said = _tried(request, subject, Release(name, version), oracle)
        say(f"{name} {version}: {said}")
        return said

    versions = environments.between(name, good, bad)
    say(f"{len(versions)} releases of {name} from {good} to {bad}")
    judges = Fleet((), None, request.of.memory_limit)
    oracle = judges.oracle()
    try:
        found = search(versions, attempt)
    finally:
        oracle.close()
        judges.close()
    say(f"first bad release: {name} {found.first_bad}; {found.last_good} is good")
    if found.between:
        say(f"nothing is known of {', '.join(map(str, found.between))} in between")
    return 0


def _tried(request: Request, subject: Subject, release: Release, oracle: Any) -> str:
    try:
        python = environments.create(release, request.folder, dependencies=request.dependencies)
        records = run_once(request, subject, release, python, oracle)
    except UsageError as error:
        return str(error)
    failing = [record for record in records if record.failing]
    if not failing:
        return GOOD
    capsule = subject.capsule
    if capsule is None or any((item.part, item.verdict) == (capsule.part, capsule.verdict) for item in failing):
        return BAD
    return f"fails otherwise: {failing[0].part} {failing[0].verdict}: {failing[0].message}"


def run_once(request: Request, subject: Subject, release: Release, python: str, oracle: Any) -> list[Record]:
    """The records of the failure in an interpreter, on the inputs of its capsule if there is one.

    Raises `UsageError` where the backend does not run there or does not claim the case, and `HarnessError`.
    """
    case, inputs = Case.parse(subject.case), subject.capsule.inputs if subject.capsule else ()
    side = sides.Live(
        label=str(release),
        backends=(subject.backend,),
        devices=(subject.device,),
        plugins=subject.plugins,
        python=python,
    )
    fleet = side.fleet(None, request.of.memory_limit, judges=False)
    try:
        survey = fleet.survey(side.backends, side.devices, 2)
        if not survey.found:
            raise UsageError(f"{subject.backend} does not run: {survey.absent[0].reason}")
        found = survey.found[0]
        target = Target(description=found.description, start=found.start, options=subject.options)
        examiner = Examiner(target, found.start(), oracle, request.of.deadline, run="bisect")
        claimed = examiner.claimed(case)
        if isinstance(claimed, str):
            raise UsageError(f"unsupported: {claimed}")
        records: list[Record] = []
        for _ in range(request.of.times):  # a fault that comes and goes is there if it ever was
            records = examiner.examine(case, inputs).records
            if any(record.failing for record in records):
                break
    except WorkerFailed as error:
        raise HarnessError(str(error)) from None
    finally:
        fleet.close()
    digest = next((record.input_sha256 for record in records if record.input_sha256), "")
    if subject.input_sha256 and digest and digest != subject.input_sha256:
        raise HarnessError(f"the inputs hash to {digest}, expected {subject.input_sha256}")
    return records
