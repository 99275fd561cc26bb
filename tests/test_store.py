"""Tests of ``tracer.format.store``."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace_files import BOUNDARIES, commit, fingerprints, manifest, row_set, write_shard
from tracer.errors import CaptureError, Code, InternalError, UsageError
from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import Sequence
from tracer.format.store import RowSet, ShardWriter
from tracer.format.store_read import read_shard
from tracer.read.findings import FindingCode
from tracer.read.load import load_trace

ROOT = Path(__file__).resolve().parent.parent


def equal(ours: Fingerprints, theirs: Fingerprints) -> bool:
    """Bitwise equality of everything kept."""
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in Fingerprints.__dataclass_fields__]
    return all((x is None and y is None) or (x is not None and y is not None and np.array_equal(x, y)) for x, y in pairs)


def joined(parts: list[Fingerprints]) -> Fingerprints:
    """Rows of several, in order."""
    columns: dict[str, Any] = {name: [getattr(part, name) for part in parts] for name in Fingerprints.__dataclass_fields__}
    whole: dict[str, Any] = {name: None if arrays[0] is None else np.concatenate(arrays) for name, arrays in columns.items()}
    return Fingerprints(**whole)


@given(data=st.data())
def test_what_was_added_is_read_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any mixture of boundaries, row sets, kinds of fingerprint, attributes and flushes comes back bit for bit, in order per block."""
    writer = ShardWriter(tmp_path_factory.mktemp("trace"), 0)
    for label in "abc":
        writer.open_sequence(Sequence(label=label))
    expected: dict[tuple[Any, ...], list[tuple[RowSet, Fingerprints]]] = {}
    executions: dict[tuple[Any, ...], int] = {}
    sets = [
        RowSet(np.array([0] * n, np.int64), np.arange(n) + 7 * k, k, np.arange(n, dtype=np.int32) if k == 1 else None)
        for k, n in enumerate(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    ]
    for seed in range(data.draw(st.integers(0, 12))):
        rows = data.draw(st.sampled_from(sets))
        name, kind = data.draw(st.sampled_from(["x", "y"])), data.draw(st.sampled_from(["float", "values", "digest"]))
        attributes: dict[str, Any] = {
            "dtype": data.draw(st.sampled_from(["bfloat16", "float32"])),
            "width": 6,
            "spans": data.draw(st.sampled_from([(), ((0, 2), (4, 5))])),
            "partial": data.draw(st.sampled_from(["", "tp"])),
            "occurrence": data.draw(st.integers(0, 1)),
            "recompute": data.draw(st.booleans()),
        }
        columns = (3 if attributes["spans"] else 6) if kind == "values" else 0
        added = fingerprints(len(rows), seed, statistics=kind == "float", columns=columns)
        writer.add(name, rows, added, **attributes)
        key = (name, *attributes.values(), kind)
        expected.setdefault(key, []).append((rows, added))
        executions[key] = executions.get(key, 0) + 1
        if data.draw(st.booleans()):
            writer.flush()
    writer.commit(manifest(complete=False))  # of which nobody holds the counts against the segments
    shard = read_shard(writer.path)
    found: dict[tuple[Any, ...], list[Any]] = {}
    for segment, block in shard.blocks():
        kind = "float" if block.stats_start >= 0 else "values" if block.values_start >= 0 else "digest"
        key = (block.boundary, block.dtype, block.width, block.spans, block.partial, block.occurrence, block.recompute, kind)
        lines = segment.block_lines(block)
        table = [segment.rows_sequence, segment.rows_position, segment.rows_forward, segment.rows_expert]
        found.setdefault(key, []).append((block, [column[lines] for column in table], segment.block_fingerprints(block)))
    assert found.keys() == expected.keys()
    for key, adds in expected.items():
        blocks = found[key]
        assert sum(block.executions for block, _, _ in blocks) == executions[key]
        assert equal(joined([kept for _, _, kept in blocks]), joined([added for _, added in adds]))
        sequence, position, forward, expert = (np.concatenate([table[i] for _, table, _ in blocks]) for i in range(4))
        rows_of = [rows for rows, _ in adds]
        np.testing.assert_array_equal(sequence, np.concatenate([rows.sequence_R for rows in rows_of]))
        np.testing.assert_array_equal(position, np.concatenate([rows.position_R for rows in rows_of]))
        np.testing.assert_array_equal(forward, np.concatenate([np.full(len(rows), rows.forward) for rows in rows_of]))
        experts = [np.full(len(rows), -1) if rows.expert_R is None else rows.expert_R for rows in rows_of]
        np.testing.assert_array_equal(expert, np.concatenate(experts))


def test_decode_steps_become_one_block_per_boundary(tmp_path: Path) -> None:
    """Many small adds of one boundary are one block, rows shared by boundaries are stored once, and so are row lists."""
    writer = ShardWriter(tmp_path, 0)
    writer.open_sequence(Sequence(label="a"))
    for step in range(50):
        rows = row_set(range(step, step + 1), forward=step)
        for name in BOUNDARIES:
            writer.add(name, rows, fingerprints(1, step), dtype="bfloat16", width=64)
    commit(writer)
    (segment,) = read_shard(writer.path).segments
    assert [(block.boundary, block.row_count, block.executions) for block in segment.header.blocks] == [
        (name, 50, 50) for name in BOUNDARIES
    ]
    assert segment.rows_position.tolist() == segment.rows_forward.tolist() == list(range(50))
    assert segment.lists.tolist() == list(range(50))


def test_boundaries_with_other_rows_have_lists_of_their_own(tmp_path: Path) -> None:
    """A boundary that only some rows reach does not disturb the rows of the others."""
    writer = ShardWriter(tmp_path, 0)
    writer.open_sequence(Sequence(label="a"))
    for step in range(3):
        every, last = row_set(range(4 * step, 4 * step + 4), forward=step), row_set(range(4 * step + 3, 4 * step + 4), forward=step)
        writer.add("embedding", every, fingerprints(4, step), dtype="bfloat16", width=64)
        writer.add("lm_head", last, fingerprints(1, step), dtype="bfloat16", width=64)
    commit(writer)
    (segment,) = read_shard(writer.path).segments
    positions = {block.boundary: segment.rows_position[segment.block_lines(block)].tolist() for block in segment.header.blocks}
    assert positions == {"embedding": list(range(12)), "lm_head": [3, 7, 11]}


def test_an_execution_without_rows_is_counted(tmp_path: Path) -> None:
    """A boundary that ran without rows, or several times at once, has its executions in a block."""
    writer = ShardWriter(tmp_path, 0)
    writer.add("moe", row_set(range(0)), fingerprints(0), dtype="bfloat16", width=64)
    writer.add("moe", row_set(range(0)), fingerprints(0), dtype="bfloat16", width=64, executions=3)
    commit(writer)
    ((_, block),) = read_shard(writer.path).blocks()
    assert (block.row_count, block.executions) == (0, 4)


def test_ids_and_sequences_are_kept_over_segments(tmp_path: Path) -> None:
    """Sequences keep their order of opening, and ids their sequence and position, whatever segment they fall into."""
    writer = ShardWriter(tmp_path, 0)
    assert writer.open_sequence(Sequence(label="a", salt="adapter")) == 0
    writer.add_ids(0, 5, np.array([1 << 40, -1], dtype=np.int64))
    writer.flush()
    assert writer.open_sequence(Sequence(label="b")) == writer.sequence_count - 1 == 1
    writer.add_ids(1, 0, np.array([7], dtype=np.int32))
    commit(writer)
    shard = read_shard(writer.path)
    assert shard.sequences == (Sequence(label="a", salt="adapter"), Sequence(label="b"))
    ids = [(s.ids_sequence.tolist(), s.ids_position.tolist(), s.ids_token.tolist()) for s in shard.segments]
    assert ids == [([0, 0], [5, 6], [1 << 40, -1]), ([1], [0], [7])]


def test_a_trace_without_anything_is_a_trace(tmp_path: Path) -> None:
    """A commit without adds makes a shard without segments that reads without complaint."""
    ShardWriter(tmp_path / "t", 0).commit(manifest())
    assert load_trace(tmp_path / "t").findings == ()


def test_bytes_per_row(tmp_path: Path) -> None:
    """Prefill and decode alike cost at most 128 bytes per token and boundary, headers and manifest included."""
    names = [f"layers.{layer}.{name}" for layer in range(8) for name in ("attn.out", "mlp.out", "residual")]
    for steps, rows in ((1, 512), (512, 1)):
        writer = ShardWriter(tmp_path / str(steps), 0)
        writer.open_sequence(Sequence(label="a"))
        for step in range(steps):
            writer.add_ids(0, step * rows, np.arange(rows))
            shared = row_set(range(step * rows, (step + 1) * rows), forward=step)
            for name in names:
                writer.add(name, shared, fingerprints(rows), dtype="bfloat16", width=64)
        commit(writer)
        size = sum(file.stat().st_size for file in writer.path.iterdir())
        assert size / (steps * rows * len(names)) <= 128


def test_segments_are_finished_by_size(tmp_path: Path) -> None:
    """Once about ``flush_bytes`` are pending, a segment is finished without being asked for."""
    writer = ShardWriter(tmp_path, 0, flush_bytes=100_000)
    writer.open_sequence(Sequence(label="a"))
    for step in range(50):
        writer.add("x", row_set(range(100 * step, 100 * (step + 1))), fingerprints(100, step), dtype="bfloat16", width=64)
    sizes = [file.stat().st_size for file in sorted(writer.path.glob("segment-*"))]
    assert len(sizes) > 3
    assert all(size < 120_000 for size in sizes)


def test_equal_runs_make_equal_files(tmp_path: Path) -> None:
    """The same adds make the same bytes in every file, manifest included."""
    for out in ("a", "b"):
        write_shard(tmp_path / out, conditions={"b": 1, "a": {"nested": [1.5, None]}})
    names = sorted(file.name for file in (tmp_path / "a/shard-00000").iterdir())
    assert names == ["manifest.json", "segment-000000.safetensors", "segment-000001.safetensors"]
    for name in names:
        assert (tmp_path / "a/shard-00000" / name).read_bytes() == (tmp_path / "b/shard-00000" / name).read_bytes()


def test_weight_rows(tmp_path: Path) -> None:
    """Weight rows come back line by line; those without statistics have undefined ones."""
    writer = ShardWriter(tmp_path, 0)
    first, second = fingerprints(3, 1), fingerprints(2, 2, columns=4)
    writer.write_weight_rows([first, second])
    written = writer.commit(manifest(weights_mode="rows"))
    assert written.weights_file is not None
    assert written.weights_file.rows == 5
    rows = read_shard(writer.path).weight_rows
    assert rows is not None
    assert len(rows) == 5
    assert equal(rows.fingerprints(0, 3), first)
    other = rows.fingerprints(3, 2)
    np.testing.assert_array_equal(other.digest_N2, second.digest_N2)
    assert other.sketch_N16 is not None
    assert np.isnan(other.sketch_N16).all()
    with pytest.raises(InternalError, match="once per shard"):
        writer.write_weight_rows([])


def test_out_in_use(tmp_path: Path) -> None:
    """A shard that exists, another run's folder and a file in the way are refused, and nothing of them changes."""
    write_shard(tmp_path / "t", run_id="first")
    before = {path: path.read_bytes() for path in (tmp_path / "t").rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("mine")
    for out, rank, run_id in (("t", 0, "first"), ("t", 0, ""), ("t", 1, "second"), ("file", 0, ""), ("file/below", 0, "")):
        with pytest.raises(UsageError) as caught:
            ShardWriter(tmp_path / out, rank, run_id=run_id)
        assert caught.value.code is (Code.BAD_ARGUMENT if "file" in out else Code.OUT_IN_USE)
        assert caught.value.found
        assert caught.value.remedy
    assert {path: path.read_bytes() for path in (tmp_path / "t").rglob("*") if path.is_file()} == before
    ShardWriter(tmp_path / "t", 1, run_id="first")


def test_misuse_is_our_own_bug(tmp_path: Path) -> None:
    """Fingerprints that do not fit their rows, rows of unknown sequences, values of another width: refused as internal errors."""
    writer = ShardWriter(tmp_path, 0)
    with pytest.raises(InternalError, match="as many fingerprints"):
        writer.add("x", row_set(range(3)), fingerprints(2), dtype="bfloat16", width=64)
    with pytest.raises(InternalError, match="not opened"):
        writer.add("x", row_set(range(3)), fingerprints(3), dtype="bfloat16", width=64)
    writer.open_sequence(Sequence(label="a"))
    with pytest.raises(InternalError, match="not opened"):
        writer.add("x", row_set(range(3), sequence=-1), fingerprints(3), dtype="bfloat16", width=64)
    writer.add("x", row_set(range(3)), fingerprints(3, columns=2), dtype="int64", width=5)
    with pytest.raises(InternalError, match="columns held"):
        writer.flush()
    with pytest.raises(CaptureError):
        writer.flush()
    assert not writer.commit(manifest()).complete
    with pytest.raises(InternalError, match="committed once"):
        writer.commit(manifest())


def test_conditions_that_are_no_json(tmp_path: Path) -> None:
    """A condition that JSON cannot hold is refused by name and leaves the shard uncommitted."""
    writer = ShardWriter(tmp_path, 0)
    with pytest.raises(InternalError, match="no JSON"):
        writer.commit(manifest(conditions={"odd": object()}))
    assert not (writer.path / "manifest.json").exists()


def test_a_failed_write_makes_the_trace_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a segment was lost, nothing more is recorded, and a commit says incomplete, with the reason, whatever it was told."""
    writer = ShardWriter(tmp_path / "t", 0)
    writer.open_sequence(Sequence(label="a"))
    writer.add("x", row_set(range(3)), fingerprints(3), dtype="bfloat16", width=64)
    writer.flush()
    writer.add("x", row_set(range(3)), fingerprints(3), dtype="bfloat16", width=64)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(CaptureError):
            writer.flush()
    with pytest.raises(CaptureError, match="recording stopped"):
        writer.add("x", row_set(range(3)), fingerprints(3), dtype="bfloat16", width=64)
    written = writer.commit(manifest())
    assert not written.complete
    assert "No space left" in written.incomplete_reason
    trace = load_trace(tmp_path / "t")
    assert [finding.code for finding in trace.findings] == [FindingCode.TRACE_INCOMPLETE]
    assert "No space left" in trace.findings[0].text
    assert len(trace.shards[0].segments) == 1


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # every larger file fails in write(2), as on a full disk
from tests.trace_files import fingerprints, manifest, row_set
from tracer.errors import CaptureError
from tracer.format.schema import Sequence
from tracer.format.store import ShardWriter
writer = ShardWriter(Path(sys.argv[1]), 0)
writer.open_sequence(Sequence(label="a"))
for rows in (100, 1000):
    writer.add("x", row_set(range(rows)), fingerprints(rows), dtype="bfloat16", width=64)
    try:
        writer.flush()
    except CaptureError as error:
        print(error.code.value, rows)
if sys.argv[2] == "commit":
    writer.commit(manifest())
"""


@pytest.mark.parametrize("end", ["commit", "no commit"])
def test_the_system_refuses_a_write(tmp_path: Path, end: str) -> None:
    """A process whose writes the kernel refuses gets a typed error, keeps what was finished, and leaves nothing half-visible."""
    out = tmp_path / "t"
    run = subprocess.run([sys.executable, "-c", FULL_DISK, str(out), end], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "write-failed 1000\n", "")
    names = ["manifest.json", "segment-000000.safetensors"] if end == "commit" else ["segment-000000.safetensors"]
    assert sorted(file.name for file in (out / "shard-00000").iterdir()) == names
    (finding,) = load_trace(out).findings
    assert finding.code is (FindingCode.TRACE_INCOMPLETE if end == "commit" else FindingCode.SHARD_UNCOMMITTED)


KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from tests.trace_files import fingerprints, manifest, row_set, write_shard
import tracer.format.store as store

def run(out, step, moment):
    # one writer that kills itself before, in or after its step-th file operation
    count = 0
    def watched(name):
        operation = getattr(os, name)
        def call(*arguments):
            nonlocal count
            count += 1
            if count == step and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if count == step and moment == "in" and name == "write":
                operation(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*arguments)
            if count == step and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        setattr(os, name, call)
    for name in ("mkdir", "open", "write", "fsync", "close", "replace"):
        watched(name)
    write_shard(out)
    os._exit(0)

base = Path(sys.argv[1])
for moment in ("before", "in", "after"):
    for step in range(1, 500):
        child = os.fork()
        if child == 0:
            run(base / moment / f"{step:03d}", step, moment)
        _, status = os.waitpid(child, 0)
        if moment != "in" and not os.WIFSIGNALED(status):
            break
        if moment == "in" and step > last:
            break
        last = step
    print(moment, step)
"""


def test_a_writer_killed_at_every_step(tmp_path: Path) -> None:
    """Whichever file operation the process dies before, in or after: no manifest or a whole trace, finished segments readable,
    and nothing half-written taken for anything."""
    for moment in ("before", "in", "after"):
        (tmp_path / moment).mkdir()
    run = subprocess.run([sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert len(run.stdout.splitlines()) == 3
    write_shard(tmp_path / "whole")
    whole = read_shard(tmp_path / "whole/shard-00000")
    outcomes: dict[str, int] = {}
    leftovers = 0
    for moment in ("before", "in", "after"):
        readable = 0
        for out in sorted((tmp_path / moment).iterdir()):
            leftovers += len(list(out.rglob(".*.tmp")))
            if not (out / "shard-00000").exists():
                assert readable == 0
                outcomes["nothing"] = outcomes.get("nothing", 0) + 1
                continue
            trace = load_trace(out)
            if trace.shards:
                assert trace.findings == ()
                (shard,) = trace.shards
                assert shard.manifest == whole.manifest
                outcomes["whole"] = outcomes.get("whole", 0) + 1
            else:
                assert [finding.code for finding in trace.findings] == [FindingCode.SHARD_UNCOMMITTED]
                (shard,) = trace.uncommitted
                outcomes[f"{len(shard.segments)} segments"] = outcomes.get(f"{len(shard.segments)} segments", 0) + 1
            assert moment == "in" or len(shard.segments) >= readable
            readable = len(shard.segments)
            for ours, theirs in zip(shard.segments, whole.segments, strict=False):
                assert ours.path.read_bytes() == theirs.path.read_bytes()
    assert outcomes.keys() == {"nothing", "0 segments", "1 segments", "2 segments", "whole"}
    assert leftovers > 10


def test_msgspec_round_trip_of_the_manifest(tmp_path: Path) -> None:
    """The manifest on disk is the one that ``commit`` returned."""
    writer = ShardWriter(tmp_path, 3)
    written = writer.commit(manifest(rank=3, world_size=4, conditions={"dtype": "bfloat16", "threads": 2}))
    assert read_shard(writer.path).manifest == written
    assert msgspec.json.decode((writer.path / "manifest.json").read_bytes())["format"] == 1
