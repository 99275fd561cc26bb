"""Small traces on disk, whole and damaged, for the tests of the store and its readers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tracer.format.container import SEGMENT_COLUMNS, ColumnFile, manifest_checksum, write_columns
from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import Axis, Block, Boundary, Manifest, MapIdentity, SegmentHeader, Sequence, segment_name
from tracer.format.store import RowSet, ShardWriter
from tracer.format.store_read import inspect_shard

BOUNDARIES = ("embedding", "layers.0.residual", "final_norm")


def fingerprints(count: int, seed: int = 0, *, statistics: bool = True, columns: int = 0) -> Fingerprints:
    """Random fingerprints: with float statistics, or with ``columns`` raw integer values, or digests alone."""
    random = np.random.default_rng(seed)
    digest = random.integers(0, 1 << 64, (count, 2), dtype=np.uint64)
    if columns:
        return Fingerprints(digest, values_NC=random.integers(-5, 5, (count, columns)))
    if not statistics:
        return Fingerprints(digest)
    sketch = random.standard_normal((count, 16)).astype(np.float32)
    return Fingerprints(
        digest, sketch, random.random(count), random.random(count).astype(np.float32), random.integers(0, 9, count).astype(np.uint32)
    )


def row_set(positions: range, *, sequence: int = 0, forward: int = 0) -> RowSet:
    """Rows of one sequence."""
    return RowSet(np.full(len(positions), sequence, np.int64), np.arange(positions.start, positions.stop), forward)


def manifest(
    *, rank: int = 0, world_size: int = 1, run_id: str = "run", mesh: tuple[Axis, ...] = (), **changes: Any
) -> Manifest:
    """A manifest of a shard without rows and weights."""
    boundaries = tuple(Boundary(name=name, level=0) for name in BOUNDARIES)
    whole = Manifest(
        format=1,
        run_id=run_id,
        tracer="0",
        host="test",
        rank=rank,
        world_size=world_size,
        mesh=mesh,
        map=MapIdentity(family="tiny", host="test", root_class="Tiny", digest="0"),
        level=1,
        boundaries=boundaries,
        weights_mode="digest" if changes.get("weights") else "none",
    )
    return msgspec.structs.replace(whole, **changes)


def commit(writer: ShardWriter, **changes: Any) -> Manifest:
    """Commit with a manifest that counts what was written."""
    writer.flush()
    rows: Counter[str] = Counter()
    executions: Counter[str] = Counter()
    widths: dict[str, Block] = {}
    for _, block in inspect_shard(writer.path).blocks():
        rows[block.boundary] += block.row_count
        executions[block.boundary] += block.executions
        widths[block.boundary] = block
    boundaries = tuple(
        Boundary(
            name=name, level=0, dtype=widths[name].dtype, width=widths[name].width, row_count=rows[name], executions=executions[name]
        )
        for name in rows
    )
    return writer.commit(manifest(**{"boundaries": boundaries, **changes}))


def write_shard(out: Path, *, forwards: int = 2, rows: int = 4, flush: bool = True, committed: bool = True, **changes: Any) -> Path:
    """Record ``forwards`` forwards of ``rows`` rows at every boundary; one segment per forward with ``flush``. Returns the shard."""
    writer = ShardWriter(out, changes.get("rank", 0))
    writer.open_sequence(Sequence(label="s0"))
    for forward in range(forwards):
        positions = range(forward * rows, (forward + 1) * rows)
        writer.add_ids(0, positions.start, np.arange(rows) + 100 * forward)
        shared = row_set(positions, forward=forward)
        for number, name in enumerate(BOUNDARIES):
            writer.add(name, shared, fingerprints(rows, 10 * forward + number), dtype="bfloat16", width=64)
        if flush:
            writer.flush()
    if committed:
        commit(writer, **changes)
    return writer.path


def edit_manifest(shard: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a manifest as JSON, whatever that makes of it, with a checksum that fits."""
    path = shard / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    content["xxh3_128"] = manifest_checksum(json.dumps(content))
    path.write_text(json.dumps(content))


def flip(path: Path) -> None:
    """Alter the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def forge_segment(
    shard: Path, number: int, *, header: Callable[[SegmentHeader], SegmentHeader] | None = None, columns: dict[str, Any] | None = None
) -> None:
    """Replace a segment by one with another header or other columns, its checksum in the manifest included."""
    path = shard / segment_name(number)
    file = ColumnFile.open(path, SEGMENT_COLUMNS)
    arrays = {column.name: file.column(column.name).copy() for column in SEGMENT_COLUMNS} | (columns or {})
    path.unlink()
    written = write_columns(
        path,
        header(file.header) if header else file.header,
        SEGMENT_COLUMNS,
        {name: len(array) for name, array in arrays.items()},
        {name: [array] for name, array in arrays.items()},
    )
    if (shard / "manifest.json").exists():
        edit_manifest(shard, lambda content: content["segments"][number].update(size_bytes=written.size_bytes, xxh3_128=written.xxh3_128))
