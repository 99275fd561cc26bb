"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.playback import Full


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
