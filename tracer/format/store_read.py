"""Reading the shards of a trace: what a manifest says, held against what the files are.

Nothing is loaded that is not asked for. ``inspect_shard`` collects everything that is wrong with a shard,
``read_shard`` raises the first of it. Suffix B: rows of one block; the others are those of ``schema``.

Refused:
- *the manifest*: no JSON, another format number or none, an unknown key, a wrong type, a rank or mesh coordinate outside
  its world, a file name other than the one its place demands (names are data, never paths), an unknown dtype, a malformed
  weight digest, a weight outside the weights file or its own shape, a boundary listed twice or before what it is computed from,
  positions that no sequence has, another checksum than it gives of itself;
- *a file*: listed but missing, present but not listed, another size or checksum than was written, other columns or layout
  than the format has, other counts than the manifest lists, another number than its name says;
- *a block*: an unknown dtype, a range outside its column, spans that overlap or leave the row;
- *a reference* (with ``verify``): to a row, a sequence or a position that does not exist;
- *a boundary*: other rows, executions or dtypes in the segments than the manifest says, one that it does not list. Not held
  against a shard that says itself that its recording stopped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, TraceFormatError
from tracer.format.container import (
    REMEDY_ALTERED,
    SEGMENT_COLUMNS,
    WEIGHT_COLUMNS,
    ColumnFile,
    check_format,
    checksum,
    invalid_file,
    manifest_checksum,
)
from tracer.format.dtypes import dtype_info
from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import (
    MANIFEST_NAME,
    MOST_TOKENS,
    WEIGHTS_NAME,
    Block,
    Boundary,
    Manifest,
    SegmentHeader,
    SegmentInfo,
    Sequence,
    Span,
    segment_name,
)

__all__ = [
    "Segment",
    "Shard",
    "WeightRows",
    "committed_run_id",
    "inspect_shard",
    "manifest_files",
    "read_manifest",
    "read_shard",
    "shard_paths",
]

U64 = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]

_SHARD = re.compile(r"shard-\d{5,}")
_MAX_WORLD = 1 << 24
_UNKNOWN = 1 << 31
_DIGEST = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(rf"segment-.*\.safetensors|{re.escape(WEIGHTS_NAME)}")


@dataclass(eq=False)
class Segment:
    """One finished segment. Columns are mapped on first use, read-only, and named as in ``schema``. What says which rows there
    are is kept; of the fingerprints, which may be many, each block's are looked up when they are asked for."""

    file: ColumnFile
    info: SegmentInfo | None = None
    """As the manifest lists it; None in an uncommitted shard."""

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def header(self) -> SegmentHeader:
        """Blocks and sequences."""
        return self.file.header

    @cached_property
    def rows_sequence(self) -> Array:
        """int32 (R,)"""
        return self.file.column("rows.sequence")

    @cached_property
    def rows_position(self) -> Array:
        """int32 (R,)"""
        return self.file.column("rows.position")

    @cached_property
    def rows_forward(self) -> Array:
        """int32 (R,)"""
        return self.file.column("rows.forward")

    @cached_property
    def rows_expert(self) -> Array:
        """int32 (R,)"""
        return self.file.column("rows.expert")

    @cached_property
    def lists(self) -> Array:
        """uint32 (L,)"""
        return self.file.column("lists")

    @cached_property
    def ids_sequence(self) -> Array:
        """int32 (I,)"""
        return self.file.column("ids.sequence")

    @cached_property
    def ids_position(self) -> Array:
        """int32 (I,)"""
        return self.file.column("ids.position")

    @cached_property
    def ids_token(self) -> Array:
        """int64 (I,)"""
        return self.file.column("ids.token")

    def block_lines(self, block: Block) -> Array:
        """Row-table lines of a block, uint32 (B,). Raises ``TraceFormatError`` (segment-invalid) where one lies outside the table."""
        lines = self.lists[block.row_start : block.row_start + block.row_count]
        if len(lines) and int(lines.max()) >= self.file.lines["rows.sequence"]:
            raise invalid_file(
                self.path,
                f"boundary {block.boundary} names a row outside the row table",
                expected=f"lines below {self.file.lines['rows.sequence']}",
                found=str(lines.max()),
            )
        return lines

    def block_digest(self, block: Block) -> U64:
        """uint64 (B, 2)"""
        return self.file.column("digest", block.digest_start, block.digest_start + block.row_count)

    def block_statistic(self, block: Block, name: str) -> Array:
        """``sketch`` (float32), ``sum_squares`` (float64), ``abs_max`` (float32) or ``nonfinite`` (uint32) of a block that has
        statistics: (B,), the sketch (B, 16)."""
        return self.file.column(name, block.stats_start, block.stats_start + block.row_count)

    def block_values(self, block: Block) -> Array | None:
        """Raw values, int64 (B, columns held), None where none are kept."""
        if block.values_start < 0:
            return None
        columns = held_columns(block)
        stop = block.values_start + block.row_count * columns
        return self.file.column("values", block.values_start, stop).reshape(block.row_count, columns)

    def block_fingerprints(self, block: Block) -> Fingerprints:
        """Everything kept of a block's rows; touches all of its columns."""
        kept = block.stats_start >= 0
        return Fingerprints(
            digest_N2=self.block_digest(block),
            sketch_N16=self.block_statistic(block, "sketch") if kept else None,
            sum_squares_N=self.block_statistic(block, "sum_squares") if kept else None,
            abs_max_N=self.block_statistic(block, "abs_max") if kept else None,
            nonfinite_N=self.block_statistic(block, "nonfinite") if kept else None,
            values_NC=self.block_values(block),
        )


@dataclass(eq=False)
class WeightRows:
    """The rows file of ``weights="rows"``: one line per weight row; statistics are NaN where none exist."""

    file: ColumnFile

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    def __len__(self) -> int:
        return self.file.lines["digest"]

    def fingerprints(self, start: int, rows: int) -> Fingerprints:
        """Lines ``start .. start + rows``, of every column."""
        digest, sketch, sum_squares, abs_max, nonfinite = (
            self.file.column(name, start, start + rows) for name in ("digest", "sketch", "sum_squares", "abs_max", "nonfinite")
        )
        return Fingerprints(digest, sketch, sum_squares, abs_max, nonfinite, None)


@dataclass(eq=False)
class Shard:
    """What one process recorded. ``manifest`` is None where the shard was never committed or its manifest is unreadable;
    then ``segments`` are those that can be read. ``problems``: everything found wrong with its files, in file order."""

    path: Path
    manifest: Manifest | None
    segments: tuple[Segment, ...]
    weight_rows: WeightRows | None = None
    problems: tuple[TraceFormatError, ...] = ()

    @property
    def rank(self) -> int:
        """From the manifest, else from the folder's name."""
        return self.manifest.rank if self.manifest is not None else int(self.path.name.removeprefix("shard-"))

    @cached_property
    def sequences(self) -> tuple[Sequence, ...]:
        """All sequences, in order of their index."""
        return tuple(sequence for segment in self.segments for sequence in segment.header.sequences)

    def blocks(self) -> Iterator[tuple[Segment, Block]]:
        """Every block with the segment it is in, in the order of recording."""
        for segment in self.segments:
            for block in segment.header.blocks:
                yield segment, block


def held_columns(block: Block) -> int:
    """Logical columns of a block that this process holds."""
    return sum(stop - start for start, stop in block.spans) if block.spans else block.width


def shard_paths(trace: Path) -> list[Path]:
    """Shard folders of a trace, by rank. Raises OSError."""
    found = [path for path in trace.iterdir() if _SHARD.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (int(path.name.removeprefix("shard-")), path.name))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest strictly: format first, then every key and type, then names, numbers and dtypes.

    Its checksum comes last, so that what is wrong with a value is named rather than that it was altered.
    Raises ``TraceFormatError``: manifest-invalid, format-unsupported, segment-invalid (an unknown dtype), checksum-mismatch.
    """

    def invalid(what: str, *, expected: str = "", found: str = "") -> TraceFormatError:
        return TraceFormatError(
            Code.MANIFEST_INVALID, f"the manifest {what}", where=str(path), expected=expected, found=found, remedy=REMEDY_ALTERED
        )

    if not path.is_file():
        raise invalid("is no file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise invalid("cannot be read", found=error.strerror or str(error)) from error
    check_format(raw, path, Code.MANIFEST_INVALID)
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid("does not fit the format", found=str(error)) from error
    if manifest.weights_mode not in ("digest", "rows", "none"):
        raise invalid("has another weights mode than the format", expected="digest, rows or none", found=manifest.weights_mode)
    if not 0 <= manifest.rank < manifest.world_size <= _MAX_WORLD:
        raise invalid(
            "names a rank outside its world", expected="0 <= rank < world size", found=f"{manifest.rank} of {manifest.world_size}"
        )
    for axis in manifest.mesh:
        if not 0 <= axis.index < axis.size <= _MAX_WORLD:
            raise invalid(
                f"names a coordinate outside mesh axis {axis.name}", expected="0 <= index < size", found=f"{axis.index} of {axis.size}"
            )
    for number, info in enumerate(manifest.segments):
        if info.file != segment_name(number):
            raise invalid("lists a segment that is not the next one", expected=segment_name(number), found=info.file)
    if manifest.weights_file is not None and manifest.weights_file.file != WEIGHTS_NAME:
        raise invalid("names another weights file than the format has", expected=WEIGHTS_NAME, found=manifest.weights_file.file)
    place = {boundary.name: at for at, boundary in enumerate(manifest.boundaries)}
    for at, boundary in enumerate(manifest.boundaries):
        if boundary.dtype not in ("", "mixed"):
            dtype_info(boundary.dtype, f"{path}, boundary {boundary.name}")
        if place[boundary.name] != at:
            raise invalid("lists a boundary twice", expected="each name once", found=boundary.name)
        later = next((name for name in boundary.inputs if place.get(name, -1) >= at), "")
        if later:
            raise invalid(f"lists {boundary.name} before what it is computed from", expected="causal order", found=later)
    for declared in manifest.not_computed:
        for start, stop in declared.positions:
            if not 0 <= start <= stop <= MOST_TOKENS:
                what = f"declares positions that no sequence has: {declared.reason}"
                raise invalid(what, expected=f"0 .. {MOST_TOKENS}", found=f"{start} .. {stop}")
    weight_lines = manifest.weights_file.rows if manifest.weights_file is not None else 0
    for weight in manifest.weights:
        if not weight.unknown:
            dtype_info(weight.dtype, f"{path}, weight {weight.name}")
            for lanes in (weight.digest, weight.after or ()):
                if not all(_DIGEST.fullmatch(lane) for lane in lanes):
                    raise invalid(
                        f"has a malformed digest of weight {weight.name}", expected="two lanes of 16 hex digits", found=str(lanes)
                    )
        for spans, size in ((weight.row_spans, weight.rows), (weight.column_spans, weight.columns)):
            if not _inside(spans, size):
                raise invalid(
                    f"places weight {weight.name} outside its shape", expected=f"disjoint spans within 0 .. {size}", found=str(list(spans))
                )
        held = sum(stop - start for start, stop in weight.row_spans) if weight.row_spans else weight.rows
        if weight.start >= 0 and weight.start + held > weight_lines:
            raise invalid(
                f"places weight {weight.name} outside the weights file", expected=f"{weight_lines} lines", found=str(weight.start + held)
            )
    found = manifest_checksum(raw)
    if found != manifest.xxh3_128:
        raise _altered(path, "is not as it was written", f"xxh3_128 {manifest.xxh3_128 or 'of itself'}", found)
    return manifest


def manifest_files(manifest: Manifest) -> list[SegmentInfo]:
    """Every file a manifest lists."""
    return [*manifest.segments, *([manifest.weights_file] if manifest.weights_file is not None else [])]


class _RunId(msgspec.Struct):
    run_id: str


def committed_run_id(trace: Path) -> str:
    """Run id of any committed shard, empty where there is none that says."""
    for path in shard_paths(trace):
        try:
            return msgspec.json.decode((path / MANIFEST_NAME).read_bytes(), type=_RunId).run_id
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return ""


def read_shard(path: Path, *, verify: bool = True) -> Shard:
    """Read one shard. Raises the first of its problems as ``TraceFormatError``; an uncommitted shard has those of the
    segments that it has, and no manifest."""
    shard = inspect_shard(path, verify=verify)
    if shard.problems:
        raise shard.problems[0]
    return shard


def inspect_shard(
    path: Path, *, verify: bool = True, manifest: Manifest | None = None, checksums: Mapping[Path, str] | None = None
) -> Shard:
    """Read one shard and collect everything that is wrong with it; raises nothing about its content.

    ``verify``: hash every file and check every row reference, not only headers and sizes. ``manifest``, ``checksums``: where the caller
    has them already.
    """
    problems: list[TraceFormatError] = []
    committed = (path / MANIFEST_NAME).exists()
    if committed and manifest is None:
        try:
            manifest = read_manifest(path / MANIFEST_NAME)
        except TraceFormatError as error:
            problems.append(error)
    try:
        present = sorted(entry.name for entry in path.iterdir() if _FILE.fullmatch(entry.name) and entry.is_file())
    except OSError as error:
        found = error.strerror or str(error)
        unreadable = TraceFormatError(Code.SHARD_INCOMPLETE, "the shard's folder cannot be read", where=str(path), found=found)
        return Shard(path, manifest, (), None, (*problems, unreadable))
    if manifest is None:
        listed: list[tuple[str, SegmentInfo | None]] = [(name, None) for name in present if name != WEIGHTS_NAME]
    else:
        listed = [(info.file, info) for info in manifest.segments]
        names = {info.file for info in manifest_files(manifest)}
        problems += [
            invalid_file(path / name, "the manifest does not list this file", expected=f"{len(names)} files", found=name)
            for name in present
            if name not in names
        ]
    segments: list[Segment] = []
    sequences = 0
    for number, (name, info) in enumerate(listed):
        try:
            segment = Segment(_open(path / name, info, SEGMENT_COLUMNS, number, verify, checksums), info)
            sequences += len(segment.header.sequences)
            _check_segment(segment, sequences if len(segments) == number else _UNKNOWN, verify)
            segments.append(segment)
        except TraceFormatError as error:
            problems.append(error)
    weight_rows = None
    if manifest is not None and manifest.weights_file is not None:
        try:
            weight_rows = WeightRows(_open(path / WEIGHTS_NAME, manifest.weights_file, WEIGHT_COLUMNS, 0, verify, checksums))
        except TraceFormatError as error:
            problems.append(error)
    if manifest is not None and manifest.complete and not problems:
        problems += _miscounted(path, manifest, segments)
    return Shard(path, manifest, tuple(segments), weight_rows, tuple(problems))


def _miscounted(path: Path, manifest: Manifest, segments: Iterable[Segment]) -> Iterator[TraceFormatError]:
    """Boundaries of which the segments hold other rows, executions or dtypes than the manifest says. A row recorded in
    several column parts counts once."""
    rows: Counter[tuple[str, tuple[Span, ...]]] = Counter()
    executions: Counter[tuple[str, bool]] = Counter()
    dtypes: dict[str, set[str]] = {}
    for segment in segments:
        for block in segment.header.blocks:
            dtypes.setdefault(block.boundary, set()).add(block.dtype)
            executions[block.boundary, block.recompute] += block.executions
            if not block.recompute:
                rows[block.boundary, block.spans] += block.row_count
    most: Counter[str] = Counter()
    for (name, _), count in rows.items():
        most[name] = max(most[name], count)
    listed = {boundary.name: boundary for boundary in manifest.boundaries}
    for name in sorted(dtypes.keys() | listed.keys()):
        seen = dtypes.get(name, {""})
        said = listed.get(name, Boundary(name=name, level=0))
        held = msgspec.structs.replace(
            said,
            row_count=most[name],
            executions=executions[name, False],
            recomputed=executions[name, True],
            dtype=said.dtype and (next(iter(seen)) if len(seen) == 1 else "mixed"),
        )
        if name not in listed or held != said:
            yield TraceFormatError(
                Code.SHARD_INCOMPLETE,
                f"the segments do not hold what the manifest says of {name}" if name in listed else f"the manifest does not list {name}",
                where=str(path),
                expected=_counts_text(said) if name in listed else "every boundary that the segments hold",
                found=_counts_text(held),
                remedy="record the trace again; if that does not help, report it",
            )


def _counts_text(boundary: Boundary) -> str:
    recomputed = f", recomputed {boundary.recomputed}" if boundary.recomputed else ""
    dtype = f", dtype {boundary.dtype}" if boundary.dtype else ""
    return f"rows {boundary.row_count}, executions {boundary.executions}{recomputed}{dtype}"


def _open(
    path: Path, info: SegmentInfo | None, columns: Any, number: int, verify: bool, checksums: Mapping[Path, str] | None
) -> ColumnFile:
    """Open a file of columns as its manifest lists it: size and checksum before anything of it is interpreted."""
    if info is not None:
        try:
            size = path.stat().st_size
            if size != info.size_bytes:
                raise _altered(path, "has another size than was written", f"{info.size_bytes} bytes", f"{size} bytes")
            found = (checksum(path) if checksums is None else checksums.get(path, "")) if verify else info.xxh3_128
        except OSError as error:
            raise TraceFormatError(
                Code.SHARD_INCOMPLETE,
                f"{path.name} is listed by the manifest and cannot be read",
                where=str(path),
                expected=f"{info.size_bytes} bytes",
                found=error.strerror or str(error),
                remedy=REMEDY_ALTERED,
            ) from error
        if found != info.xxh3_128:
            raise _altered(path, "is not as it was written", f"xxh3_128 {info.xxh3_128}", found or "unreadable")
    file = ColumnFile.open(path, columns)
    if file.header.number != number:
        raise invalid_file(path, "calls itself another number", expected=str(number), found=str(file.header.number))
    rows, fingerprints = file.lines.get("rows.sequence", file.lines["digest"]), file.lines["digest"]
    if info is not None and (info.rows, info.fingerprints) != (rows, fingerprints):
        raise invalid_file(
            path,
            "other counts than the manifest lists",
            expected=f"{info.rows} rows, {info.fingerprints} fingerprints",
            found=f"{rows} rows, {fingerprints} fingerprints",
        )
    return file


def _check_segment(segment: Segment, sequences: int, verify: bool) -> None:
    """Every range of every block lies inside its column; with ``verify``, every row reference too."""
    path, lines = segment.path, segment.file.lines
    held: dict[tuple[str, tuple[Span, ...], int], int] = {}
    for block in segment.header.blocks:
        kind = (block.dtype, block.spans, block.width)
        if kind not in held:
            dtype_info(block.dtype, f"{path}, boundary {block.boundary}")
            _check_spans(path, block)
            held[kind] = held_columns(block)
        count = block.row_count
        if (
            count < 0
            or not 0 <= block.row_start <= lines["lists"] - count
            or not 0 <= block.digest_start <= lines["digest"] - count
            or not -1 <= block.stats_start <= lines["sketch"] - (count if block.stats_start >= 0 else 0)
            or not -1 <= block.values_start <= lines["values"] - (count * held[kind] if block.values_start >= 0 else 0)
        ):
            raise invalid_file(
                path,
                f"boundary {block.boundary} lies outside its columns",
                expected=", ".join(f"{lines[name]} {name}" for name in ("lists", "digest", "sketch", "values")),
                found=f"{count} rows of {held[kind]} columns from {block.row_start}, {block.digest_start}, "
                f"{block.stats_start} and {block.values_start} on",
            )
        if block.executions < 0:
            raise invalid_file(path, f"boundary {block.boundary} has a negative number of executions", found=str(block.executions))
    if not verify:
        return
    limits = {"lists": lines["rows.sequence"], "rows.sequence": sequences, "ids.sequence": sequences}
    for column in ("lists", "rows.sequence", "rows.position", "rows.forward", "rows.expert", "ids.sequence", "ids.position"):
        values = segment.file.column(column)
        if not len(values):
            continue
        low, high, limit = int(values.min()), int(values.max()), limits.get(column, 1 << 31)
        least = -1 if column == "rows.expert" else 0
        if low < least or high >= limit:
            what = f"column {column} refers to nothing"
            raise invalid_file(path, what, expected=f"within {least} .. {limit - 1}", found=f"{low} .. {high}")
    segment.file.release()


def _inside(spans: Iterable[Span], size: int) -> bool:
    """Disjoint spans, none empty, within ``0 .. size``."""
    taken = sorted(spans)
    ends = [0, *(stop for _, stop in taken)]
    return size >= 0 and all(end <= start < stop <= size for (start, stop), end in zip(taken, ends[:-1], strict=True))


def _check_spans(path: Path, block: Block) -> None:
    if not _inside(block.spans, block.width):
        raise invalid_file(
            path,
            f"boundary {block.boundary} has columns that no row has",
            expected=f"disjoint spans within 0 .. {block.width}",
            found=str(list(block.spans)),
        )


def _altered(path: Path, what: str, expected: str, found: str) -> TraceFormatError:
    return TraceFormatError(
        Code.CHECKSUM_MISMATCH, f"checksum: {path.name} {what}", where=str(path), expected=expected, found=found, remedy=REMEDY_ALTERED
    )
