"""``tracer show``: what a trace holds, finished or not."""

from __future__ import annotations

from pathlib import Path

from tests.trace_files import edit_manifest, flip, write_shard
from tracer.format.schema import Axis, NotComputed, Skipped
from tracer.format.schema import Counts as ShardCounts
from tracer.read.findings import FindingCode
from tracer.read.inventory import take_inventory


def test_a_finished_trace(tmp_path: Path) -> None:
    """Boundaries come with their counts, and what was left out with its reason."""
    write_shard(
        tmp_path / "t",
        counts=ShardCounts(forwards=2, rows=8, skipped=(Skipped(reason="padding", rows=3),)),
        not_computed=(NotComputed(sequence="s0", positions=((6, 8),), reason="cache hit"),),
        conditions={"mode": "eval"},
    )
    found = take_inventory(str(tmp_path / "t"))
    assert found.complete
    assert [(line.name, line.rows, line.width) for line in found.boundaries] == [
        ("embedding", 8, 64),
        ("layers.0.residual", 8, 64),
        ("final_norm", 8, 64),
    ]
    assert (found.skipped, found.not_computed, found.conditions) == ({"padding": 3}, {"cache hit": 2}, {"mode": "eval"})


def test_s39_an_unfinished_trace_still_shows_its_segments(tmp_path: Path) -> None:
    """A shard without a manifest is listed as unfinished, with the rows of the segments that were flushed."""
    write_shard(tmp_path / "t", committed=False)
    found = take_inventory(str(tmp_path / "t"))
    assert not found.complete
    assert [finding.code for finding in found.findings][:1] == [FindingCode.SHARD_UNCOMMITTED]
    assert [(line.name, line.rows) for line in found.boundaries] == [("embedding", 8), ("layers.0.residual", 8), ("final_norm", 8)]
    assert [(shard.rank, shard.committed) for shard in found.shards] == [(0, False)]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """A trace of two processes of which one is missing is not complete."""
    write_shard(tmp_path / "t", world_size=2, mesh=(Axis(name="tp", index=0, size=2),))
    found = take_inventory(str(tmp_path / "t"))
    assert not found.complete
    assert found.shards[0].mesh == "tp=0/2"


def test_an_altered_trace_is_shown_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    """A flipped byte and a manifest of another format are problems by file, and what is left is listed."""
    shard = write_shard(tmp_path / "t")
    flip(shard / "segment-000001.safetensors")
    found = take_inventory(str(tmp_path / "t"))
    assert not found.complete
    assert [(problem.code, Path(problem.file).name) for problem in found.problems] == [("checksum-mismatch", "segment-000001.safetensors")]
    assert [(line.name, line.rows) for line in found.boundaries][:1] == [("embedding", 4)]
    edit_manifest(shard, lambda content: content.update(format=2))
    found = take_inventory(str(tmp_path / "t"))
    assert [problem.code for problem in found.problems][:1] == ["format-unsupported"]
    assert (found.complete, found.level) == (False, None)
