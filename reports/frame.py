"""Records in one fixed order, as a pandas frame, an Arrow table, Parquet and CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from reports.record import Record

_TEXT, _FLOAT = pa.string(), pa.float64()
_TYPES = {
    "schema": pa.int32(),
    "run": _TEXT,
    "operation": _TEXT,
    "variant": _TEXT,
    "case": _TEXT,
    "id": _TEXT,
    "input_sha256": _TEXT,
    "backend": _TEXT,
    "version": _TEXT,
    "interpreter": _TEXT,
    "device": _TEXT,
    "sm": _TEXT,
    "options": _TEXT,
    "recipe": _TEXT,
    "part": _TEXT,
    "verdict": _TEXT,
    "ledger_id": _TEXT,
    "headroom": _FLOAT,
    "stage_radii": pa.map_(_TEXT, _FLOAT),
    "bit_equal": _FLOAT,
    "error": _FLOAT,
    "fp32_error": _FLOAT,
    "output_sha256": _TEXT,
    "worst_index": pa.list_(pa.int64()),
    "seconds": _FLOAT,
    "message": _TEXT,
}
SCHEMA = pa.schema(list(_TYPES.items()))
COLUMNS = tuple(_TYPES)
_PARTS = {"call": 0, "scales": 1, "selection": 2, "weights": 3, "payload": 4, "output": 5}
_DIGITS = re.compile(r"(\d+)")


def part_rank(part: str) -> int:
    """Where a part stands among the parts of an answer: earlier ones are the cause of later ones."""
    return 6 if part.startswith("property:") else _PARTS.get(part, 5)


def order(records: Iterable[Record]) -> list[Record]:
    """The records sorted by operation, variant, backend, device, case (sizes by value), options and part.

    The order is total up to equal lines, so that files made from the records do not depend on who finished first.
    """
    natural: dict[str, tuple[tuple[int, int, str], ...]] = {}
    keyed = []
    for record in records:
        key = natural.get(record.case)
        if key is None:
            words = _DIGITS.split(record.case.split(" ", 2)[-1])
            key = tuple((1, int(word), "") if index % 2 else (0, 0, word) for index, word in enumerate(words))
            natural[record.case] = key
        rank = (part_rank(record.part), record.part)
        first = (*record.case.split(" ", 2)[:2], record.backend, record.version, record.device)
        keyed.append(((first, key, record.case, record.options, rank), record))
    keyed.sort(key=itemgetter(0))
    ordered: list[Record] = []
    for _, alike in groupby(keyed, key=itemgetter(0)):
        found = [record for _, record in alike]
        ordered += sorted(found, key=Record.to_line) if len(found) > 1 else found
    return ordered


def arrow(ordered: Sequence[Record]) -> pa.Table:
    """The records as an Arrow table with the columns of `COLUMNS`; ``stage_radii`` is a map, ``worst_index`` a list."""
    columns: dict[str, list[Any]] = {name: list(map(attrgetter(name), ordered)) for name in COLUMNS}
    columns["stage_radii"] = [sorted(radii.items()) for radii in columns["stage_radii"]]
    return pa.table({name: _array(columns[name], _TYPES[name]) for name in COLUMNS}, schema=SCHEMA)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold
        return pa.array([value.encode("utf-8", "replace").decode() for value in values], type=kind)


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """The records as a frame in the order of `order`; ``stage_radii`` are dicts, ``worst_index`` lists or None."""
    ordered = order(records)
    table = pd.DataFrame({name: list(map(attrgetter(name), ordered)) for name in COLUMNS}, columns=list(COLUMNS))
    numbers = ("headroom", "bit_equal", "error", "fp32_error", "seconds")
    return table.astype(dict.fromkeys(numbers, "float64"))


def write_parquet(path: Path, ordered: Sequence[Record]) -> None:
    """Parquet with the columns of `COLUMNS`."""
    pq.write_table(arrow(ordered), path, compression="zstd")


def write_csv(path: Path, ordered: Sequence[Record]) -> None:
    """CSV with the columns of `COLUMNS`: ``stage_radii`` and ``worst_index`` as JSON, None as an empty field."""
    get = attrgetter(*COLUMNS)
    radii, index = COLUMNS.index("stage_radii"), COLUMNS.index("worst_index")
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for record in ordered:
            row = list(get(record))
            row[radii] = json.dumps(row[radii], sort_keys=True) if row[radii] else ""
            row[index] = json.dumps(row[index]) if row[index] is not None else ""
            writer.writerow(row)
