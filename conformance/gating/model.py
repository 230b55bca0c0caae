"""What is known of a gate: one answer a gate, one observation an architecture, one gap where nothing could be seen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 107, 110, 120, 121)
"""Compute capabilities, ten times the major plus the minor number."""
LIBRARIES = ("flashinfer", "sglang", "vllm", "torch", "triton", "backends")
"""`backends`: what this project's own backends claim; asked by name, and where a device is called."""
WITHOUT_NAMES = LIBRARIES[:-1]
"""What is asked where no library is named."""

SHAPE = "shape"
"""The gate that says no where another shape than the one that is admitted is refused for its architecture."""
PATHS = ("eager", "compiled")
"""The gates of an operator that runs in either way."""

Answer = Literal["yes", "no", "unknown", "error"]
"""yes: admits. no: refuses the architecture. unknown: cannot tell here. error: raises what no caller expects."""

ENVIRONMENT = re.compile(
    r"compiled with CUDA|without CUDA|no CUDA GPUs|NVIDIA driver|unable to find symbol|no module named|faked device"
    r"|shared object|not installed|pip install|requires? .*(package|toolchain|CUDA \d|CuTe DSL|cuDNN|cuda-tile|nvcc)",
    re.IGNORECASE,
)
"""Refusals that speak of this machine: a missing package, toolchain or driver."""
ARCHITECTURE = re.compile(r"\bsm_?\d{2,3}|architecture|compute capabilit|\barch\b", re.IGNORECASE)
"""Refusals that speak of the architecture."""


@dataclass(frozen=True)
class Gate:
    """One gate's answer. name: such as ``config`` or ``runner``. detail: why it refuses, as the library says it."""

    name: str
    answer: Answer
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a library says of one subject (runner, function, kernel) and variant on one architecture.

    A caller passes all gates in turn. facts: what was found in compiled code, such as ``wgmma``. patch: the number of
    the patch that was applied before, 0 for none.
    """

    library: str
    subject: str
    variant: str
    sm: int
    gates: tuple[Gate, ...]
    facts: tuple[str, ...] = ()
    patch: int = 0

    @property
    def answer(self) -> Answer:
        """What the gates say together: the worst of error, no, unknown, yes."""
        given = {gate.answer for gate in self.gates}
        order: tuple[Answer, ...] = ("error", "no", "unknown")
        return next((answer for answer in order if answer in given), "yes")

    @property
    def detail(self) -> str:
        """The detail of the gate that decides."""
        return next((gate.detail for gate in self.gates if gate.answer == self.answer), "")

    def gate(self, name: str) -> Answer | None:
        """The answer of one gate."""
        return next((gate.answer for gate in self.gates if gate.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """What could not be observed: a library (``sm`` None) or one architecture of it."""

    library: str
    reason: str
    sm: int | None = None
    patch: int = 0


@dataclass(frozen=True, kw_only=True)
class Observed:
    """All that was seen of one library. version: empty where it is not installed. notes: how it was made to answer.

    twins: what another device of the architecture was answered, where that is something else.
    """

    library: str
    version: str
    observations: tuple[Observation, ...] = ()
    gaps: tuple[Gap, ...] = ()
    notes: tuple[str, ...] = ()
    twins: tuple[Observation, ...] = ()

    def patched(self, number: int) -> Observed:
        """The part that was seen under one patch."""
        return Observed(
            library=self.library,
            version=self.version,
            observations=tuple(item for item in self.observations if item.patch == number),
            gaps=tuple(gap for gap in self.gaps if gap.patch == number),
            notes=self.notes,
            twins=tuple(item for item in self.twins if item.patch == number),
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A disagreement. rule: its name. variants: which, all if empty. sms: where.

    source: who says otherwise. explained: the reason of the row that explains it, empty if none does. everywhere:
    whether it shows only where all architectures are asked. line: what shows it again, if that is another line.
    """

    rule: str
    library: str
    subject: str
    variants: tuple[str, ...]
    sms: tuple[int, ...]
    message: str
    source: str = ""
    explained: str = ""
    everywhere: bool = False
    line: str = ""

    @property
    def what(self) -> str:
        """Subject and variants."""
        return " ".join(word for word in (self.subject, ", ".join(self.variants)) if word)

    @property
    def repro(self) -> str:
        """The one line that shows it again."""
        if self.line:
            return self.line
        words = [f"python -m conformance gating --library {self.library} --subject {self.subject}"]
        return " ".join(words + ([] if self.everywhere else [f"--sm {sm}" for sm in self.sms]))


Outcome = Literal["right", "wrong", "refused", "raised", "crashed", "hung"]
"""What a real call came to. refused: an exception of the kind that says no, with the device usable afterwards."""
OUTCOMES: tuple[Outcome, ...] = ("wrong", "crashed", "hung", "raised", "refused", "right")
"""The worst first."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What calls of one subject and variant came to on a real device.

    calls: how many. repro: the line that shows the worst of them again.
    """

    library: str
    subject: str
    variant: str
    sm: int
    outcome: Outcome
    detail: str = ""
    calls: int = 1
    repro: str = ""


def numbers(sms: Iterable[int]) -> str:
    """``SM100, SM103``."""
    return ", ".join(f"SM{sm}" for sm in sorted(set(sms)))


def classify(error: BaseException, caught: tuple[type[BaseException], ...]) -> Gate:
    """A gate's exception as an answer of a gate without a name. caught: what the library takes as a refusal."""
    text = " ".join(str(error).split()) or type(error).__name__
    said = text if isinstance(error, caught) else f"{type(error).__name__}: {text}"
    if isinstance(error, ImportError | FileNotFoundError) or ENVIRONMENT.search(text):
        return Gate("", "unknown", said)
    if not isinstance(error, caught):
        return Gate("", "error", said)
    return Gate("", "no" if ARCHITECTURE.search(text) else "unknown", said)
