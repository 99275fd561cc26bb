"""Tests of ``tracer.format.dumps``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

from tracer.errors import Code, TracerError
from tracer.format.container import Column, write_columns
from tracer.format.dumps import (
    DumpBlock,
    DumpHeader,
    DumpPlan,
    DumpWriter,
    PlanBoundary,
    PlanSide,
    dump_name,
    read_dump,
    read_plan,
    write_plan,
)
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import FORMAT_VERSION, Sequence

ROWS, COLUMNS = 3, 5


def a_block(dtype: str, boundary: str = "residual", columns: int = COLUMNS, **changes: Any) -> DumpBlock:
    """A block of three whole rows."""
    return DumpBlock(**{"boundary": boundary, "dtype": dtype, "width": columns, "forward": 0, "rows": ROWS, **changes})


def add(writer: DumpWriter, block: DumpBlock, values: torch.Tensor, expert_N: np.ndarray | None = None) -> np.ndarray:
    """Add rows of sequence 1 from position 4 on; their raw bytes."""
    raw: np.ndarray = values.contiguous().view(torch.uint8).numpy()
    digest = fingerprint_rows(raw, block.dtype, width=block.width, spans=block.spans).digest_N2
    writer.add(block, digest, raw, np.full(ROWS, 1), np.arange(4, 4 + ROWS), expert_N)
    return raw


def a_writer(out: Path, **changes: Any) -> DumpWriter:
    writer = DumpWriter(out, 2, "run", "dump=*", 1000, **changes)
    for label in ("s0", "s1"):
        writer.open_sequence(Sequence(label=label))
    return writer


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Bytes, digests and places of every dtype survive the file, values decode to float32, and safetensors reads it too."""
    writer = a_writer(tmp_path)
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    kinds = ["bfloat16", "float32", "float16", "float64", "float8_e4m3fn", "float8_e5m2fnuz", "int64", "uint8", "bool"]
    raws = [add(writer, a_block(kind), values.to(getattr(torch, kind))) for kind in kinds]
    raws.append(add(writer, a_block("float32", "expert", spans=((0, 2), (7, 10)), width=12), values, np.array([3, 0, 3])))
    (info,) = writer.finish()
    assert info.rows == ROWS * (len(kinds) + 1)

    file = read_dump(tmp_path / "dumps" / info.file, info)
    assert [sequence.label for sequence in file.header.sequences] == ["s1"]
    assert (file.header.bytes, file.header.why, file.header.rank) == (sum(raw.nbytes for raw in raws), "dump=*", 2)
    for number, (kind, raw) in enumerate(zip(kinds, raws, strict=False)):
        rows = file.rows(number)
        np.testing.assert_array_equal(rows.raw_NB, raw)
        assert not rows.altered().any()
        assert (rows.position_N.tolist(), rows.sequence_N.tolist()) == ([4, 5, 6], [0, 0, 0])
        np.testing.assert_array_equal(rows.float32(), values.to(getattr(torch, kind)).float().numpy())
    experts = file.rows(len(kinds))
    assert experts.expert_N is not None
    assert experts.expert_N.tolist() == [3, 0, 3]
    assert not experts.altered().any()
    with safe_open(tmp_path / "dumps" / info.file, framework="pt") as opened:
        assert torch.equal(opened.get_tensor("0.values"), values.bfloat16())


def test_files_are_finished_by_size_and_the_last_counts_everything(tmp_path: Path) -> None:
    """Beyond the flush size a file is finished; the last one, even empty, holds the plan and all counts."""
    plan = DumpPlan(format=1, boundaries=(), max_bytes=1, a=PlanSide(run_id="x", host="h"), b=PlanSide(run_id="y", host="h"))
    writer = a_writer(tmp_path, plan=plan, flush_bytes=1)
    add(writer, a_block("float32"), torch.ones(ROWS, COLUMNS))
    writer.left_out["lm_head"] = 7
    infos = writer.finish()
    assert [info.file for info in infos] == [dump_name(2, 0), dump_name(2, 1)]
    first, last = (read_dump(tmp_path / "dumps" / info.file, info).header for info in infos)
    assert (first.plan, first.left_out, last.plan, last.left_out, last.blocks) == (None, {}, plan, {"lm_head": 7}, ())


@pytest.mark.parametrize("damage", ["checksum", "torn", "layout", "extra", "header", "gone", "sequence"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    """An altered, torn, foreign or missing file raises its own error that names the file."""
    writer = a_writer(tmp_path)
    add(writer, a_block("float32"), torch.ones(ROWS, COLUMNS))
    (info,) = writer.finish()
    path = tmp_path / "dumps" / info.file
    raw, wanted, listed = path.read_bytes(), Code.SEGMENT_INVALID, None
    if damage == "checksum":
        path.write_bytes(raw[:-1] + b"\xff")
        wanted, listed = Code.CHECKSUM_MISMATCH, info
    elif damage == "torn":
        path.write_bytes(raw[:-1])
    elif damage == "gone":
        path.unlink()
        wanted, listed = Code.SHARD_INCOMPLETE, info
    elif damage == "sequence":
        path.write_bytes(raw.replace(np.zeros(ROWS, "<i4").tobytes(), np.full(ROWS, 9, "<i4").tobytes()))
    else:
        header = read_dump(path).header
        blocks = (a_block("float32", columns=6),) if damage == "layout" else () if damage == "extra" else header.blocks
        changed: object = msgspec.structs.replace(header, blocks=blocks)
        if damage == "header":
            changed = {**msgspec.to_builtins(header), "unknown": 1}
        path.unlink()
        columns = [Column("0.digest", "U64", 2), Column("0.values", "F32", COLUMNS)]
        columns += [Column(f"0.{name}", "I32") for name in ("sequence", "position")]
        parts = {column.name: [np.zeros(column.shape(ROWS), column.dtype)] for column in columns}
        write_columns(path, changed, columns, dict.fromkeys(parts, ROWS), parts)  # type: ignore[arg-type]
    with pytest.raises(TracerError) as caught:
        read_dump(path, listed).rows(0)
    assert (caught.value.code, info.file in str(caught.value)) == (wanted, True)


def test_bytes_that_changed_are_told_row_by_row(tmp_path: Path) -> None:
    """A row whose bytes are not those of its digest is named, whatever the checksum says."""
    writer = a_writer(tmp_path)
    raw = torch.ones(ROWS, COLUMNS).view(torch.uint8).numpy().copy()
    digest = fingerprint_rows(raw, "float32").digest_N2
    raw[1, 3] ^= 1
    writer.add(a_block("float32"), digest, raw, np.zeros(ROWS, np.int64), np.arange(ROWS), None)
    (info,) = writer.finish()
    assert read_dump(tmp_path / "dumps" / info.file, info).rows(0).altered().tolist() == [False, True, False]


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """A plan is read as it was written; no file, other JSON and another format are refused."""
    rows = PlanBoundary(boundary="lm_head", output=True, keys=("00" * 8,), differing=1, digests_a=("11" * 16,), places_a=((0, 3),))
    side = PlanSide(run_id="x", host="h", sequences=(("", "s0"),))
    plan = DumpPlan(format=1, boundaries=(rows,), max_bytes=64, a=side, b=side)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    for text, code in [('{"format": 1}', Code.MANIFEST_INVALID), ('{"format": 9}', Code.FORMAT_UNSUPPORTED), ("", Code.MANIFEST_INVALID)]:
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(TracerError) as caught:
            read_plan(tmp_path / "other.json")
        assert caught.value.code is code
    with pytest.raises(TracerError) as caught:
        read_plan(tmp_path / "none.json")
    assert caught.value.code is Code.BAD_ARGUMENT


def test_headers_are_of_this_format() -> None:
    """A header states the format number that readers check first."""
    header = DumpHeader(format=FORMAT_VERSION, number=0, run_id="r", rank=0, why="plan", blocks=(), max_bytes=0, bytes=0)
    assert msgspec.json.decode(msgspec.json.encode(header), type=DumpHeader) == header
