"""Tests of ``tracer.format.container``."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tracer.errors import CaptureError, Code, InternalError, TraceFormatError
from tracer.format import container
from tracer.format.container import SEGMENT_COLUMNS, WEIGHT_COLUMNS, ColumnFile, checksum, write_columns, write_in_one_step
from tracer.format.schema import SegmentHeader
from tracer.format.schema import __doc__ as schema_text

HEADER = SegmentHeader(format=1, number=0, blocks=())


def write(path: Path, lines: int = 5) -> dict[str, Any]:
    """A weights file of ``lines`` lines; returns its columns."""
    arrays: dict[str, Any] = {
        column.name: np.arange(lines * max(column.inner, 1)).reshape(column.shape(lines)).astype(column.dtype) for column in WEIGHT_COLUMNS
    }
    write_columns(path, HEADER, WEIGHT_COLUMNS, dict.fromkeys(arrays, lines), {name: [array] for name, array in arrays.items()})
    return arrays


def test_columns_are_those_the_format_names() -> None:
    """The columns of a segment, with dtype and second axis, are those of the table in the format's definition."""
    codes = {"I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "F32": "float32", "F64": "float64"}
    named = {line.split("``")[1]: line.split("|")[2].strip() for line in (schema_text or "").splitlines() if line.startswith("| ``")}
    assert {column.name: codes[column.code] for column in SEGMENT_COLUMNS} == {name: text.split()[0] for name, text in named.items()}
    assert {column.name for column in SEGMENT_COLUMNS if column.inner} == {name for name, text in named.items() if ", " in text[:-2]}


def test_the_safetensors_package_reads_the_same(tmp_path: Path) -> None:
    """A file of columns is a safetensors file, and both readers find the same arrays in it."""
    arrays = write(tmp_path / "a.safetensors")
    theirs = load_file(tmp_path / "a.safetensors")
    ours = ColumnFile.open(tmp_path / "a.safetensors", WEIGHT_COLUMNS)
    assert theirs.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(ours.column(name), array)


@given(data=st.data())
def test_any_cutting_into_parts_makes_the_same_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """How a column is cut into arrays, and their integer widths, do not show in the file."""
    folder = tmp_path_factory.mktemp("parts")
    write(folder / "whole", 30)
    arrays = {column.name: ColumnFile.open(folder / "whole", WEIGHT_COLUMNS).column(column.name) for column in WEIGHT_COLUMNS}
    cuts = {name: sorted(data.draw(st.lists(st.integers(0, 30), max_size=4))) for name in arrays}
    parts = {name: (part.copy() for part in np.split(array, cuts[name])) for name, array in arrays.items()}
    write_columns(folder / "cut", HEADER, WEIGHT_COLUMNS, dict.fromkeys(arrays, 30), parts)
    assert (folder / "cut").read_bytes() == (folder / "whole").read_bytes()


def test_columns_are_aligned_and_read_only(tmp_path: Path) -> None:
    """Mapped columns are aligned to their dtype, and nobody can write to them."""
    write(tmp_path / "a")
    file = ColumnFile.open(tmp_path / "a", WEIGHT_COLUMNS)
    for column in WEIGHT_COLUMNS:
        array = file.column(column.name)
        assert array.flags.aligned
        assert not array.flags.writeable


def test_empty_columns(tmp_path: Path) -> None:
    """A file without a single line has all its columns, empty and of their dtype."""
    write(tmp_path / "a", 0)
    file = ColumnFile.open(tmp_path / "a", WEIGHT_COLUMNS)
    for column in WEIGHT_COLUMNS:
        assert file.column(column.name).shape == column.shape(0)
        assert file.column(column.name).dtype == column.dtype


def test_columns_are_read_where_no_more_mappings_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the number of mappings that descriptors allow, columns are read instead, with the same content."""
    arrays = write(tmp_path / "a")
    monkeypatch.setattr(container, "_MAPS_AT_MOST", 0)
    monkeypatch.setattr(container, "_KEEPS_DESCRIPTOR", True)
    file = ColumnFile.open(tmp_path / "a", WEIGHT_COLUMNS)
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.column(name), array)
        np.testing.assert_array_equal(file.column(name, 1, len(array) - 1), array[1:-1])
        assert not file.column(name).flags.writeable
    assert file._mapped is None


def test_checksum_is_over_all_bytes(tmp_path: Path) -> None:
    """The checksum of a file, as written and as read, is xxh3_128 of its bytes; an empty file has one too."""
    written = write_in_one_step(tmp_path / "a", [b"abc", np.arange(200, dtype=np.uint8)])
    content = (tmp_path / "a").read_bytes()
    assert content == b"abc" + bytes(range(200))
    assert written.size_bytes == 203
    assert written.xxh3_128 == checksum(tmp_path / "a") == xxhash.xxh3_128_hexdigest(content)
    (tmp_path / "empty").touch()
    assert checksum(tmp_path / "empty") == xxhash.xxh3_128_hexdigest(b"")


@pytest.mark.parametrize("refusing", ["write", "fsync", "replace"])
def test_nothing_is_left_of_a_file_that_could_not_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str) -> None:
    """When the system refuses a write, a sync or the rename, the error is typed and neither the file nor a part of it stays."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, refusing, refuse)
    with pytest.raises(CaptureError) as caught:
        write(tmp_path / "a")
    assert caught.value.code is Code.WRITE_FAILED
    assert "No space left" in caught.value.found
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_made_durable_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the folder cannot be synced after the rename, the file is removed again."""
    synced: list[int] = []
    fsync = os.fsync

    def second_fails(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(CaptureError):
        write(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    """An interrupt in the middle passes through and leaves no file."""

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_in_one_step(tmp_path / "a", chunks())
    assert list(tmp_path.iterdir()) == []


def test_columns_of_other_lengths_than_announced_are_a_bug(tmp_path: Path) -> None:
    """A column with fewer lines than its header says never becomes a file."""
    lines = {column.name: 2 for column in WEIGHT_COLUMNS}
    parts = {column.name: [np.zeros(column.shape(1), column.dtype)] for column in WEIGHT_COLUMNS}
    with pytest.raises(InternalError):
        write_columns(tmp_path / "a", HEADER, WEIGHT_COLUMNS, lines, parts)
    assert list(tmp_path.iterdir()) == []


def reheaded(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A damage that edits the JSON header and leaves the columns alone."""

    def damage(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return damage


def tracer_metadata(text: str) -> Callable[[bytes], bytes]:
    """A damage that replaces the segment header."""
    return reheaded(lambda header: header.__setitem__("__metadata__", {"tracer": text}))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Code, str]] = {
    "empty file": (lambda _: b"", Code.SEGMENT_INVALID, "header is not whole"),
    "seven bytes": (lambda content: content[:7], Code.SEGMENT_INVALID, "header is not whole"),
    "cut inside the header": (lambda content: content[:60], Code.SEGMENT_INVALID, "header is not whole"),
    "a header length beyond the file": (lambda content: b"\xff" * 8 + content[8:], Code.SEGMENT_INVALID, "header is not whole"),
    "cut inside the columns": (lambda content: content[:-1], Code.SEGMENT_INVALID, "torn or padded"),
    "a byte too many": (lambda content: content + b"\0", Code.SEGMENT_INVALID, "torn or padded"),
    "no JSON": (lambda content: content[:8] + b"?" + content[9:], Code.SEGMENT_INVALID, "no safetensors header"),
    "no UTF-8": (lambda content: content[:10] + b"\xff" + content[11:], Code.SEGMENT_INVALID, "no safetensors header"),
    "nested without end": (
        lambda content: (100_000).to_bytes(8, "little") + b'{"a":' + b"[" * 99_995 + content,
        Code.SEGMENT_INVALID,
        "no safetensors header",
    ),
    "a pickle": (lambda _: b"\x80\x04\x95" + b"\0" * 100, Code.SEGMENT_INVALID, "header is not whole"),
    "a column missing": (reheaded(lambda header: header.pop("digest")), Code.SEGMENT_INVALID, "other columns"),
    "a column too many": (reheaded(lambda header: header.update(extra=header["digest"])), Code.SEGMENT_INVALID, "other columns"),
    "another dtype": (reheaded(lambda header: header["digest"].update(dtype="I64")), Code.SEGMENT_INVALID, "column digest"),
    "another shape": (reheaded(lambda header: header["sketch"].update(shape=[10, 8])), Code.SEGMENT_INVALID, "column sketch"),
    "a negative shape": (reheaded(lambda header: header["abs_max"].update(shape=[-1])), Code.SEGMENT_INVALID, "column abs_max"),
    "no shape": (reheaded(lambda header: header["abs_max"].update(shape=[])), Code.SEGMENT_INVALID, "column abs_max"),
    "an offset outside": (
        reheaded(lambda header: header["digest"].update(data_offsets=[0, 1 << 62])),
        Code.SEGMENT_INVALID,
        "column digest",
    ),
    "columns on top of each other": (
        reheaded(lambda header: header["sum_squares"].update(data_offsets=[0, 40])),
        Code.SEGMENT_INVALID,
        "column sum_squares",
    ),
    "someone else's file": (reheaded(lambda header: header.pop("__metadata__")), Code.SEGMENT_INVALID, "not written by tracer"),
    "a header that is no JSON": (tracer_metadata("{"), Code.SEGMENT_INVALID, "not a JSON object"),
    "a header that is a list": (tracer_metadata("[]"), Code.SEGMENT_INVALID, "not a JSON object"),
    "no format": (tracer_metadata('{"number":0,"blocks":[]}'), Code.FORMAT_UNSUPPORTED, "format"),
    "format 2": (tracer_metadata('{"format":2,"anything":0}'), Code.FORMAT_UNSUPPORTED, "format"),
    "an unknown key": (tracer_metadata('{"format":1,"number":0,"blocks":[],"more":1}'), Code.SEGMENT_INVALID, "malformed header"),
    "a key missing": (tracer_metadata('{"format":1,"number":0}'), Code.SEGMENT_INVALID, "malformed header"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    """A torn, altered or foreign file raises an error that names the file, what is wrong with it, and what to do."""
    damage, code, what = DAMAGES[name]
    path = tmp_path / "segment"
    write(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceFormatError) as caught:
        ColumnFile.open(path, WEIGHT_COLUMNS)
    assert (caught.value.code, caught.value.where) == (code, str(path))
    assert what in caught.value.what
    assert caught.value.remedy


def test_file_that_vanishes_is_refused(tmp_path: Path) -> None:
    """A file that is not there, or vanishes before its columns are asked for, raises a typed error."""
    with pytest.raises(TraceFormatError, match="cannot be read"):
        ColumnFile.open(tmp_path / "a", WEIGHT_COLUMNS)
    write(tmp_path / "a")
    file = ColumnFile.open(tmp_path / "a", WEIGHT_COLUMNS)
    (tmp_path / "a").unlink()
    with pytest.raises(TraceFormatError, match="changed while it was read"):
        file.column("digest")
