"""The probe: what a backend really does where recipes leave a choice, beside what its recipe declares.

For every claim of a quantiser, of ``ue8m0`` or of a GEMM one call with inputs made for the purpose
(``fuzz.fingerprint_gemm``, ``fuzz.fingerprint_quantize``). Its answer is read as a handful of properties; the declared
recipe is read the same way: through the exact model that it names, or through the references.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from conformance import journal, planning
from conformance.discover import UsageError
from conformance.messages import Claimed, Description, Wire
from conformance.operations.gemm import DTYPES, operands
from conformance.operations.quantize import open_choices as quantize_choices
from conformance.process import Worker
from conformance.targets import Fleet, Found
from conformance.worker_tensors import from_wire, to_wire
from fuzz.case import Case, CaseError
from fuzz.fingerprint_gemm import GemmProbe
from fuzz.fingerprint_quantize import QuantizeProbe, Ue8m0Probe
from fuzz.grammar import GRAMMAR, Choice
from references.backend import Claim
from references.blocks import scales_from_amax
from references.gemm_models import exact_rows, has_model
from references.recipes import Recipe
from references.rounding import round_to

M, N, K = 256, 128, 1024
"""Sizes of a GEMM's experiments, unless a claim asks for others."""
LEAST_BITS = {"fp32_any": 23, "fp32_rn": 23, "fp64": 26, "hopper_f16": 24, "f16_upcast": 24, "bf16_split_k": 23}
"""Fraction bits of an addend that survives, at least, for accumulators without an exact model."""
CANDIDATES = tuple(
    (f"{accumulator}, promotion {promotion}", accumulator, promotion)
    for accumulator in ("hopper_fp8", "f16_upcast", "hopper_f16")
    for promotion in ("every_128", "none")
)


@dataclass(frozen=True)
class Line:
    """One property of one backend. agrees: ``yes``, ``no``, or why nobody can tell."""

    operation: str
    variant: str
    backend: str
    version: str
    device: str
    property: str
    measured: str
    declared: str
    agrees: str
    case: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    backends: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    out: Path = Path("out/probe")
    deadline: float = 60.0
    memory_limit: int | None = None
    jobs: int = 1


def probe(settings: Settings, console: Console) -> int:
    """Probe and return the exit code: 0 where everything agrees, 1 where something differs. Raises `UsageError`."""
    chosen = planning.probed(settings.operations, settings.formats)
    journal.make_writable(settings.out)
    fleet = Fleet(settings.plugins, settings.out / journal.LOGS, settings.memory_limit)
    lines: list[Line] = []
    try:
        survey = fleet.survey(settings.backends, settings.devices, settings.jobs)
        with ThreadPoolExecutor(settings.jobs) as pool:
            parts = [pool.submit(_of_one, found, chosen, settings.deadline) for found in survey.found]
            for part in as_completed(parts):
                lines += part.result()
                _write(settings.out, lines)
    finally:
        fleet.close()
    if not lines:
        why = [f"{item.backend}: {item.reason}" for item in survey.absent if settings.backends]
        raise UsageError(f"no case was executed: {why[0] if why else 'no backend at hand claims what is asked for'}")
    _show(sorted(lines, key=lambda line: (line.operation, line.variant, line.backend, line.device, line.case)), console)
    console.print(str(settings.out / "probe.md"), markup=False, highlight=False, soft_wrap=True)
    return int(any(line.agrees == "no" for line in lines))


def _of_one(found: Found, chosen: Sequence[planning.Group], deadline: float) -> list[Line]:
    worker = found.start()
    try:
        return list(_lines(found.description, chosen, worker, deadline))
    finally:
        worker.close()


def _lines(
    description: Description, chosen: Sequence[planning.Group], worker: Worker, deadline: float
) -> Iterator[Line]:
    for claimed in description.claims:
        claim = Claim.from_json(claimed.claim)
        if (claim.operation, claim.variant) not in chosen:
            continue
        for words in _words(claim):
            yield from _one(description, claimed, claim, words, worker, deadline)


def _words(claim: Claim) -> Iterator[dict[str, str]]:
    """The words of a claim that are worth a probe each: every block and scale, the first of anything else."""
    rule = GRAMMAR[claim.operation][claim.variant]
    domains = {key: domain.values for key, domain in rule.keys.items() if isinstance(domain, Choice)}
    allowed = {key: claim.where.get(key, values) for key, values in domains.items()}
    first = {key: values[0] for key, values in allowed.items()}
    first |= {
        key: word for key, word in (("stride", "contiguous"), ("layout", "plain")) if word in allowed.get(key, ())
    }
    varied = [key for key in ("block", "scale", "from", "out") if key in allowed]
    turns: list[dict[str, str]] = [{}]
    for key in varied:
        turns = [{**turn, key: word} for turn in turns for word in allowed[key]]
    for turn in turns:
        yield {**first, **turn}


def _case(claim: Claim, words: Mapping[str, str], sizes: Mapping[str, int]) -> Case:
    """A case of the words. Raises `CaseError`."""
    given = {**words, **{key: str(size) for key, size in sizes.items()}}
    return Case(claim.operation, claim.variant, tuple(sorted(given.items())), 0)


def _fitted(claim: Claim, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes within a claim's limits: as large as it allows, up to multiples of what it asks for."""
    fitted = {}
    for key, size in sizes.items():
        multiple = claim.multiples.get(key, 1)
        size = -(-size // multiple) * multiple
        most = claim.maxima.get(key, size)
        fitted[key] = size if size <= most else most // multiple * multiple
    return fitted


def _one(
    description: Description, claimed: Claimed, claim: Claim, words: dict[str, str], worker: Worker, deadline: float
) -> Iterator[Line]:
    recipe = Recipe.from_json(claimed.recipe)
    try:
        prepared = _prepared(claim, words)
    except (CaseError, ValueError):
        return  # words that do not belong together
    if prepared is None:
        return
    case, inputs, read, declared = prepared

    def line(name: str, measured: str, expected: str, agrees: str) -> Line:
        about = (description.backend, description.version, description.device)
        return Line(claim.operation, claim.variant, *about, name, measured, expected, agrees, case.text)

    if claim.refusal(case) is not None:
        yield line("", "", "", f"not probed: {claim.refusal(case)}")
        return
    reply = worker.call(case.text, description.backend, {"poison": "nan"}, deadline, _wires(inputs))
    if reply.status != "ok":
        yield line("", "", "", f"not probed: {reply.status}: {reply.message}")
        return
    outputs = {wire.name: from_wire(wire) for wire in reply.outputs}
    for name, measured in read(outputs).items():
        yield line(name, measured, *_compared(name, measured, declared(recipe)))


Expected = Callable[[str, str], tuple[str, bool | None]]
Declared = Mapping[str, tuple[str, Callable[[str], bool | None]]]
"""Property -> the declared value as text, and whether a measured one agrees with it (None: nobody can tell)."""
Prepared = tuple[
    Case, dict[str, Tensor], Callable[[Mapping[str, Tensor]], dict[str, str]], Callable[[Recipe], Declared]
]


def _compared(name: str, measured: str, declared: Declared) -> tuple[str, str]:
    if name not in declared:
        return "", "not declared"
    text, agrees = declared[name]
    answer = agrees(measured)
    return text, "not declared" if answer is None else "yes" if answer else "no"


def _prepared(claim: Claim, words: dict[str, str]) -> Prepared | None:
    match claim.operation:
        case "ue8m0":
            return _prepared_ue8m0(claim, words)
        case "quantize":
            return _prepared_quantize(claim, words)
    return _prepared_gemm(claim, words)


def _exactly(expected: str) -> tuple[str, Callable[[str], bool | None]]:
    return expected, lambda measured: measured == expected


def _one_of(expected: str) -> tuple[str, Callable[[str], bool | None]]:
    return expected, lambda measured: expected in measured.split(", ")


def _prepared_ue8m0(claim: Claim, words: dict[str, str]) -> Prepared:
    case = _case(claim, words, {"n": 1})
    case = case.replace(**Ue8m0Probe.sizes(case))
    found = Ue8m0Probe(case)

    def declared(recipe: Recipe) -> Declared:
        expected = found.read(found.expected(case.variant))
        return {name: _one_of(case.variant) if name == "policy" else _exactly(text) for name, text in expected.items()}

    return case, found.inputs(), lambda outputs: found.read(outputs["scales"]), declared


def _prepared_quantize(claim: Claim, words: dict[str, str]) -> Prepared | None:
    case = _case(claim, words, _fitted(claim, {"m": 1, "k": 128}))
    if QuantizeProbe.usable(case) is not None:
        return None
    case = case.replace(**QuantizeProbe.sizes(case))
    found = QuantizeProbe(case)

    def declared(recipe: Recipe) -> Declared:
        recipe = recipe.only(quantize_choices(case.variant))
        free = recipe.scale_arithmetic == "approximate"
        policy = case["scale"] if found.kind.scale == "ue8m0" else recipe.scale_arithmetic
        product = f"{policy} by reciprocal"
        edges = product if recipe.scale_arithmetic == "reciprocal" and product in found.edge_answers else policy
        answers = {
            "scale policy": (policy, (lambda measured: None) if free else _one_of(policy)[1]),
            "scale at the last bit": (edges, (lambda measured: None) if free else _one_of(edges)[1]),
            "ties": _exactly("nearest even"),
            "overflow": ("saturates", lambda measured: measured in ("saturates", "does not occur")),
        }
        for name, amax in (("zero", 0.0), ("tiny", found.tiny)):
            scale = scales_from_amax(torch.full((1, 1), amax), found.kind, recipe, global_scale=torch.ones(1))
            answers[f"scale of a {name} block"] = _exactly(found.shown(scale[0, 0]))
        return answers

    return case, found.inputs(), lambda outputs: found.read(outputs["scales"], outputs["payload"]), declared


def _prepared_gemm(claim: Claim, words: dict[str, str]) -> Prepared | None:
    case = _case(claim, words, _fitted(claim, {"m": M, "n": N, "k": K}))
    found = GemmProbe(case)
    if found.usable() is not None:
        return None
    inputs = found.inputs()
    a, b = operands(case, inputs)
    dtype = DTYPES[case["out"]]

    def model(accumulator: Any, promotion: Any) -> Tensor | None:
        recipe = Recipe(
            source="a candidate", accumulator=accumulator, promotion=promotion, scale_combination="fma_dot_sasb"
        )
        return round_to(exact_rows(a, b, recipe), dtype) if has_model(a, b, recipe) else None

    models = {name: model(accumulator, promotion) for name, accumulator, promotion in CANDIDATES}

    def read(outputs: Mapping[str, Tensor]) -> dict[str, str]:
        actual = outputs["output"].to(torch.float64)
        equal = [name for name, expected in models.items() if expected is not None and torch.equal(expected, actual)]
        return {**found.read(actual), "equals the model of": "; ".join(equal) or "none"}

    def declared(recipe: Recipe) -> Declared:
        answers: dict[str, tuple[str, Callable[[str], bool | None]]] = {}
        if case["out"] == "bf16":
            nearest = recipe.out_rounding == "nearest"
            answers["output rounding"] = _exactly("nearest even") if nearest else ("faithful", lambda measured: None)
        if recipe.scale_combination == "any":
            recipe = Recipe(
                **{**recipe.to_json(), "scale_combination": "fma_dot_sasb"}
            )  # with scales of one any is alike
        if has_model(a, b, recipe):
            expected = found.read(round_to(exact_rows(a, b, recipe), dtype))
            answers = {name: _exactly(text) for name, text in expected.items()} | answers
            name = f"{recipe.accumulator}, promotion {recipe.promotion}"
            return {**answers, "equals the model of": (name, lambda measured: name in measured.split("; "))}
        least = min(LEAST_BITS.get(recipe.accumulator, 13), found.span)
        answers["fraction bits"] = (f"at least {least}", lambda measured: int(measured.removeprefix(">=")) >= least)
        return answers

    return case, inputs, read, declared


def _wires(inputs: Mapping[str, Tensor]) -> tuple[Wire, ...]:
    return tuple(to_wire(name, tensor) for name, tensor in inputs.items())


HEADER = tuple(field.name for field in fields(Line))


def _sorted(lines: Sequence[Line]) -> list[Line]:
    order = {"no": 0}
    return sorted(
        lines, key=lambda line: (order.get(line.agrees, 1), line.operation, line.variant, line.backend, line.case)
    )


def _write(out: Path, lines: Sequence[Line]) -> None:
    with (out / "probe.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(map(astuple, _sorted(lines)))
    rows = ["| " + " | ".join(HEADER[:-1]) + " |", "|" + "---|" * (len(HEADER) - 1)]
    rows += [
        "| " + " | ".join(str(word).replace("|", "\\|") for word in astuple(line)[:-1]) + " |"
        for line in _sorted(lines)
    ]
    (out / "probe.md").write_text("# Fingerprints\n\n" + "\n".join(rows) + "\n", encoding="utf-8")


def _show(lines: Sequence[Line], console: Console) -> None:
    """One row a claim: the properties side by side, what differs from the declaration marked."""
    by_case: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        by_case.setdefault((line.operation, line.variant, line.backend, line.device, line.case), []).append(line)
    for operation in dict.fromkeys(line.operation for line in lines):
        table = Table(title=operation, title_justify="left")
        names = list(dict.fromkeys(line.property for line in lines if line.operation == operation and line.property))
        for name in ("format", "backend", "device", "words", *names):
            table.add_column(name, overflow="fold")
        for (own, variant, backend, device, text), mine in by_case.items():
            if own == operation:
                shown = {line.property: _cell(line) for line in mine}
                words = _telling(Case.parse(text))
                refused = [mine[0].agrees] if "" in shown else []
                table.add_row(variant, backend, device, words, *(refused or [shown.get(name, "") for name in names]))
        console.print(table)
    differing = sum(line.agrees == "no" for line in lines)
    read = sum(bool(line.property) for line in lines)
    console.print(f"{differing} of {read} properties differ from what is declared")


def _cell(line: Line) -> str:
    return f"[bold red]{line.measured}[/] (declared {line.declared})" if line.agrees == "no" else line.measured


def _telling(case: Case) -> str:
    return " ".join(
        f"{key}={case[key]}" for key in ("block", "scale", "from", "out", "dtype") if key in dict(case.params)
    )
