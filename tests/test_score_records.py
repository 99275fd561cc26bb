"""Tests of ``tracer.format.score_records``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tracer.errors import Code, ScoreError
from tracer.format.score_records import (
    Logits,
    PolicySegment,
    Score,
    ScoreDefinition,
    ScoreInfo,
    ScoreKind,
    ScoreName,
    ScoreRecord,
    make_score,
)

RAW = ScoreDefinition(kind=ScoreKind.RAW)


def test_defaults_of_a_record() -> None:
    """Without mask and positions all of the response counts, and positions are 0, 1, 2."""
    record = ScoreRecord(request="r", ids=[5, 6, 7, 8], prompt_length=2, scores={"A": [-1.0, -2.0]}, info=ScoreInfo(definition=RAW))  # type: ignore[arg-type, dict-item]
    assert record.mask is not None
    assert record.positions is not None
    assert (record.mask.tolist(), record.positions.tolist(), record.response.tolist()) == ([True, True], [0, 1, 2, 3], [7, 8])
    assert record.scores[ScoreName.A].info.definition == RAW
    more = record.with_scores({ScoreName.B0: make_score([-1.0, -2.5])})
    assert (set(record.scores), set(more.scores)) == ({ScoreName.A}, {ScoreName.A, ScoreName.B0})


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([-0.1, -0.2], "float64"),  # 0.1 is no float32
        ([-0.5, float(np.float32(-0.2)), None], "float32"),
        (np.array([-0.1], np.float16), "float16"),
        (np.array([-0.1], np.float64), "float64"),
        (torch.tensor([-0.1, -0.2], dtype=torch.bfloat16, requires_grad=True), "bfloat16"),
        (torch.tensor([-0.1]), "float32"),
    ],
    ids=["list", "list from float32", "float16", "float64", "bfloat16 tensor", "tensor"],
)
def test_the_dtype_is_kept(values: Any, dtype: str) -> None:
    """A score keeps the dtype it was handed over in and exactly its numbers; plain numbers become float32 where that is exact."""
    score = make_score(values)
    assert (score.dtype, score.value_R.dtype.name) == (dtype, "float64")
    plain = values if isinstance(values, list) else values.tolist()
    np.testing.assert_array_equal(score.value_R, [np.nan if value is None else value for value in plain])


def test_definitions_have_one_meaning() -> None:
    """Temperature 1 is raw; what is unknown equals nothing."""
    one = ScoreDefinition(kind=ScoreKind.TEMPERATURE)
    assert one.meaning() == RAW.meaning() is not None
    assert ScoreDefinition().meaning() is None
    warm = ScoreDefinition(kind=ScoreKind.PROCESSED, temperature=0.7, settings={"top_k": 20})
    assert (RAW.text(), warm.text(), ScoreDefinition(kind=ScoreKind.TEMPERATURE, temperature=0.7).text()) == (
        "raw",
        "processed (temperature=0.7, top_k=20)",
        "temperature 0.7",
    )


GOOD: dict[str, Any] = {"request": "r", "ids": [5, 6, 7, 8], "prompt_length": 2, "scores": {"A": [-1.0, -2.0]}}
POLICIES = ScoreInfo(policies=(PolicySegment(start=1, version="7"),))


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": [5.0, 6.5, 7.0, 8.0]},
        {"ids": [5, -6, 7, 8]},
        {"ids": [[5, 6, 7, 8]]},
        {"prompt_length": 0},
        {"prompt_length": 5},
        {"scores": {"D": [-1.0, -2.0]}},
        {"scores": {"A": [-1.0]}},
        {"scores": {"A": np.array([-1, -2])}},
        {"scores": {"A": np.zeros((2, 1))}},
        {"scores": {"A": make_score([-1.0, -2.0], argmax=[3])}},
        {"scores": {"A": Score(np.zeros(2), "float32", POLICIES)}},
        {"mask": [True]},
        {"positions": [0, 1]},
        {"logits": Logits(ScoreName.C0, np.array([0, 2]), np.zeros((2, 4), np.float32))},
        {"logits": Logits(ScoreName.C0, np.array([1, 0]), np.zeros((2, 4), np.float32))},
        {"logits": Logits(ScoreName.C0, np.array([0]), np.zeros((2, 4), np.float32))},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    """Lengths, names, dtypes and logits that do not fit together are refused with a code."""
    with pytest.raises(ScoreError) as refused:
        ScoreRecord(**GOOD | changes)
    assert refused.value.code is Code.SCORES_INVALID
