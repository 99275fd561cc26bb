"""Tests of ``tracer.format.store_read``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.trace_files import edit_manifest, forge_segment, write_shard
from tracer.errors import Code, TraceFormatError
from tracer.format.schema import Block, SegmentHeader
from tracer.format.store_read import committed_run_id, inspect_shard, read_shard, shard_paths

Damage = Callable[[Path], object]
"""Something done to a shard folder."""
SEGMENT = "segment-000001.safetensors"
WEIGHT = {"name": "w", "parameter": "p", "dtype": "float32", "rows": 2, "columns": 2, "digest": ["0" * 16, "f" * 16]}


def text(content: str) -> Damage:
    """A manifest that is this text."""
    return lambda shard: (shard / "manifest.json").write_text(content)


def edited(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A manifest with other content."""
    return lambda shard: edit_manifest(shard, change)


def with_boundary(**changes: Any) -> Damage:
    """A manifest whose second boundary is another."""
    return edited(lambda content: content["boundaries"][1].update(changes))


def with_block(**changes: Any) -> Damage:
    """A segment whose last block is another, with a checksum that fits."""

    def forged(header: SegmentHeader) -> SegmentHeader:
        blocks = (*header.blocks[:-1], msgspec.structs.replace(header.blocks[-1], **changes))
        return msgspec.structs.replace(header, blocks=blocks)

    return lambda shard: forge_segment(shard, 1, header=forged)


def with_column(name: str, value: int) -> Damage:
    """A segment whose column holds this value everywhere, with a checksum that fits."""
    dtype = {"lists": np.uint32, "ids.token": np.int64}.get(name, np.int32)
    return lambda shard: forge_segment(shard, 1, columns={name: np.full(4, value, dtype)})


def folder_for_manifest(shard: Path) -> None:
    """A folder where the manifest should be."""
    (shard / "manifest.json").unlink()
    (shard / "manifest.json").mkdir()


def cut(shard: Path) -> None:
    """Half of a segment."""
    content = (shard / SEGMENT).read_bytes()
    (shard / SEGMENT).write_bytes(content[: len(content) // 2])


def flip(where: float) -> Damage:
    """One bit of a segment flipped, at a fraction of its length."""

    def damage(shard: Path) -> None:
        content = bytearray((shard / SEGMENT).read_bytes())
        content[int(where * (len(content) - 1))] ^= 4
        (shard / SEGMENT).write_bytes(content)

    return damage


MANIFESTS: dict[str, tuple[Damage, Code, str]] = {
    "empty": (text("\n"), Code.MANIFEST_INVALID, ""),
    "no JSON": (text("format: 1"), Code.MANIFEST_INVALID, ""),
    "a list": (text("[1]"), Code.MANIFEST_INVALID, "object"),
    "no UTF-8": (lambda shard: (shard / "manifest.json").write_bytes(b'{"format":1,"run_id":"\xff"}'), Code.MANIFEST_INVALID, ""),
    "nested without end": (text('{"format":1,"conditions":{"a":' + "[" * 100_000), Code.MANIFEST_INVALID, ""),
    "cut": (lambda shard: text((shard / "manifest.json").read_text()[:500])(shard), Code.MANIFEST_INVALID, "truncated"),
    "a folder": (folder_for_manifest, Code.MANIFEST_INVALID, "is no file"),
    "no format": (edited(lambda content: content.pop("format")), Code.FORMAT_UNSUPPORTED, "no format number"),
    "format 2": (edited(lambda content: content.update(format=2)), Code.FORMAT_UNSUPPORTED, "2"),
    "format as text": (edited(lambda content: content.update(format="1")), Code.FORMAT_UNSUPPORTED, '"1"'),
    "a key missing": (edited(lambda content: content.pop("run_id")), Code.MANIFEST_INVALID, "run_id"),
    "an unknown key": (edited(lambda content: content.update(extra=1)), Code.MANIFEST_INVALID, "extra"),
    "an unknown key inside": (with_boundary(colour="red"), Code.MANIFEST_INVALID, "colour"),
    "a wrong type": (edited(lambda content: content.update(level="1")), Code.MANIFEST_INVALID, "level"),
    "an unknown status": (with_boundary(status="fine"), Code.MANIFEST_INVALID, "fine"),
    "a rank outside its world": (edited(lambda content: content.update(rank=1)), Code.MANIFEST_INVALID, "1 of 1"),
    "a negative rank": (edited(lambda content: content.update(rank=-1)), Code.MANIFEST_INVALID, "-1 of 1"),
    "a world without end": (edited(lambda content: content.update(world_size=1 << 40)), Code.MANIFEST_INVALID, "of 1099511627776"),
    "an axis of size 0": (
        edited(lambda content: content.update(mesh=[{"name": "tp", "index": 0, "size": 0}])),
        Code.MANIFEST_INVALID,
        "0 of 0",
    ),
    "a file elsewhere": (
        edited(lambda content: content["segments"][1].update(file="../shard-00001/segment-000001.safetensors")),
        Code.MANIFEST_INVALID,
        "../shard-00001",
    ),
    "an absolute file": (edited(lambda content: content["segments"][1].update(file="/etc/passwd")), Code.MANIFEST_INVALID, "/etc/passwd"),
    "a segment twice": (
        edited(lambda content: content["segments"].append(content["segments"][1])),
        Code.MANIFEST_INVALID,
        "segment-000001",
    ),
    "a segment not listed": (edited(lambda content: content["segments"].pop()), Code.SEGMENT_INVALID, SEGMENT),
    "a weights file elsewhere": (
        edited(lambda content: content.update(weights_file=content["segments"][0])),
        Code.MANIFEST_INVALID,
        "segment-000000",
    ),
    "a weights file not listed": (
        lambda shard: shutil.copy(shard / SEGMENT, shard / "weights.safetensors"),
        Code.SEGMENT_INVALID,
        "weights.safetensors",
    ),
    "an unknown dtype of a boundary": (with_boundary(dtype="float5"), Code.SEGMENT_INVALID, "float5"),
    "an unknown dtype of a weight": (
        edited(lambda content: content.update(weights=[WEIGHT | {"dtype": "f8"}])),
        Code.SEGMENT_INVALID,
        "f8",
    ),
    "a weight digest that is no number": (
        edited(lambda content: content.update(weights=[WEIGHT | {"digest": ["xyz", "0" * 16]}])),
        Code.MANIFEST_INVALID,
        "xyz",
    ),
    "a weight outside its file": (edited(lambda content: content.update(weights=[WEIGHT | {"start": 0}])), Code.MANIFEST_INVALID, "2"),
    "a boundary twice": (
        edited(lambda content: content["boundaries"].append(content["boundaries"][0])),
        Code.MANIFEST_INVALID,
        "embedding",
    ),
    "a boundary before its input": (
        edited(lambda content: content["boundaries"][0].update(inputs=["final_norm"])),
        Code.MANIFEST_INVALID,
        "final_norm",
    ),
    "an unknown weights mode": (edited(lambda content: content.update(weights_mode="some")), Code.MANIFEST_INVALID, "some"),
    "a weight outside its shape": (
        edited(lambda content: content.update(weights=[WEIGHT | {"row_spans": [[1, 3]]}])),
        Code.MANIFEST_INVALID,
        "(1, 3)",
    ),
    "a weight with a negative size": (edited(lambda content: content.update(weights=[WEIGHT | {"rows": -1}])), Code.MANIFEST_INVALID, "w"),
    "rows never computed without end": (
        edited(lambda content: content.update(not_computed=[{"sequence": "s0", "positions": [[0, 1 << 60]], "reason": "none"}])),
        Code.MANIFEST_INVALID,
        str(1 << 60),
    ),
    "another dtype than its segments": (with_boundary(dtype="float32"), Code.SHARD_INCOMPLETE, "dtype bfloat16"),
    "other counts": (edited(lambda content: content["segments"][1].update(rows=5)), Code.SEGMENT_INVALID, "4 rows"),
}

SEGMENTS: dict[str, tuple[Damage, Code, str]] = {
    "gone": (lambda shard: (shard / SEGMENT).unlink(), Code.SHARD_INCOMPLETE, "No such file"),
    "cut in half": (cut, Code.CHECKSUM_MISMATCH, "bytes"),
    "a byte more": (
        lambda shard: (shard / SEGMENT).write_bytes((shard / SEGMENT).read_bytes() + b"\0"),
        Code.CHECKSUM_MISMATCH,
        "",
    ),
    "a bit flipped at the start": (flip(0), Code.CHECKSUM_MISMATCH, ""),
    "a bit flipped in the header": (flip(0.1), Code.CHECKSUM_MISMATCH, ""),
    "a bit flipped in the middle": (flip(0.5), Code.CHECKSUM_MISMATCH, ""),
    "a bit flipped at the end": (flip(1), Code.CHECKSUM_MISMATCH, ""),
    "another segment's content": (
        lambda shard: shutil.copy(shard / "segment-000000.safetensors", shard / SEGMENT),
        Code.CHECKSUM_MISMATCH,
        "",
    ),
    "another number": (
        lambda shard: forge_segment(shard, 1, header=lambda header: msgspec.structs.replace(header, number=2)),
        Code.SEGMENT_INVALID,
        "2",
    ),
    "an unknown dtype": (with_block(dtype="float5"), Code.SEGMENT_INVALID, "float5"),
    "rows beyond the list": (with_block(row_start=1), Code.SEGMENT_INVALID, "4 rows"),
    "rows before the list": (with_block(row_start=-1), Code.SEGMENT_INVALID, "4 rows"),
    "a negative count": (with_block(row_count=-1), Code.SEGMENT_INVALID, "-1 rows"),
    "a count without end": (with_block(row_count=1 << 62), Code.SEGMENT_INVALID, "rows"),
    "digests beyond the column": (with_block(digest_start=9), Code.SEGMENT_INVALID, "4 rows"),
    "digests before the column": (with_block(digest_start=-4), Code.SEGMENT_INVALID, "4 rows"),
    "statistics beyond the column": (with_block(stats_start=9), Code.SEGMENT_INVALID, "4 rows"),
    "statistics before the column": (with_block(stats_start=-2), Code.SEGMENT_INVALID, "4 rows"),
    "values beyond the column": (with_block(values_start=0), Code.SEGMENT_INVALID, "4 rows"),
    "a span beyond the row": (with_block(spans=((0, 65),)), Code.SEGMENT_INVALID, "65"),
    "spans on top of each other": (with_block(spans=((0, 8), (7, 16))), Code.SEGMENT_INVALID, "7"),
    "a span turned round": (with_block(spans=((8, 4),)), Code.SEGMENT_INVALID, "8"),
    "a negative width": (with_block(width=-1), Code.SEGMENT_INVALID, "columns"),
    "negative executions": (with_block(executions=-1), Code.SEGMENT_INVALID, "-1"),
    "a row that is not in the table": (with_column("lists", 4), Code.SEGMENT_INVALID, "4"),
    "a sequence that was never opened": (with_column("rows.sequence", 1), Code.SEGMENT_INVALID, "1"),
    "a negative sequence": (with_column("rows.sequence", -1), Code.SEGMENT_INVALID, "-1"),
    "an expert that is none": (with_column("rows.expert", -2), Code.SEGMENT_INVALID, "-2"),
    "a negative position": (with_column("rows.position", -7), Code.SEGMENT_INVALID, "-7"),
    "ids of a sequence that was never opened": (with_column("ids.sequence", 3), Code.SEGMENT_INVALID, "3"),
}


@pytest.mark.parametrize("name", [*MANIFESTS, *SEGMENTS])
def test_hostile_shard_is_refused(tmp_path: Path, name: str) -> None:
    """A shard that is torn, altered, foreign or forged raises an error that names the file, what was found in it, and what to do."""
    damage, code, found = (MANIFESTS | SEGMENTS)[name]
    shard = write_shard(tmp_path)
    damage(shard)
    with pytest.raises(TraceFormatError) as caught:
        read_shard(shard)
    error = caught.value
    assert error.code is code
    assert str(shard) in error.where
    assert found in error.text()
    assert error.remedy


@pytest.mark.parametrize("damage", [with_boundary(dtype="float5"), with_block(dtype="float5")])
def test_unknown_dtype_names_file_boundary_and_known_ones(tmp_path: Path, damage: Damage) -> None:
    """S42: an unknown dtype, in the manifest or in a segment, is refused naming file, boundary, what was found and what is known."""
    shard = write_shard(tmp_path)
    damage(shard)
    with pytest.raises(TraceFormatError) as caught:
        read_shard(shard)
    assert any(name in caught.value.where for name in ("manifest.json", SEGMENT))
    assert any(name in caught.value.where for name in ("layers.0.residual", "final_norm"))
    assert "float5" in caught.value.found
    assert "bfloat16" in caught.value.expected


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """S40: whichever byte of a segment is altered, the checksum error names the file."""
    shard = write_shard(tmp_path, rows=1)
    whole = (shard / SEGMENT).read_bytes()
    for position in range(0, len(whole), 7):
        content = bytearray(whole)
        content[position] ^= 1 << (position % 8)
        (shard / SEGMENT).write_bytes(content)
        with pytest.raises(TraceFormatError, match="checksum") as caught:
            read_shard(shard)
        assert caught.value.where.endswith(SEGMENT)


def test_headers_alone_are_checked_without_verify(tmp_path: Path) -> None:
    """Without ``verify``, altered columns pass, and everything a header, a size or a count can show is still refused."""
    shard = write_shard(tmp_path / "a")
    flip(1)(shard)
    assert read_shard(shard, verify=False).problems == ()
    passing = {"a bit flipped in the middle", "a bit flipped at the end", "a bit flipped in the header"}
    for number, name in enumerate(sorted(SEGMENTS.keys() - passing)):
        if any(word in name for word in ("sequence", "position", "table", "expert")):
            continue
        shard = write_shard(tmp_path / str(number))
        SEGMENTS[name][0](shard)
        with pytest.raises(TraceFormatError):
            read_shard(shard, verify=False)


def test_rows_outside_the_table_are_refused_on_use(tmp_path: Path) -> None:
    """Without ``verify``, a reference to a row that does not exist is refused when it is followed."""
    shard = write_shard(tmp_path)
    with_column("lists", 4)(shard)
    segment = read_shard(shard, verify=False).segments[1]
    with pytest.raises(TraceFormatError, match="outside the row table"):
        segment.block_lines(segment.header.blocks[0])


def test_all_problems_are_collected(tmp_path: Path) -> None:
    """Inspecting a shard finds everything that is wrong with it, each with its own file, and keeps what can be read."""
    shard = write_shard(tmp_path, forwards=4)
    flip(0.5)(shard)
    (shard / "segment-000002.safetensors").unlink()
    (shard / "segment-000009.safetensors").write_bytes(b"")
    found = inspect_shard(shard)
    assert [(Path(problem.where).name, problem.code) for problem in found.problems] == [
        ("segment-000009.safetensors", Code.SEGMENT_INVALID),
        (SEGMENT, Code.CHECKSUM_MISMATCH),
        ("segment-000002.safetensors", Code.SHARD_INCOMPLETE),
    ]
    assert [segment.header.number for segment in found.segments] == [0, 3]


def test_uncommitted_shard_shows_its_finished_segments(tmp_path: Path) -> None:
    """Without a manifest, whole segments are read, torn ones are problems, and temporary files are nothing."""
    shard = write_shard(tmp_path, forwards=3, committed=False)
    (shard / ".segment-000003.safetensors.tmp").write_bytes(b"half")
    (shard / "segment-000002.safetensors").write_bytes(b"half")
    found = inspect_shard(shard)
    assert found.manifest is None
    assert found.rank == 0
    assert [segment.header.number for segment in found.segments] == [0, 1]
    assert [problem.code for problem in found.problems] == [Code.SEGMENT_INVALID]


def test_nothing_is_mapped_that_is_not_asked_for(tmp_path: Path) -> None:
    """Opening a shard maps no column."""
    for segment in read_shard(write_shard(tmp_path), verify=False).segments:
        assert segment.file._mapped is None


def test_values_have_the_columns_held(tmp_path: Path) -> None:
    """Raw values come back with one column per logical column held, whatever the spans."""
    block = Block(boundary="x", dtype="int64", width=9, spans=((0, 2), (8, 9)), row_start=0, row_count=2, digest_start=0, values_start=0)
    shard = write_shard(tmp_path)
    header = SegmentHeader(format=1, number=1, blocks=(block,))
    forge_segment(shard, 1, header=lambda _: header, columns={"values": np.arange(6, dtype=np.int64)})
    edit_manifest(shard, lambda content: content.update(complete=False))
    segment = read_shard(shard).segments[1]
    kept = segment.block_fingerprints(block)
    assert kept.values_NC is not None
    assert kept.values_NC.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert kept.sketch_N16 is None


def test_shard_folders_are_found_by_rank(tmp_path: Path) -> None:
    """Shard folders are sorted by rank; other names and files are no shards."""
    for name in ("shard-00010", "shard-00002", "shard-100000", "dumps", "shard-1", "shard-00001x"):
        (tmp_path / name).mkdir()
    (tmp_path / "shard-00003").write_text("a file")
    assert [path.name for path in shard_paths(tmp_path)] == ["shard-00002", "shard-00010", "shard-100000"]


def test_committed_run_id(tmp_path: Path) -> None:
    """The run id of a folder is that of any committed shard; unreadable manifests say nothing."""
    assert committed_run_id(tmp_path) == ""
    (tmp_path / "shard-00000").mkdir()
    (tmp_path / "shard-00000/manifest.json").write_text("{")
    write_shard(tmp_path, rank=1, world_size=2, run_id="second")
    assert committed_run_id(tmp_path) == "second"
