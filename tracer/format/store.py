"""Writing one shard of a trace; ``tracer.format.store_read`` reads it.

What a shard survives
- *A killed process*: every segment that was finished before stays whole and readable; the one being written
  leaves only a temporary file that no reader looks at; without its manifest the shard counts as uncommitted.
- *A power cut*: every finished file was synced before it got its name and its folder after, so the same
  holds for segments whose ``flush`` returned; after ``commit`` returned, for the whole shard.

Suffixes: R lines of a row set, N fingerprints, C columns held here.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import CaptureError, Code, InternalError, UsageError
from tracer.format.container import SEGMENT_COLUMNS, WEIGHT_COLUMNS, manifest_checksum, sync_folder, write_columns, write_in_one_step
from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Block,
    Manifest,
    SegmentHeader,
    SegmentInfo,
    Span,
    segment_name,
    shard_name,
)
from tracer.format.schema import Sequence as SequenceInfo
from tracer.format.store_read import committed_run_id

__all__ = ["RowSet", "ShardWriter"]

I32 = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.signedinteger[Any]]
Array = npt.NDArray[Any]

_ADD_BYTES = 1024
"""What one ``add`` keeps in memory besides its data: headers of up to six small arrays."""


@dataclass(frozen=True, eq=False)
class RowSet:
    """The rows of one leaf in one forward. Pass the same object to every ``add`` with these rows: identity is what
    stores it once per segment.

    ``sequence_R``: indices from ``ShardWriter.open_sequence``. ``position_R``: index of the token in its sequence.
    ``expert_R``: expert id of (token, expert) rows, else None. Integer arrays that fit int32, (R,), kept and not copied
    until the next flush: do not write to them.
    """

    sequence_R: IntArray
    position_R: IntArray
    forward: int
    expert_R: IntArray | None = None

    def __len__(self) -> int:
        return len(self.sequence_R)


@dataclass
class _Pending:
    """A block that grows until the next flush: per add the first row-table line of its row set, its fingerprints."""

    starts: list[int] = field(default_factory=list)
    parts: list[Fingerprints] = field(default_factory=list)
    executions: int = 0


@dataclass
class _Batch:
    """Everything since the last flush."""

    blocks: dict[tuple[Any, ...], _Pending] = field(default_factory=dict)
    row_starts: dict[int, int] = field(default_factory=dict)
    """``id`` of a row set (kept alive in ``row_sets``) -> its first row-table line."""
    row_sets: list[RowSet] = field(default_factory=list)
    row_count: int = 0
    sequences: list[SequenceInfo] = field(default_factory=list)
    ids: list[tuple[int, int, IntArray]] = field(default_factory=list)
    bytes: int = 0


class ShardWriter:
    """Writes the shard of one process: used by one thread, crash-safe, equal calls make equal bytes.

    Arrays that are passed in are kept until the next flush and must not be written to meanwhile. Every method that
    writes raises ``CaptureError`` (write-failed) when the system refuses; what was pending is then dropped, nothing
    half-written is visible, further adds raise the same error, and a later ``commit`` says that the trace is incomplete.
    """

    def __init__(self, out: Path, rank: int, *, flush_bytes: int = 64 << 20, run_id: str = "") -> None:
        """Create ``out`` (if need be) and this rank's shard folder in it, exclusively.

        ``flush_bytes``: a segment is finished when about this much is pending in memory. ``run_id``: where given, an
        ``out`` with a committed shard of another run is refused. Raises ``UsageError`` (out-in-use), ``CaptureError`` (write-failed).
        """
        self.path = Path(out) / shard_name(rank)
        self._flush_bytes = flush_bytes
        self._batch = _Batch()
        self._sequence_count = 0
        self._segments: list[SegmentInfo] = []
        self._weights_file: SegmentInfo | None = None
        self._failure: BaseException | None = None
        self._committed = False
        try:
            _make_folders(Path(out))
            other = committed_run_id(Path(out)) if run_id else ""
            if other not in ("", run_id):
                raise _in_use(self.path.parent, f"a shard of run {other}")
            os.mkdir(self.path)
            sync_folder(Path(out))
        except FileExistsError as error:
            if not Path(error.filename).is_dir():
                raise UsageError(
                    Code.BAD_ARGUMENT,
                    "the output folder is a file, or lies below one",
                    where=str(out),
                    expected="a folder, or a path where there is nothing yet",
                    found=f"{error.filename} is no folder",
                    remedy="choose another out=",
                ) from error
            raise _in_use(Path(error.filename), "something of that name") from error
        except OSError as error:
            raise CaptureError(
                Code.WRITE_FAILED,
                "the trace folder could not be created",
                where=str(self.path),
                found=error.strerror or str(error),
                remedy="choose another out=",
            ) from error

    @property
    def sequence_count(self) -> int:
        """Sequences opened so far."""
        return self._sequence_count

    def open_sequence(self, sequence: SequenceInfo) -> int:
        """Give a sequence the next index, which row sets and ids refer to."""
        self._batch.sequences.append(sequence)
        self._sequence_count += 1
        return self._sequence_count - 1

    def add_ids(self, sequence: int, position: int, ids: IntArray) -> None:
        """Record the token ids of a sequence from ``position`` on, (I,). Repeats of what is known cost space and nothing else."""
        self._batch.ids.append((sequence, position, ids))
        self._batch.bytes += 16 * len(ids) + _ADD_BYTES

    def add(
        self,
        boundary: str,
        rows: RowSet,
        fingerprints: Fingerprints,
        *,
        dtype: str,
        width: int,
        spans: tuple[Span, ...] = (),
        partial: str = "",
        occurrence: int = 0,
        recompute: bool = False,
        executions: int = 1,
    ) -> None:
        """Record one execution of a boundary: fingerprint k belongs to row k. No rows at all is an execution too.

        The other arguments are the fields of ``schema.Block``; adds that share them become one block of the segment.
        May flush. Raises ``CaptureError`` (write-failed).
        """
        self._refuse_after_failure()
        batch = self._batch
        has_statistics, has_values = fingerprints.sketch_N16 is not None, fingerprints.values_NC is not None
        key = (boundary, dtype, width, spans, partial, occurrence, recompute, has_statistics, has_values)
        pending = batch.blocks.get(key)
        if pending is None:
            pending = batch.blocks[key] = _Pending()
        pending.executions += executions
        count = len(rows.sequence_R)
        if len(fingerprints.digest_N2) != count:
            raise InternalError(
                Code.INTERNAL,
                "as many fingerprints as rows are needed",
                where=boundary,
                expected=str(count),
                found=str(len(fingerprints.digest_N2)),
            )
        if count:
            start = batch.row_starts.get(id(rows))
            if start is None:
                if rows.sequence_R.min() < 0 or rows.sequence_R.max() >= self._sequence_count:
                    raise InternalError(Code.INTERNAL, "rows of sequences that were not opened", where=boundary)
                start = batch.row_starts[id(rows)] = batch.row_count
                batch.row_sets.append(rows)
                batch.row_count += count
                batch.bytes += 16 * count + _ADD_BYTES
            pending.starts.append(start)
            pending.parts.append(fingerprints)
            batch.bytes += _ADD_BYTES + count * (100 if has_statistics else 20)
            if fingerprints.values_NC is not None:
                batch.bytes += fingerprints.values_NC.nbytes
        if batch.bytes >= self._flush_bytes:
            self.flush()

    def flush(self) -> None:
        """Finish a segment with everything pending, if anything is. Raises ``CaptureError`` (write-failed)."""
        self._refuse_after_failure()
        batch, self._batch = self._batch, _Batch()
        if not (batch.blocks or batch.sequences or batch.ids):
            return
        try:
            self._segments.append(self._write_segment(batch, len(self._segments)))
        except BaseException as error:
            self._failure = error
            raise

    def _write_segment(self, batch: _Batch, number: int) -> SegmentInfo:
        blocks, lists = _lay_out(batch)
        parts = [list(pending.parts) for pending in batch.blocks.values()]
        fingerprints = list(itertools.chain.from_iterable(parts))
        with_statistics = [part for part in fingerprints if part.sketch_N16 is not None]
        with_values = [part.values_NC.reshape(-1) for part in fingerprints if part.values_NC is not None]
        count = sum(len(part.digest_N2) for part in fingerprints)
        id_count = sum(len(ids) for _, _, ids in batch.ids)
        lines = {
            "digest": count,
            **dict.fromkeys(("sketch", "sum_squares", "abs_max", "nonfinite"), sum(len(part.digest_N2) for part in with_statistics)),
            "values": sum(values.size for values in with_values),
            "lists": len(lists),
            **dict.fromkeys(("rows.sequence", "rows.position", "rows.forward", "rows.expert"), batch.row_count),
            **dict.fromkeys(("ids.sequence", "ids.position", "ids.token"), id_count),
        }
        arrays: dict[str, Iterable[Array]] = {
            "digest": (part.digest_N2 for part in fingerprints),
            "sketch": (part.sketch_N16 for part in with_statistics if part.sketch_N16 is not None),
            "sum_squares": (part.sum_squares_N for part in with_statistics if part.sum_squares_N is not None),
            "abs_max": (part.abs_max_N for part in with_statistics if part.abs_max_N is not None),
            "nonfinite": (part.nonfinite_N for part in with_statistics if part.nonfinite_N is not None),
            "values": with_values,
            "lists": [lists],
            "rows.sequence": (rows.sequence_R for rows in batch.row_sets),
            "rows.position": (rows.position_R for rows in batch.row_sets),
            "rows.forward": (np.full(len(rows), rows.forward, np.int32) for rows in batch.row_sets),
            "rows.expert": (np.full(len(rows), -1, np.int32) if rows.expert_R is None else rows.expert_R for rows in batch.row_sets),
            "ids.sequence": (np.full(len(ids), sequence, np.int32) for sequence, _, ids in batch.ids),
            "ids.position": (np.arange(position, position + len(ids), dtype=np.int32) for _, position, ids in batch.ids),
            "ids.token": (ids for _, _, ids in batch.ids),
        }
        header = SegmentHeader(format=FORMAT_VERSION, number=number, blocks=blocks, sequences=tuple(batch.sequences))
        written = write_columns(self.path / segment_name(number), header, SEGMENT_COLUMNS, lines, arrays)
        return SegmentInfo(
            file=segment_name(number),
            size_bytes=written.size_bytes,
            xxh3_128=written.xxh3_128,
            rows=batch.row_count,
            fingerprints=count,
        )

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise CaptureError(
                Code.WRITE_FAILED, "recording stopped when a file could not be written", where=str(self.path), found=str(self._failure)
            ) from self._failure

    def write_weight_rows(self, parts: Sequence[Fingerprints]) -> None:
        """Write the fingerprints of weight rows, once per shard: a weight's ``start`` is the number of rows in the parts before it.

        Every column has one line per row; rows without statistics (integers, packed) get NaN ones.
        Raises ``CaptureError`` (write-failed).
        """
        if self._weights_file is not None:
            raise InternalError(Code.INTERNAL, "weight rows are written once per shard", where=str(self.path))
        count = sum(len(part.digest_N2) for part in parts)

        def filled(name: str, *inner: int) -> Iterator[Array]:
            for part in parts:
                array = getattr(part, name)
                yield np.full((len(part.digest_N2), *inner), np.nan, np.float32) if array is None else array

        header = SegmentHeader(format=FORMAT_VERSION, number=0, blocks=())
        nonfinite = (np.zeros(len(part.digest_N2), np.uint32) if part.nonfinite_N is None else part.nonfinite_N for part in parts)
        arrays: dict[str, Iterable[Array]] = {
            "digest": (part.digest_N2 for part in parts),
            "sketch": filled("sketch_N16", 16),
            "sum_squares": filled("sum_squares_N"),
            "abs_max": filled("abs_max_N"),
            "nonfinite": nonfinite,
        }
        lines = dict.fromkeys(arrays, count)
        try:
            written = write_columns(self.path / WEIGHTS_NAME, header, WEIGHT_COLUMNS, lines, arrays)
        except BaseException as error:
            self._failure = error
            raise
        self._weights_file = SegmentInfo(
            file=WEIGHTS_NAME, size_bytes=written.size_bytes, xxh3_128=written.xxh3_128, rows=count, fingerprints=count
        )

    def commit(self, manifest: Manifest) -> Manifest:
        """Finish the last segment, then make the shard count: the manifest, with its files and checksum filled in, appears last.

        Where something could not be written before, the manifest says incomplete, whatever was passed.
        Returns the manifest as written. Raises ``CaptureError`` (write-failed): the shard then stays uncommitted.
        """
        if self._committed:
            raise InternalError(Code.INTERNAL, "a shard is committed once", where=str(self.path))
        if self._failure is None:
            self.flush()
        manifest = msgspec.structs.replace(manifest, segments=tuple(self._segments), weights_file=self._weights_file)
        if self._failure is not None:
            reason = manifest.incomplete_reason or str(self._failure)
            manifest = msgspec.structs.replace(manifest, complete=False, incomplete_reason=reason)
        try:
            manifest = msgspec.structs.replace(manifest, xxh3_128=manifest_checksum(msgspec.json.encode(manifest)))
            text = msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)
            manifest = msgspec.json.decode(text, type=Manifest)  # as a reader will have it
        except (TypeError, ValueError) as error:
            raise InternalError(
                Code.INTERNAL,
                "the manifest holds something that is no JSON",
                where=str(self.path),
                found=str(error),
                remedy="report this; conditions must be plain JSON",
            ) from error
        write_in_one_step(self.path / MANIFEST_NAME, [text + b"\n"])
        self._committed = True
        return manifest


def _lay_out(batch: _Batch) -> tuple[tuple[Block, ...], npt.NDArray[np.uint32]]:
    """Blocks with their places in the columns, and the row lists. Blocks over the same row sets share one list."""
    lengths = {start: len(rows) for start, rows in zip(batch.row_starts.values(), batch.row_sets, strict=True)}
    list_starts: dict[tuple[int, ...], int] = {}
    pieces: list[Array] = []
    blocks = []
    list_lines = digests = statistics = values = 0
    for key, pending in batch.blocks.items():
        boundary, dtype, width, spans, partial, occurrence, recompute, has_statistics, has_values = key
        count = sum(lengths[start] for start in pending.starts)
        row_sets = tuple(pending.starts)
        if row_sets not in list_starts:
            list_starts[row_sets] = list_lines
            list_lines += count
            pieces += [np.arange(start, start + lengths[start], dtype=np.uint32) for start in row_sets]
        blocks.append(
            Block(
                boundary=boundary,
                dtype=dtype,
                width=width,
                spans=spans,
                partial=partial,
                occurrence=occurrence,
                recompute=recompute,
                row_start=list_starts[row_sets],
                row_count=count,
                digest_start=digests,
                stats_start=statistics if has_statistics else -1,
                values_start=values if has_values else -1,
                executions=pending.executions,
            )
        )
        digests += count
        statistics += count if has_statistics else 0
        held = sum(stop - start for start, stop in spans) if spans else width
        added = sum(part.values_NC.size for part in pending.parts if part.values_NC is not None)
        if has_values and added != count * held:
            raise InternalError(
                Code.INTERNAL, "raw values must have the columns held", where=boundary, expected=str(count * held), found=str(added)
            )
        values += added
    return tuple(blocks), np.concatenate(pieces) if pieces else np.empty(0, np.uint32)


def _make_folders(out: Path) -> None:
    """``mkdir -p`` whose new names survive a power cut."""
    if out.is_dir():
        return
    _make_folders(out.parent)
    try:
        os.mkdir(out)
    except FileExistsError:
        if not out.is_dir():
            raise
    sync_folder(out.parent)


def _in_use(path: Path, found: str) -> UsageError:
    return UsageError(
        Code.OUT_IN_USE,
        "the output folder holds another run",
        where=str(path),
        expected="a new folder, or one that the other processes of this run write to",
        found=found,
        remedy="choose another out=; nothing existing is overwritten. Processes that share no process group need one TRACER_RUN_ID",
    )
