"""Running a user's command once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tracer.sessions.commands import run_command


def test_output_status_and_environment(tmp_path: Path) -> None:
    """Both streams are kept apart, the status and the last words come back, and the environment is the one given."""
    command = 'echo "out $X"; echo "err" >&2; pwd; exit 7'
    ended = run_command(command, tmp_path, {**os.environ, "X": "1"}, None, tmp_path)
    assert ended.exit_status == 7
    assert ended.last_words == "err"
    assert (tmp_path / "stdout.log").read_text() == f"out 1\n{tmp_path}\n"
    assert (tmp_path / "stderr.log").read_text() == "err\n"


def test_over_the_budget_the_whole_group_ends(tmp_path: Path) -> None:
    """A command over its budget is ended with its children."""
    marker = tmp_path / "child"
    begun = time.monotonic()
    ended = run_command(f"(sleep 2; touch {marker}) & echo started; wait", tmp_path, dict(os.environ), 0.5, tmp_path)
    assert ended.exit_status is None
    assert (tmp_path / "stdout.log").read_text() == "started\n"
    time.sleep(max(0.0, begun + 2.5 - time.monotonic()))
    assert not marker.exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_secrets_do_not_reach_the_logs(stream: str, tmp_path: Path) -> None:
    """The value of a variable with a secret's name is taken out of both logs and of the last words."""
    where = ">&2" if stream == "stderr" else ""
    ended = run_command(f'echo "key is $MY_API_KEY" {where}', tmp_path, {**os.environ, "MY_API_KEY": "hunter2hunter2"}, None, tmp_path)
    assert (tmp_path / f"{stream}.log").read_text() == "key is <redacted>\n"
    assert ended.last_words == "key is <redacted>"
