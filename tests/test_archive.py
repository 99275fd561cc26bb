"""What a session keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracer.errors import Code, UsageError
from tracer.sessions.archive import Archive, RunStatus, locked, read_state, write_state


def test_a_run_is_listed_before_it_runs_and_never_overwritten(tmp_path: Path) -> None:
    """A run is in the index with a folder of its own from the start; a folder that a dead process left is passed over."""
    archive = Archive(tmp_path)
    first = archive.begin("coarse-a", "command", {"X": "1"}, "now")
    assert [run.status for run in Archive(tmp_path)] == [RunStatus.RUNNING]
    (tmp_path / "0002-coarse-b").mkdir()
    second = archive.begin("coarse-b", "command", {}, "now")
    assert [first.id, second.id] == ["0001-coarse-a", "0003-coarse-b"]
    archive.change(first, status=RunStatus.DONE, exit_status=0)
    assert Archive(tmp_path)["0001-coarse-a"].exit_status == 0


def test_a_conclusion_keeps_its_first_reason(tmp_path: Path) -> None:
    """An invalidated run is marked once; unknown names are passed over."""
    archive = Archive(tmp_path)
    run = archive.begin("a", "command", {}, "now")
    archive.invalidate((run.id, "no such run"), "first")
    archive.invalidate((run.id,), "second")
    assert Archive(tmp_path)[run.id].invalidated == "first"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second worker on the same session is refused, and let in when the first is gone."""
    with locked(tmp_path), pytest.raises(UsageError) as error, locked(tmp_path):
        pass
    assert error.value.code is Code.SESSION_BUSY
    with locked(tmp_path):
        pass


def test_damaged_state_is_refused(tmp_path: Path) -> None:
    """A file that is not what was written has its own error, and is left as it is."""
    archive = Archive(tmp_path)
    run = archive.begin("a", "command", {}, "now")
    file = tmp_path / "run.json"
    write_state(file, run)
    assert read_state(file, type(run)) == run
    (tmp_path / "index.json").write_text('{"version": 1, "runs": [{}]}')
    with pytest.raises(UsageError) as error:
        Archive(tmp_path)
    assert error.value.code is Code.SESSION_DAMAGED
    assert (tmp_path / "index.json").read_text() == '{"version": 1, "runs": [{}]}'
