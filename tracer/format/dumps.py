"""Raw values of chosen rows of chosen boundaries: dumps, and the plan that says which.

```
trace/
  dumps/
    rank-00000-000000.safetensors   one process's rows, at most so many bytes; listed with checksum in its manifest
```

A file holds blocks: rows of one boundary, forward and slice. Of block ``i`` with N rows and C columns held here:

| tensor | dtype, shape | meaning |
|---|---|---|
| ``<i>.digest``   | uint64 (N, 2) | the row's fingerprint digest (of this slice), taken at the same moment |
| ``<i>.values``   | the boundary's own dtype (N, C) | the row's bytes, untouched; uint8 (N, bytes) for dtypes safetensors has no name for |
| ``<i>.sequence`` | int32 (N,) | index into the header's ``sequences`` |
| ``<i>.position`` | int32 (N,) | index of the token in its sequence, from 0 |
| ``<i>.expert``   | int32 (N,) | only of (token, expert) rows: expert id |

Blocks of weights hold rows of one parameter: ``position`` is the row's number, ``sequence`` is 0 and means nothing.
The metadata key ``tracer`` holds a ``DumpHeader`` as JSON. A row's token key follows from its sequence, as for fingerprints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import CaptureError, Code, InternalError, TraceFormatError, UsageError
from tracer.format.container import (
    REMEDY_ALTERED,
    Column,
    check_format,
    checksum,
    invalid_file,
    read_entries,
    sync_folder,
    write_columns,
    write_in_one_step,
)
from tracer.format.dtypes import decode_to_float32, dtype_info
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import FORMAT_VERSION, Record, SegmentInfo, Sequence, Span

__all__ = [
    "DUMPS_FOLDER",
    "DumpBlock",
    "DumpFile",
    "DumpHeader",
    "DumpPlan",
    "DumpRows",
    "DumpWriter",
    "PlanBoundary",
    "PlanSide",
    "PlanWeight",
    "dump_name",
    "read_dump",
    "read_plan",
    "write_plan",
]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.signedinteger[Any]]

DUMPS_FOLDER = "dumps"
_PLAN = "a file that tracer diff A B --plan FILE wrote"

_CODES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"{'U' if sign else 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""dtype -> safetensors code. Complex rows are stored as their reals."""


class PlanSide(Record, frozen=True, kw_only=True):
    """One side of the comparison that a plan was made from."""

    run_id: str
    host: str
    sequences: tuple[tuple[str, str], ...] = ()
    """(scope, label) of the sequences that rows of the plan lie in. A process that does not know the token ids finds its
    rows by these, which hold if the rerun labels its sequences alike."""


class PlanBoundary(Record, frozen=True, kw_only=True):
    """Rows of one boundary that a plan asks for. All lists are parallel to ``keys``."""

    boundary: str
    output: bool = False
    """This is the boundary that differs; the others are what it is computed from."""
    keys: tuple[str, ...]
    """Token keys, 16 hex digits. The differing rows come first."""
    differing: int
    """So many of the rows differ; the rest are equal neighbours, or rows of inputs."""
    experts: tuple[int, ...] = ()
    """Expert id per row; empty where rows are tokens."""
    digests_a: tuple[str, ...] = ()
    """Both lanes as A recorded them, 32 hex digits; empty for a row that A lacks."""
    digests_b: tuple[str, ...] = ()
    places_a: tuple[tuple[int, int], ...] = ()
    """(index into the side's ``sequences``, position) on A; (-1, -1) for a row that A lacks."""
    places_b: tuple[tuple[int, int], ...] = ()


class PlanWeight(Record, frozen=True, kw_only=True):
    """Rows of one weight that a plan asks for."""

    name: str
    rows: tuple[int, ...]
    """Their numbers in the whole weight, ascending."""
    differing: int | None = None
    """So many of them differ; None where that is not known, because a side did not record rows (``weights="rows"``)."""
    digests_a: tuple[str, ...] = ()
    """Both lanes of every row as A recorded them, 32 hex digits; empty where A recorded the weight as a whole."""
    digests_b: tuple[str, ...] = ()
    whole_a: str = ""
    """Digest of the whole weight on A, both lanes."""
    whole_b: str = ""


class DumpPlan(Record, frozen=True, kw_only=True):
    """What to save in a second run of both sides: written by ``tracer diff A B --plan FILE``, read by ``trace(plan=)``.

    The first ``PlanBoundary`` with ``output`` is the earliest boundary that differs, the others are its inputs. ``weights``: the
    first weight that differs, where one is the first divergence."""

    format: int
    boundaries: tuple[PlanBoundary, ...]
    weights: tuple[PlanWeight, ...] = ()
    max_bytes: int
    rows_left_out: int = 0
    """Differing rows beyond what a plan lists."""
    a: PlanSide
    b: PlanSide


class DumpBlock(Record, frozen=True, kw_only=True):
    """Rows of one boundary in one forward, or of one weight. Fields as in ``Block``."""

    boundary: str
    """Or the weight's name."""
    weight: bool = False
    dtype: str
    width: int
    """Columns of the whole logical row; of complex rows, reals."""
    spans: tuple[Span, ...] = ()
    """Logical columns held, in local order; empty means the whole row."""
    partial: str = ""
    """Mesh axis over which these values are partial sums."""
    occurrence: int = 0
    forward: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as held here."""
        return self.columns * dtype_info(self.dtype, self.boundary).itemsize

    @property
    def columns(self) -> int:
        """Columns held here."""
        return sum(stop - start for start, stop in self.spans) if self.spans else self.width


class DumpHeader(Record, frozen=True, kw_only=True):
    """What a file of dumps says about itself."""

    format: int
    number: int
    run_id: str
    rank: int
    why: str
    """``dump=embedding,layers.*.residual``, ``plan`` or ``against <run id>``."""
    blocks: tuple[DumpBlock, ...]
    sequences: tuple[Sequence, ...] = ()
    """The sequences that rows of this file lie in."""
    max_bytes: int
    """The cap on all values of this process."""
    bytes: int
    """Values of this process up to and with this file."""
    left_out: dict[str, int] = msgspec.field(default_factory=dict)
    """Boundary -> rows that the cap left out so far. The last file counts all."""
    plan: DumpPlan | None = None
    """In a process's last file: the plan that was followed."""


def dump_name(rank: int, number: int) -> str:
    """File name of one file of dumps."""
    return f"rank-{rank:05d}-{number:06d}.safetensors"


# ---------------------------------------------------------------------------------------------------- writing


@dataclass
class _Pending:
    block: DumpBlock
    digest_N2: U64
    raw_NB: U8
    sequence_N: IntArray
    position_N: IntArray
    expert_N: IntArray | None


@dataclass
class DumpWriter:
    """Writes the dumps of one process. Used by one thread. What is added is kept until the next flush.

    ``why``, ``max_bytes``, ``plan``: for the header. Whoever adds holds to the cap and counts into ``left_out``."""

    out: Path
    rank: int
    run_id: str
    why: str
    max_bytes: int
    plan: DumpPlan | None = None
    flush_bytes: int = 64 << 20
    left_out: dict[str, int] = field(default_factory=dict)
    _sequences: list[Sequence] = field(default_factory=list)
    _pending: list[_Pending] = field(default_factory=list)
    _pending_bytes: int = 0
    _bytes: int = 0
    _files: list[SegmentInfo] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of values so far."""
        return self._bytes

    def open_sequence(self, sequence: Sequence) -> None:
        """The next sequence of the run: ``sequence_N`` counts in this order."""
        self._sequences.append(sequence)

    def add(
        self, block: DumpBlock, digest_N2: U64, raw_NB: U8, sequence_N: IntArray, position_N: IntArray, expert_N: IntArray | None
    ) -> None:
        """Save rows. ``raw_NB``: their bytes, held columns in order, (N, columns * itemsize). May flush.

        Raises ``CaptureError`` (write-failed)."""
        if raw_NB.shape != (block.rows, block.row_bytes) or len(digest_N2) != block.rows:
            expected, found = f"({block.rows}, {block.row_bytes}) bytes", str(raw_NB.shape)
            raise InternalError(Code.INTERNAL, "a dump of other rows than it says", where=block.boundary, expected=expected, found=found)
        self._pending.append(_Pending(block, digest_N2, raw_NB, sequence_N, position_N, expert_N))
        self._bytes += raw_NB.nbytes
        self._pending_bytes += raw_NB.nbytes + 40 * block.rows
        if self._pending_bytes >= self.flush_bytes:
            self._flush(None)

    def finish(self) -> tuple[SegmentInfo, ...]:
        """Write the last file, with the plan and all counts, empty or not; every file for the manifest. Raises ``CaptureError``."""
        self._flush(self.plan)
        return tuple(self._files)

    def _flush(self, plan: DumpPlan | None) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        spoken = [entry.sequence_N for entry in pending if not entry.block.weight]
        used = np.unique(np.concatenate(spoken)) if spoken else np.zeros(0, np.int64)
        columns: list[Column] = []
        parts: dict[str, list[npt.NDArray[Any]]] = {}
        lines: dict[str, int] = {}
        for number, entry in enumerate(pending):
            sequence_N = entry.sequence_N if entry.block.weight else np.searchsorted(used, entry.sequence_N)
            places = {"sequence": sequence_N, "position": entry.position_N}
            if entry.expert_N is not None:
                places["expert"] = entry.expert_N
            for column, array in [
                (Column(f"{number}.digest", "U64", 2), entry.digest_N2),
                (_values_column(number, entry.block), entry.raw_NB),
                *((Column(f"{number}.{name}", "I32"), array) for name, array in places.items()),
            ]:
                columns.append(column)
                lines[column.name] = entry.block.rows
                data = np.ascontiguousarray(array)
                parts[column.name] = [data.view(column.dtype) if data.dtype == np.uint8 and data.size else data]
        columns.sort(key=lambda column: -column.dtype.itemsize)  # aligned, without gaps
        number = len(self._files)
        header = DumpHeader(
            format=FORMAT_VERSION,
            number=number,
            run_id=self.run_id,
            rank=self.rank,
            why=self.why,
            blocks=tuple(entry.block for entry in pending),
            sequences=tuple(self._sequences[index] for index in used.tolist()),
            max_bytes=self.max_bytes,
            bytes=self._bytes,
            left_out=dict(sorted(self.left_out.items())),
            plan=plan,
        )
        folder = self.out / DUMPS_FOLDER
        try:
            folder.mkdir(exist_ok=True)
            sync_folder(self.out)
        except OSError as error:
            raise CaptureError(
                Code.WRITE_FAILED, "the folder for dumps could not be created", where=str(folder), found=error.strerror or str(error)
            ) from error
        name = dump_name(self.rank, number)
        written = write_columns(folder / name, header, columns, lines, parts)
        rows = sum(entry.block.rows for entry in pending)
        self._files.append(SegmentInfo(file=name, size_bytes=written.size_bytes, xxh3_128=written.xxh3_128, rows=rows, fingerprints=rows))


def _values_column(number: int, block: DumpBlock) -> Column:
    info = dtype_info(block.dtype, block.boundary)
    name = f"{number}.values"
    if info.kind == "complex":
        return Column(name, f"F{8 * info.itemsize}", block.columns)
    code = _CODES.get(block.dtype)
    return Column(name, code, block.columns) if code else Column(name, "U8", block.columns * info.itemsize)


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, eq=False)
class DumpRows:
    """The rows of one block: ``raw_NB`` uint8, their bytes; ``sequence_N`` an index into the header's sequences."""

    block: DumpBlock
    digest_N2: U64
    raw_NB: U8
    sequence_N: I32
    position_N: I32
    expert_N: I32 | None

    def float32(self) -> F32:
        """The values as float32 (N, C); float64 and wide integers are rounded. Raises ``ValueError`` for packed dtypes."""
        return decode_to_float32(self.raw_NB, self.block.dtype).reshape(len(self.raw_NB), self.block.columns)

    def altered(self) -> npt.NDArray[np.bool_]:
        """Rows whose bytes do not have the digest that was recorded with them, (N,)."""
        block = self.block
        found = fingerprint_rows(self.raw_NB, block.dtype, width=block.width, spans=block.spans).digest_N2
        return np.asarray((found != self.digest_N2).any(axis=1))


@dataclass(frozen=True, eq=False)
class DumpFile:
    """One file of dumps, headers checked; rows are read when asked for."""

    path: Path
    header: DumpHeader
    _offsets: Mapping[str, tuple[int, tuple[int, ...]]]

    def rows(self, number: int) -> DumpRows:
        """The rows of block ``number``. Raises ``TraceFormatError`` (segment-invalid)."""
        block = self.header.blocks[number]
        sequence_N = self._column(f"{number}.sequence", np.dtype("<i4"))
        if not block.weight and len(sequence_N) and not 0 <= int(sequence_N.min()) <= int(sequence_N.max()) < len(self.header.sequences):
            raise invalid_file(self.path, f"block {number} refers to a sequence that the header lacks")
        return DumpRows(
            block,
            self._column(f"{number}.digest", np.dtype("<u8")),
            self._column(f"{number}.values", np.dtype("u1")).reshape(block.rows, -1),
            sequence_N,
            self._column(f"{number}.position", np.dtype("<i4")),
            self._column(f"{number}.expert", np.dtype("<i4")) if f"{number}.expert" in self._offsets else None,
        )

    def __iter__(self) -> Iterator[DumpRows]:
        return (self.rows(number) for number in range(len(self.header.blocks)))

    def _column(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        offset, shape = self._offsets[name]
        try:
            if dtype.itemsize == 1:
                return np.memmap(self.path, np.uint8, "r", offset, shape) if np.prod(shape) else np.zeros(shape, np.uint8)
            return np.fromfile(self.path, dtype, int(np.prod(shape)), offset=offset).reshape(shape)
        except (OSError, ValueError) as error:
            raise invalid_file(self.path, "changed while it was read", found=str(error)) from error


def read_dump(path: Path, info: SegmentInfo | None = None, *, verify: bool = True) -> DumpFile:
    """Open a file of dumps. ``info``: what the manifest says of it. ``verify``: hash it.

    Raises ``TraceFormatError``: shard-incomplete (it is gone), checksum-mismatch, segment-invalid, format-unsupported."""
    if info is not None:
        try:
            size, found = os.stat(path).st_size, checksum(path) if verify else info.xxh3_128
        except OSError as error:
            raise TraceFormatError(
                Code.SHARD_INCOMPLETE, f"{path.name} is listed by the manifest and cannot be read", where=str(path),
                found=error.strerror or str(error), remedy=REMEDY_ALTERED,
            ) from error  # fmt: skip
        if (size, found) != (info.size_bytes, info.xxh3_128):
            told = [f"{size} bytes, xxh3_128 {digest}" for size, digest in ((info.size_bytes, info.xxh3_128), (size, found))]
            raise TraceFormatError(
                Code.CHECKSUM_MISMATCH, f"checksum: {path.name} is not as it was written", where=str(path),
                expected=told[0], found=told[1], remedy=REMEDY_ALTERED,
            )  # fmt: skip
    whole = read_entries(path)
    try:
        header = msgspec.json.decode(whole.metadata, type=DumpHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid_file(path, "malformed header", found=str(error)) from error
    offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
    names = set()
    for number, block in enumerate(header.blocks):
        dtype_info(block.dtype, f"{path}, boundary {block.boundary}")
        wanted = [Column(f"{number}.digest", "U64", 2), _values_column(number, block)]
        wanted += [Column(f"{number}.sequence", "I32"), Column(f"{number}.position", "I32")]
        if f"{number}.expert" in whole.entries:
            wanted.append(Column(f"{number}.expert", "I32"))
        for column in wanted:
            entry = whole.entries.get(column.name)
            nbytes = block.rows * column.line_bytes
            fits = entry is not None and (entry.dtype, entry.shape) == (column.code, column.shape(block.rows))
            if entry is None or not fits or entry.data_offsets[1] - entry.data_offsets[0] != nbytes:
                expected = f"{block.rows} rows of {column.code}"
                raise invalid_file(path, f"{column.name} is not laid out as the header says", expected=expected, found=str(entry))
            start = whole.start + entry.data_offsets[0]
            if not whole.start <= start <= start + nbytes <= whole.size_bytes:
                raise invalid_file(path, f"torn: {column.name} lies outside the file", found=f"{whole.size_bytes} bytes")
            shape = (block.rows, column.line_bytes) if column.name.endswith(".values") else column.shape(block.rows)
            offsets[column.name] = (start, shape)
            names.add(column.name)
    if names != set(whole.entries):
        raise invalid_file(path, "tensors that no block has", found=", ".join(sorted(set(whole.entries) - names)))
    return DumpFile(path, header, offsets)


# ---------------------------------------------------------------------------------------------------- plans


def write_plan(plan: DumpPlan, path: Path) -> None:
    """Write a plan, replacing one of that name. Raises ``CaptureError`` (write-failed)."""
    write_in_one_step(path, [msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"])


def read_plan(path: str | os.PathLike[str]) -> DumpPlan:
    """Read a plan.

    Raises ``UsageError`` (bad-argument) where there is none, ``TraceFormatError`` (manifest-invalid, format-unsupported)."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            Code.BAD_ARGUMENT, "the plan cannot be read", where=str(path), expected=_PLAN, found=error.strerror or str(error)
        ) from error
    check_format(raw, Path(path), Code.MANIFEST_INVALID)
    try:
        return msgspec.json.decode(raw, type=DumpPlan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(Code.MANIFEST_INVALID, "this is no plan", where=str(path), expected=_PLAN, found=str(error)) from error
