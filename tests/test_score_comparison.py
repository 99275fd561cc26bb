"""Tests of ``tracer.scores.score_comparison``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.score_cases import make_batch
from tracer.errors import Code, ScoreError, UsageError
from tracer.format.score_file import write_scores
from tracer.format.score_records import ScoreName
from tracer.scores.results import PairStatus, ScoreResult
from tracer.scores.score_comparison import compare_scores


def test_records_and_files_are_the_same(tmp_path: Path) -> None:
    """Records, one file, a folder and a file per side give the same result; the result is strict JSON."""
    records = make_batch().records()
    result = compare_scores(records)
    write_scores(tmp_path / "all.safetensors", records)
    for side, names in (("rollout", "AB"), ("trainer", "C")):
        (tmp_path / side).mkdir()
        parts = [replace(record, scores={name: score for name, score in record.scores.items() if name.side in names}) for record in records]
        write_scores(tmp_path / side / "scores.safetensors", parts)
    assert compare_scores(tmp_path / "all.safetensors") == result
    assert compare_scores(*records) == result
    assert compare_scores(str(tmp_path / "rollout"), tmp_path / "trainer") == result
    assert msgspec.json.decode(msgspec.json.encode(result), type=ScoreResult) == result


def test_what_was_compared_is_counted() -> None:
    """Requests, valid and masked tokens and requests without any are counted; each score says what it is."""
    batch = make_batch(4, 10, 32)
    batch.mask[0, 3:] = False
    batch.mask[2] = False
    result = batch.compare()
    counts = result.counts
    assert (counts.requests, counts.tokens, counts.masked, counts.without_tokens, counts.groups) == (4, 23, 17, ("r2",), 2)
    assert [(score.score.value, score.dtype, score.definitions) for score in result.scores] == [
        (name, "float32", ("unknown",)) for name in ("A", "B0", "B1", "C0", "C1")
    ]
    assert [pair.tokens for pair in (*result.repeats, *result.pairs)] == [23] * 5
    assert {pattern.request for pattern in result.sequences} == {"r0", "r1", "r3"}


def test_identical_scores() -> None:
    """All sides equal, bit for bit: exit 0 and said so, with no class of a difference that is not there."""
    result = make_batch(noise=0.0).compare()
    assert (result.exit, {pair.status for pair in result.pairs}) == (0, {PairStatus.IDENTICAL})
    assert result.headline.startswith("Scores agree, bit for bit")


def test_log_lines() -> None:
    """One line per pair and metric on request, its fields without spaces; metrics keep their names."""
    batch = make_batch()
    batch.scores["A"] = batch.scores["A"] - 0.1
    assert batch.compare().log_lines == ()
    lines = batch.compare(log={"run": "nightly 7", "step": "40"}).log_lines
    assert len(lines) == 5 * 3
    names = {"run", "step", "policy", "input", "phase", "rank", "repeat", "scope", "intervention", "metric", "value", "reference"}
    for line in lines:
        assert line.startswith("[mismatch] ")
        fields = dict(part.split("=", 1) for part in line.split()[1:])
        assert set(fields) == names | {"self_repeat", "report", "classification"}
        assert (fields["run"], fields["policy"], fields["classification"]) == ("nightly_7", "unknown", "defect")
    found = next(line for line in lines if "metric=logprob_mae" in line and "reference=A-B0" in line)
    value = re.search(r" value=(\S+)", found)
    assert value is not None
    assert float(value[1]) == pytest.approx(0.1, abs=0.01)


def test_marks_move_the_verdict() -> None:
    """A wider pass mark accepts a gap, a narrower one refuses it; marks that are no numbers of nats are usage errors."""
    batch = make_batch(noise=0.03)
    assert (batch.compare().exit, batch.compare(pass_mark=0.05).exit) == (1, 0)
    wrongs: list[dict[str, Any]] = [{"pass_mark": 0.0}, {"tail_mark": float("nan")}, {"pass_mark": float("inf")}]
    for wrong in wrongs:
        with pytest.raises(UsageError) as refused:
            compare_scores(batch.records(), **wrong)
        assert refused.value.code is Code.BAD_ARGUMENT


def test_nothing_is_an_error() -> None:
    """No records, or one score alone, is never equal."""
    with pytest.raises(ScoreError) as refused:
        compare_scores([])
    assert refused.value.code is Code.SCORES_NOTHING
    with pytest.raises(ScoreError) as alone:
        compare_scores([replace(record, scores={ScoreName.A: record.scores[ScoreName.A]}) for record in make_batch().records()])
    assert alone.value.code is Code.SCORES_NOTHING


def test_one_far_token_among_many_is_not_equal() -> None:
    """A single wrong token in thousands moves no mean and is found all the same."""
    batch = make_batch(64, 128, 16)
    batch.scores["A"] = batch.scores["A"].copy()
    batch.scores["A"][17, 90] -= 4
    result = batch.compare()
    assert (result.exit, result.decision.side) == (1, "A")
    assert result.pairs[0].logprob_mae < 0.01
    assert (result.sequences[0].request, result.sequences[0].first, result.sequences[0].differing) == ("r17", 90, 1)
    assert np.isclose(abs(result.pairs[0].worst[0].difference), 4, atol=0.1)
