"""report.md: the report as GitHub-flavoured Markdown, short enough for a step summary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from reports import tables, text
from reports.kept import kept
from reports.sections import Section
from reports.summary import Summary, lines

LIMIT = 900_000
"""Bytes; GitHub takes 1 MiB from a step and drops all of a summary that is longer."""
CAUSES, MOST = 5, 150
"""Kinds of failure that are shown of a group, and of all groups."""
MARKS = {"fail": "❌ fail", "known": "⚠️ known", "pass": "✅ pass", "refused": "◻️ refused"}
OUTCOMES = {"failed": "❌", "empty": "❌", "incomplete": "⚠️", "conformant": "✅"}
_SPECIAL = re.compile(r"[\\`*<>\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")


def plain(value: object, limit: int = 0) -> str:
    """Foreign text as Markdown that shows exactly it, fit for a table cell."""
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", text.line(value, limit).replace("&", "&amp;"))


def code(value: object) -> str:
    """Foreign text as code, fit for a table cell; empty for empty text."""
    flat = text.line(value)
    if not flat:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    pad = " " if "`" in flat else ""
    return f"{fence}{pad}{flat}{pad}{fence}".replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """The lines of a table. right: one letter a column, ``r`` to align it right."""
    rules = ["---:" if index < len(right) and right[index] == "r" else "---" for index in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, rules, *rows)]


def render(summary: Summary, limit: int = LIMIT) -> str:
    """The whole report, at most ``limit`` bytes of UTF-8; what is left out is said."""
    sections = [
        _head(summary),
        _results(summary),
        _failures(summary),
        _kept(summary),
        _known(summary),
        _absent(summary),
        *(section_lines(section) for section in summary.sections),
        _backends(summary),
        _run(summary),
        _words(),
    ]
    return cut([line for section in sections for line in section], limit)


def cut(said: Sequence[str], limit: int) -> str:
    """The lines as far as they fit, followed by a line that says how many do not."""
    whole = "\n".join(said) + "\n"
    if len(whole.encode()) <= limit:
        return whole
    room, kept = limit - 300, 0
    for line in said:
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept += 1
    # An open <details> would swallow the note.
    shown = list(said[:kept])
    shown += ["", "</details>"] * (shown.count("<details>") - shown.count("</details>"))
    note = (
        f"**Truncated: {text.count(len(said) - kept)} of {text.count(len(said))} lines of this report are left out.**"
    )
    return "\n".join([*shown, "", f"{note} All of it is in report.html and results.csv.", ""])


def _head(summary: Summary) -> list[str]:
    first, *rest = lines(summary)
    return [f"# {OUTCOMES[summary.outcome]} {plain(first)}", "", *(f"- {plain(item)}" for item in rest), ""]


def _results(summary: Summary) -> list[str]:
    rows = tables.results(summary)
    if not rows:
        return ["## Results", "", "No case was executed.", ""]
    first = ("", "operation", "backend", "device", "cases", "pass", "known", "unexplained", "refused")
    head = (*first, "worst headroom", "bits equal", "error / FP32's", "worst input", "claim", "recipe")
    cells = [
        (
            MARKS[row.status],
            f"{plain(row.operation)} {plain(row.variant)}",
            plain(row.backend),
            plain(row.device),
            text.count(row.cases),
            text.count(row.passed),
            f"{row.known_words}" if row.known else "",
            f"**{row.failed_words}**" if row.failed else "",
            text.count(row.refused) if row.refused else "",
            text.headroom(row.headroom),
            text.share(row.bit_equal),
            text.ratio(row.over_fp32),
            code(row.worst),
            plain(row.claim, 300),
            plain(row.recipe, 400),
        )
        for row in rows
    ]
    return ["## Results", "", *table(head, cells, "llllrrrrrrrr"), "", *(f"{note}  " for note in tables.NOTES), ""]


def _failures(summary: Summary) -> list[str]:
    blocks = tables.failures(summary, causes=CAUSES, rows=1, most=MOST)
    if not blocks:
        return []
    said = ["## Unexplained failures", ""]
    for block in blocks:
        cells = [
            (
                cause.verdict,
                code(cause.part),
                text.count(cause.count),
                plain(cause.message, 400) + (f"; also {plain(row.others)}" if row.others else ""),
                text.headroom(row.headroom),
                code(row.repro),
            )
            for cause in block.causes
            for row in cause.rows
        ]
        said += [f"### {plain(block.title)}: {text.count(block.count)}", ""]
        if cells:
            said += [*table(("verdict", "part", "calls", "message", "headroom", "the first"), cells, "llrlr"), ""]
        if block.hidden:
            hidden = text.plural(block.hidden, "further kind of failure is", "further kinds of failure are")
            said += [f"{hidden} not shown here; all failures are in results.csv.", ""]
    return said


def _kept(summary: Summary) -> list[str]:
    rows = kept(summary.run)
    if not rows:
        return []
    cells = [
        (
            plain(row.what),
            text.count(row.calls),
            code(row.smallest),
            plain(row.size),
            f"[capsule]({row.link})" if row.link else "",
            code(row.repro) if row.link else "",
            plain(row.note),
        )
        for row in rows
    ]
    head = ("failure", "calls", "smallest case", "elements that matter", "file", "again", "note")
    return ["## Failures, made smaller", "", *table(head, cells, "lrlr"), ""]


def _known(summary: Summary) -> list[str]:
    rows = tables.known(summary)
    if not rows:
        return []
    cells = [
        (
            code(row.id),
            plain(row.backend),
            text.count(row.calls),
            plain(row.reason),
            f"[{plain(row.issue)}]({row.address})" if row.address else plain(row.issue),
            plain(row.where),
            code(row.witness) + (f" {plain(row.witness_verdict)}" if row.witness_verdict else ""),
        )
        for row in rows
    ]
    head = ("ledger entry", "backend", "calls", "reason", "issue", "where", "witness")
    return ["## Known failures", "", *table(head, cells, "llr"), ""]


def _absent(summary: Summary) -> list[str]:
    said: list[str] = []
    absent = tables.absent(summary)
    if absent:
        cells = [(plain(name), plain(reason)) for name, reason in absent]
        said += ["## Did not run", "", *table(("what", "why"), cells), ""]
    rows = tables.unclaimed(summary)
    if rows:
        cells2 = [
            (
                plain(row.backend),
                plain(row.device),
                plain(row.operation),
                plain(row.variants),
                text.count(row.calls),
                plain(row.reasons),
            )
            for row in rows
        ]
        head = ("backend", "device", "operation", "variants", "calls not made", "reasons")
        said += ["<details>", f"<summary>Not claimed: {text.plural(summary.counts['unsupported'], 'call')}</summary>"]
        said += ["", *table(head, cells2, "llllr"), "", "</details>", ""]
    return said


def section_lines(section: Section, level: int = 2) -> list[str]:
    """A section that was taken over; folded tables only below the first level of a page."""
    marks, said = "#" * level, [f"{'#' * level} {plain(section.title)}", "", plain(section.headline), ""]
    for item in section.tables:
        cells = [
            [code(cell) if place in (*item.code, *item.lines) else plain(cell) for place, cell in enumerate(row)]
            for row in item.rows
        ]
        body = [*(f"{plain(note)}.  " for note in item.notes), *[""] * bool(item.notes), *table(item.head, cells), ""]
        if item.folded and level > 1:
            said += ["<details>", f"<summary>{plain(item.title)}</summary>", "", *body, "</details>", ""]
        else:
            said += [f"{marks}# {plain(item.title)}", "", *body] if item.title else body
    return said + [line for note in section.notes for line in (plain(note), "")]


def _backends(summary: Summary) -> list[str]:
    rows = tables.backends(summary)
    if not rows:
        return []
    cells = [
        (
            plain(row.backend),
            plain(row.version),
            plain(row.device),
            plain(row.interpreter),
            text.count(row.calls),
            text.seconds(row.seconds),
            plain("; ".join(row.sources), 1000),
        )
        for row in rows
    ]
    head = ("backend", "version", "device", "interpreter", "calls", "time", "claims and recipes from")
    return ["## Backends", "", *table(head, cells, "llllrr"), ""]


def _run(summary: Summary) -> list[str]:
    pairs = [(plain(key), code(value)) for key, value in tables.facts(summary)]
    return ["<details>", "<summary>Run</summary>", "", *table(("", ""), pairs), "", "</details>", ""]


def _words() -> list[str]:
    rows = [(code(word), effect, plain(meaning)) for word, effect, meaning in tables.words()]
    said = ["<details>", "<summary>Verdicts</summary>", ""]
    return [*said, *table(("verdict", "", "meaning"), rows), "", "</details>"]
