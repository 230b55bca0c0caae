"""Every operation and variant on every backend and device, and every known failure, as an item of pytest."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each check of the plan, which the plugin has drawn."""
    plugin = metafunc.config.pluginmanager.get_plugin("conformance.plugin")
    if plugin is None:
        raise pytest.Collector.CollectError("the suite needs its plugin: python -m pytest -p conformance.plugin ...")
    plugin.parametrize(metafunc)


def test_conformance(check: str, conformance_check: Callable[[str], None]) -> None:
    """Run the cases of one check, all of them, then fail, xfail or skip by what they gave."""
    conformance_check(check)
