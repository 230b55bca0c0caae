"""Sweeps: the same cases under every call option that a backend's claims list, one option at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conformance.discover import UsageError
from conformance.ledger import Ledger
from conformance.target import Target

ALL, NONE = "all", "none"


def options_of(target: Target) -> list[tuple[str, str]]:
    """(option, word) pairs that some claim of the target lists, in the order of the claims."""
    pairs = [
        (key, word)
        for claims in target.groups.values()
        for claim in claims
        for key, words in claim.options.items()
        for word in words
    ]
    return list(dict.fromkeys(pairs))


def swept_targets(targets: Sequence[Target], asked: str = ALL) -> list[Target]:
    """A target more for each option of each target; the ledger explains its failures, but proves nothing there.

    asked: ``all``, ``none``, or ``KEY=WORD`` words with commas between them. Raises `UsageError` for an option that no
    target has.
    """
    if asked == NONE:
        return []
    offered = [(target, pair) for target in targets for pair in options_of(target)]
    if asked != ALL:
        known = dict.fromkeys(f"{key}={word}" for _, (key, word) in offered)
        wanted = asked.split(",")
        for text in wanted:
            if text not in known:
                raise UsageError(f"--sweep {text!r} is no call option; known: {', '.join(known) or 'none'}")
        offered = [(target, (key, word)) for target, (key, word) in offered if f"{key}={word}" in wanted]
    return [
        replace(target, options={**target.options, key: word}, swept=True, ledger=Ledger(target.ledger.entries))
        for target, (key, word) in offered
    ]
