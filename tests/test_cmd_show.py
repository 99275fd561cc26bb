"""``tracer show`` on traces on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import flip, write_shard
from tracer.read.inventory import Inventory


def test_a_finished_trace_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A complete trace exits 0 and lists its boundaries."""
    write_shard(tmp_path / "t")
    assert run_tracer("show", tmp_path / "t") == 0
    out = capsys.readouterr().out
    assert "complete, 1 process" in out
    assert "layers.0.residual  recorded  bfloat16" in out


def test_s39_an_unfinished_trace_is_2_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed process leaves a trace that exits 2 and still shows what was flushed; ``diff`` gives no verdict on it."""
    write_shard(tmp_path / "t", committed=False)
    assert run_tracer("show", tmp_path / "t") == 2
    out = capsys.readouterr().out
    assert "not complete" in out
    assert "layers.0.residual" in out
    assert run_tracer("diff", tmp_path / "t", tmp_path / "t") == 2
    assert "Could not tell" in capsys.readouterr().out


def test_a_flipped_byte_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``show`` verifies what it shows: one flipped byte exits 2 and names the file."""
    flip(write_shard(tmp_path / "t") / "segment-000001.safetensors")
    assert run_tracer("show", tmp_path / "t") == 2
    out = capsys.readouterr().out
    assert "damaged, so tracer diff gives no verdict" in out
    assert "segment-000001.safetensors" in out
    assert "[checksum-mismatch]" in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json -`` is the inventory."""
    write_shard(tmp_path / "t")
    assert run_tracer("show", tmp_path / "t", "--json", "-") == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Inventory).complete
