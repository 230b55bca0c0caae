"""The conformance suite for pytest: ``python -m pytest -p conformance.plugin --pyargs conformance.suite``."""
