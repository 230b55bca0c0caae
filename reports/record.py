"""The record: one row for each case x backend x part, as it is journalled in ``records.jsonl``.

Everything else a run writes (tables, reports, junit.xml) is derived from records and can be made again from them.
Only the standard library is imported.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCHEMA = 2
ADDED = {"error": None, "fp32_error": None, "output_sha256": "", "selection": ""}
"""Fields that records of schema 1 lack, with what they stand for there: not known."""

PASSING = ("pass", "refused", "unsupported")
FAILING = ("wrong", "crash", "hang", "oom", "error", "ungated", "flaky")
VERDICTS = PASSING + FAILING
MEANING = {
    "pass": "every element is admissible",
    "wrong": "an output outside the admissible set",
    "crash": "the worker process died",
    "hang": "no answer within the deadline",
    "oom": "out of memory",
    "error": "an exception on a claimed call",
    "refused": "a clean refusal of a call outside the claims",
    "ungated": "an answer outside the claims, and wrong",
    "flaky": "identical runs differ",
    "unsupported": "the backend does not claim this",
}


class RecordError(ValueError):
    """A line that is no record of this schema; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One verdict.

    run: id of the run. case: the case's text; id: its id. input_sha256: hash of the inputs, empty if none were made.
    part: ``scales``, ``payload``, ``output``, ... or ``call`` where the verdict is about the call as a whole.
    sm: compute capability such as ``90``, empty on a CPU. options: call options as ``key=value`` words.
    headroom: largest |out - centre| / radius over the elements: at most 1 passes; inf where the output has no distance
        (a NaN, say); None where nothing was judged.
    stage_radii: radius of the worst element by source. bit_equal: share of elements equal to the nominal answer.
    error: root mean square of |out - exact| over the elements, in units of the output, or in codes where it is
        made of codes; inf where an output that should be finite is not; None where the part has no distance.
    fp32_error: the same of a reference in FP32 arithmetic, rounded to the output's dtype; None where there is none.
    output_sha256: hash of the answer in its canonical dtype; empty where none was judged or identical calls differ.
    selection: of a router's ids, 8 hex digits a token that tell sets of experts apart; empty elsewhere.
    worst_index: coordinates of the worst element. seconds: of the backend's call.
    """

    run: str
    case: str
    id: str
    input_sha256: str
    backend: str
    version: str
    interpreter: str
    device: str
    sm: str
    options: str
    recipe: str
    part: str
    verdict: str
    ledger_id: str = ""
    headroom: float | None = None
    stage_radii: dict[str, float] = field(default_factory=dict)
    bit_equal: float | None = None
    error: float | None = None
    fp32_error: float | None = None
    output_sha256: str = ""
    selection: str = ""
    worst_index: list[int] | None = None
    seconds: float = 0.0
    message: str = ""
    schema: int = SCHEMA

    @property
    def operation(self) -> str:
        """The case's first word."""
        return self.case.split(" ", 1)[0]

    @property
    def variant(self) -> str:
        """The case's second word."""
        return self.case.split(" ", 2)[1]

    @property
    def failing(self) -> bool:
        """Whether the verdict is a failure, known to the ledger or not."""
        return self.verdict in FAILING

    def to_line(self) -> str:
        """One line of strict JSON without the newline; infinity is written as the string "inf"."""
        data = asdict(self)
        for name in ("headroom", "error", "fp32_error"):
            if data[name] is not None and math.isinf(data[name]):
                data[name] = "inf"
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Record:
        """The inverse of `to_line`; lines of schema 1 are read too. Raises `RecordError`."""
        try:
            data: Any = json.loads(line)
        except ValueError as error:
            raise RecordError(f"record: not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("schema") not in (1, SCHEMA):
            raise RecordError(f"record: not an object of schema {SCHEMA}")
        if data["schema"] == 1 or "fp32_error" not in data:
            data = {**ADDED, **data, "schema": SCHEMA}
        if set(data) != {item.name for item in fields(cls)}:
            raise RecordError("record: keys differ from the schema's")
        if data["verdict"] not in VERDICTS:
            raise RecordError(f"record: unknown verdict {data['verdict']!r}")
        for name in ("headroom", "error", "fp32_error"):
            if data[name] == "inf":
                data[name] = math.inf
        return cls(**data)


def repro_line(
    case: str, backend: str, *, device: str = "cpu", options: str = "", plugins: tuple[str, ...] = ()
) -> str:
    """The line that shows a verdict again, ready to paste into a shell."""
    quoted = "'" + case.replace("'", "'\"'\"'") + "'"
    words = ["nox -s repro --", quoted, f"--backend {backend}"]
    if device != "cpu":
        words.append(f"--device {device}")
    words += [f"--option {option}" for option in options.split()]
    words += [f"--plugin {shlex.quote(plugin)}" for plugin in plugins]
    return " ".join(words)
