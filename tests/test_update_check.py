"""Tests of ``tracer.scores.update_check``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.score_cases import F64, ToyBatch, log_softmax, make_batch
from tracer.errors import Code, ScoreError
from tracer.format.score_records import PolicySegment, ScoreInfo, ScoreName, ScoreRecord
from tracer.scores.results import UpdateOutcome
from tracer.scores.update_check import UpdateWeights, check_update

OLD = {"layers.0.w": "0", "layers.1.w": "0", "lm_head.w": "0"}
NEW = {"layers.0.w": "1", "layers.1.w": "1", "lm_head.w": "1"}


def sides(batch: ToyBatch, b: F64, c: F64, version: str) -> list[ScoreRecord]:
    """The batch scored by an engine and a trainer with these logits."""
    generator = np.random.default_rng(3)
    made = replace(batch, logits=c, scores={})
    for name, logits in (("B0", b), ("C0", c)):
        made.scores[name] = np.minimum(batch.pick(log_softmax(logits)) + 0.005 * generator.standard_normal(batch.response.shape), -1e-6)
    made.scores |= {"B1": made.scores["B0"], "C1": made.scores["C0"]}
    made.info = {name: ScoreInfo(policies=(PolicySegment(start=0, version=version),)) for name in made.scores}
    kept = []
    for q, record in enumerate(made.records()):
        likely = {"B": b[q].argmax(-1), "C": c[q].argmax(-1)}
        kept.append(record.with_scores({name: replace(score, argmax_R=likely[name.side]) for name, score in record.scores.items()}))
    return kept


def logits() -> tuple[ToyBatch, F64, F64]:
    """A batch, the logits of the old weights, and those of the new ones."""
    batch = make_batch()
    return batch, batch.logits, batch.logits + 0.5 * make_batch(seed=9).logits


CASES = {
    "applied": (True, True, NEW, UpdateOutcome.APPLIED, 0),
    "applied, no fingerprints": (True, True, None, UpdateOutcome.APPLIED, 0),
    "skipped": (False, True, OLD, UpdateOutcome.SKIPPED, 1),
    "skipped, no fingerprints": (False, True, None, UpdateOutcome.SKIPPED, 1),
    "partial": (True, True, {**NEW, "lm_head.w": "0"}, UpdateOutcome.PARTIAL, 1),
    "other bytes": (None, True, {**NEW, "lm_head.w": "2"}, UpdateOutcome.WRONG, 1),
    "half of it, no fingerprints": (None, True, None, UpdateOutcome.PARTIAL, 1),
    "only the engine moved": (True, False, None, UpdateOutcome.WRONG, 1),
    "nothing moved": (False, False, None, UpdateOutcome.NOTHING_MOVED, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_what_became_of_the_update(name: str) -> None:
    """An applied, skipped, partial or wrong update is named, by scores and, where they are given, by fingerprints."""
    b_new, c_new, weights, outcome, exit_code = CASES[name]
    batch, old, new = logits()
    half = old + 0.5 * (new - old)
    b = half if b_new is None else new if b_new else old
    given = UpdateWeights(OLD, weights, OLD, NEW) if weights is not None else UpdateWeights()
    result = check_update(sides(batch, old, old, "6"), sides(batch, b, new if c_new else old, "7"), weights=given)
    assert (result.outcome, result.exit) == (outcome, exit_code), result
    assert result.headline.startswith(f"Update {outcome.value}")
    assert bool(result.not_proven) == (weights is None)
    if name == "partial":
        assert result.sides[0].unchanged == ("lm_head.w",)
        assert any("lm_head.w" in text for text in result.evidence)


def test_the_oracle() -> None:
    """On fixed tokens the most likely token is compared too: how often it moved on each side, and where the sides differ."""
    batch, old, new = logits()
    result = check_update(sides(batch, old, old, "6"), sides(batch, old, new, "7"))
    moved = {side.side: side.argmax_changed for side in result.oracle}
    changed = int((old.argmax(-1) != new.argmax(-1)).sum())
    assert (moved, result.argmax_apart) == ({"B": 0, "C": changed}, (0, changed))
    assert changed > 0


def test_a_gap_from_before_is_not_the_updates() -> None:
    """Where the engines were apart already, the update cannot be judged by its scores."""
    batch, old, new = logits()
    other = make_batch(seed=4).logits
    result = check_update(sides(batch, other, old, "6"), sides(batch, other + new - old, new, "7"))
    assert (result.outcome, result.exit) == (UpdateOutcome.COULD_NOT_TELL, 2)


def test_only_one_batch_can_be_compared() -> None:
    """Other requests, tokens or masks before and after, or a side that is missing, are refused."""
    batch, old, new = logits()
    before, after = sides(batch, old, old, "6"), sides(batch, new, new, "7")
    moved = [replace(after[0], ids=np.roll(after[0].ids, 1)), *after[1:]]
    masked = [replace(after[0], mask=np.arange(48) > 3), *after[1:]]
    bare = [replace(record, scores={ScoreName.B0: record.scores[ScoreName.B0]}) for record in after]
    for wrong, code in (
        (after[1:], Code.SCORES_REQUESTS),
        (moved, Code.SCORES_IDS),
        (masked, Code.SCORES_MASKS),
        (bare, Code.SCORES_REQUESTS),
    ):
        with pytest.raises(ScoreError) as refused:
            check_update(before, wrong)
        assert refused.value.code is code
