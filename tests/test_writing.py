"""Reports as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracer.errors import Code, UsageError
from tracer.reports.writing import write_whole


def test_an_older_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    """The new content stands alone; nothing else is left in the folder."""
    path = tmp_path / "report"
    path.write_bytes(b"old")
    write_whole(b"new", str(path), "--html")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the file and the option that named it."""
    with pytest.raises(UsageError) as error:
        write_whole(b"new", str(tmp_path / "nowhere" / "report"), "--html")
    assert error.value.code is Code.BAD_ARGUMENT
    assert "--html" in error.value.remedy
