"""Durations and sizes as they are written on a command line."""

from __future__ import annotations

import re

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "B": 1} | {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)\Z")


def seconds(text: str) -> float:
    """``60s``, ``5m``, ``1.5h`` or plain seconds, more than zero. Raises ValueError."""
    return _quantity(text, _SECONDS, "a duration such as 60s, 5m or 1h")


def size(text: str) -> int:
    """``8GiB``, ``512MiB`` or plain bytes, more than zero. Raises ValueError."""
    return int(_quantity(text, _BYTES, "a size such as 8GiB or 512MiB"))


def _quantity(text: str, units: dict[str, float] | dict[str, int], what: str) -> float:
    match = _QUANTITY.match(text)
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1]) * units[match[2]]
