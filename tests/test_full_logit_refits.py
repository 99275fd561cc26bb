"""Tests of ``tracer.scores.full_logit_refits``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.score_cases import F64, ToyBatch, log_softmax, make_batch
from tracer.format.score_records import ScoreName
from tracer.scores.aligning import align_records
from tracer.scores.full_logit_refits import gather_logits, logit_refits
from tracer.scores.refits import best_refit
from tracer.scores.results import Refit, RefitKind

LIMIT = 0.02


def refits(batch: ToyBatch, x: str = "A") -> list[Refit]:
    table = align_records(batch.records(logits=True))
    logits = gather_logits(table)
    assert logits is not None
    return logit_refits(table, logits, ScoreName(x), LIMIT)


def top_k(batch: ToyBatch) -> F64:
    """Renormalised over the 20 most likely; tokens outside are exchanged for the most likely one first."""
    kept = np.partition(batch.logits, -20, axis=-1)[..., -20:-19]
    batch.ids[:, batch.prompt :] = np.where(batch.pick(batch.logits) < kept[..., 0], batch.logits.argmax(axis=-1), batch.response)
    return batch.pick(log_softmax(np.where(batch.logits < kept, -np.inf, batch.logits)))


def top_p(batch: ToyBatch) -> F64:
    """Renormalised over the smallest set that reaches 0.8."""
    p = np.exp(log_softmax(batch.logits))
    order = np.argsort(-p, axis=-1)
    before = np.take_along_axis(np.cumsum(np.take_along_axis(p, order, -1), -1), np.argsort(order, -1), -1) - p
    held = before < 0.8
    batch.ids[:, batch.prompt :] = np.where(batch.pick(held), batch.response, batch.logits.argmax(axis=-1))
    return batch.pick(log_softmax(np.where(held, batch.logits, -np.inf)))


def shard(batch: ToyBatch) -> F64:
    """The normaliser of the label's own quarter of the vocabulary: never above 0."""
    lse = np.log(np.exp(batch.logits).reshape(*batch.logits.shape[:2], 4, -1).sum(axis=-1))
    scores: F64 = batch.pick(batch.logits) - np.take_along_axis(lse, batch.response[..., None] // 32, axis=-1)[..., 0]
    return scores


def padded(batch: ToyBatch) -> F64:
    return batch.pick(log_softmax(np.concatenate([batch.logits, np.zeros((*batch.logits.shape[:2], 64))], axis=-1)))


def labels(batch: ToyBatch) -> F64:
    full = log_softmax(batch.logits)
    return np.take_along_axis(full, np.roll(batch.response, -1, axis=1)[..., None], axis=-1)[..., 0]


CASES: dict[str, tuple[Callable[[ToyBatch], F64], RefitKind, str]] = {
    "temperature 0.8": (lambda batch: batch.pick(log_softmax(batch.logits / 0.8)), RefitKind.TEMPERATURE, "T = 0.8"),
    "temperature 0.9": (lambda batch: batch.pick(log_softmax(batch.logits / 0.9)), RefitKind.TEMPERATURE, "T = 0.9"),
    "temperature 1.3": (lambda batch: batch.pick(log_softmax(batch.logits / 1.3)), RefitKind.TEMPERATURE, "T = 1.3"),
    "top-k": (top_k, RefitKind.KEPT_SET, "top_k = 20"),
    "top-p": (top_p, RefitKind.KEPT_SET, "top_p = 0.8"),
    "shard": (shard, RefitKind.SHARD, "the label's shard of 4"),
    "padding": (padded, RefitKind.EXTRA_MASS, "64 columns of zeros"),
    "labels": (labels, RefitKind.LABELS, "+1 token"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("score", ["A", "C0"])
def test_the_cause_is_named(name: str, score: str) -> None:
    """Each way of turning logits into a score is named with its parameter, on either side of the pair."""
    spoil, kind, parameter = CASES[name]
    batch = make_batch(8, 32, noise=0.0)
    batch.scores[score] = spoil(batch)
    found = refits(batch, score)
    best = best_refit(found)
    assert best is not None
    assert best.kind is kind, found
    assert parameter in best.parameter
    own = [refit for refit in found if refit.kind is RefitKind.OWN_LOGITS]
    assert [refit.matched for refit in own] == ([True] if score == "C0" else [])


def test_honest_scores_need_no_refit() -> None:
    """Scores that are those of the logits, up to noise, are not explained by anything."""
    batch = make_batch()
    assert refits(batch) == []
    own = refits(batch, "C0")
    assert [(refit.kind, refit.matched) for refit in own] == [(RefitKind.OWN_LOGITS, False)]


def test_other_weights_match_nothing() -> None:
    """Scores of other weights are no way of scoring these logits."""
    batch = make_batch(seed=0)
    other = make_batch(seed=1)
    batch.scores["A"] = batch.pick(log_softmax(batch.logits + 0.5 * other.logits))
    assert best_refit(refits(batch)) is None


def test_no_logits_no_refits() -> None:
    """Records without logits, or with none of a valid token, give None."""
    batch = make_batch(2, 4, 16)
    assert gather_logits(align_records(batch.records())) is None
    records = batch.records(logits=True)
    for record in records:
        assert record.logits is not None
        record.logits.value_LV[:] = np.nan
    assert gather_logits(align_records(records)) is None
