"""``tracer report``: the page of a comparison made earlier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import write_shard


def test_diff_and_report_write_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``diff --html`` and ``report`` on its JSON give one page; the exit codes are those of a comparison and of a written file."""
    write_shard(tmp_path / "a")
    write_shard(tmp_path / "b")
    status = run_tracer("diff", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "d.json", "--html", tmp_path / "direct.html")
    assert status in (0, 1, 2)
    assert run_tracer("report", tmp_path / "d.json", "--html", tmp_path / "later.html") == 0
    assert "later.html" in capsys.readouterr().out
    assert (tmp_path / "direct.html").read_bytes() == (tmp_path / "later.html").read_bytes()


@pytest.mark.parametrize("content", ["", "{}", '{"version": 99}', "<html>", None], ids=["empty", "no-fields", "other", "html", "none"])
def test_what_is_no_result_is_refused(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything but a result of this version exits 2 with the code, and writes nothing."""
    source = tmp_path / "d.json"
    if content is not None:
        source.write_text(content)
    assert run_tracer("report", source, "--html", tmp_path / "page.html") == 2
    assert "not-a-result" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
