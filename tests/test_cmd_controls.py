"""``tracer controls`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import write_shard
from tracer.sessions.controls import template_names


def test_run_previews_runs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands and the budget come first; a dry run runs nothing; the result is on the terminal, as JSON and as a page."""
    write_shard(tmp_path / "t")
    file = tmp_path / "controls.yaml"
    file.write_text(f"command: cp -r {tmp_path / 't'} $TRACER_OUT\nbudget_seconds: 30\nvariants: {{repeat: {{}}}}\n")
    assert run_tracer("controls", "run", file, "--out", tmp_path / "c", "--dry-run") == 0
    assert "2 runs, at most 30 s each" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    pages = ("--json", tmp_path / "c.json", "--html", tmp_path / "c.html")
    status = run_tracer("controls", "run", file, "--out", tmp_path / "c", *pages)
    assert json.loads((tmp_path / "c.json").read_text())["exit"] == status
    assert "Runs" in (tmp_path / "c.html").read_text()
    assert "repeat" in capsys.readouterr().out or status == 2


def test_templates_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name the names, with one the file, with another an error that lists them."""
    assert run_tracer("controls", "template") == 0
    assert capsys.readouterr().out.split() == template_names()
    assert run_tracer("controls", "template", "inference-alone") == 0
    assert "variants:" in capsys.readouterr().out
    assert run_tracer("controls", "template", "nothing") == 2
    assert "inference-alone" in capsys.readouterr().err
