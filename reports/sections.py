"""Tables that a run takes over from elsewhere, such as the architecture gates: plain data in run.json, ``sections``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from reports import text

TONES = ("ok", "warn", "bad")


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table. Cells are plain text; every row has as many as ``head``.

    code: columns of names and other text in a fixed font. lines: columns of commands, to be copied. folded: whether a
    report shows it closed. notes: sentences above it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    code: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    folded: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A title, one line that says how it ended, its tables, and notes below them. tone: one of `TONES`."""

    title: str
    headline: str
    tone: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, as run.json holds it."""
        return asdict(self)


def sections(run: Mapping[str, Any]) -> tuple[Section, ...]:
    """The sections that a run's description holds, cleaned; what is not of their form is left out."""
    listed = run.get("sections")
    found = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list | tuple) else []
    return tuple(
        Section(
            title=text.line(item.get("title")),
            headline=text.line(item.get("headline")),
            tone=item["tone"] if item.get("tone") in TONES else "bad",
            tables=tuple(_tables(item.get("tables"))),
            notes=tuple(text.strings(item.get("notes"))),
        )
        for item in found
    )


def _tables(listed: Any) -> Iterator[Table]:
    for item in listed if isinstance(listed, list | tuple) else ():
        if not isinstance(item, Mapping):
            continue
        head = tuple(text.line(cell) for cell in _list(item.get("head")))
        rows = [tuple(text.line(cell) for cell in _list(row)) for row in _list(item.get("rows"))]
        yield Table(
            title=text.line(item.get("title")),
            head=head,
            rows=tuple(row for row in rows if len(row) == len(head)),
            code=tuple(index for index in _list(item.get("code")) if isinstance(index, int)),
            lines=tuple(index for index in _list(item.get("lines")) if isinstance(index, int)),
            folded=bool(item.get("folded")),
            notes=tuple(text.strings(item.get("notes"))),
        )


def _list(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else []
