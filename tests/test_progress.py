"""The progress bar."""

from __future__ import annotations

import io
import sys

import pytest

from tracer.cli import progress
from tracer.cli.progress import progress_bar


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def test_nobody_watching_means_silence() -> None:
    """Where standard error is no terminal there is nothing to report to."""
    with progress_bar() as report:
        assert report is None


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is done at once draws nothing on a terminal either."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar() as report:
        assert report is not None
        report("reading A", 1, 2)
    assert terminal.getvalue() == ""


def test_long_work_is_shown_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that takes a while draws a bar, and an interrupt leaves the terminal usable."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        _interrupted()
    assert "comparing" in terminal.getvalue()
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is back


def _interrupted() -> None:
    with progress_bar() as report:
        assert report is not None
        report("reading A", 1, 2)
        report("comparing", 1, 1)
        raise KeyboardInterrupt
