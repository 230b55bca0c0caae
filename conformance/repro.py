"""A failure once more: its inputs' hash, a verdict for each part, and the elements that differ; smaller, if asked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from conformance import capsule as capsules
from conformance.capsule import Capsule
from conformance.causes import cause_of_record, failing
from conformance.discover import UsageError
from conformance.examine import Examination, Examiner
from conformance.ledger import Ledger
from conformance.messages import Claimed
from conformance.oracles import HarnessError
from conformance.process import WorkerFailed
from conformance.sealing import MAX_EXPLICIT, seal
from conformance.subjects import OWN_PLUGINS, Subject, subjects
from conformance.target import Target
from conformance.targets import Fleet, Found
from conformance.tensor_file import TensorFileError
from fuzz.case import Case
from fuzz.grammar import GRAMMAR, Size
from reports.record import Record, repro_line

if TYPE_CHECKING:
    from conformance.shrink import Shrunk

_OPTION = re.compile(r"([a-z_]+)=([A-Za-z0-9_.+,:-]+)\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
BYTES = 8
"""Bytes for an element of the inputs that a worker and a judge take at the least, one with the other."""
SHRINK_DEADLINE = 10.0
"""Seconds for a call while shrinking: what hangs is given up sooner than in a run."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be shown.

    subject: a case's text, a record's id, a capsule or a run.json. backend, device: empty for those of the subject.
    folder: the run in which an id is looked up. times: how often. expected: SHA-256 that the inputs must have, any if
    empty. shrink: seconds to make it smaller first, 0 for none. keep: where capsules go. script: where a script goes.
    """

    subject: str
    backend: str = ""
    device: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    folder: Path = Path("out/conformance")
    times: int = 1
    expected: str = ""
    shrink: float = 0.0
    keep: Path | None = None
    script: Path | None = None
    deadline: float = 30.0
    memory_limit: int | None = None


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """Call options from ``key=value`` words. Raises `UsageError`."""
    options: dict[str, str] = {}
    for word in words:
        match = _OPTION.match(word)
        if match is None or match[1] in options or match[1] == "poison":
            raise UsageError(f"--option {word!r} is not KEY=VALUE with a new key")
        options[match[1]] = match[2]
    return options


def repro(request: Request, ledger: Ledger, console: Console) -> int:
    """Show the subject and return the exit code: 0 if every time everything passes, else 1.

    Raises `UsageError`, or `HarnessError` where the inputs are not those that were expected.
    """
    found = _found(request)
    if request.script and len(found) > 1:
        raise UsageError(f"--script takes one failure, {request.subject} has {len(found)}: name a capsule of them")
    codes = []
    for number, subject in enumerate(found, start=1):
        if len(found) > 1:
            say(console, f"{'' if number == 1 else chr(10)}failure {number} of {len(found)}")
        codes.append(_one(request, subject, ledger, console))
    return max(codes)


def single(request: Request) -> Subject:
    """The one failure that is asked for, with what the command line adds. Raises `UsageError`."""
    found = _found(request)
    if len(found) > 1:
        raise UsageError(f"--bisect takes one failure, {request.subject} has {len(found)}: name a capsule of them")
    return _completed(request, found[0])


def _found(request: Request) -> list[Subject]:
    if request.expected and not _HASH.match(request.expected):
        raise UsageError("--expect-sha256 is not 64 hexadecimal digits in lower case")
    return subjects(request.subject, request.folder)


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _one(request: Request, subject: Subject, ledger: Ledger, console: Console) -> int:
    subject = _completed(request, subject)
    case = Case.parse(subject.case)
    _check_size(case, request.memory_limit)
    fleet = Fleet(subject.plugins, None, request.memory_limit)
    try:
        survey = fleet.survey((subject.backend,), (subject.device,), 2)
        if not survey.found:
            raise UsageError(f"{subject.backend} does not run: {survey.absent[0].reason}")
        found = survey.found[0]
        target = Target(
            description=found.description,
            start=found.start,
            options=subject.options,
            ledger=ledger.narrowed(found.description, [(case.operation, case.variant)]),
        )
        worker, oracle = found.start(), fleet.oracle()
        examiner = Examiner(target, worker, oracle, request.deadline)
        claimed = examiner.claimed(case)
        if isinstance(claimed, str):
            raise UsageError(f"{subject.backend} on {subject.device} does not claim this case: {claimed}")
        _check_options(subject, claimed)
        swift = Examiner(target, worker, oracle, min(request.deadline, SHRINK_DEADLINE))
        return _Repro(request, subject, case, found, claimed, examiner, swift, console).show()
    except WorkerFailed as error:
        if subject.capsule is not None and "explicit inputs: " in str(error):
            raise UsageError(f"capsule {subject.capsule.id}: {str(error).partition('explicit inputs: ')[2]}") from None
        raise HarnessError(str(error)) from None
    finally:
        fleet.close()


def _check_options(subject: Subject, claimed: Claimed) -> None:
    """Refuse call options that nobody would heed: the plain call would stand for them. Raises `UsageError`."""
    if not subject.options:
        return
    from conformance.call_options import CARRIED_OUT  # torch comes with it

    known = {**{key: list(words) for key, words in CARRIED_OUT.items()}, **claimed.claim["options"]}
    for key, word in subject.options.items():
        if key not in known:
            listed = ", ".join(sorted(known))
            raise UsageError(f"{subject.backend} has no call option {key!r} for this case; known: {listed}")
        if key in CARRIED_OUT and word not in CARRIED_OUT[key]:
            raise UsageError(f"call option {key}={word} is none of {', '.join(CARRIED_OUT[key])}")
        if key in ("stream", "graph") and not subject.device.startswith("cuda"):
            raise UsageError(f"call option {key}={word}: {subject.device} has no streams")


def _check_size(case: Case, memory_limit: int | None) -> None:
    """Refuse what no worker could make within its memory. Raises `UsageError`."""
    keys = GRAMMAR[case.operation][case.variant].keys
    at_most = math.prod(case.integer(key) for key, domain in keys.items() if isinstance(domain, Size))
    if memory_limit is None or BYTES * at_most <= memory_limit:
        return
    from fuzz.anatomy import elements  # torch comes with it

    count = elements(case)
    if BYTES * count > memory_limit:
        raise UsageError(f"the case has {count} elements of input: too many for --memory-limit, {BYTES} bytes for each")


def _completed(request: Request, subject: Subject) -> Subject:
    """The subject with what the command line adds. Raises `UsageError`."""
    backend = request.backend or subject.backend
    if not backend:
        raise UsageError("Missing option '--backend'.")
    foreign = [name for name in subject.plugins if name not in OWN_PLUGINS]
    if foreign and not request.plugins and not request.backend:
        raise UsageError(f"backend {backend} came from --plugin {foreign[0]}: give --plugin again, if you trust it")
    own = tuple(name for name in subject.plugins if name in OWN_PLUGINS)
    return replace(
        subject,
        backend=backend,
        device=request.device or subject.device or "cpu",
        options=request.options or subject.options,
        plugins=request.plugins or own,
        input_sha256=request.expected or subject.input_sha256,
    )


class _Repro:
    def __init__(
        self,
        request: Request,
        subject: Subject,
        case: Case,
        found: Found,
        claimed: Claimed,
        examiner: Examiner,
        swift: Examiner,
        console: Console,
    ) -> None:
        self._request, self._subject, self._case, self._found = request, subject, case, found
        self._claimed, self._examiner, self._swift, self._console = claimed, examiner, swift, console
        self._inputs = subject.capsule.inputs if subject.capsule else ()

    def show(self) -> int:
        """See `repro`."""
        subject, target = self._subject, self._examiner.target
        about, capsule = target.description, subject.capsule
        digest = self._examiner.judge(self._case, (), self._inputs).input_sha256
        if subject.input_sha256 and digest != subject.input_sha256:
            if capsule is not None:
                raise UsageError(
                    f"capsule {capsule.id}: the inputs of its case hash to {digest}, not to {subject.input_sha256}"
                )
            raise HarnessError(f"the inputs hash to {digest}, expected {subject.input_sha256}")
        self._say(f"case     {self._case}")
        if self._inputs:
            self._say(f"         on explicit inputs: {', '.join(f'{w.name} {list(w.shape)}' for w in self._inputs)}")
        self._say(f"backend  {about.backend} {about.version} on {about.device} {about.device_name}".rstrip())
        self._say(f"with     {about.interpreter}; " + ", ".join(f"{k} {v}" for k, v in sorted(about.libraries.items())))
        self._say(f"recipe   {self._claimed.recipe_text} ({self._claimed.recipe.get('source', '')})")
        if target.options:
            self._say(f"options  {target.options_text}")
        self._say(f"inputs   SHA-256 {digest}")
        for line in _changes(capsule, about.version, about.libraries, self._claimed):
            self._say(line)
        failed, last = 0, None
        for number in range(1, self._request.times + 1):
            if self._request.times > 1:
                self._say(f"time {number} of {self._request.times}")
            examination = self._examiner.examine(self._case, self._inputs)
            bad = self._shown(examination)
            failed += bad
            last = examination if bad or last is None else last
        if self._request.times > 1:
            share = failed / self._request.times
            self._say(f"failed {failed} of {self._request.times} times ({share:.1%})")
        if failed and last is not None:
            self._keep(last, failed)
        elif self._request.shrink or self._request.script or self._request.keep:
            self._say("nothing failed: nothing is kept")
        return 1 if failed else 0

    def _keep(self, examination: Examination, failed: int) -> None:
        """Shrink, write a capsule, export a script, as far as that is asked for."""
        request = self._request
        if not (request.shrink or request.script or request.keep):
            return
        from conformance import shrink

        small = None
        if request.shrink and not self._inputs:
            small = shrink.shrink(self._case, self._swift, seconds=request.shrink)
            if small is None:
                self._say("it does not fail every time: nothing is shrunk")
            else:
                self._tell(small)
        held = self._sealed(examination, small, failed)
        try:
            if request.keep or (small and not request.script):
                path = capsules.write(request.keep or Path("out/capsules"), held)
                self._say(f"capsule  {path}")
                self._say(f"         {self._line(str(path))}")
            if request.script:
                request.script.write_text(self._script(held), encoding="utf-8")
                self._say(f"script   {request.script}")
        except (OSError, TensorFileError) as error:
            raise UsageError(f"cannot write: {error}") from None

    def _tell(self, small: Shrunk) -> None:
        """What shrinking found."""
        counts = f"{small.differing} of {small.elements} elements differ from the simplest value"
        self._say(f"shrunk   {small.case}")
        self._say(
            f"         {counts}, {small.tries} tries, {small.seconds:.1f} s" + f"; {small.note}" * bool(small.note)
        )
        self._say(f"         as text: {self._line(small.text_case.text)}")

    def _line(self, subject: str) -> str:
        target = self._examiner.target
        return repro_line(
            subject,
            target.description.backend,
            device=target.description.device,
            options=target.options_text,
            plugins=self._subject.plugins,
        )

    def _sealed(self, examination: Examination, small: Shrunk | None, failed: int) -> Capsule:
        case, inputs, origin = self._case, self._inputs, self._case
        counts: dict[str, Any] = {}
        if small is not None:
            case, inputs = small.case, small.wires
            if sum(len(wire.data) for wire in inputs) > MAX_EXPLICIT:
                case, inputs = small.text_case, ()
            counts = {"differing": small.differing, "elements": small.elements, "note": small.note}
            examination = small.found if inputs or small.inputs is None else self._swift.examine(case, inputs)
        record = failing(examination.records)
        assert record is not None
        cause = cause_of_record(record)
        return seal(
            case,
            inputs,
            examination,
            record,
            self._examiner.target.description,
            self._claimed,
            cause={"kind": cause.kind, "stage": cause.stage},
            origin=origin,
            plugins=self._subject.plugins,
            options=self._examiner.target.options_text,
            shrunk=counts,
            times=(self._request.times, failed),
        )

    def _script(self, held: Capsule) -> str:
        from conformance import script
        from conformance.operations import OPERATIONS

        case = Case.parse(held.case)
        inputs = script.laid_out_inputs(held.case, held.inputs)
        return script.export(held, self._found.source, inputs, OPERATIONS[case.operation].outputs(case))

    def _shown(self, examination: Examination) -> bool:
        """Print the records; whether one of them fails."""
        for record in examination.records:
            self._show(record, examination)
        return any(record.failing for record in examination.records)

    def _show(self, record: Record, examination: Examination) -> None:
        words = [f"{record.part}: {record.verdict}"]
        if record.headroom is not None:
            words.append(f"headroom {record.headroom:.4g}")
        if record.bit_equal is not None:
            words.append(f"bits equal {record.bit_equal:.6g}")
        words += [f"known to the ledger as {record.ledger_id}"] * bool(record.ledger_id)
        words += [record.message] * bool(record.message)
        self._say(", ".join(words))
        if record.failing:
            for example in examination.examples(record.part):
                self._say(f"    {_example(example)}")
            for name, radius in sorted(examination.radii(record.part).items()):
                self._say(f"    radius from {name}: {radius:.6g}")

    def _say(self, line: str) -> None:
        say(self._console, line)


def _changes(capsule: Capsule | None, version: str, libraries: Mapping[str, str], claimed: Claimed) -> list[str]:
    """What is not as it was where the capsule was written."""
    if capsule is None:
        return []
    lines = []
    if capsule.version_of_backend != version:
        lines.append(f"changed  {capsule.backend} {version}, it was {capsule.version_of_backend}")
    names = sorted(name for name in capsule.libraries if libraries.get(name) != capsule.libraries[name])
    lines += [f"changed  {name} {libraries.get(name, 'is absent')}, it was {capsule.libraries[name]}" for name in names]
    if capsule.recipe_text != claimed.recipe_text:
        lines.append(f"changed  the recipe was {capsule.recipe_text}")
    return lines


def _example(example: Mapping[str, Any]) -> str:
    """``[3, 17]: actual 0x7e, admissible 0x7d or 0x7c; input ...``; what else there is follows."""
    known = ("index", "actual", "admissible", "input")
    line = f"{example.get('index')}: actual {example.get('actual')}, admissible {example.get('admissible')}"
    if example.get("input") is not None:
        line += f"; input {example['input']}"
    return line + "".join(f"; {key} {value}" for key, value in example.items() if key not in known)
