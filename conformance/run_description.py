"""The contents of run.json: what a run is before it starts, what became of it, and which run may go on with which."""

from __future__ import annotations

import platform
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conformance import journal, planning
from conformance.engine import RunResult
from conformance.ledger import Entry, Ledger
from conformance.messages import Description
from conformance.run_settings import FAILED, HARNESS, INTERRUPTED, OK, USAGE, Settings
from conformance.target import Target
from conformance.targets import Survey
from fuzz.case import Case
from reports.record import Record


def describe_run(settings: Settings, plan: Sequence[Case], targets: Sequence[Target], survey: Survey) -> dict[str, Any]:
    """The contents of run.json before the run: not complete."""
    entries: dict[str, Entry] = {entry.id: entry for target in targets for entry in target.ledger.entries}
    descriptions = [target.description for target in targets if not target.swept]
    libraries: dict[str, set[str]] = {}
    for description in descriptions:
        for name, number in description.libraries.items():
            libraries.setdefault(name, set()).add(number)
    return {
        "tool": journal.TOOL,
        "run": f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}",
        "command": settings.command,
        "seed": settings.seed,
        "plan": described_plan(plan),
        "started": now(),
        "ended": "",
        "complete": False,
        "exit_code": None,
        "problems": [],
        "plugins": list(settings.plugins),
        "jobs": settings.limits.jobs,
        "workers": settings.limits.workers,
        "judge": settings.judge,
        "deadline": settings.limits.deadline,
        "sweep": settings.sweep,
        "budget": settings.limits.budget,
        "version": version_of("blockscale-conformance"),
        "git_commit": git_commit(),
        "hypothesis": version_of("hypothesis"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "devices": survey.devices,
        "driver": ", ".join(sorted(libraries.pop("driver", set()))),
        "libraries": {name: ", ".join(sorted(numbers)) for name, numbers in sorted(libraries.items())},
        "backends": [_backend(description) for description in descriptions],
        "not_run": [vars(item) for item in survey.absent],
        "ledger": [{**entry.to_json(), "witness_verdict": ""} for entry in entries.values()],
    }


def described_plan(plan: Sequence[Case]) -> dict[str, Any]:
    """The entry of run.json that tells one plan from another."""
    return {"cases": len(plan), "sha256": planning.digest(plan)}


def _backend(description: Description) -> dict[str, Any]:
    claims = [
        {
            "operation": item.claim["operation"],
            "variant": item.claim["variant"],
            "claim": item.claim_text,
            "recipe": item.recipe_text,
            "source": item.recipe.get("source") or item.claim["source"],
        }
        for item in description.claims
    ]
    return {**vars(description), "claims": claims}


def difference_between(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What keeps a run from being resumed: another plan or another version of anything. None if nothing does."""
    for key in ("plan", "version", "git_commit", "python"):
        if earlier.get(key) != now[key]:
            return f"its {key.replace('_', ' ')} is {_shown(earlier.get(key))}, not {_shown(now[key])}"
    mine, theirs = ({(item["backend"], item["device"]): item for item in run["backends"]} for run in (now, earlier))
    for name in sorted(set(mine) | set(theirs)):
        one, other = mine.get(name), theirs.get(name)
        if one is None or other is None:
            return f"{name[0]} on {name[1]} is only in {'this run' if one else 'the journal'}"
        for key in sorted(set(one) | set(other)):
            if one.get(key) != other.get(key):
                return f"{name[0]} on {name[1]}: its {key} was {_shown(other.get(key))}, not {_shown(one.get(key))}"
    return None


def _shown(value: object) -> str:
    if isinstance(value, Mapping) and "sha256" in value:
        return str(value["sha256"])[:16]
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def git_commit() -> str:
    """The commit of this checkout, with ``+changes`` if the tree differs from it; empty outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        words = ("git", "-C", str(root))
        commit = subprocess.run([*words, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run(
            [*words, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.stdout.strip() + "+changes" * bool(status.stdout.strip())


def version_of(distribution: str) -> str:
    """Of an installed distribution; empty for one that is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def now() -> str:
    """The time, UTC, as run.json writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def concluded(
    description: Mapping[str, Any], targets: Sequence[Target], records: Sequence[Record], result: RunResult
) -> dict[str, Any]:
    """The contents of run.json after the run, the exit code included.

    description: as `describe_run` gave it. targets: with the ledger's entries that the run was to prove.
    """
    problems = [*description["problems"], *_problems(targets, records, result)]
    executed = any(record.verdict != "unsupported" for record in records)
    unexplained = any(record.failing and not record.ledger_id for record in records)
    code = FAILED if problems or unexplained else OK if executed else USAGE
    stopped = result.stopped
    if result.unjudged:
        code, stopped = HARNESS, stopped or f"the harness failed on {len(result.unjudged)} of its calls"
    if result.stopped == "interrupted":
        code = INTERRUPTED
    return {
        **description,
        "complete": result.complete,
        "stopped": stopped,
        "pairs": {"planned": result.planned, "settled": result.settled},
        "left_out": [{"backend": name, "device": on, "cases": n} for (name, on), n in result.left_out.items()],
        "problems": problems,
        "exit_code": code,
        "ended": now(),
        "ledger": [{**entry, "witness_verdict": _witness_verdict(entry, records)} for entry in description["ledger"]],
    }


def _problems(targets: Sequence[Target], records: Sequence[Record], result: RunResult) -> list[str]:
    lines: list[str] = []
    for target in targets:
        if target.swept:
            continue
        description = target.description
        mine = [item for item in records if (item.backend, item.device) == (description.backend, description.device)]
        reached = {item.case for item in mine}
        entries = [entry for entry in target.ledger.entries if result.complete or entry.witness in reached]
        lines += Ledger(tuple(entries)).problems(mine)
    return list(dict.fromkeys(lines))


def _witness_verdict(entry: Mapping[str, Any], records: Sequence[Record]) -> str:
    its = [item for item in records if (item.case, item.backend) == (entry["witness"], entry["backend"])]
    return next((item.verdict for item in its if item.failing), its[0].verdict if its else "")
