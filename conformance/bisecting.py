"""The first bad release: one case on one backend, over the releases of a package between a good and a bad one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console

from conformance import environments, sides
from conformance.discover import UsageError
from conformance.engine import Engine, HarnessError, Limits, Oracles, Target
from conformance.environments import Release
from conformance.process import WorkerFailed
from conformance.progress import Progress
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
    """What to bisect. good, bad: versions, or ``NAME==VERSION``."""

    case: str
    backend: str
    good: str
    bad: str
    device: str = "cpu"
    plugins: tuple[str, ...] = ()
    folder: Path = environments.FOLDER
    dependencies: bool = True
    deadline: float = 30.0
    memory_limit: int | None = None


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


def package(request: Request) -> tuple[str, Version, Version]:
    """The distribution and both ends. Raises `UsageError`.

    Where neither end names it, it follows from the backend's name (`PACKAGES`).
    """
    ends = []
    names = set()
    for text in (request.good, request.bad):
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
        names = {name for start, name in PACKAGES.items() if f"{request.backend}_".startswith(f"{start}_")}
    if len(names) != 1:
        raise UsageError(f"--bisect: of which package? write GOOD as NAME=={ends[0]}")
    return names.pop(), ends[0], ends[1]


def bisect(request: Request, console: Console) -> int:
    """Name the first bad release; exit code 0. Raises `UsageError`, or `HarnessError`."""
    case = Case.parse(request.case)
    name, good, bad = package(request)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def attempt(version: Version) -> str:
        said = _tried(request, case, Release(name, version), oracles)
        say(f"{name} {version}: {said}")
        return said

    versions = environments.between(name, good, bad)
    say(f"{len(versions)} releases of {name} from {good} to {bad}")
    judges = Fleet((), None, request.memory_limit)
    oracles = Oracles(judges.oracle, 1, Limits().judge_deadline)
    try:
        found = search(versions, attempt)
    finally:
        oracles.close()
        judges.close()
    say(f"first bad release: {name} {found.first_bad}; {found.last_good} is good")
    if found.between:
        say(f"nothing is known of {', '.join(map(str, found.between))} in between")
    return 0


def _tried(request: Request, case: Case, release: Release, oracles: Oracles) -> str:
    try:
        python = environments.create(release, request.folder, dependencies=request.dependencies)
        records = run_once(request, case, release, python, oracles)
    except UsageError as error:
        return str(error)
    failing = [record for record in records if record.failing]
    if failing:
        return BAD
    silent = next((record for record in records if record.verdict != "pass"), None)
    return GOOD if silent is None else f"{silent.verdict}: {silent.message}"


def run_once(request: Request, case: Case, release: Release, python: str, oracles: Oracles) -> list[Record]:
    """The records of the case in an interpreter. Raises `UsageError` where the backend does not run there."""
    side = sides.Live(
        label=str(release),
        backends=(request.backend,),
        devices=(request.device,),
        plugins=request.plugins,
        python=python,
    )
    fleet = side.fleet(None, request.memory_limit, judges=False)
    try:
        survey = fleet.survey(side.backends, side.devices, 2)
        if not survey.found:
            raise UsageError(f"{request.backend} does not run: {survey.absent[0].reason}")
        item = survey.found[0]
        target = Target(description=item.description, start=item.start)
        book = _Book()
        Engine("bisect", [target], oracles, book, Limits(deadline=request.deadline), _Silent()).run([case])
        return book.records
    except WorkerFailed as error:
        raise HarnessError(str(error)) from None
    finally:
        fleet.close()


@dataclass
class _Book:
    records: list[Record] = field(default_factory=list)

    def launching(self, key: object) -> None:
        """Nothing to note."""

    def write(self, records: Sequence[Record]) -> None:
        """Keep them."""
        self.records.extend(records)


class _Silent(Progress):
    def start(self, total: int | None) -> None:
        """Nothing to show."""

    def advance(self, records: Sequence[Record]) -> None:
        """Nothing to show."""

    def finish(self) -> None:
        """Nothing to show."""
