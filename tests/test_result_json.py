"""Results as JSON files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.sides import Side
from tracer.errors import Code, UsageError
from tracer.read.diff import diff_traces
from tracer.read.findings import DiffResult
from tracer.reports.result_json import encode_result, write_result


def some_result() -> DiffResult:
    """A comparison with a difference."""
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    return diff_traces(Side().trace(), b.trace())


def test_the_file_is_the_result(tmp_path: Path) -> None:
    """What is written decodes into an equal result; an older file is replaced and nothing else is left behind."""
    result, path = some_result(), tmp_path / "out.json"
    path.write_text("old")
    write_result(result, str(path))
    assert msgspec.json.decode(path.read_bytes(), type=DiffResult) == result
    assert list(tmp_path.iterdir()) == [path]


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """``-`` writes the same bytes to standard output."""
    result = some_result()
    write_result(result, "-")
    assert capsys.readouterr().out.encode() == encode_result(result)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """A missing folder is a usage error and leaves nothing behind."""
    with pytest.raises(UsageError) as error:
        write_result(some_result(), str(tmp_path / "no" / "out.json"))
    assert error.value.code is Code.BAD_ARGUMENT
