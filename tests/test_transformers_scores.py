"""Tests of ``tracer.hosts.transformers_scores``: how one request is called."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny_models import make_model
from tracer.errors import Code, ScoreError
from tracer.format.score_records import ScoreName, ScoreRecord
from tracer.hosts.trainer_scores import collect_trainer
from tracer.hosts.transformers_scores import TransformersForward

pytestmark = pytest.mark.host


def test_only_the_rows_that_predict_the_response_come_back() -> None:
    """Logits of the last prompt token and of every response token, equal to those of a plain call; padding columns are cut."""
    model = make_model("qwen3")
    ids = np.arange(3, 12)
    with torch.no_grad():
        plain = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        found = TransformersForward(model, 500).logits(ids, np.arange(9), 4)
    torch.testing.assert_close(found, plain[-5:], atol=1e-5, rtol=1e-5)
    assert TransformersForward(model, 500).whole(found).shape == (5, 500)


def test_padding_columns_are_out_of_the_normaliser() -> None:
    """With the number of tokens given, columns beyond it change no score."""
    model = make_model("qwen3")
    record = ScoreRecord(request="r", ids=np.arange(3, 12), prompt_length=4)
    cut = collect_trainer(model, record, vocabulary=400, repeats=1)[0].scores[ScoreName.C0].value_R
    whole = collect_trainer(model, record, repeats=1)[0].scores[ScoreName.C0].value_R
    assert (cut > whole).all()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(record.ids)[None], use_cache=False).logits[0, 3:-1, :400]
    expected = logits.log_softmax(-1)[range(5), record.response].numpy()
    np.testing.assert_allclose(cut, expected, atol=1e-5)


def test_a_model_without_logits_is_refused() -> None:
    """A module that returns no logits has no score."""
    model = make_model("qwen3").model
    with pytest.raises(ScoreError) as refused:
        collect_trainer(model, ScoreRecord(request="r", ids=np.arange(3, 12), prompt_length=4))
    assert refused.value.code is Code.SCORES_COLLECT
