"""Ask a library in a child process, and read what it says. The parent imports neither torch nor the library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conformance.gating.model import ARCHITECTURES, Gap, Gate, Observation, Observed

PROBE_S = 3.0
"""Seconds for one runner's gate; those that start to look for kernels on the device take far longer and then fail."""
SM_S = 120.0
LIBRARY_S = {"vllm": 420.0, "triton": 600.0}
LIBRARY_REST_S = 150.0
"""Seconds for a library: vLLM is imported anew for each architecture, Triton compiles."""
OFFERS = {"backends": ("claims", "no claim"), "vllm": ("quant", "does not take this format here")}
"""Libraries that say what they offer on an architecture, and nothing of the rest: the gate that refuses it, and how."""
TWINS: Mapping[str, tuple[int, ...]] = {"flashinfer": (90, 100, 120), "torch": ARCHITECTURES}
"""Where a second device of the architecture is asked. vLLM's modules keep what they were told of DeepGEMM last."""
ROOT = Path(__file__).parent.parent.parent


def observe(
    library: str,
    sms: Sequence[int] = ARCHITECTURES,
    *,
    subjects: Sequence[str] = (),
    patches: Sequence[Path] = (),
    python: str = sys.executable,
    limit: float | None = None,
    real: bool = False,
    twins: bool = False,
) -> Observed:
    """All gates of one library on these architectures; a library that is missing or dies is a gap, never an exception.

    subjects: parts of the names of what is asked, all if empty. patches: Python files, each run in forks of its own
    after the library is imported; the observations under the i-th have ``patch`` i + 1. python: the interpreter.
    limit: seconds for everything, `LIBRARY_S` if None. real: whether the real device answers, not the faked one. twins:
    whether a second device is asked on the architectures of `TWINS`.
    """
    limit = limit or LIBRARY_S.get(library, LIBRARY_REST_S)
    request = {
        "library": library,
        "sms": list(sms),
        "subjects": list(subjects),
        "patches": [str(patch) for patch in patches],
        "probe_s": PROBE_S,
        "sm_s": SM_S,
        "real": real,
        "twins": TWINS.get(library, ()) if twins else (),
    }
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT), *([before] if before else [])])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    if not real:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [python, "-P", "-m", "conformance.gating.child", json.dumps(request)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
    )
    reason = ""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        reason = f"stopped after {limit:g} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if not reason and process.returncode:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        reason = f"the child ended with {process.returncode}: {' '.join(last)}"
    return _read(library, out.decode(errors="replace").splitlines(), reason)


def joined(parts: Sequence[Observed]) -> Observed:
    """What several children say of one library, each of some architectures."""
    first = parts[0]
    rows = sorted((row for part in parts for row in part.observations), key=lambda row: row.sm)
    gaps = dict.fromkeys(gap for part in parts for gap in part.gaps)
    version = next((part.version for part in parts if part.version), "")
    twins = tuple(row for part in parts for row in part.twins)
    return replace(first, version=version, observations=tuple(rows), gaps=tuple(gaps), twins=twins)


def _read(library: str, lines: Sequence[str], reason: str) -> Observed:
    version, notes = "", ()
    rows: list[Observation] = []
    twins: list[Observation] = []
    gaps = []
    for line in lines:
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when the child was stopped
        match said["kind"]:
            case "library":
                version, notes = said["version"], tuple(said["notes"])
            case "gap":
                gaps.append(Gap(library=library, reason=said["reason"], sm=said.get("sm"), patch=said.get("patch", 0)))
            case "row" | "twin" as kind:
                gates = tuple(Gate(*gate) for gate in said["gates"])
                row = {key: said[key] for key in ("subject", "variant", "sm", "patch")}
                found = Observation(library=library, gates=gates, facts=tuple(said["facts"]), **row)
                (rows if kind == "row" else twins).append(found)
    if reason:
        gaps.append(Gap(library=library, reason=reason))
    if library in OFFERS:
        rows += _unclaimed(rows, *OFFERS[library])
    return Observed(
        library=library,
        version=version,
        observations=tuple(rows),
        gaps=tuple(gaps),
        notes=tuple(notes),
        twins=tuple(twins),
    )


def _unclaimed(rows: Sequence[Observation], name: str, why: str) -> list[Observation]:
    """What is offered on another architecture, and not on one where the subject answered, is refused there."""
    where: dict[tuple[str, str, int], set[int]] = {}
    for row in rows:
        where.setdefault((row.subject, row.variant, row.patch), set()).add(row.sm)
    silent = {(row.subject, row.sm, row.patch) for row in rows if not row.variant}
    answered: dict[int, set[int]] = {}
    for row in rows:
        answered.setdefault(row.patch, set()).add(row.sm)
    return [
        Observation(
            library=rows[0].library,
            subject=subject,
            variant=variant,
            sm=sm,
            gates=(Gate(name, "no", why),),
            patch=patch,
        )
        for (subject, variant, patch), sms in where.items()
        if variant
        for sm in sorted(answered[patch] - sms)
        if (subject, sm, patch) not in silent
    ]
