"""The pytest plugin: ``python -m pytest -p conformance.plugin --pyargs conformance.suite``.

Options start with ``--conformance-``. Nothing is surveyed or drawn unless the suite is among what pytest is to collect.
Everything that takes time to import is imported when it is needed: ``-p`` loads this module into foreign test runs too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

from conformance import plugin_options

if TYPE_CHECKING:
    from conformance.plugin_controller import Controller, Executor
    from reports.record import Record

INPUT = "conformance"
"""Key of the blueprint in what xdist hands to a worker."""
REPORT = "conformance_records"
FAILURE = "conformance_failure"
"""Attributes of a report: the records of a check as lines; why the harness failed."""
CONTROLLER: pytest.StashKey[Controller] = pytest.StashKey()
EXECUTOR: pytest.StashKey[Executor] = pytest.StashKey()
RECORDS: pytest.StashKey[list[Record]] = pytest.StashKey()
HARNESS: pytest.StashKey[str] = pytest.StashKey()
PATHS: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `plugin_options.add`."""
    plugin_options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register a marker for each operation and kind of device."""
    from fuzz.grammar import GRAMMAR

    for operation in GRAMMAR:
        config.addinivalue_line("markers", f"{operation}: a check of the operation {operation}")
    config.addinivalue_line("markers", "cpu: runs on the CPU")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Survey and plan in the process that owns the run; unpack the blueprint in an xdist worker."""
    config = session.config
    if hasattr(config, "workerinput"):
        blueprint = config.workerinput.get(INPUT)
        if blueprint is not None:
            from conformance.plugin_controller import Executor

            config.stash[EXECUTOR] = Executor(blueprint)
    elif plugin_options.names_suite(config):
        _control(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the blueprint to an xdist worker."""
    controller = node.config.stash.get(CONTROLLER, None)
    if controller is not None:
        node.workerinput[INPUT] = controller.hand_over()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The plan, and what does not run."""
    controller = config.stash.get(CONTROLLER, None)
    return controller.header() if controller else []


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give the suite's test an item for each check."""
    config = metafunc.config
    if EXECUTOR not in config.stash and CONTROLLER not in config.stash:
        if hasattr(config, "workerinput"):
            raise pytest.Collector.CollectError(f"name the suite on the command line: --pyargs {plugin_options.SUITE}")
        try:
            _control(config)
        except pytest.UsageError as error:
            raise pytest.Collector.CollectError(str(error)) from None
    found = _process(config).checks.values()
    params = [
        pytest.param(item.id, id=item.id, marks=[getattr(pytest.mark, mark) for mark in item.marks]) for item in found
    ]
    metafunc.parametrize("check", params)


@pytest.fixture
def conformance_check(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Runs a check, given its id, and ends the test accordingly."""

    def run(name: str) -> None:
        __tracebackhide__ = True
        _run(request.node, name)

    return run


def _run(item: pytest.Item, name: str) -> None:
    __tracebackhide__ = True
    from conformance.oracles import HarnessError
    from conformance.plugin_checks import outcome

    process, controller = _process(item.config), item.config.stash.get(CONTROLLER, None)
    check = process.checks[name]
    sink = controller.receive if controller else lambda records: None
    failure = ""
    try:
        records = process.bench.run(check, sink)
    except HarnessError as error:
        failure = str(error)
    if failure:
        item.stash[HARNESS] = failure
        item.session.shouldfail = f"the harness failed: {failure}"
        pytest.fail(f"the harness failed, so that nothing can be said: {failure}", pytrace=False)
    item.stash[RECORDS] = records
    said = outcome(check, records, process.blueprint.plugins)
    item.user_properties += [("cases", len(check.cases)), ("outcome", said.kind)]
    match said.kind:
        case "failed":
            pytest.fail(said.text, pytrace=False)
        case "known":
            if not item.config.getoption("runxfail"):
                pytest.xfail(said.text)
            pytest.fail(said.text, pytrace=False)
        case "skipped":
            pytest.skip(said.text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the records into the report, which is what xdist sends to the controller."""
    report = yield
    if call.when == "call" and EXECUTOR in item.config.stash:
        from conformance.plugin_controller import lines_of

        records = item.stash.get(RECORDS, None)
        setattr(report, REPORT, lines_of(records or ()))
    if call.when == "call" and HARNESS in item.stash:
        setattr(report, FAILURE, item.stash[HARNESS])
    return report


class _Receiver:
    """Takes what arrives in the process that owns the run."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from conformance.plugin_controller import records_of

        self._controller.receive(records_of(getattr(report, REPORT, ())))
        self._controller.failure = self._controller.failure or getattr(report, FAILURE, "")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._controller.select(_check_of(item.nodeid) for item in session.items)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # xdist ends a run with a kind of KeyboardInterrupt that has a message.
        self._controller.stopped = str(excinfo.value) or "interrupted"

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._controller.select(map(_check_of, ids))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a backend's worker when the next item is of another backend or device."""
    stash = item.config.stash
    if RECORDS in item.stash and (EXECUTOR in stash or CONTROLLER in stash):
        process = _process(item.config)
        process.bench.release(process.checks.get(_check_of(nextitem.nodeid)) if nextitem else None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the reports; nothing non-conformant, and nothing executed at all, ends with exit code 0."""
    controller = session.config.stash.get(CONTROLLER, None)
    if controller is None or not controller.selected or session.config.option.collectonly:
        return
    controller.stopped = controller.stopped or str(session.shouldfail or session.shouldstop or "")
    code = controller.conclude()
    session.config.stash[PATHS] = []
    try:
        controller.keep(lambda line: _say(session.config, line))
        session.config.stash[PATHS] = [str(path) for path in controller.write()]
    except OSError as error:
        controller.failure = f"cannot write the reports: {error}"
    if controller.failure:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    elif session.exitstatus == pytest.ExitCode.OK and code:
        from conformance.run_settings import USAGE

        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED if code == USAGE else pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The headline of the run, and where its files are."""
    controller = config.stash.get(CONTROLLER, None)
    if controller is None or PATHS not in config.stash:
        return
    terminalreporter.section("conformance")
    for line in (*controller.summary(), *config.stash[PATHS]):
        terminalreporter.write_line(line)
    if controller.failure:
        terminalreporter.write_line(f"conformance: the harness failed: {controller.failure}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every worker that is left."""
    for process in (config.stash.get(CONTROLLER, None), config.stash.get(EXECUTOR, None)):
        if process is not None:
            process.close()


def _control(config: pytest.Config) -> None:
    """Make this process the one that owns the run. Raises pytest's UsageError; a failure of the harness is exit 3."""
    from conformance.discover import UsageError
    from conformance.journal import JournalError
    from conformance.ledger import LedgerError
    from conformance.oracles import HarnessError
    from conformance.plugin_controller import Controller
    from fuzz.case import CaseError

    try:
        controller = Controller(plugin_options.request(config))
    except (UsageError, CaseError, LedgerError, JournalError) as error:
        raise pytest.UsageError(f"conformance: {error}") from None
    except HarnessError as error:
        pytest.exit(f"conformance: the harness failed: {error}", returncode=pytest.ExitCode.INTERNAL_ERROR)
    config.stash[CONTROLLER] = controller
    config.pluginmanager.register(_Receiver(controller))


def _process(config: pytest.Config) -> Controller | Executor:
    executor = config.stash.get(EXECUTOR, None)
    return executor if executor is not None else config.stash[CONTROLLER]


def _say(config: pytest.Config, line: str) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.ensure_newline()
        reporter.write_line(f"conformance: {line}")


def _check_of(nodeid: str) -> str:
    """The id of the check that an item is about."""
    return nodeid.rpartition("[")[2].removesuffix("]")
