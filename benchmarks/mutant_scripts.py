"""Shrink what catches each mutant, export its script, and run the script on the mutant and on a right answer.

    python -m benchmarks.mutant_scripts [FAMILY ...] [--out docs/results/repro.md]

The cases are the smallest ones that ``power`` recorded, or what a search under seed 1 finds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance import script, shrink
from conformance.capsule import Capsule
from conformance.launch import BackendSource
from conformance.messages import Claimed, Description
from conformance.mutant_backends import MutantBackend
from conformance.operations import OPERATIONS
from conformance.power import hunt
from conformance.sealing import seal
from fuzz.case import Case
from fuzz.mutants import CONFORMANT, MUTANTS
from fuzz.mutants.base import Mutant
from fuzz.shrink_inputs import ENOUGH
from references.backend import CaseLike

SOURCE = BackendSource(kind="plugin_module", location="conformance.mutant_backends", name="mutant_backends")


class Right(MutantBackend):
    """A right answer under a mutant's name, claims and declarations."""

    def __init__(self, mutant: Mutant) -> None:
        answer = next(item.answer for item in CONFORMANT if item.operation == mutant.operation)
        if mutant.choices.get("via") == "bf16":
            answer = _via_bf16
        super().__init__(Mutant(**{**vars(mutant), "answer": answer, "frozen": ()}))


def _via_bf16(case: CaseLike, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from references.recipes import Recipe
    from references.requantize import requantize_deepseek

    found = requantize_deepseek(inputs["payload"], inputs["scales"], Recipe(source="docs/operations.md", via="bf16"))
    assert found.scales is not None
    return {"scales": found.scales, "payload": found.payload}


def capsule_of(mutant: Mutant, found: shrink.Shrunk, probe: shrink.LocalProbe) -> Capsule:
    """The capsule of a shrunk failure of a mutant."""
    known = probe.claim(found.case)
    assert known is not None
    recipe = probe.backend.recipe(known[0])
    about = Description(
        backend=probe.backend.name,
        version="1",
        interpreter="",
        device="cpu",
        device_name="",
        sm="",
        pace=1.0,
        claims=[],
        libraries={"torch": torch.__version__},
    )
    claimed = Claimed(claim=known[0].to_json(), recipe=recipe.to_json(), recipe_text=recipe.text(), claim_text="")
    cause = {"kind": found.cause.kind, "stage": found.cause.stage}
    counts = {"differing": found.differing, "elements": found.elements, "note": found.note}
    plugins = ("conformance.mutant_backends",)
    return seal(
        found.case,
        found.wires,
        found.found,
        found.record,
        about,
        claimed,
        cause=cause,
        origin=found.origin,
        plugins=plugins,
        shrunk=counts,
    )


def exported(capsule: Capsule) -> str:
    """The script of a capsule."""
    case = Case.parse(capsule.case)
    inputs = script.laid_out_inputs(capsule.case, capsule.inputs)
    return script.export(capsule, SOURCE, inputs, OPERATIONS[case.operation].outputs(case))


def outcome(text: str, backend: Any) -> tuple[bool, str]:
    """Whether a script says that the bug is there, and what it prints; run in this process, on another backend."""
    space: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), space)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            lines = space["check"](space["DATA"], backend, "cpu")
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
    return bool(lines), said.getvalue()


def row(mutant: Mutant, text: str, seconds: float) -> dict[str, Any]:
    """What came of one mutant."""
    probe = shrink.LocalProbe(MutantBackend(mutant))
    found = shrink.shrink(Case.parse(text), probe, seconds=seconds)
    if found is None:
        return {"family": mutant.family, "case": text, "note": "does not fail by itself"}
    capsule = capsule_of(mutant, found, probe)
    script_text = exported(capsule)
    mutant_fails, said = outcome(script_text, MutantBackend(mutant))
    right_fails, right_said = outcome(script_text, Right(mutant))
    return {
        "family": mutant.family,
        "case": found.case.text,
        "cause": found.cause.text,
        "differing": found.differing,
        "elements": found.elements,
        "tries": found.tries,
        "mutant": mutant_fails,
        "right": not right_fails,
        "note": found.note,
        "said": said if not mutant_fails else right_said,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="*")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, escaped = [], []
    started = time.monotonic()
    for mutant in MUTANTS:
        if asked.family and not any(word in mutant.family for word in asked.family):
            continue
        catch = hunt(mutant, 1)
        if not catch.caught:
            escaped.append(mutant.family)
            continue
        rows.append(row(mutant, catch.case, asked.seconds))
        last = rows[-1]
        good = last.get("mutant") and last.get("right")
        print(
            f"{'ok ' if good else 'BAD'} {last['family']}: {last.get('differing')} of {last.get('elements')} "
            f"elements, {last.get('tries')} tries; {last.get('cause')} {last['note']}\n    {last['case']}"
            + ("" if good else f"\n{last.get('said')}"),
            flush=True,
        )
    table = markdown(rows, escaped)
    if asked.out:
        asked.out.write_text(table, encoding="utf-8")
    print(f"{len(rows)} mutants, {time.monotonic() - started:.0f} s")
    return 0 if all(item.get("mutant") and item.get("right") for item in rows) else 1


def markdown(rows: list[dict[str, Any]], escaped: list[str]) -> str:
    """The published table."""
    few = [item for item in rows if item.get("differing", ENOUGH + 1) <= ENOUGH]
    told = [item for item in rows if item.get("mutant") and item.get("right")]
    said = [
        "# Shrinking and scripts, for every mutant that is caught",
        "",
        "Regenerate with `python -m benchmarks.mutant_scripts --out docs/results/repro.md` (one core).",
        "Each mutant is searched for under seed 1, the case that catches it is shrunk, a script is exported and run on",
        "the mutant, where it must fail, and on a right answer, where it must pass.",
        "",
        f"- {len(few)} of {len(rows)} mutants keep at most {ENOUGH} elements that differ from the simplest value",
        f"- {len(told)} of {len(rows)} scripts tell the mutant from a right answer",
        f"- not caught under seed 1: {', '.join(escaped) or 'none'}",
        "",
        "| family | cause | elements that differ | of | tries | script on mutant, right answer | shrunk case | note |",
        "|---|---|---:|---:|---:|---|---|---|",
    ]
    for item in rows:
        scripts = f"{'fails' if item.get('mutant') else 'PASSES'}, {'passes' if item.get('right') else 'FAILS'}"
        counts = [str(item.get(key, "")) for key in ("cause", "differing", "elements", "tries")]
        said.append(f"| {item['family']} | {' | '.join(counts)} | {scripts} | `{item['case']}` | {item['note']} |")
    return "\n".join(said) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
