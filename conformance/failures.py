"""After a run: the unexplained failures by cause, the first of each made smaller and kept as a capsule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conformance import capsule as capsules
from conformance.causes import cause_of_record, failing
from conformance.examine import Examiner
from conformance.sealing import MAX_EXPLICIT, seal
from conformance.target import Target
from fuzz.case import Case
from reports.record import Record, repro_line

FOLDER = "capsules"
MOST = 8
"""Causes of one run that are kept."""
DEADLINE = 10.0
"""Seconds for a call while shrinking."""

Say = Callable[[str], None]


def by_cause(records: Sequence[Record]) -> list[list[Record]]:
    """The unexplained failures, those that seem to have one cause together, the commonest first.

    Call options tell no causes apart; failures without any come first.
    """
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in sorted(records, key=lambda item: (item.backend, item.device, item.options, item.case, item.part)):
        if record.failing and not record.ledger_id:
            about = (record.operation, record.variant, record.backend, record.device)
            found.setdefault((*about, record.part, record.verdict, cause_of_record(record).kind), []).append(record)
    return sorted(found.values(), key=lambda group: -len(group))


def keep(
    records: Sequence[Record],
    targets: Sequence[Target],
    start_oracle: Callable[[], Any],
    out: Path,
    *,
    plugins: tuple[str, ...],
    seconds: float,
    deadline: float,
    say: Say,
) -> list[dict[str, Any]]:
    """What run.json lists under ``failures``: one object a cause, with the capsule where one was written.

    seconds: for shrinking all of them; 0 keeps the failures as they are. deadline: of one call in the run.
    """
    groups = by_cause(records)[:MOST]
    if not groups:
        return []
    if seconds:
        say(f"shrinking {len(groups)} {'failure' if len(groups) == 1 else 'kinds of failure'}, at most {seconds:g} s")
    known = {(item.description.backend, item.description.device, item.options_text): item for item in targets}
    left, listed = seconds, []
    oracle = start_oracle() if seconds else None
    workers: dict[int, Any] = {}
    try:
        for number, group in enumerate(groups):
            record = group[0]
            item = _listed(record, len(group))
            target = known.get((record.backend, record.device, record.options))
            if left > 0 and target is not None:
                worker = workers.get(id(target)) or workers.setdefault(id(target), target.start())
                examiner = Examiner(target, worker, oracle, min(deadline, DEADLINE), run=record.run)
                left -= _shrink(item, record, examiner, out, plugins, left / (len(groups) - number))
            item["repro"] = repro_line(
                f"{out / str(item['capsule'])}" if item["capsule"] else item["smallest"],
                record.backend,
                device=record.device,
                options=record.options,
                plugins=plugins,
            )
            listed.append(item)
    finally:
        for worker in (*workers.values(), *([oracle] if oracle is not None else [])):
            worker.close()
    return listed


def _listed(record: Record, calls: int) -> dict[str, Any]:
    cause = cause_of_record(record)
    return {
        "case": record.case,
        "smallest": record.case,
        "backend": record.backend,
        "device": record.device,
        "options": record.options,
        "part": record.part,
        "verdict": record.verdict,
        "kind": cause.kind,
        "stage": cause.stage,
        "message": record.message,
        "input_sha256": record.input_sha256,
        "calls": calls,
        "capsule": "",
        "shrunk": "",
        "differing": 0,
        "elements": 0,
        "note": "",
        "repro": "",
    }


def _shrink(
    item: dict[str, Any], record: Record, examiner: Examiner, out: Path, plugins: tuple[str, ...], seconds: float
) -> float:
    """Shrink a failure, write its capsule, complete its item; the seconds that it took, starting a worker aside."""
    from conformance import shrink

    target = examiner.target
    started = time.monotonic()
    try:
        small = shrink.shrink(Case.parse(record.case), examiner, seconds=seconds)
        if small is None:
            item["note"] = "does not fail when it is called again by itself"
            return time.monotonic() - started
        case, inputs, found, fails = small.case, small.wires, small.found, small.record
        if sum(len(wire.data) for wire in inputs) > MAX_EXPLICIT:
            case, inputs, found = small.text_case, (), examiner.examine(small.text_case)
            fails = failing(found.records) or fails
        claimed = examiner.claimed(case)
        if isinstance(claimed, str):
            return small.seconds
        counts = {"differing": small.differing, "elements": small.elements, "note": small.note}
        held = seal(
            case,
            inputs,
            found,
            fails,
            target.description,
            claimed,
            cause={"kind": small.cause.kind, "stage": small.cause.stage},
            origin=small.origin,
            plugins=plugins,
            options=target.options_text,
            shrunk=counts,
        )
        path = capsules.write(out / FOLDER, held)
        item.update(counts, smallest=small.text_case.text, shrunk=case.text, capsule=f"{FOLDER}/{path.name}")
    except Exception as error:  # the run's verdicts stand, whatever becomes of this
        item["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return time.monotonic() - started
    return small.seconds
