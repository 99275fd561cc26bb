"""The tutorial with both programs, trainer-against-rollout.md, as a reader runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_readme import run_page
from tests.vllm.engines import ENVIRONMENT


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the page runs in order, in a fresh folder, and prints what the page shows."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    run_page("docs/tutorial/trainer-against-rollout.md", tmp_path)
