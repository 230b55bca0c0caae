"""``python -m conformance replay``: the backends of a replay, its table and its capsules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from conformance import capsule as capsules
from conformance import journal, planning
from conformance.discover import UsageError
from conformance.engine import HarnessError, Target
from conformance.examine import Examination, Examiner
from conformance.ledger import Ledger
from conformance.messages import Wire
from conformance.process import WorkerFailed
from conformance.replay import Caller, Pair, markdown, pairs, replay
from conformance.repro import say
from conformance.sealing import MAX_EXPLICIT, seal
from conformance.targets import Fleet, Found
from fuzz.grammar import GRAMMAR
from reports.record import Record


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to replay.

    routers, backends: names; all that claim ``routing`` or ``moe`` if empty. methods, formats: all if empty. cases: for
    each method. out: where the table and the capsules go.
    """

    routers: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    cases: int
    seed: int
    out: Path
    deadline: float
    memory_limit: int | None = None


def run(settings: Settings, ledger: Ledger, console: Console) -> int:
    """0 if every selection and every output passes or is known, else 1. Raises `UsageError` and `HarnessError`."""
    planning.check("method", settings.methods, GRAMMAR["routing"])
    planning.check("format", settings.formats, GRAMMAR["moe"])
    methods, formats = settings.methods or tuple(GRAMMAR["routing"]), settings.formats or tuple(GRAMMAR["moe"])
    journal.make_writable(settings.out)
    names = tuple(dict.fromkeys((*settings.routers, *settings.backends)))
    wanted = names if settings.routers and settings.backends else ()
    fleet = Fleet(settings.plugins, None, settings.memory_limit)
    try:
        survey = fleet.survey(wanted, settings.devices, 2)
        for name in names:
            if all(found.description.backend != name for found in survey.found):
                raise UsageError(f"backend {name!r} does not run here")
        oracle = fleet.oracle()
        routers, layers, kept = _callers(settings, survey.found, oracle, ledger)

        def keep(pair: Pair, wires: Sequence[Wire], found: Examination, record: Record) -> Path | None:
            if sum(len(wire.data) for wire in wires) > MAX_EXPLICIT:
                return None
            examiner = kept[f"{record.backend} on {record.device}"]
            claimed = examiner.claimed(pair.layer)
            if isinstance(claimed, str):
                return None
            held = seal(pair.layer, wires, found, record, examiner.target.description, claimed, cause={})
            return capsules.write(settings.out, held)

        every = list(pairs(methods, formats, settings.cases, settings.seed))
        outcomes = replay(routers, layers, every, keep)
    except WorkerFailed as error:
        raise HarnessError(str(error)) from None
    finally:
        fleet.close()
    if not any(outcome.selections for outcome in outcomes.values()):
        raise UsageError("no router claims any of the cases")
    table = markdown(outcomes)
    failing = [line for outcome in outcomes.values() for line in outcome.failing]
    try:
        (settings.out / "replay.md").write_text(f"# Routing replay\n\n{table}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {settings.out}: {error.strerror}") from None
    for line in (*table.splitlines(), *failing, str(settings.out / "replay.md")):
        say(console, line)
    return 1 if failing else 0


def _callers(
    settings: Settings, found: Sequence[Found], oracle: object, ledger: Ledger
) -> tuple[dict[str, Caller], dict[str, Caller], dict[str, Examiner]]:
    """Routers and layers by ``NAME on DEVICE``; a worker each, however often it is used."""
    routers: dict[str, Caller] = {}
    layers: dict[str, Caller] = {}
    every: dict[str, Examiner] = {}
    for item in found:
        about = item.description
        claimed = {claim.claim["operation"] for claim in about.claims}
        roles = [
            role
            for role, operation, chosen in (
                (routers, "routing", settings.routers),
                (layers, "moe", settings.backends),
            )
            if operation in claimed and (not chosen or about.backend in chosen)
        ]
        if not roles:
            continue
        groups = [(operation, variant) for operation in ("routing", "moe") for variant in GRAMMAR[operation]]
        target = Target(description=about, start=item.start, ledger=ledger.narrowed(about, groups))
        name = f"{about.backend} on {about.device}"
        every[name] = Examiner(target, item.start(), oracle, settings.deadline, run="replay")
        for role in roles:
            role[name] = every[name]
    return routers, layers, every
