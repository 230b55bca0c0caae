"""The bench of one pytest process: it runs checks one at a time with the engine.

Its blueprint travels as JSON from the process that has surveyed the backends and drawn the plan to those that execute.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from conformance.engine import Engine, Limits
from conformance.journal import Key
from conformance.kept_worker import KeptWorker, Silent
from conformance.launch import BackendSource
from conformance.ledger import Ledger, load
from conformance.oracles import Oracles, OracleWorker
from conformance.plugin_checks import Check, checks
from conformance.process_replies import descriptions
from conformance.target import BackendWorker, Target
from conformance.targets import Fleet
from fuzz.case import Case
from reports.record import Record

Sink = Callable[[Sequence[Record]], None]
"""Takes the records of one case, marked by the ledger."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """All that a process needs to run checks. sources: of the backends, target for target. logs: of the workers.

    ledger: path of the file, None for no ledger.
    """

    run: str
    plan: tuple[Case, ...]
    targets: tuple[Target, ...]
    sources: tuple[BackendSource, ...]
    plugins: tuple[str, ...]
    ledger: Path | None
    logs: Path | None
    limits: Limits
    memory_limit: int | None

    def checks(self) -> dict[str, Check]:
        """id -> check, in order."""
        return {check.id: check for check in checks(self.plan, self.targets)}

    def to_json(self) -> str:
        """Everything but the running workers."""
        data = {
            "run": self.run,
            "plan": [case.text for case in self.plan],
            "descriptions": [asdict(target.description) for target in self.targets],
            "sources": [asdict(source) for source in self.sources],
            "plugins": self.plugins,
            "ledger": self.ledger and str(self.ledger),
            "logs": self.logs and str(self.logs),
            "deadline": self.limits.deadline,
            "memory_limit": self.memory_limit,
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> tuple[Blueprint, Fleet]:
        """The inverse, with a fleet of this process that starts the targets' workers and oracles."""
        data: Mapping[str, Any] = json.loads(text)
        logs = Path(data["logs"]) if data["logs"] else None
        ledger = Path(data["ledger"]) if data["ledger"] else None
        fleet = Fleet((), logs, data["memory_limit"])
        plan = tuple(map(Case.parse, data["plan"]))
        groups = dict.fromkeys((case.operation, case.variant) for case in plan)
        entries = load(ledger) if ledger else Ledger()
        sources = tuple(
            BackendSource(**{**item, "roots": tuple(map(tuple, item["roots"])), "names": tuple(item["names"])})
            for item in data["sources"]
        )
        targets = [
            Target(
                description=description,
                start=_starter(fleet, source, description.device),
                ledger=entries.narrowed(description, groups),
            )
            for description, source in zip(descriptions(data["descriptions"]), sources, strict=True)
        ]
        blueprint = cls(
            run=data["run"],
            plan=plan,
            targets=tuple(targets),
            sources=sources,
            plugins=tuple(data["plugins"]),
            ledger=ledger,
            logs=logs,
            limits=Limits(deadline=data["deadline"]),
            memory_limit=data["memory_limit"],
        )
        return blueprint, fleet


def _starter(fleet: Fleet, source: BackendSource, device: str) -> Callable[[], BackendWorker]:
    return lambda: fleet.worker(source, device)


class Bench:
    """Runs checks. The worker of a target serves check after check, until `release` or its death."""

    def __init__(self, blueprint: Blueprint, oracle: Callable[[], OracleWorker]) -> None:
        self.blueprint = blueprint
        self._limits = replace(blueprint.limits, jobs=1)
        self._oracles = Oracles(oracle, 1, self._limits.judge_deadline)
        self._kept: dict[tuple[str, str], KeptWorker] = {}

    def run(self, check: Check, sink: Sink) -> list[Record]:
        """Run all cases of a check and return their records.

        sink: gets them case by case. Raises `HarnessError`, or KeyboardInterrupt after what was settled went to the
        sink.
        """
        target = check.target
        name = (target.description.backend, target.description.device)
        kept = self._kept.setdefault(name, KeptWorker(target.start))
        # The check's cases are its target's share already, witnesses and pace included.
        alone = replace(
            target,
            description=replace(target.description, pace=1.0),
            start=kept.take,
            before=kept.before,
            ledger=Ledger(),
        )
        book = _Book(target.ledger, sink)
        result = (
            Engine(self.blueprint.run, [alone], self._oracles, book, self._limits, Silent()).run(check.cases).sure()
        )
        if result.stopped == "interrupted":
            raise KeyboardInterrupt
        return book.records

    def release(self, but: Check | None) -> None:
        """End the workers that the next check, if any, has no use for."""
        wanted = but and (but.target.description.backend, but.target.description.device)
        for name in [name for name in self._kept if name != wanted]:
            self._kept.pop(name).end()

    def close(self) -> None:
        """End all workers."""
        self.release(None)
        self._oracles.close()


class _Book:
    """What the engine writes to: marks the records and hands them on."""

    def __init__(self, ledger: Ledger, sink: Sink) -> None:
        self._ledger, self._sink, self._mutex = ledger, sink, Lock()
        self.records: list[Record] = []

    def launching(self, key: Key) -> None:
        """Nothing is kept of it."""

    def write(self, records: Sequence[Record]) -> None:
        marked = [self._ledger.marked(record) for record in records]
        with self._mutex:
            self.records += marked
            self._sink(marked)
