"""Tests of ``tracer.read.load``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.shard_records import tensor_parallel
from tests.trace_files import BOUNDARIES, edit_manifest, flip, write_shard
from tracer.errors import Code, TraceFormatError, UsageError
from tracer.format.schema import Axis, MapIdentity
from tracer.read.findings import FindingCode, Kind
from tracer.read.load import TraceFiles, load_trace, verify_trace

ROOT = Path(__file__).resolve().parent.parent


def mesh(**axes: tuple[int, int]) -> tuple[Axis, ...]:
    """Coordinates: ``tp=(index, size)``."""
    return tuple(Axis(name=name, index=index, size=size) for name, (index, size) in axes.items())


def write_world(out: Path, size: int, place: Callable[[int], tuple[Axis, ...]] = lambda _: ()) -> None:
    """One small shard per rank."""
    for rank in range(size):
        write_shard(out, rank=rank, world_size=size, mesh=place(rank))


def codes(trace: TraceFiles) -> list[FindingCode]:
    """What was found; all of it keeps the trace from being whole."""
    assert all(finding.kind is Kind.UNREADABLE and finding.text and finding.remedy for finding in trace.findings)
    return [finding.code for finding in trace.findings]


def test_whole_trace(tmp_path: Path) -> None:
    """All shards of one run are there, by rank, and nothing is found."""
    write_world(tmp_path, 3)
    trace = load_trace(str(tmp_path))
    assert [shard.rank for shard in trace.shards] == [0, 1, 2]
    assert (trace.findings, trace.uncommitted, trace.world_size, trace.run_id) == ((), (), 3, "run")
    assert verify_trace(tmp_path).good


def test_dumps_and_reports_beside_the_shards_are_no_concern(tmp_path: Path) -> None:
    """Other files and folders in a trace's folder change nothing."""
    write_world(tmp_path, 1)
    (tmp_path / "dumps").mkdir()
    (tmp_path / "diff.json").write_text("{")
    assert load_trace(tmp_path).findings == ()


@pytest.mark.parametrize("what", ["nothing", "file", "empty", "shard"])
def test_not_a_trace(tmp_path: Path, what: str) -> None:
    """A path that does not exist, a file, a folder without shards and a single shard are refused, the last with where to look."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    path = write_shard(tmp_path / "t") if what == "shard" else tmp_path / what
    for opened in (load_trace, verify_trace):
        with pytest.raises(UsageError) as caught:
            opened(path)
        assert (caught.value.code, caught.value.where) == (Code.NOT_A_TRACE, str(path))
        assert caught.value.found
        assert what != "shard" or str(tmp_path / "t") in caught.value.remedy


MESHES: dict[str, tuple[int, Callable[[int], tuple[Axis, ...]], tuple[int, ...], list[str]]] = {
    "no mesh": (4, lambda rank: (), (2,), ["rank 2 is missing"]),
    "tp fastest": (4, lambda rank: mesh(dp=(rank // 2, 2), tp=(rank % 2, 2)), (2,), ["rank 2 (dp=1, tp=0) is missing"]),
    "dp fastest": (4, lambda rank: mesh(dp=(rank % 2, 2), tp=(rank // 2, 2)), (2,), ["rank 2 (dp=0, tp=1) is missing"]),
    "one of two left": (2, lambda rank: mesh(tp=(rank, 2)), (1,), ["rank 1 (tp=1) is missing"]),
    "an axis of one": (2, lambda rank: mesh(pp=(0, 1), tp=(rank, 2)), (0,), ["rank 0 (pp=0, tp=0) is missing"]),
    "three axes, two missing": (
        8,
        lambda rank: mesh(pp=(rank // 4, 2), dp=(rank // 2 % 2, 2), tp=(rank % 2, 2)),
        (3, 6),
        ["rank 3 (pp=0, dp=1, tp=1) is missing", "rank 6 (pp=1, dp=1, tp=0) is missing"],
    ),
    "ep over dp and tp": (
        8,
        lambda rank: mesh(dp=(rank // 2, 4), tp=(rank % 2, 2), ep=(rank % 4, 4)),
        (7,),
        ["rank 7 (dp=3, tp=1, ep=3) is missing"],
    ),
    "only rank 0 left": (
        4,
        lambda rank: mesh(dp=(rank // 2, 2), tp=(rank % 2, 2)),
        (1, 2, 3),
        ["rank 1 (dp=0 or 1, tp=0 or 1)", "rank 2 (dp=0 or 1, tp=0 or 1)", "rank 3 (dp=1, tp=1)"],
    ),
    "no regular mesh": (4, lambda rank: mesh(x=((0, 1, 1, 0)[rank], 2)), (2,), ["rank 2 is missing"]),
}


@pytest.mark.parametrize("name", MESHES)
def test_missing_shards_are_named_with_their_coordinates(tmp_path: Path, name: str) -> None:
    """S32: every missing rank is named, with the mesh coordinates that the present ranks leave it."""
    size, place, missing, texts = MESHES[name]
    write_world(tmp_path, size, place)
    for rank in missing:
        shutil.rmtree(tmp_path / f"shard-{rank:05d}")
    trace = load_trace(tmp_path)
    assert codes(trace) == [FindingCode.SHARD_MISSING] * len(missing)
    assert [finding.ranks for finding in trace.findings] == [(rank,) for rank in missing]
    for finding, text in zip(trace.findings, texts, strict=True):
        assert text in finding.text
    assert not verify_trace(tmp_path).good


def test_many_missing_shards_share_a_finding(tmp_path: Path) -> None:
    """A world of thousands of which one rank is left names every missing rank without a finding for each."""
    write_shard(tmp_path, rank=5, world_size=5000)
    trace = load_trace(tmp_path)
    assert len(trace.findings) < 100
    assert sorted(rank for finding in trace.findings for rank in finding.ranks) == [rank for rank in range(5000) if rank != 5]


def test_same_rank_twice(tmp_path: Path) -> None:
    """S38: a shard that was copied under another rank's name is found, and the original is kept."""
    write_world(tmp_path, 2)
    shutil.copytree(tmp_path / "shard-00001", tmp_path / "shard-00002")
    trace = load_trace(tmp_path)
    assert codes(trace) == [FindingCode.SHARD_TWICE]
    assert "rank 1 is there twice: shard-00001 and shard-00002" in trace.findings[0].text
    assert [shard.path.name for shard in trace.shards] == ["shard-00000", "shard-00001"]


def test_copy_in_place_of_another_rank(tmp_path: Path) -> None:
    """A copy that takes another rank's place is both: one rank twice, and another missing."""
    write_world(tmp_path, 2)
    shutil.rmtree(tmp_path / "shard-00000")
    shutil.copytree(tmp_path / "shard-00001", tmp_path / "shard-00000")
    trace = load_trace(tmp_path)
    assert codes(trace) == [FindingCode.SHARD_TWICE, FindingCode.SHARD_MISSING]
    assert [shard.path.name for shard in trace.shards] == ["shard-00001"]


def test_mixed_runs(tmp_path: Path) -> None:
    """Shards of two runs, or of two world sizes, are found with both."""
    write_shard(tmp_path, rank=0, world_size=2, run_id="first")
    write_shard(tmp_path, rank=1, world_size=2, run_id="second")
    trace = load_trace(tmp_path)
    assert codes(trace) == [FindingCode.RUN_MIXED]
    assert "rank 1 belongs to run second, rank 0 to run first" in trace.findings[0].text
    edit_manifest(tmp_path / "shard-00001", lambda content: content.update(run_id="first", world_size=4))
    assert codes(load_trace(tmp_path)) == [FindingCode.RUN_MIXED, FindingCode.SHARD_MISSING, FindingCode.SHARD_MISSING]


def test_shards_that_were_not_recorded_alike(tmp_path: Path) -> None:
    """Processes on other code (map, host, version of tracer), or that saw another mesh, make no trace together: each is named."""
    other = MapIdentity(family="other", host="test", root_class="Tiny", digest="1")
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "map": ({"map": other}, "rank 1 recorded with the boundary map other (1), rank 0 with tiny (0)"),
        "host": ({"host": "other"}, "rank 1 recorded with the host other, rank 0 with test"),
        "version": ({"tracer": "0.0.9"}, "rank 1 recorded with tracer 0.0.9"),
        "mesh": ({"mesh": (Axis(name="tp", index=1, size=3),)}, "axis tp has 3 processes at rank 1 and 2 at rank 0"),
    }
    for name, (change, text) in changes.items():
        ranks = tensor_parallel(tmp_path / name, 2)
        ranks[0].commit()
        ranks[1].commit(**change)
        (finding,) = load_trace(tmp_path / name).findings
        assert (finding.code, finding.kind, finding.ranks) == (FindingCode.RUN_MIXED, Kind.UNREADABLE, (1,))
        assert text in finding.text


def test_incomplete_recording(tmp_path: Path) -> None:
    """A shard whose recording stopped says so, with the rank and the reason."""
    write_shard(tmp_path, complete=False, incomplete_reason="an exception in the model: boom")
    trace = load_trace(tmp_path)
    assert codes(trace) == [FindingCode.TRACE_INCOMPLETE]
    assert "rank 0 stopped recording: an exception in the model: boom" in trace.findings[0].text


def test_uncommitted_shard(tmp_path: Path) -> None:
    """S39: a shard without a manifest is found, and its finished segments can be read; torn ones are named."""
    write_shard(tmp_path, rank=0, world_size=2)
    shard = write_shard(tmp_path, rank=1, forwards=3, committed=False)
    (shard / "segment-000002.safetensors").write_bytes(b"half")
    trace = load_trace(tmp_path)
    assert codes(trace) == [FindingCode.SHARD_UNCOMMITTED, FindingCode.SEGMENT_TORN]
    assert "2 finished segments" in trace.findings[0].text
    assert [finding.ranks for finding in trace.findings] == [(1,), (1,)]
    ((segment, _),) = [(segment, block) for segment, block in trace.uncommitted[0].blocks() if block.boundary == BOUNDARIES[0]][:1]
    assert segment.block_digest(segment.header.blocks[0]).shape == (4, 2)


def test_no_shard_committed(tmp_path: Path) -> None:
    """A run of which nothing committed is found to be that."""
    write_shard(tmp_path, committed=False)
    trace = load_trace(tmp_path)
    assert (trace.shards, trace.world_size, trace.run_id) == ((), 0, "")
    assert codes(trace) == [FindingCode.SHARD_UNCOMMITTED]


def test_altered_files_raise_and_are_all_reported(tmp_path: Path) -> None:
    """S40, S41: a trace with altered files raises the first of them; ``verify_trace`` lists every one and what else is wrong."""
    write_world(tmp_path, 4)
    flip(tmp_path / "shard-00000/segment-000001.safetensors")
    edit_manifest(tmp_path / "shard-00001", lambda content: content.update(format=2))
    (tmp_path / "shard-00002/segment-000000.safetensors").unlink()
    shutil.rmtree(tmp_path / "shard-00003")
    with pytest.raises(TraceFormatError) as caught:
        load_trace(tmp_path)
    assert caught.value.code is Code.CHECKSUM_MISMATCH
    report = verify_trace(tmp_path)
    assert [(problem.code, Path(problem.file).relative_to(tmp_path).as_posix()) for problem in report.problems] == [
        ("checksum-mismatch", "shard-00000/segment-000001.safetensors"),
        ("format-unsupported", "shard-00001/manifest.json"),
        ("shard-incomplete", "shard-00002/segment-000000.safetensors"),
    ]
    assert all(problem.text and problem.remedy for problem in report.problems)
    assert [finding.ranks for finding in report.findings if finding.code is FindingCode.SHARD_MISSING] == [(1,), (3,)]
    assert not report.good


def test_counts_are_held_against_the_manifest(tmp_path: Path) -> None:
    """A boundary of which the segments hold other rows or executions than the manifest counts, or which it does not list, is
    refused, unless recording stopped."""
    shard = write_shard(tmp_path)
    report = verify_trace(tmp_path)
    assert (report.good, report.shards, report.files, report.rows, report.fingerprints) == (True, 1, 3, 8, 24)
    assert report.bytes == sum(file.stat().st_size for file in shard.glob("segment-*"))
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda content: content["boundaries"][1].update(row_count=9), "rows 9, executions 2, dtype bfloat16"),
        (lambda content: content["boundaries"][1].update(row_count=8, executions=1), "rows 8, executions 1, dtype bfloat16"),
        (lambda content: content["boundaries"][1].update(executions=2, dtype="float32"), "rows 8, executions 2, dtype float32"),
        (lambda content: content["boundaries"].pop(1), "every boundary that the segments hold"),
    ]
    for change, expected in changes:
        edit_manifest(shard, change)
        (problem,) = verify_trace(tmp_path).problems
        assert BOUNDARIES[1] in problem.text
        assert (problem.expected, problem.found.removesuffix(", dtype bfloat16")) == (expected, "rows 8, executions 2")
        with pytest.raises(TraceFormatError, match=BOUNDARIES[1]):
            load_trace(tmp_path)
    edit_manifest(shard, lambda content: content.update(complete=False))
    assert verify_trace(tmp_path).problems == ()


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    """Any value of a manifest that was changed without its checksum is found; another layout of the same JSON is none."""
    shard = write_shard(tmp_path)
    path = shard / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(content.items()))))
    assert verify_trace(tmp_path).good
    for key, value in (("boundaries", content["boundaries"][:2]), ("level", 2), ("complete", False), ("xxh3_128", "")):
        path.write_text(json.dumps(content | {key: value}))
        with pytest.raises(TraceFormatError) as caught:
            load_trace(tmp_path)
        assert (caught.value.code, caught.value.where) == (Code.CHECKSUM_MISMATCH, str(path))


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    """Progress grows to the size of all files."""
    write_world(tmp_path, 2)
    seen: list[tuple[int, int]] = []
    load_trace(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert len(seen) == 4
    assert seen[-1][0] == seen[-1][1]


def test_a_large_world_opens_in_linear_time_and_little_memory(tmp_path: Path) -> None:
    """512 shards take about 8 times as long as 64, a few kilobytes each, and keep no file mapped."""
    shard = write_shard(tmp_path / "one", forwards=1)
    for size in (64, 512):
        for rank in range(size):
            shutil.copytree(shard, tmp_path / str(size) / f"shard-{rank:05d}")
            edit_manifest(tmp_path / str(size) / f"shard-{rank:05d}", partial(dict.update, rank=rank, world_size=size))
    seconds = {}
    for size in (64, 512):
        start = time.process_time()
        trace = load_trace(tmp_path / str(size))
        seconds[size] = time.process_time() - start
        assert len(trace.shards) == size
        assert trace.findings == ()
    assert seconds[512] < 24 * seconds[64]
    assert all(shard.segments[0].file._mapped is None for shard in trace.shards)
    tracemalloc.start()
    trace = load_trace(tmp_path / "512")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 512 * 20_000


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    """A trace is opened and verified without torch, in a process where importing it fails."""
    write_world(tmp_path, 1)
    code = "import sys; sys.modules['torch'] = None\nfrom tracer.read.load import *\nassert load_trace(sys.argv[1]).run_id == 'run'"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
