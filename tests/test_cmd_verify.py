"""``tracer verify`` on traces on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import write_shard


def test_whole_and_altered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole trace exits 0; one flipped byte exits 2 and names the file."""
    shard = write_shard(tmp_path / "t")
    assert run_tracer("verify", tmp_path / "t") == 0
    assert "whole and unaltered" in capsys.readouterr().out
    segment = shard / "segment-000001.safetensors"
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    segment.write_bytes(raw)
    assert run_tracer("verify", tmp_path / "t") == 2
    assert "segment-000001.safetensors" in capsys.readouterr().out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json -`` is the report."""
    write_shard(tmp_path / "t")
    assert run_tracer("verify", tmp_path / "t", "--json", "-") == 0
    assert '"problems": []' in capsys.readouterr().out
