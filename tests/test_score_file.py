"""Tests of ``tracer.format.score_file``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tracer.errors import Code, ScoreError, TracerError, UsageError
from tracer.format.score_file import read_scores, write_scores
from tracer.format.score_records import (
    SCORE_DTYPES,
    SCORES_METADATA_KEY,
    Logits,
    PolicySegment,
    ScoreDefinition,
    ScoreInfo,
    ScoreKind,
    ScoreName,
    ScoreRecord,
    make_score,
)

INFO = ScoreInfo(
    definition=ScoreDefinition(kind=ScoreKind.PROCESSED, temperature=0.7, settings={"top_k": 20}),
    policies=(PolicySegment(start=0, version="6"), PolicySegment(start=2, version="7")),
    worker="replica 3",
    adapter="lora-a",
    model="0123",
    source="engine 1.0, bfloat16",
)


def records() -> list[ScoreRecord]:
    """Two requests of other lengths, every kind of column."""
    generator = np.random.default_rng(0)
    made = []
    for q, (prompt, response) in enumerate([(3, 5), (1, 0), (2, 4)]):
        values = -generator.random((5, response))
        values[:, -1:] = [[np.nan], [-np.inf], [0.0], [-0.0], [-1e-30]]
        scores = {
            ScoreName.A: make_score(torch.from_numpy(values[0]).bfloat16(), INFO),
            ScoreName.B0: make_score(values[1].astype(np.float16)),
            ScoreName.B1: make_score(values[2].astype(np.float32), argmax=np.arange(response)),
            ScoreName.C0: make_score(values[3]),
        }
        if q == 2:
            del scores[ScoreName.B0]
        made.append(
            ScoreRecord(
                request=f"step7-p2-s{q}",
                ids=generator.integers(0, 1 << 40, prompt + response),
                prompt_length=prompt,
                scores=scores,
                mask=generator.random(response) < 0.5,
                positions=np.arange(prompt + response) + 7,
                group="p2",
                logits=Logits(ScoreName.C0, np.array([1, 3]), generator.random((2, 6)).astype(np.float32)) if q != 1 else None,
            )
        )
    return made


def same(a: ScoreRecord, b: ScoreRecord) -> bool:
    """Everything equal, bit for bit."""
    fields = all(getattr(a, name) == getattr(b, name) for name in ("request", "prompt_length", "group"))
    arrays = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "mask", "positions"))
    scores = sorted(a.scores) == sorted(b.scores) and all(
        (x.dtype, x.info, x.value_R.view(np.int64).tolist()) == (y.dtype, y.info, y.value_R.view(np.int64).tolist())
        and (x.argmax_R is None) == (y.argmax_R is None)
        and np.array_equal(x.argmax_R, y.argmax_R)  # type: ignore[arg-type]
        for x, y in ((a.scores[name], b.scores[name]) for name in a.scores)
    )
    logits = (a.logits is None) == (b.logits is None)
    if a.logits is not None and b.logits is not None:
        logits = (
            a.logits.of is b.logits.of
            and np.array_equal(a.logits.row_L, b.logits.row_L)
            and np.array_equal(a.logits.value_LV, b.logits.value_LV)
        )
    return fields and arrays and scores and logits


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every field and every bit comes back, in any dtype; a folder gives the records of all its files."""
    wrote = records()
    write_scores(tmp_path / "a.safetensors", wrote)
    read = read_scores(tmp_path / "a.safetensors")
    assert [same(a, b) for a, b in zip(wrote, read, strict=True)] == [True] * 3
    write_scores(tmp_path / "b.safetensors", read)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert len(read_scores(tmp_path)) == 6


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    """A score file is a plain safetensors file: dtypes are stored, not widened."""
    path = write_scores(tmp_path / "a.safetensors", records())
    with safe_open(path, "pt") as file:
        found = {name: file.get_slice(name).get_dtype() for name in ("A", "B0", "B1", "C0")}
        assert file.get_tensor("A").shape == (9,)
    assert found == {"A": "BF16", "B0": "F16", "B1": "F32", "C0": "F64"}
    assert set(found.values()) == set(SCORE_DTYPES.values())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """An existing file stays, and neither nothing nor a mixture of dtypes is written."""
    path = write_scores(tmp_path / "a.safetensors", records())
    with pytest.raises(UsageError) as refused:
        write_scores(path, records())
    assert refused.value.code is Code.OUT_IN_USE
    mixed = [*records(), records()[0].with_scores({ScoreName.A: make_score([-1.0] * 5)})]
    for wrong, code in (([], Code.SCORES_NOTHING), (mixed, Code.SCORES_INVALID)):
        with pytest.raises(ScoreError) as refusal:
            write_scores(tmp_path / "b.safetensors", wrong)
        assert refusal.value.code is code
    assert "(first in " in refusal.value.found
    assert not (tmp_path / "b.safetensors").exists()


Damage = Callable[[dict[str, Any], dict[str, Any]], object]
"""Something done to the tensors and the header of a score file."""


def encode(tensors: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """A safetensors file of tensors as ``{"dtype", "shape", "data"}``."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, part in tensors.items():
        entries[name] = {"dtype": part["dtype"], "shape": part["shape"], "data_offsets": (offset, offset + len(part["data"]))}
        offset += len(part["data"])
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(part["data"] for part in tensors.values())


def decode(raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The reverse."""
    length = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:length])
    metadata = entries.pop("__metadata__")
    for entry in entries.values():
        start, stop = entry.pop("data_offsets")
        entry["data"] = raw[length + start : length + stop]
    return entries, metadata


def header(**changes: Any) -> Damage:
    return lambda _, content: content.update(changes)


def record(number: int, **changes: Any) -> Damage:
    return lambda _, content: content["records"][number].update(changes)


def tensor(name: str, **changes: Any) -> Damage:
    return lambda tensors, _: tensors[name].update(changes)


DAMAGES: dict[str, tuple[Damage, Code]] = {
    "another format": (header(format=2), Code.FORMAT_UNSUPPORTED),
    "no format": (lambda _, content: content.pop("format"), Code.SCORES_INVALID),
    "unknown key": (header(extra=1), Code.SCORES_INVALID),
    "unknown score": (record(0, scores={"D0": 0}), Code.SCORES_INVALID),
    "info outside": (record(0, scores={"A": 9}), Code.SCORES_INVALID),
    "negative length": (record(0, tokens=-8), Code.SCORES_INVALID),
    "huge length": (record(0, tokens=1 << 60), Code.SCORES_INVALID),
    "longer prompt": (record(0, prompt_length=9), Code.SCORES_INVALID),
    "no prompt": (record(0, prompt_length=0), Code.SCORES_INVALID),
    "fewer records": (lambda _, content: content["records"].pop(), Code.SCORES_INVALID),
    "argmax without its score": (record(2, argmax=["B1", "C1"]), Code.SCORES_INVALID),
    "more logits": (record(0, logits={"of": "C0", "rows": 3}), Code.SCORES_INVALID),
    "other vocabulary": (header(columns=5), Code.SCORES_INVALID),
    "policies backwards": (lambda _, content: content["infos"][0]["policies"].reverse(), Code.SCORES_INVALID),
    "missing column": (lambda tensors, _: tensors.pop("C0"), Code.SCORES_INVALID),
    "more columns": (lambda tensors, _: tensors.update(D0=tensors["C0"]), Code.SCORES_INVALID),
    "integer scores": (tensor("C0", dtype="I64"), Code.SCORES_INVALID),
    "unknown dtype": (tensor("C0", dtype="F8_E4M3"), Code.SCORES_INVALID),
    "bytes over": (lambda tensors, _: tensors["C0"].update(data=tensors["C0"]["data"] + b"\0" * 8), Code.SCORES_INVALID),
    "two axes": (tensor("C0", shape=(9, 1)), Code.SCORES_INVALID),
    "ids of another dtype": (tensor("ids", dtype="F64"), Code.SCORES_INVALID),
    "negative id": (tensor("ids", data=np.full(15, -1, np.int64).tobytes()), Code.SCORES_INVALID),
    "mask of numbers": (tensor("mask", data=b"\2" * 9), Code.SCORES_INVALID),
    "rows outside": (tensor("logits.rows", data=np.array([1, 9, 1, 3], np.int32).tobytes()), Code.SCORES_INVALID),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_malformed_files_are_refused(name: str, tmp_path: Path) -> None:
    """A header or column that is not what the format says is refused with its code, naming the file."""
    path = write_scores(tmp_path / "a.safetensors", records())
    tensors, metadata = decode(path.read_bytes())
    content = json.loads(metadata[SCORES_METADATA_KEY])
    damage, code = DAMAGES[name]
    damage(tensors, content)
    path.write_bytes(encode(tensors, {SCORES_METADATA_KEY: json.dumps(content)}))
    with pytest.raises(TracerError) as refused:
        read_scores(path)
    assert refused.value.code is code
    assert refused.value.where


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x80\x04\x95", encode({}, {"other": "x"})],
    ids=["empty", "huge header", "no tensors", "pickle", "foreign"],
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    """What is no score file is refused, however it begins; half a file too."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    half = write_scores(tmp_path / "b.safetensors", records())
    half.write_bytes(half.read_bytes()[:-9])
    for wrong in (path, half):
        with pytest.raises(ScoreError) as refused:
            read_scores(wrong)
        assert refused.value.code is Code.SCORES_INVALID


def test_no_file(tmp_path: Path) -> None:
    """A path without score files is a usage error."""
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError) as refused:
            read_scores(path)
        assert refused.value.code is Code.BAD_ARGUMENT
