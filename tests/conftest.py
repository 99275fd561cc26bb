"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.playback import Full

# A busy machine is no failure.
hypothesis.settings.register_profile("tracer", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tracer")

_TOUCHES_A_MODEL = re.compile(r"^\s*(?:from|import) (?:transformers|tests\.(?:tiny_models|planters)|tracer\.hosts)", re.MULTILINE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests go first. Tests of modules that touch a framework's model are marked ``host``: they run again with the oldest version."""
    touches: dict[Path, bool] = {}
    for item in items:
        if item.path not in touches:
            touches[item.path] = _TOUCHES_A_MODEL.search(item.path.read_text()) is not None
        if touches[item.path]:
            item.add_marker(pytest.mark.host)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


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


@pytest.fixture(scope="session")
def full() -> Full:
    """The scenarios' base tensors; tests change copies only."""
    from tests.playback import Full

    return Full()


@pytest.fixture(scope="session")
def plain(full: Full, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenarios' side A: one process, one right-padded forward. Never changed by a test."""
    from tests.playback import Stage

    return Stage(tmp_path_factory.mktemp("plain")).plain("a", full)


@pytest.fixture(autouse=True)
def nothing_survives() -> Iterator[None]:
    """No test leaves a hook of ours on a module or an optimizer, or a writer thread running."""
    before = _handles()
    yield
    if _handles() == before:  # no hook of anybody's was registered
        return
    assert _own_hooks() == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("tracer")] == []


def _handles() -> int:
    """Hooks ever registered in this process."""
    torch = sys.modules.get("torch")
    return 0 if torch is None else int(torch.utils.hooks.RemovableHandle.next_id)


def _own_hooks() -> list[str]:
    """Hooks of ours on any living module, and on optimizers."""
    import torch
    from torch.optim.optimizer import _global_optimizer_post_hooks

    found = [str(hook) for hook in _global_optimizer_post_hooks.values() if _ours(hook)]
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.Module) and "_forward_hooks" in module.__dict__:
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            found += [f"{type(module).__name__}: {hook}" for hook in hooks if _ours(hook)]
    return found


def _ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("tracer.")
