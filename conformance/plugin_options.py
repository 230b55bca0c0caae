"""The options of the pytest plugin, and what they ask for."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.plugin_controller import Request

SUITE = "conformance.suite"
_FOLDER = Path(__file__).parent / "suite"


def add(parser: pytest.Parser) -> None:
    """The options of ``python -m conformance run`` that make sense in pytest."""
    group = parser.getgroup("conformance", f"conformance of block-scaled kernels (--pyargs {SUITE})")

    def option(name: str, text: str, **more: Any) -> None:
        group.addoption(f"--conformance-{name}", dest=f"conformance_{name.replace('-', '_')}", help=text, **more)

    def many(name: str, metavar: str, text: str) -> None:
        option(name, f"{text} Repeatable.", action="append", metavar=metavar, default=[])

    many("backend", "NAME", "Run this backend only.")
    many("operation", "NAME", "Run this operation only.")
    many("format", "NAME", "Run this format, policy or layout only.")
    many("device", "NAME", "Use this device only, such as cuda:1.")
    option("cases", "Cases for each operation x variant.", type=int, metavar="N")
    many("case", "TEXT", "Run this case.")
    option("seed", "Seed of the plan; that of --hypothesis-seed if absent.", type=int, metavar="N")
    option("out", "Where records and reports go; nowhere if absent.", metavar="DIR")
    option("corpus", "Kept cases, replayed first; corpus beside DIR of --conformance-out.", metavar="DIR|none")
    option("shrink", "For making failures smaller where files are written; 60s, 0s for none.", metavar="DURATION")
    many("plugin", "FILE|MODULE", "Load further backends.")
    option("ledger", "Known failures.", metavar="FILE")
    option("no-ledger", "Take no failure as known.", action="store_true")
    option("deadline", "Longest time for one call.", metavar="DURATION")
    option("memory-limit", "Resident memory of a backend's process.", metavar="SIZE")


def names_suite(config: pytest.Config) -> bool:
    """Whether the suite is among the arguments, by its module, a file of it or a folder above it."""
    for argument in config.args:
        word = argument.partition("::")[0].partition("[")[0]
        if config.option.pyargs and (word == SUITE or word.startswith(f"{SUITE}.") or word == "conformance"):
            return True
        path = (config.invocation_params.dir / word).resolve()
        if path == _FOLDER or path in _FOLDER.parents or _FOLDER in path.parents:
            return True
    return False


def request(config: pytest.Config) -> Request:
    """What the command line asks for. Raises `UsageError`."""
    from conformance import ledger as ledgers
    from conformance import units
    from conformance.cli_options import DEADLINE, MEMORY_LIMIT, SHRINK, cpus
    from conformance.discover import UsageError
    from conformance.engine import Limits
    from conformance.plugin_controller import Request
    from conformance.run_settings import Settings

    def given(name: str) -> Any:
        return config.getoption(f"conformance_{name}")

    def parsed(name: str, parse: Callable[[str], Any], default: str) -> Any:
        try:
            return parse(given(name.replace("-", "_")) or default)
        except ValueError as error:
            raise UsageError(f"--conformance-{name}: {error}") from None

    cases = given("cases")
    if cases is not None and cases < 1:
        raise UsageError(f"--conformance-cases: {cases} is less than 1")
    out = given("out")
    here = config.invocation_params.dir.resolve()
    if out in config.invocation_params.args and here not in (here / out).resolve().parents:
        # Before plugins are loaded, pytest takes the word for a place of tests and moves its rootdir there.
        raise UsageError(f"write --conformance-out={out}, without a blank, for a directory outside this one")
    place = here / out if out else Settings.out
    corpus = given("corpus")
    settings = Settings(
        backends=tuple(given("backend")),
        operations=tuple(given("operation")),
        formats=tuple(given("format")),
        devices=tuple(given("device")),
        cases=cases,
        texts=tuple(given("case")),
        seed=_seed(config),
        out=place,
        corpus=None if corpus == "none" else here / corpus if corpus else place.parent / "corpus",
        shrink=0.0 if given("shrink") in ("0", "0s") else parsed("shrink", units.seconds, SHRINK),
        plugins=tuple(given("plugin")),
        memory_limit=parsed("memory-limit", units.size, MEMORY_LIMIT),
        limits=Limits(
            jobs=cpus(),
            deadline=parsed("deadline", units.seconds, DEADLINE),
        ),
        command=shlex.join(["python", "-m", "pytest", *map(str, config.invocation_params.args)]),
    )
    ledger = None if given("no_ledger") else Path(given("ledger") or ledgers.DEFAULT).absolute()
    return Request(
        settings=settings,
        ledger=ledger,
        write=bool(out) and not config.option.collectonly,
        processes=max(1, len(config.getoption("tx", None) or ())),
    )


def _seed(config: pytest.Config) -> int:
    from conformance.cli_options import SEED
    from conformance.discover import UsageError

    seed = config.getoption("conformance_seed")
    if seed is not None:
        if not 0 <= seed < 2**32:
            raise UsageError(f"--conformance-seed: {seed} is not within 0..{2**32 - 1}")
        return int(seed)
    text = config.getoption("hypothesis_seed", None)
    if text is None:
        return SEED
    try:
        return int(text) % 2**32  # Hypothesis prints seeds of 128 bits
    except ValueError:
        raise UsageError(f"--hypothesis-seed: {text!r} is no number; give --conformance-seed") from None
