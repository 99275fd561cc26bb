"""Tests of ``tracer.scores.metrics``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.score_cases import make_batch
from tracer.format.score_records import ScoreName, ScoreRecord, make_score
from tracer.scores.aligning import align_records
from tracer.scores.metrics import compare_pair, limit_of
from tracer.scores.results import PairResult, PairStatus, Thresholds

MARKS = Thresholds(pass_mark=0.01, tail_mark=1.0)


def pair(x: Any, y: Any, *, mask: Any = None, **given: Any) -> PairResult:
    """Two scores of one request."""
    record = ScoreRecord(
        request="r", ids=np.arange(len(x) + 1), prompt_length=1, mask=mask, scores={ScoreName.A: make_score(x), ScoreName.C0: make_score(y)}
    )
    return compare_pair(align_records([record]), ScoreName.A, ScoreName.C0, MARKS, **given)


def test_every_number_by_hand() -> None:
    """Four tokens, computed by hand: differences are x - y, k3 takes d = y - x, percentiles are values that occur."""
    x, y = [-1.0, -0.5, -2.0, -3.0], [-1.5, -0.5, -1.75, -3.25]
    found = pair(x, y)
    d = [0.5, 0.0, -0.25, 0.25]
    assert found.name == "A-C"
    assert found.signed_mean == sum(d) / 4
    assert found.logprob_mae == 0.25
    assert (found.p95, found.p99, found.largest) == (0.5, 0.5, 0.5)
    assert found.probability_mae == pytest.approx(sum(abs(math.exp(a) - math.exp(b)) for a, b in zip(x, y, strict=True)) / 4)
    assert found.k3 == pytest.approx(sum(math.exp(-v) - 1 + v for v in d) / 4)
    assert (found.k3_overflow, found.k3_overflow_float32) == (0, 0)
    assert found.bitwise_differing == 3
    assert found.first_mismatch is not None
    assert (found.first_mismatch.response_index, found.first_mismatch.token) == (0, 1)
    assert found.first_token.logprob_mae == 0.5
    assert found.later_tokens.logprob_mae == pytest.approx(0.5 / 3)
    assert [place.difference for place in found.worst] == [0.5, -0.25, 0.25]
    assert (found.histogram.zero, found.histogram.above, found.histogram.below) == (1, 2, 1)
    assert sum(found.histogram.counts) == 3
    assert [(part.start, part.tokens, part.largest) for part in found.positions] == [(0, 1, 0.5), (1, 1, 0.0), (2, 1, 0.25), (3, 1, 0.25)]


def test_masked_tokens_count_nowhere() -> None:
    """What the mask leaves out is reported apart and moves no other number, whatever it holds."""
    mask = np.array([True, False, True, False])
    found = pair([-1.0, 7.0, -2.0, np.nan], [-1.0, -3.0, -2.0, -1.0], mask=mask)
    assert (found.status, found.tokens, found.logprob_mae, found.largest) == (PairStatus.IDENTICAL, 2, 0.0, 0.0)
    assert (found.masked.tokens, found.masked.logprob_mae) == (1, 10.0)
    assert found.worst == ()
    assert found.first_mismatch is None


def test_k3_overflow_is_reported() -> None:
    """exp(d) beyond float64 makes k3 undefined and is counted; beyond float32 is counted too. Nothing is clipped."""
    found = pair([-1000.0, -100.0, -1.0], [-1.0, -1.0, -1.0])
    assert (found.k3, found.k3_overflow, found.k3_overflow_float32) == (None, 1, 2)
    small = pair([-100.0, -1.0], [-1.0, -1.0])
    assert small.k3 is not None
    assert small.k3 == pytest.approx((math.exp(99) - 1 - 99) / 2)
    assert (small.k3_overflow, small.k3_overflow_float32) == (0, 1)


def test_bits_are_compared_only_within_one_dtype() -> None:
    """-0 and +0 differ in their bits; across dtypes there is no bitwise claim."""
    assert pair(np.array([-0.0, -1.0]), np.array([0.0, -1.0])).bitwise_differing == 1
    other = pair(np.array([-0.5, -1.0], np.float32), np.array([-0.5, -1.0]))
    assert (other.bitwise_differing, other.status) == (None, PairStatus.IDENTICAL)


@pytest.mark.parametrize(
    ("mae", "noise", "status"),
    [
        (0.0, None, PairStatus.IDENTICAL),
        (0.009, None, PairStatus.AGREE),
        (0.0122, None, PairStatus.UNCLEAR),
        (0.0122, 0.008, PairStatus.AGREE),
        (0.03, 0.0, PairStatus.APART),
        (0.03, 0.02, PairStatus.AGREE),
        (0.05, 0.02, PairStatus.APART),
    ],
)
def test_status(mae: float, noise: float | None, status: PairStatus) -> None:
    """A gap agrees up to the pass mark or twice the noise, and is apart beyond twice the larger of the two."""
    sign = np.tile([1.0, -1.0], 50)
    assert pair(-1.0 + mae * sign, -np.ones(100), noise=noise).status is status
    assert limit_of(noise, MARKS) == 2 * max(noise or 0, 0.01)


def test_single_tokens_and_one_sign_are_apart() -> None:
    """One token beyond the tail mark, or a mean of one sign, is apart however small the mean error is."""
    y = -np.ones(1000) - 0.001 * np.tile([1.0, -1.0], 500)
    x = -np.ones(1000)
    assert pair(x, y).status is PairStatus.AGREE
    far = y.copy()
    far[500] = -3.0
    found = pair(x, far)
    assert (found.status, found.far, found.logprob_mae < 0.01) == (PairStatus.APART, 1, True)
    assert pair(x, far, tail_noise=1.5).status is PairStatus.AGREE
    assert pair(x, far, tail_noise=0.2).status is PairStatus.APART
    one_sided = pair(x, x - 0.006)
    assert (one_sided.biased, one_sided.status) == (True, PairStatus.APART)


def test_positions_cover_every_token_once() -> None:
    """Bins by response position hold every valid token once and weigh up to the mean error."""
    batch = make_batch(5, 300, 16)
    batch.mask[:, 7] = False
    table = align_records(batch.records())
    found = compare_pair(table, ScoreName.A, ScoreName.B0, MARKS)
    assert sum(part.tokens for part in found.positions) == found.tokens == 5 * 299
    assert sum(part.tokens * part.logprob_mae for part in found.positions) / found.tokens == pytest.approx(found.logprob_mae)
    assert (found.positions[0].start, found.positions[-1].stop, 7 in {part.start for part in found.positions}) == (0, 300, False)
    assert all(a.stop <= b.start for a, b in zip(found.positions, found.positions[1:], strict=False))


def test_mixed_dtypes_of_one_score() -> None:
    """Requests of one score in other dtypes are compared by value and never called bitwise equal."""
    records = make_batch(2, 4, 16).records()
    records[1] = replace(records[1], scores={**records[1].scores, ScoreName.A: make_score(records[1].scores[ScoreName.B0].value_R)})
    table = align_records(records)
    assert table.dtypes[ScoreName.A] == "mixed"
    assert compare_pair(table, ScoreName.A, ScoreName.B0, MARKS).bitwise_differing is None
