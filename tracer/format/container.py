"""Files of numeric columns: safetensors, written in one step and mapped back column by column.

A file is 8 bytes of header length (little-endian), a JSON header padded to a multiple of 8, then the columns
without gaps, the wide dtypes first so that every column is aligned. The header is written and parsed here, in
a few lines, because a reader must not load what it is not asked for and equal runs must make equal files.
The ``safetensors`` package reads the same files.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tracer.errors import CaptureError, Code, InternalError, TraceFormatError
from tracer.format.schema import FORMAT_VERSION, SEGMENT_METADATA_KEY, SegmentHeader

__all__ = [
    "SEGMENT_COLUMNS",
    "WEIGHT_COLUMNS",
    "Column",
    "ColumnFile",
    "Entries",
    "Entry",
    "Written",
    "check_format",
    "checksum",
    "invalid_file",
    "manifest_checksum",
    "read_entries",
    "sync_folder",
    "write_columns",
    "write_in_one_step",
]

Array = npt.NDArray[Any]

REMEDY_ALTERED = "copy the trace again from where it was recorded, or record it again"
_BATCH_BYTES = 1 << 20
_MAPS = weakref.WeakSet[mmap.mmap]()
_KEEPS_DESCRIPTOR = sys.version_info < (3, 13)
_MAPS_AT_MOST = 256
"""Where a mapping keeps a file descriptor: beyond this many, columns are read instead."""
_MAX_HEADER_BYTES = 1 << 30


_STORED = {"BF16": "<u2", "F8_E4M3": "<u1", "F8_E5M2": "<u1", "F8_E8M0": "<u1", "BOOL": "<u1"}


@dataclass(frozen=True)
class Column:
    """One tensor of a file. ``code``: safetensors dtype. ``inner``: size of the second axis, 0 for 1-D."""

    name: str
    code: str
    inner: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Little-endian numpy dtype; unsigned integers of that size where numpy has none."""
        return np.dtype(_STORED.get(self.code) or f"<{self.code[0].lower()}{int(self.code[1:]) // 8}")

    @property
    def line_bytes(self) -> int:
        """Bytes of one line."""
        return self.dtype.itemsize * max(self.inner, 1)

    def shape(self, lines: int) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (lines, self.inner) if self.inner else (lines,)


_DIGEST = Column("digest", "U64", 2)
_STATISTICS = (Column("sum_squares", "F64"), Column("sketch", "F32", 16), Column("abs_max", "F32"), Column("nonfinite", "U32"))

SEGMENT_COLUMNS = (
    _DIGEST,
    _STATISTICS[0],
    Column("values", "I64"),
    Column("ids.token", "I64"),
    *_STATISTICS[1:],
    Column("lists", "U32"),
    Column("rows.sequence", "I32"),
    Column("rows.position", "I32"),
    Column("rows.forward", "I32"),
    Column("rows.expert", "I32"),
    Column("ids.sequence", "I32"),
    Column("ids.position", "I32"),
)
"""Every column of a segment, in file order. All are present, empty ones too."""

WEIGHT_COLUMNS = (_DIGEST, *_STATISTICS)
"""Every column of a weights file; one line per weight row in each."""


@dataclass(frozen=True)
class Written:
    """A finished file: its size and the xxh3_128 of all its bytes, 32 hex digits."""

    size_bytes: int
    xxh3_128: str


def write_in_one_step(path: Path, chunks: Iterable[bytes | npt.NDArray[np.uint8]]) -> Written:
    """Make ``path`` appear with all of its bytes, or not at all.

    Written to the sibling ``.NAME.tmp``, synced, renamed, folder synced: once this returns, the file survives a
    power cut; at any moment before, a killed process leaves at most the temporary file, which no reader looks at.
    Raises ``CaptureError`` (write-failed) on a full disk or any other refusal of the system.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    state, size = xxhash.xxh3_128(), 0
    visible = temporary
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for data in chunks:
                chunk = memoryview(data)  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol before Python 3.12
                state.update(chunk)
                size += len(chunk)
                _write_all(descriptor, chunk)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        visible = path
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            visible.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CaptureError(
                Code.WRITE_FAILED,
                f"{path.name} could not be written",
                where=str(path),
                found=error.strerror or str(error),
                remedy="free space or choose another out=; what was committed before stays readable",
            ) from error
        raise
    return Written(size, state.hexdigest())


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the file system can do that for folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems refuse to sync folders
        if error.errno not in (22, 95):  # EINVAL, ENOTSUP
            raise
    finally:
        os.close(descriptor)


def write_columns(
    path: Path, header: msgspec.Struct, columns: Sequence[Column], lines: Mapping[str, int], parts: Mapping[str, Iterable[Array]]
) -> Written:
    """Write a file of columns in one step.

    ``lines``: lines per column name. ``parts``: arrays that make up each column in order, of any dtype that casts
    safely; generators are consumed one array at a time, so that nothing is gathered in memory.
    Raises ``CaptureError`` (write-failed).
    """
    entries: dict[str, Any] = {"__metadata__": {SEGMENT_METADATA_KEY: msgspec.json.encode(header).decode()}}
    offset = 0
    for column in columns:
        end = offset + lines[column.name] * column.line_bytes
        entries[column.name] = {"dtype": column.code, "shape": column.shape(lines[column.name]), "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[bytes | npt.NDArray[np.uint8]]:
        yield len(text).to_bytes(8, "little") + text
        for column in columns:
            announced = lines[column.name] * column.line_bytes
            for batch in _batches(parts[column.name]):
                whole = batch[0] if len(batch) == 1 else np.concatenate(batch)
                data = np.ascontiguousarray(whole.astype(column.dtype, casting="same_kind", copy=False)).reshape(-1).view(np.uint8)
                announced -= len(data)
                yield data
            if announced:
                raise InternalError(Code.INTERNAL, f"column {column.name} has other lines than announced", where=str(path))

    return write_in_one_step(path, chunks())


def _batches(parts: Iterable[Array]) -> Iterator[list[Array]]:
    """The parts in groups of about a mebibyte: decode steps leave thousands of tiny ones."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += part.nbytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if size:
        yield batch


def checksum(path: Path) -> str:
    """xxh3_128 over the whole file, 32 hex digits. Releases the interpreter lock, so threads scale. Raises OSError."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return xxhash.xxh3_128_hexdigest(mapped)


def manifest_checksum(raw: bytes | str) -> str:
    """xxh3_128 over what a manifest says, its own checksum left out, however the file is laid out; 32 hex digits.

    Raises ``msgspec.DecodeError`` for what is no JSON."""
    said = msgspec.json.decode(raw)
    said.pop("xxh3_128", None)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(said, order="sorted"))


class _Probe(msgspec.Struct):
    format: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def check_format(raw: bytes | str, path: Path, code: Code) -> None:
    """Refuse JSON that is not an object of this format number, before any of its content is interpreted.

    Raises ``TraceFormatError``: ``code`` where it is no JSON object, format-unsupported where the number is missing or another.
    """
    try:
        found = msgspec.json.decode(raw, type=_Probe).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(
            code,
            f"{path.name} is not a JSON object",
            where=str(path),
            expected="a JSON object with a format number",
            found=str(error),
            remedy=REMEDY_ALTERED,
        ) from error
    text = "no format number" if isinstance(found, msgspec.UnsetType) else bytes(found).decode(errors="replace").strip()[:40]
    if text != str(FORMAT_VERSION):
        raise TraceFormatError(
            Code.FORMAT_UNSUPPORTED,
            f"{path.name} has a format that this version cannot read",
            where=str(path),
            expected=f"format {FORMAT_VERSION}",
            found=text,
            remedy="read it with the tracer version that recorded it, or record it again",
        )


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor as a safetensors header lists it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Entries:
    """The header of a file: its tensors, what tracer says about them (JSON of a known format), and where the data starts."""

    entries: Mapping[str, Entry]
    metadata: str
    start: int
    size_bytes: int


def read_entries(path: Path) -> Entries:
    """Read a file's header. Raises ``TraceFormatError``: segment-invalid where it is torn, no safetensors file or not tracer's;
    format-unsupported."""
    try:
        with open(path, "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length > min(size_bytes - 8, _MAX_HEADER_BYTES):
                raise invalid_file(
                    path, "torn, its header is not whole", expected=f"{length + 8} bytes or more", found=f"{size_bytes} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise invalid_file(path, "cannot be read", found=error.strerror or str(error)) from error
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_file(path, "no safetensors header", found=str(error)) from error
    if SEGMENT_METADATA_KEY not in metadata:
        raise invalid_file(
            path, "not written by tracer", expected=f"metadata key {SEGMENT_METADATA_KEY}", found=", ".join(metadata) or "none"
        )
    check_format(metadata[SEGMENT_METADATA_KEY], path, Code.SEGMENT_INVALID)
    return Entries(entries, metadata[SEGMENT_METADATA_KEY], 8 + length, size_bytes)


def invalid_file(path: Path, what: str, *, expected: str = "", found: str = "") -> TraceFormatError:
    """A file that is not laid out as the format says."""
    return TraceFormatError(
        Code.SEGMENT_INVALID, f"{path.name}: {what}", where=str(path), expected=expected, found=found, remedy=REMEDY_ALTERED
    )


@dataclass(eq=False)
class ColumnFile:
    """A file of columns, opened by its header alone. Columns are mapped on first use and are read-only.

    ``lines``: lines per column name.
    """

    path: Path
    size_bytes: int
    header: SegmentHeader
    lines: Mapping[str, int]
    _columns: Mapping[str, Column]
    _offsets: Mapping[str, int]
    _mapped: mmap.mmap | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path, columns: Sequence[Column]) -> ColumnFile:
        """Read and check the header.

        Raises ``TraceFormatError``: segment-invalid where the file is no safetensors file of exactly these columns,
        torn, or its own header is malformed; format-unsupported.
        """

        def invalid(what: str, *, expected: str = "", found: str = "") -> TraceFormatError:
            return invalid_file(path, what, expected=expected, found=found)

        whole = read_entries(path)
        entries, metadata, start, size_bytes = whole.entries, whole.metadata, whole.start, whole.size_bytes
        names = sorted(column.name for column in columns)
        if sorted(entries) != names:
            raise invalid("other columns than the format has", expected=", ".join(names), found=", ".join(sorted(entries)))
        lines, offsets, offset = {}, {}, 0
        for column in columns:
            entry = entries[column.name]
            count = entry.shape[0] if entry.shape else -1
            end = offset + count * column.line_bytes
            expected = Entry(column.code, column.shape(count), (offset, end))
            if entry != expected or count < 0:
                raise invalid(f"column {column.name} is not laid out as the format says", expected=str(expected), found=str(entry))
            lines[column.name], offsets[column.name], offset = count, start + offset, end
        if size_bytes != start + offset:
            raise invalid("torn or padded", expected=f"{start + offset} bytes", found=f"{size_bytes} bytes")
        try:
            header = msgspec.json.decode(metadata, type=SegmentHeader)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise invalid("malformed header", found=str(error)) from error
        return cls(path, size_bytes, header, lines, {column.name: column for column in columns}, offsets)

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Lines ``start:stop`` of one column, by default all: mapped, or just these read where no more files can be mapped;
        read-only, not checked against anything but its layout. Raises ``TraceFormatError`` (segment-invalid) where the file
        has vanished since it was opened."""
        column = self._columns[name]
        lines = max((self.lines[name] if stop is None else min(stop, self.lines[name])) - start, 0)
        count, offset = lines * max(column.inner, 1), self._offsets[name] + start * column.line_bytes
        if not count:
            return np.empty(column.shape(0), column.dtype)
        try:
            if self._mapped is None and not (_KEEPS_DESCRIPTOR and len(_MAPS) >= _MAPS_AT_MOST):
                self._mapped = _map(self.path)
            if self._mapped is None:
                flat = np.fromfile(self.path, column.dtype, count, offset=offset)
                flat.flags.writeable = False
            else:
                flat = np.frombuffer(self._mapped, column.dtype, count, offset)
            return flat.reshape(column.shape(lines))
        except (OSError, ValueError) as error:
            raise TraceFormatError(
                Code.SEGMENT_INVALID,
                f"{self.path.name} changed while it was read",
                where=str(self.path),
                found=str(error),
                remedy=REMEDY_ALTERED,
            ) from error

    def release(self) -> None:
        """Forget the mapping; columns that were handed out stay valid, and it goes with the last of them."""
        self._mapped = None


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        if sys.version_info >= (3, 13):
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _MAPS.add(mapped)
    return mapped
