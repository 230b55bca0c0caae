"""Triton launches that a backend makes for a claim, taken down instead of made: what its library would compile.

The library's own code chooses tiles, stages and constants, for the architecture that the faked device has. Tensors lie
on the CPU; nothing is launched, so that answers mean nothing, and an error after the launches is of no interest.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance import planning
from conformance.operations import OPERATIONS
from fuzz import inputs as fuzz_inputs
from fuzz import plan as plans
from fuzz.case import Case
from fuzz.grammar import GRAMMAR, Size
from references.backend import Backend, Claim

POINTERS: Mapping[torch.dtype, str] = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e8m0fnu: "*u8",
}
DIVISIBLE = [["tt.divisibility", 16]]
"""What Triton knows of a pointer or an integer that is a multiple of 16."""

EIGHT_BITS, SIXTEEN_BITS = {"*u8", "*i8", "*fp8e4nv", "*fp8e5"}, {"*bf16", "*fp16"}
ROWS = ("BLOCK_SIZE_M", "TILE_M")
"""Constants on which the kind of a product's instruction depends."""
WHOLE = re.compile(r"even|mask|aligned", re.IGNORECASE)
"""Names of switches for sizes that are whole blocks."""


@dataclass(frozen=True)
class Launch:
    """One launch. operation: of the case. signature: parameter -> Triton's type. constants: parameter -> value.

    attributes: (parameter's index,) -> what is known of it. options: warps, stages and the like.
    """

    operation: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    @property
    def kind(self) -> str:
        """Equal for launches that need not be compiled twice.

        A product's operands, rows and warps decide over its instructions, types and switches over those of all else;
        of a router one method is enough.
        """
        pointers = {name: kind for name, kind in self.signature.items() if kind.startswith("*")}
        decisive: object = (pointers, [item for item in self.constants.items() if isinstance(item[1], bool | str)])
        if self.operation == "routing":
            decisive = ""
        elif "tl.dot" in getattr(self.kernel, "src", ""):
            kinds = set(pointers.values())
            operands = ["8 bits"] if kinds & EIGHT_BITS else sorted(kinds & SIXTEEN_BITS)
            decisive = (operands, [item for item in self.constants.items() if item[0] in ROWS or WHOLE.search(item[0])])
        return repr((self.kernel.__module__, self.name, decisive, self.options.get("num_warps")))


def launches(backend: Backend, claim: Claim) -> list[Launch]:
    """The launches for small cases of a claim; empty where none is made, or a device is needed before one is."""
    found: list[Launch] = []
    for case in _cases(claim):
        specs = OPERATIONS[case.operation].outputs(case)
        outputs: dict[str, Tensor] = {part: torch.zeros(spec.shape, dtype=spec.dtype) for part, spec in specs.items()}
        with recorded(case.operation, found), contextlib.suppress(Exception):
            backend.run(backend.prepare(case, fuzz_inputs.build(case), {}), outputs)
    return found


def _cases(claim: Claim) -> list[Case]:
    """Of the cornerstones that the claim covers, or that are bent to it, a ragged one, and one of whole blocks.

    Kernels are compiled otherwise where sizes are multiples of something, as in production they are and here seldom.
    Triton takes a size of 1 for a constant, so that few of them are 1.
    """
    cases = cornerstones(claim.operation, claim.variant)
    covered = [case for case in cases if claim.refusal(case) is None]
    bent = [] if covered else [planning.bend(case, claim, number, 0) for number, case in enumerate(cases)]
    candidates = covered or [case for case in bent if case is not None and claim.refusal(case) is None]
    ragged = min(candidates, key=lambda case: (_sizes(case).count(1), len(case.text)), default=None)
    whole = min(
        candidates, key=lambda case: (-sum(size % 128 == 0 for size in _sizes(case)), len(case.text)), default=None
    )
    return [case for case in dict.fromkeys((ragged, whole)) if case is not None]


@cache
def cornerstones(operation: str, variant: str) -> tuple[Case, ...]:
    """Those of the plan; remembered, because every architecture asks for them."""
    return tuple(plans.cornerstones((operation, variant)))


def _sizes(case: Case) -> list[int]:
    rule = GRAMMAR[case.operation][case.variant]
    return [case.integer(key) for key, domain in rule.keys.items() if isinstance(domain, Size)]


@contextmanager
def recorded(operation: str, found: list[Launch]) -> Iterator[None]:
    """Within it every launch is appended to ``found``; an autotuner takes its first configuration."""
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        found.append(_launch(operation, self, args, kwargs))

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **{**self.configs[0].all_kwargs(), **kwargs})

    with patch.object(jit, "run", run), patch.object(tuner, "run", tuned):
        yield


def _launch(operation: str, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launch:
    given = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: value for name, value in kwargs.items() if name in kernel.arg_names
    }
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(kernel.params):
        value = given.get(parameter.name, parameter.default)
        value = None if value is inspect.Parameter.empty else value
        kind = "constexpr" if parameter.is_constexpr else _type(value, parameter)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif not getattr(parameter, "do_not_specialize", False) and _divisible(value):
            attributes[(place,)] = DIVISIBLE
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    return Launch(operation, kernel, signature, constants, attributes, options)


def _type(value: Any, parameter: Any) -> str:
    """As Triton takes an argument: 1 and None are constants, integers have 32 bits where that is enough."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        if value == 1 and not getattr(parameter, "do_not_specialize", False):
            return "constexpr"
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else "constexpr"


def _divisible(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0
