"""Running a user's command once."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import pytest

from tracer.sessions import commands
from tracer.sessions.commands import run_command, sets_variable


@pytest.mark.parametrize(
    "command",
    ["A=1 x", "cd y && A=1 x", "env -i A=1 x", "export B=2 A='1'; x", 'bash -c "A=1 x"', "A=$AB x", "unset A; x", "env -u A x", "A+=1 x"],
)
def test_a_command_that_sets_a_variable_itself(command: str) -> None:
    """Every way of giving a variable another value, or none, inside the command is seen."""
    assert sets_variable(command, "A")


@pytest.mark.parametrize("command", ["x", "BA=1 x", "x --A=1", "A=$A x", 'A="${A:-1}" x', "x $A", "x A.b=1", "unset B; x A", "A_B=1 x"])
def test_a_command_that_leaves_a_variable_alone(command: str) -> None:
    """Other names, options, and a value made of the variable itself let what is set for the command arrive."""
    assert not sets_variable(command, "A")


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


def test_over_the_budget_nothing_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ignores the request to end, and a child in a session of its own that does, are ended all the same."""
    monkeypatch.setattr(commands, "_GRACE_SECONDS", 0.3)
    child = f"trap '' TERM; echo $$ > {tmp_path / 'child'}; sleep 60; true"
    command = f"trap '' TERM; setsid bash -c {shlex.quote(child)} & while true; do sleep 1; done"
    ended = run_command(command, tmp_path, {**os.environ, "TRACER_OUT": str(tmp_path / "t")}, 0.5, tmp_path)
    assert ended.exit_status is None
    assert ended.elapsed_seconds < 10
    assert _gone(int((tmp_path / "child").read_text()))


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    """Processes that outlive a command, in its group or in a session of their own, are ended and counted."""
    command = "sleep 60 & echo $! > one; setsid bash -c 'echo $$ > two; exec sleep 60' & until [ -s two ]; do sleep 0.02; done"
    ended = run_command(command, tmp_path, {**os.environ, "TRACER_OUT": str(tmp_path / "t")}, 30, tmp_path)
    assert (ended.exit_status, ended.left_behind) == (0, 2)
    assert ended.elapsed_seconds < 10
    assert all(_gone(int((tmp_path / name).read_text())) for name in ("one", "two"))


def test_a_full_disk_does_not_hang_a_command(tmp_path: Path) -> None:
    """Where a log cannot be written, the command runs to its end, and what is missing is said."""
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    ended = run_command("head -c 300000 /dev/zero | tr '\\0' 'x\\n'; echo done", tmp_path, dict(os.environ), 30, tmp_path)
    assert ended.exit_status == 0
    assert ended.unwritten == "stdout.log: No space left on device"


def _gone(process: int) -> bool:
    """Whether a process has ended; one that its parent has not fetched yet has."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
