"""Targets: which backends there are, on which devices, and why the others do not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from conformance import discover
from conformance.discover import UsageError
from conformance.launch import BackendSource
from conformance.messages import Description
from conformance.oracles import HarnessError
from conformance.process import StartFailed, Worker, WorkerFailed

DESCRIBE_DEADLINE = 300.0
"""Seconds for a source to be imported and described."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A backend on a device where it claims something. start: a worker of its source, a new one each time."""

    description: Description
    source: BackendSource
    start: Callable[[], Worker]


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A backend, or a source of backends, that does not run on a device (on any, if empty), and why."""

    backend: str
    device: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What `Fleet.survey` finds. devices: those of this machine."""

    found: list[Found]
    absent: list[Absent]
    devices: list[str]


class Fleet:
    """Starts the workers of a run and ends those that are left when it is closed.

    plugins: files or modules. log_dir: of the workers. memory_limit: bytes for one worker. python: the interpreter of
    every backend, whatever is configured. alone: the only source of backends. judges: whether a survey tries an oracle.
    judge_device: where the references compute.
    """

    def __init__(
        self,
        plugins: Sequence[str],
        log_dir: Path | None,
        memory_limit: int | None,
        *,
        python: str | None = None,
        alone: BackendSource | None = None,
        judges: bool = True,
        judge_device: str = "cpu",
    ) -> None:
        self._judges, self._judge_device = judges, judge_device
        self._python, self._pythons = python, discover.environments()
        self._sources = [alone] if alone else discover.sources(plugins, self._pythons)
        self._log_dir, self._memory_limit = log_dir, memory_limit
        self._workers: list[Worker] = []
        self._mutex = Lock()
        self._spare_oracles: list[Worker] = []

    def worker(self, source: BackendSource | None, device: str = "cpu") -> Worker:
        """A new worker of a source, of the oracle if None."""
        python = (self._python or discover.python_for(source, self._pythons)) if source else None
        worker = Worker(source, device, python=python, log_dir=self._log_dir, memory_limit=self._memory_limit)
        with self._mutex:
            self._workers.append(worker)
        return worker

    def oracle(self) -> Worker:
        """A worker that judges: the one that the survey has tried, or a new one."""
        with self._mutex:
            if self._spare_oracles:
                return self._spare_oracles.pop()
        return self.worker(None, self._judge_device)

    def survey(self, backends: Sequence[str], devices: Sequence[str], jobs: int) -> Survey:
        """Describe the backends: those named, or all. Raises `UsageError` where a name or a plugin is no good.

        devices: as named by the user, or none for the CPU and the first CUDA device. Only sources that offer the
        backends named, or do not say what they offer, are looked at.
        """
        discover.check_names(backends, self._sources)
        here = self._devices()
        for device in devices:
            if device not in here:
                raise UsageError(f"unknown device {device!r}; known: {', '.join(here)}")
        if self._judge_device not in here:
            raise UsageError(f"--judge: unknown device {self._judge_device!r}; known: {', '.join(here)}")
        chosen = list(devices) or here[:2]
        asked = [s for s in self._sources if not (backends and s.names) or set(backends) & set(s.names)]
        # What the user wrote comes first: an error in it need not wait for all the rest.
        plugins = [source for source in asked if source.kind.startswith("plugin")]
        found, absent = self._describe(plugins, chosen, jobs)
        more, reasons = self._describe([source for source in asked if source not in plugins], chosen, jobs)
        found, absent = found + more, absent + reasons
        _check_distinct(found)
        wanted = set(backends) or _names(found, absent)
        for name in sorted(wanted - _names(found, absent)):
            known = _names(found, []) | {known for source in self._sources for known in source.names}
            lost = ", ".join(sorted({item.backend for item in absent} - known))
            raise UsageError(discover.unknown("backend", name, sorted(known)) + (lost and f"; not loadable: {lost}"))
        used = [item for item in found if item.description.backend in wanted and item.description.claims]
        for idle in {item.start for item in found} - {item.start for item in used}:
            idle().close()
        return Survey(
            found=used,
            absent=sorted(_without_claims(found, here, wanted), key=str)
            + [item for item in absent if not backends or item.backend in wanted],
            devices=here,
        )

    def close(self) -> None:
        """End every worker that is left."""
        for worker in self._workers:
            worker.close()

    def _devices(self) -> list[str]:
        try:
            return discover.devices()
        except WorkerFailed as error:
            raise HarnessError(f"cannot ask for the devices: {error}") from None

    def _describe(
        self, sources: Sequence[BackendSource], devices: Sequence[str], jobs: int
    ) -> tuple[list[Found], list[Absent]]:
        found: list[Found] = []
        absent: list[Absent] = []
        pairs = [(source, device) for source in sources for device in devices]
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                tried = pool.submit(self._try_oracle)
                outcomes = list(pool.map(lambda pair: self._describe_one(*pair), pairs))
                tried.result()
            except BaseException:  # Ctrl-C, or an error in what the user wrote: an import may take minutes more
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise
        for outcome in outcomes:
            found += [item for item in outcome if isinstance(item, Found)]
            absent += [item for item in outcome if isinstance(item, Absent)]
        return found, absent

    def _try_oracle(self) -> None:
        """Without a judge nothing can be said of any backend; and the first judgement need not wait for its start."""
        if self._spare_oracles or not self._judges:
            return
        oracle = self.worker(None, self._judge_device)
        try:
            oracle.devices(DESCRIBE_DEADLINE)
        except WorkerFailed as error:
            if isinstance(error, StartFailed) and error.status == "oom":
                raise UsageError(f"--memory-limit: too little: {error}") from None
            raise HarnessError(str(error)) from None
        self._spare_oracles.append(oracle)

    def _describe_one(self, source: BackendSource, device: str) -> Sequence[Found | Absent]:
        worker = self.worker(source, device)
        try:
            descriptions = worker.describe(DESCRIBE_DEADLINE)
        except WorkerFailed as error:
            worker.close()
            if source.kind.startswith("plugin"):
                raise UsageError(str(error)) from None
            reason = str(error).removeprefix(f"{source.label}: ")
            return [Absent(backend=name, device=device, reason=reason) for name in source.names or (source.name,)]
        if not descriptions and source.kind.startswith("plugin"):
            raise UsageError(f"{source.label}: backends() yields no backend")
        spare = [worker]

        def start() -> Worker:
            # The worker that described its source serves the first backend that asks.
            with self._mutex:
                if spare:
                    return spare.pop()
            return self.worker(source, device)

        return [Found(description=item, source=source, start=start) for item in descriptions]


def _names(found: Iterable[Found], absent: Iterable[Absent]) -> set[str]:
    return {item.description.backend for item in found} | {item.backend for item in absent}


def _check_distinct(found: Sequence[Found]) -> None:
    owners: dict[str, BackendSource] = {}
    for item in found:
        name = item.description.backend
        if owners.setdefault(name, item.source) != item.source:
            raise UsageError(f"two backends are named {name!r}: {owners[name].label} and {item.source.label}")


def _without_claims(found: Sequence[Found], devices: Sequence[str], wanted: set[str]) -> list[Absent]:
    """Backends that claim nothing on any device that was looked at."""
    claiming = {item.description.backend for item in found if item.description.claims}
    absent = []
    for name in sorted({item.description.backend for item in found} & wanted - claiming):
        on = ", ".join(item.description.device for item in found if item.description.backend == name)
        reason = f"claims nothing on {on}" + ("" if len(devices) > 1 else "; there is no CUDA device here")
        absent.append(Absent(backend=name, device="", reason=reason))
    return absent
