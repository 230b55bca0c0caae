"""Everything that a run leaves behind besides its journal, made from records and the run's own description."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from reports import files, frame, html, junit, markdown
from reports.record import Record
from reports.summary import summarise


def write_all(out_dir: Path, records: Iterable[Record], run: Mapping[str, Any]) -> dict[str, Path]:
    """Write every file under ``out_dir`` and append the Markdown to ``$GITHUB_STEP_SUMMARY`` where that is set.

    Each file is written beside its place and renamed, so that a reader sees an old one or a new one. The same records
    in another order give the same bytes. Returns file name -> path. Raises OSError where ``out_dir`` cannot be written.
    """
    summary = summarise(records, run)
    described = {**run, "totals": summary.totals()}
    page = markdown.render(summary)
    texts: dict[str, Callable[[], str]] = {
        "run.json": lambda: json.dumps(described, indent=2, sort_keys=True, default=str) + "\n",
        "report.md": lambda: page,
        "report.html": lambda: html.render(summary),
        "junit.xml": lambda: junit.render(summary),
    }
    paths = {
        "results.parquet": files.replace(
            out_dir / "results.parquet", lambda path: frame.write_parquet(path, summary.records)
        ),
        "results.csv": files.replace(out_dir / "results.csv", lambda path: frame.write_csv(path, summary.records)),
    }
    for name, make in texts.items():
        paths[name] = files.replace_text(out_dir / name, make())
    _step_summary(page)
    return paths


def _step_summary(page: str) -> None:
    """A step summary that cannot be written is no reason to lose the run."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if not place:
        return
    path = Path(place)
    try:
        used = path.stat().st_size if path.exists() else 0
        files.append_text(path, markdown.cut(page.splitlines(), max(1000, markdown.LIMIT - used)))
    except OSError as error:
        warnings.warn(f"cannot append to GITHUB_STEP_SUMMARY: {error}", stacklevel=2)
