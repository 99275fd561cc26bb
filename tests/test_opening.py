"""Traces as arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sides import Side
from tests.trace_files import write_shard
from tracer.errors import Code, UsageError
from tracer.read.opening import opened, summarize


def test_a_folder_and_an_opened_trace_are_both_taken(tmp_path: Path) -> None:
    """A path is read with progress; a trace is passed through."""
    write_shard(tmp_path / "t")
    heard: list[str] = []
    trace = opened(tmp_path / "t", "A", lambda what, done, total: heard.append(what))
    assert opened(trace) is trace
    assert {"reading A", "stitching A"} <= set(heard)
    assert summarize(trace).run_id == "run"


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    """A folder without shards is a usage error."""
    with pytest.raises(UsageError) as error:
        opened(tmp_path)
    assert error.value.code is Code.NOT_A_TRACE


def test_a_side_in_a_few_words() -> None:
    """The summary names host, class, level and sizes."""
    summary = summarize(Side().trace())
    assert (summary.host, summary.root_class, summary.level, summary.sequences, summary.tokens) == ("playback", "Playback", 2, 2, 12)
