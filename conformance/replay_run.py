"""``python -m conformance replay``: the backends of a replay, its table and its capsules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from conformance import capsule as capsules
from conformance import journal, planning
from conformance.discover import UsageError
from conformance.examine import JUDGE_DEADLINE, Examination, Examiner
from conformance.ledger import Ledger
from conformance.messages import JudgeReply, Wire
from conformance.oracles import HarnessError
from conformance.process import WorkerFailed
from conformance.replay import Caller, markdown, pairs, replay, replay_recorded
from conformance.repro import say
from conformance.sealing import MAX_EXPLICIT, seal
from conformance.selection_file import Recording, read
from conformance.target import Target
from conformance.targets import Fleet, Found
from fuzz.case import Case
from fuzz.grammar import GRAMMAR
from reports.record import FAILING, Record, repro_line


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to replay.

    routers, backends: names; all that claim ``routing`` or ``moe`` if empty. methods, formats: all if empty. cases: for
    each method. out: where the table and the capsules go. selections: recorded ones (``selection_file.read``), fed
    instead of those of routers that are called. experts: how many there are where a recording has no case.
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
    selections: Path | None = None
    experts: int = 0


def run(settings: Settings, ledger: Ledger, console: Console) -> int:
    """0 if every selection and every output passes or is known, else 1. Raises `UsageError` and `HarnessError`."""
    planning.check("method", settings.methods, GRAMMAR["routing"])
    planning.check("format", settings.formats, GRAMMAR["moe"])
    methods, formats = settings.methods or tuple(GRAMMAR["routing"]), settings.formats or tuple(GRAMMAR["moe"])
    recordings = _chosen(settings)
    journal.make_writable(settings.out)
    routers_here = settings.routers if recordings is None else ()
    names = tuple(dict.fromkeys((*routers_here, *settings.backends)))
    wanted = names if (settings.routers or recordings) and settings.backends else ()
    fleet = Fleet(settings.plugins, None, settings.memory_limit)
    try:
        survey = fleet.survey(wanted, settings.devices, 2)
        for name in names:
            if all(found.description.backend != name for found in survey.found):
                raise UsageError(f"backend {name!r} does not run here")
        oracle = fleet.oracle()
        routers, layers, kept = _callers(settings, survey.found, oracle, ledger)

        def keep(layer: Case, wires: Sequence[Wire], found: Examination, record: Record) -> str | None:
            if sum(len(wire.data) for wire in wires) > MAX_EXPLICIT:
                return None
            examiner = kept[f"{record.backend} on {record.device}"]
            claimed = examiner.claimed(layer)
            if isinstance(claimed, str):
                return None
            about, plugins = examiner.target.description, settings.plugins
            held = seal(layer, wires, found, record, about, claimed, cause={}, plugins=plugins)
            path = capsules.write(settings.out, held)
            return repro_line(str(path), record.backend, device=record.device, plugins=plugins)

        if recordings is not None:

            def judge(item: Recording) -> list[tuple[str, str]]:
                return judged(item, oracle.judge(item.case, item.recipe, item.outputs, JUDGE_DEADLINE))

            outcomes = replay_recorded(recordings, judge, layers, formats, settings.experts, keep)
        else:
            outcomes = replay(routers, layers, list(pairs(methods, formats, settings.cases, settings.seed)), keep)
    except WorkerFailed as error:
        raise HarnessError(str(error)) from None
    finally:
        fleet.close()
    if not any(outcome.outputs for outcome in outcomes.values()) and recordings is not None:
        raise UsageError("no expert layer here claims any of the layers for these selections")
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


def _chosen(settings: Settings) -> list[Recording] | None:
    """The recordings that are asked for, None where routers are to be called. Raises `UsageError`."""
    if settings.selections is None:
        return None
    every = read(settings.selections)
    found = [
        item
        for item in every
        if (not settings.routers or item.backend in settings.routers)
        and (not settings.methods or (item.case and Case.parse(item.case).variant in settings.methods))
    ]
    if not found:
        raise UsageError(
            f"{settings.selections}: none of {len(every)} recorded selections is of these routers and methods"
        )
    return found


def judged(item: Recording, reply: JudgeReply) -> list[tuple[str, str]]:
    """(verdict, message) of what is wrong with a recording, by its judge now and by its records then.

    A call that left its buffer unwritten or wrote its inputs has records that say so, whatever the recorded answer is.
    What the ledger knew of the same part is ``known``. Raises `UsageError` for a recording of other inputs.
    """
    if item.input_sha256 and reply.input_sha256 != item.input_sha256:
        raise UsageError(f"{item.name}: recorded on other inputs than its case has now")
    known = {part for part, _, ledger_id, _ in item.records if ledger_id}
    found = [(part, verdict, message) for part, verdict, _, message in item.records if verdict in FAILING]
    named = {part for part, _, _ in found}
    for part in reply.parts:
        if part["verdict"] != "pass" and part["part"] not in named:
            found.append((part["part"], part["verdict"], part["message"]))
    return [("known" if part in known else verdict, f"{part} {verdict}: {message}") for part, verdict, message in found]


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
            if operation == "moe" or settings.selections is None
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
