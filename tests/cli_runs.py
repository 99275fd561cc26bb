"""The command line, run in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracer.cli.main import main

__all__ = ["run_tracer"]


def run_tracer(*arguments: str | Path) -> int:
    """Exit code of ``tracer ARGUMENTS``; what it prints goes to this process's streams."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code
