"""Fixtures and rules shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

_MODEL_WORDS = ("transformers", "tiny_models", "planters", "demo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of modules that touch a framework's model are marked ``host``: they run again with the oldest version supported."""
    touches: dict[str, bool] = {}
    for item in items:
        path = str(item.path)
        if path not in touches:
            text = item.path.read_text()
            touches[path] = any(word in text for word in _MODEL_WORDS)
        if touches[path]:
            item.add_marker(pytest.mark.host)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test may be skipped for want of a GPU and for nothing else: what is skipped there is tested nowhere."""
    report = yield
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("cuda") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI a test module is not skipped as a whole either."""
    report = yield
    if os.environ.get("CI") and report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: Any) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
