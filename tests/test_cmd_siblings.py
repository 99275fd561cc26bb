"""``tracer siblings`` on traces on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import BOUNDARIES, commit, fingerprints, row_set, write_shard
from tracer.format.schema import Sequence
from tracer.format.store import ShardWriter


def write_twice(out: Path, seed: int) -> Path:
    """The same four rows in two forwards; ``seed`` 0 gives equal values."""
    writer = ShardWriter(out, 0)
    writer.open_sequence(Sequence(label="s0"))
    writer.add_ids(0, 0, fingerprints(4).digest_N2[:, 0].astype("int64"))
    for forward in (0, 1):
        for name in BOUNDARIES:
            writer.add(name, row_set(range(4), forward=forward), fingerprints(4, seed * forward), dtype="bfloat16", width=64)
    commit(writer)
    return out


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Repeats that agree exit 0, repeats that do not 1, no repeat at all 2."""
    assert run_tracer("siblings", write_twice(tmp_path / "same", 0)) == 0
    assert "agree bitwise" in capsys.readouterr().out
    assert run_tracer("siblings", write_twice(tmp_path / "noisy", 1)) == 1
    assert "[repeats-disagree]" in capsys.readouterr().out
    write_shard(tmp_path / "once")
    assert run_tracer("siblings", tmp_path / "once") == 2
    assert run_tracer("siblings", tmp_path / "noisy", "--json", "-") == 1
    assert '"exit": 1' in capsys.readouterr().out
