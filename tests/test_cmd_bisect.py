"""``tracer bisect`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import write_shard
from tracer.format.schema import Weight


def test_a_session_from_start_to_reset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """start, status, run, log, report and reset work on one folder; the exit codes are those of the answer."""
    write_shard(tmp_path / "t", weights=(Weight(name="w", parameter="w", dtype="bfloat16", rows=1, columns=1, digest=("0" * 16,) * 2),))
    folder, command = tmp_path / "s", f'cp -r {tmp_path / "t"} "$TRACER_OUT"'
    assert run_tracer("bisect", "start", folder, "--a", command, "--b", command) == 0
    assert run_tracer("bisect", "report", folder) == 2
    assert run_tracer("bisect", "status", folder) == 2
    assert "nothing has run yet" in capsys.readouterr().out
    assert run_tracer("bisect", "run", folder) in (0, 2)
    assert "step 1, coarse" in capsys.readouterr().err
    assert run_tracer("bisect", "log", folder) == 0
    assert "0002-coarse-b" in capsys.readouterr().out
    assert run_tracer("bisect", "reset", folder, "--b", "pythn side.py") == 0
    assert run_tracer("bisect", "status", folder) == 2
    assert "invalidated" in capsys.readouterr().out
    assert run_tracer("bisect", "next", folder) == 2
    assert f"tracer bisect reset {folder} --a COMMAND or --b COMMAND" in " ".join(capsys.readouterr().out.split())
    assert run_tracer("bisect", "start", folder, "--a", command, "--b", command) == 2
    assert "out-in-use" in capsys.readouterr().err


def test_no_session_is_an_error_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every subcommand but start needs a session."""
    for command in ("run", "next", "status", "log", "reset", "report"):
        assert run_tracer("bisect", command, tmp_path) == 2
        assert "tracer bisect start" in capsys.readouterr().err
