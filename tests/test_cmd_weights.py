"""``tracer weights`` on traces on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import write_shard
from tracer.format.schema import Weight


def weight(last: str) -> tuple[Weight, ...]:
    """One weight with this last digit."""
    return (Weight(name="lm_head.weight", parameter="head", dtype="bfloat16", rows=4, columns=8, digest=("0" * 16, "0" * 15 + last)),)


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal weights exit 0, other bytes 1, no weights 2."""
    for name, weights in (("a", weight("1")), ("b", weight("2")), ("c", ())):
        write_shard(tmp_path / name, weights=weights)
    assert run_tracer("weights", tmp_path / "a", tmp_path / "a") == 0
    assert run_tracer("weights", tmp_path / "a", tmp_path / "b") == 1
    assert "lm_head.weight" in capsys.readouterr().out
    assert run_tracer("weights", tmp_path / "a", tmp_path / "c", "--all") == 2
    assert "recorded no weights" in capsys.readouterr().out
    assert run_tracer("weights", tmp_path / "a", tmp_path / "b", "--json", "-") == 1
    assert '"state": "differs"' in capsys.readouterr().out
