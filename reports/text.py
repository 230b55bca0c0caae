"""How numbers, devices and foreign text are shown. Only the standard library is imported.

Messages and case texts come from the outside: `clean` must come before anything else that shows them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

NONE = "-"
# What XML 1.0 cannot hold, what would steer a terminal, and what would reorder the text around it.
_HOSTILE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
_ISSUE = re.compile(r"([A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+)#([0-9]+)\Z")
_URL = re.compile(r"https?://[^\s<>\"'`\\]+\Z")
_NUMBER = re.compile(r"0x[0-9A-Fa-f]+|-?[0-9][0-9_,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
_GIVEN = re.compile(r"\b([a-z_]+)=[^\s,;]+")


def clean(value: object) -> str:
    """Text without control characters, lone surrogates and direction marks; other values become JSON or str."""
    if value is None:
        return ""
    if isinstance(value, Mapping | list | tuple):
        value = json.dumps(value, sort_keys=True, default=str)
    return _HOSTILE.sub("\ufffd", str(value).replace("\r\n", "\n").replace("\r", "\n"))


def line(value: object, limit: int = 0) -> str:
    """`clean` text on a single line, cut to ``limit`` characters (0: not at all), the cut being shown."""
    flat = " ".join(clean(value).split())
    return flat if not limit or len(flat) <= limit else f"{flat[: limit - 1]}…"


def count(number: int) -> str:
    """An integer with thousands separated: ``12,345``."""
    return f"{number:,}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """``1 case``, ``2 cases``."""
    return f"{count(number)} {noun if number == 1 else nouns or noun + 's'}"


def counts(pairs: Mapping[str, int]) -> str:
    """``12 wrong, 2 crash``: the most frequent first, zeros left out."""
    shown = sorted((item for item in pairs.items() if item[1]), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count(number)} {word}" for word, number in shown)


def headroom(value: float | None) -> str:
    """Three digits, rounded away from 1, so that 1.0001 never reads as a pass nor 0.9999 as the edge."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞"
    if value == 0 or value == 1:
        return f"{value:.0f}"
    if value < 0.001:
        return "<0.001"
    if value < 1:
        return f"{math.floor(value * 1000) / 1000:.3f}"
    if value < 1000:
        digits = 2 - math.floor(math.log10(value))
        return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"
    return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def share(value: float | None) -> str:
    """A percentage, rounded down so that only everything reads as 100 %."""
    if value is None:
        return NONE
    if value >= 1:
        return "100 %"
    if 0 < value < 0.0001:
        return "<0.01 %"
    return f"{math.floor(value * 10000) / 100:.2f} %"


def ratio(value: float | None) -> str:
    """Three digits; infinity where an error has no bound."""
    if value is None:
        return NONE
    return "∞" if math.isinf(value) else f"{value:.3g}"


def seconds(value: float) -> str:
    """``0.8 s``, ``75 s``, ``12 min 5 s``, ``2 h 3 min``."""
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def device(name: str, sm: str = "", model: str = "") -> str:
    """``cpu``, ``cuda:0 (NVIDIA H200, sm90)``."""
    inner = ", ".join(word for word in (model, f"sm{sm}" if sm else "") if word and word != name)
    return f"{name} ({inner})" if inner else name


def link(issue: object) -> str:
    """The address of an issue: an http(s) address itself, or GitHub's for ``owner/repo#number``; empty otherwise."""
    words = clean(issue).strip()
    match = _ISSUE.match(words)
    if match:
        return f"https://github.com/{match[1]}/issues/{match[2]}"
    return words if _URL.match(words) else ""


def alike(message: str) -> str:
    """A message without its numbers and its first example, to count messages that differ in nothing else."""
    return _NUMBER.sub("N", line(message, 1000).split("; first at ", 1)[0])[:300]


def valueless(reason: str) -> str:
    """A reason without the values that a case had: ``k=33 is no multiple of 128`` -> ``k=… is no multiple of 128``."""
    return _GIVEN.sub(r"\1=…", line(reason, 300))


def strings(value: Any) -> list[str]:
    """A list of clean one-line strings from whatever a run says: nothing, one thing, or many."""
    if value is None or value == "":
        return []
    if isinstance(value, Mapping):
        return [f"{line(key)} {line(item)}".strip() for key, item in sorted(value.items())]
    if isinstance(value, list | tuple | set | frozenset):
        return [line(item) for item in value]
    return [line(value)]
