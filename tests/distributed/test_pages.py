"""The pages with sharded sessions and controls, as a reader runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_readme import commands, folder, run_page

__all__ = ["commands", "folder"]

pytestmark = pytest.mark.distributed


def test_the_sharded_session_runs(folder: Path, commands: Path) -> None:
    """Every block of bisect-sharded.md runs in order, over real processes, and prints what the page shows."""
    run_page("docs/how-to/bisect-sharded.md", folder, commands)
