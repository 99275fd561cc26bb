"""Score files: written in one step, read back whole.

Refused: a file that is no safetensors file, has other columns than its header implies, or other lengths or dtypes;
unknown keys in the header; ids below 0; a mask other than 0 and 1; logits that belong to no response token; a format number
other than this one's. Nothing that exists is ever overwritten.
Equal records make equal files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, ScoreError, UsageError
from tracer.format.container import write_in_one_step
from tracer.format.score_records import (
    SCORE_DTYPES,
    SCORES_METADATA_KEY,
    SCORES_VERSION,
    Logits,
    LogitsHeader,
    RecordHeader,
    Score,
    ScoreInfo,
    ScoreName,
    ScoreRecord,
    ScoresHeader,
)

__all__ = ["read_scores", "score_files", "write_scores"]

Array = npt.NDArray[Any]

_INTEGERS = {"ids": "I64", "positions": "I32", "mask": "U8", "logits.rows": "I32", "logits": "F32"}
_NUMPY = {"I64": "<i8", "I32": "<i4", "U8": "|u1", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
_MAX_HEADER_BYTES = 100_000_000
_NAMES = {code: name for name, code in SCORE_DTYPES.items()}


def write_scores(path: str | os.PathLike[str], records: Iterable[ScoreRecord]) -> Path:
    """Write records to one file, whole or not at all; returns its path.

    A score has one dtype per file: records that differ in it go to several files. Raises ScoreError (scores-invalid,
    scores-nothing), UsageError (out-in-use) where the file exists, CaptureError (write-failed).
    """
    target, kept = Path(path), list(records)
    if not kept:
        raise ScoreError(Code.SCORES_NOTHING, "there is no record to write", where=str(target))
    if target.exists():
        raise UsageError(Code.OUT_IN_USE, "the score file exists", where=str(target), remedy="choose another name, or delete it yourself")
    infos: dict[bytes, int] = {}
    distinct: list[ScoreInfo] = []

    def entry(info: ScoreInfo) -> int:
        key = msgspec.json.encode(info)
        if key not in infos:
            infos[key] = len(distinct)
            distinct.append(info)
        return infos[key]

    widths = {record.logits.value_LV.shape[1] for record in kept if record.logits is not None}
    if len(widths) > 1:
        raise _invalid(target, "logits of one file have one vocabulary", "one width", ", ".join(map(str, sorted(widths))))
    headers = tuple(
        RecordHeader(
            request=record.request,
            group=record.group,
            tokens=len(record.ids),
            prompt_length=record.prompt_length,
            scores={name: entry(score.info) for name, score in sorted(record.scores.items())},
            argmax=tuple(sorted(name for name, score in record.scores.items() if score.argmax_R is not None)),
            logits=None if record.logits is None else LogitsHeader(of=record.logits.of, rows=len(record.logits.row_L)),
        )
        for record in kept
    )
    header = ScoresHeader(format=SCORES_VERSION, records=headers, infos=tuple(distinct), columns=next(iter(widths), 0))
    entries: dict[str, Any] = {"__metadata__": {SCORES_METADATA_KEY: msgspec.json.encode(header).decode()}}
    columns, offset = dict(_columns(target, kept)), 0
    for name in sorted(columns, key=lambda name: -columns[name][1].itemsize):  # wide ones first, so that all are aligned
        code, array = columns[name]
        entries[name] = {"dtype": code, "shape": array.shape, "data_offsets": (offset, offset + array.nbytes)}
        offset += array.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    parts = [columns[name][1].reshape(-1).view(np.uint8) for name in entries if name in columns]
    write_in_one_step(target, [len(text).to_bytes(8, "little") + text, *parts])
    return target


def _columns(target: Path, records: list[ScoreRecord]) -> Iterable[tuple[str, tuple[str, Array]]]:
    """Name -> safetensors dtype and the stored array."""
    yield "ids", ("I64", np.concatenate([record.ids for record in records]).astype("<i8"))
    yield "positions", ("I32", np.concatenate([record.positions for record in records]).astype("<i4"))
    yield "mask", ("U8", np.concatenate([record.mask for record in records]).astype(np.uint8))
    for name in ScoreName:
        scores = [record.scores[name] for record in records if name in record.scores]
        dtypes = sorted({score.dtype for score in scores})
        if len(dtypes) > 1:
            first = {record.scores[name].dtype: record.request for record in reversed(records) if name in record.scores}
            found = ", ".join(f"{dtype} (first in {first[dtype]})" for dtype in dtypes)
            raise _invalid(target, f"score {name.value} has one dtype per file", "one dtype", found)
        if scores:
            values = np.concatenate([score.value_R for score in scores])
            yield name.value, (SCORE_DTYPES[dtypes[0]], _narrow(values, dtypes[0]))
            kept = [score.argmax_R for score in scores if score.argmax_R is not None]
            if kept:
                yield f"{name.value}.argmax", ("I64", np.concatenate(kept).astype("<i8"))
    logits = [record.logits for record in records if record.logits is not None]
    if logits:
        yield "logits.rows", ("I32", np.concatenate([found.row_L for found in logits]).astype("<i4"))
        yield "logits", ("F32", np.concatenate([found.value_LV for found in logits]).astype("<f4"))


def _narrow(values: Array, dtype: str) -> Array:
    """float64 that came from ``dtype``, back in it."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        return values.astype(np.dtype(dtype).newbyteorder("<"))


def score_files(path: str | os.PathLike[str]) -> list[Path]:
    """The file itself, or every ``.safetensors`` file of a folder by name. Raises UsageError (bad-argument) for neither."""
    given = Path(path)
    found = sorted(given.glob("*.safetensors")) if given.is_dir() else [given] if given.is_file() else []
    if not found:
        raise UsageError(
            Code.BAD_ARGUMENT, "there are no score records", where=str(given), expected="a .safetensors file, or a folder with some"
        )
    return found


def read_scores(path: str | os.PathLike[str]) -> list[ScoreRecord]:
    """Every record of a file, or of all files of a folder. Arrays are views of one copy of the file.

    Raises ScoreError (scores-invalid), TraceFormatError never; UsageError (bad-argument) where there is no file.
    """
    return [record for file in score_files(path) for record in _read_file(file)]


@dataclass
class _Reader:
    """Hands out the columns of a file part by part; ``rest`` must be empty at the end."""

    path: Path
    columns: Mapping[str, Array]
    at: dict[str, int]

    def take(self, name: str, count: int) -> Array:
        start = self.at.get(name, 0)
        column = self.columns.get(name)
        if column is None or start + count > len(column):  # else a slice would be short in silence
            raise _invalid(
                self.path,
                f"column {name} is shorter than the header says",
                f"{start + count} or more",
                len(column) if column is not None else "none",
            )
        self.at[name] = start + count
        return column[start : start + count]

    def finish(self) -> None:
        for name, column in self.columns.items():
            if self.at.get(name, 0) != len(column):
                raise _invalid(self.path, f"column {name} is longer than the header says", self.at.get(name, 0), len(column))


def _read_file(path: Path) -> list[ScoreRecord]:
    try:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        if len(raw) < 8 or length > min(len(raw) - 8, _MAX_HEADER_BYTES):
            raise _invalid(path, "torn, its header is not whole", f"{length + 8} bytes or more", len(raw))
        parts = msgspec.json.decode(raw[8 : 8 + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        text = metadata.get(SCORES_METADATA_KEY)
        if text is None:
            raise _invalid(path, "not a score file", f"metadata key {SCORES_METADATA_KEY}", ", ".join(metadata) or "none")
        number = msgspec.json.decode(text, type=_Probe).format
        if number != SCORES_VERSION:
            raise ScoreError(
                Code.FORMAT_UNSUPPORTED,
                "the score file has a format that this version cannot read",
                where=str(path),
                expected=f"score format {SCORES_VERSION}",
                found=str(number),
                remedy="read it with the tracer version that wrote it",
            )
        header = msgspec.json.decode(text, type=ScoresHeader)
        stored = {name: msgspec.json.decode(part, type=_Tensor) for name, part in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise _invalid(path, "no score file, or a damaged one", found=error) from error
    _check_layout(path, stored, len(raw) - 8 - length)
    columns, dtypes = {}, {}
    for name, tensor in stored.items():
        start, stop = tensor.data_offsets
        columns[name], dtypes[name] = _column(path, name, tensor, raw[8 + length + start : 8 + length + stop], header.columns)
    _check_columns(path, columns, header)
    reader = _Reader(path, columns, dict.fromkeys(columns, 0))
    records = [_record(reader, dtypes, entry, header) for entry in header.records]
    reader.finish()
    return records


def _check_columns(path: Path, columns: Mapping[str, Array], header: ScoresHeader) -> None:
    """What every record must fulfil, over all of them at once."""
    for name, column in columns.items():
        if column.dtype == np.int64 and column.size and column.min() < 0:
            raise _invalid(path, f"column {name} holds numbers below 0", "0 or more", int(column.min()))
    for info in header.infos:
        starts = [segment.start for segment in info.policies]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            raise _invalid(path, "policies of a score", "ascending starts from 0 on", starts)


class _Probe(msgspec.Struct):
    format: int


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def _check_layout(path: Path, stored: Mapping[str, _Tensor], size: int) -> None:
    """Columns cover the rest of the file, in file order, without gaps or overlaps, each as long as its shape says."""
    end = 0
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].data_offsets):
        itemsize = np.dtype(_NUMPY[tensor.dtype]).itemsize if tensor.dtype in _NUMPY else 0
        expected = (end, end + math.prod(tensor.shape) * itemsize)
        if tensor.data_offsets != expected or not itemsize:
            raise _invalid(path, f"column {name} is not laid out as a score file's", expected, f"{tensor.dtype} at {tensor.data_offsets}")
        end = expected[1]
    if end != size:
        raise _invalid(path, "torn or padded", f"{end} bytes of columns", size)


def _column(path: Path, name: str, tensor: _Tensor, data: bytes, width: int) -> tuple[Array, str]:
    """One column as numpy (scores as float64), and its dtype's name."""
    score = name in ScoreName.__members__
    code, shape = tensor.dtype, tensor.shape
    integers = {**_INTEGERS, **{f"{found}.argmax": "I64" for found in ScoreName.__members__}}
    expected = ", ".join(_NAMES) if score else integers.get(name, "no such column")
    if (code not in _NAMES) if score else (code != expected):
        raise _invalid(path, f"column {name}", expected, code)
    if len(shape) != (2 if name == "logits" else 1) or (name == "logits" and shape[1] != width):
        raise _invalid(path, f"column {name} has another shape", f"(rows, {width})" if name == "logits" else "one axis", shape)
    array = np.frombuffer(data, _NUMPY[code]).reshape(shape)
    if name == "mask" and array.size and array.max() > 1:
        raise _invalid(path, "the mask holds something else than 0 and 1", "0 or 1", array.max())
    if not score:
        return array.astype(np.int64) if code == "I32" else array, ""
    if code == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64), _NAMES[code]


def _record(reader: _Reader, dtypes: Mapping[str, str], entry: RecordHeader, header: ScoresHeader) -> ScoreRecord:
    response = entry.tokens - entry.prompt_length
    if response < 0 or entry.prompt_length < 1:
        raise _invalid(
            reader.path, f"request {entry.request}: length of the prompt", f"1 to {entry.tokens}, the number of tokens", entry.prompt_length
        )
    take, infos, argmax = reader.take, header.infos, entry.argmax
    scores = {}
    for name, number in entry.scores.items():
        if number >= len(infos):
            raise _invalid(reader.path, f"request {entry.request}: score {name.value} points outside infos", len(infos), number)
        likely = take(f"{name.value}.argmax", response) if name in argmax else None
        column = _COLUMNS[name]
        scores[name] = Score(take(column, response), dtypes[column], infos[number], likely)
    if argmax and not set(argmax) <= set(entry.scores):
        raise _invalid(
            reader.path, f"request {entry.request}: argmax of a score that is not there", ", ".join(entry.scores), ", ".join(entry.argmax)
        )
    logits = None
    if entry.logits is not None:
        rows = take("logits.rows", entry.logits.rows)
        logits = Logits(entry.logits.of, rows, take("logits", entry.logits.rows))
    fields: dict[str, Any] = {
        "request": entry.request,
        "ids": take("ids", entry.tokens),
        "prompt_length": entry.prompt_length,
        "scores": scores,
        "mask": take("mask", response).view(np.bool_),
        "positions": take("positions", entry.tokens),
        "group": entry.group,
        "logits": logits,
    }
    # Checked in full only where something is left to check: ten thousand short records are read at once.
    return ScoreRecord(**fields) if logits is not None else ScoreRecord.of_checked(**fields, info=_UNKNOWN)


_UNKNOWN = ScoreInfo()
_COLUMNS = {name: name.value for name in ScoreName}


def _invalid(path: Path, what: str, expected: object = "", found: object = "") -> ScoreError:
    return ScoreError(
        Code.SCORES_INVALID,
        f"{path.name}: {what}",
        where=str(path),
        expected=str(expected),
        found=str(found),
        remedy="write the score file again from where the scores come from",
    )
