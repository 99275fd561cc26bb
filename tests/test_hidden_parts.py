"""Tests of ``tracer.scores.hidden_parts``: what is apart in a part alone is said, and noise is not taken for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.score_cases import ToyBatch, make_batch
from tracer.format.score_records import ScoreInfo, ScoreRecord
from tracer.scores.results import Branch, PairStatus, ScoreResult
from tracer.scores.score_comparison import compare_scores


def of_workers(batch: ToyBatch, workers: int) -> list[ScoreRecord]:
    """The records with the requests dealt out to so many workers of A."""
    return [
        replace(
            record,
            scores={
                name: replace(score, info=ScoreInfo(worker=f"w{q % workers}" if name == "A" else ""))
                for name, score in record.scores.items()
            },
        )
        for q, record in enumerate(batch.records())
    ]


def first_tokens(batch: ToyBatch) -> None:
    batch.scores["A"][:, 0] -= 0.3


def last_place(batch: ToyBatch) -> None:
    batch.scores["A"][:, -1] -= 0.3


def one_worker(batch: ToyBatch) -> None:
    batch.scores["A"][1::16] -= 0.08


def one_request(batch: ToyBatch) -> None:
    batch.scores["A"][5] -= 0.4


PARTS = {"first response tokens": first_tokens, "response token": last_place, "worker w1 of A": one_worker, "request r5": one_request}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_part_alone_makes_its_pair_apart(name: str, seed: int) -> None:
    """A fault that the mean over all tokens hides is told with its place, whatever the seed; the half of the system is right."""
    batch = make_batch(64, 48, 32, seed=seed)
    batch.scores["A"] = batch.scores["A"].copy()
    PARTS[name](batch)
    result = compare_scores(of_workers(batch, 16))
    assert result.pairs[0].logprob_mae < 0.02
    assert any(name in text for text in result.pairs[0].hidden), result.pairs[0].hidden
    assert (result.exit, result.decision.branch, result.decision.side) == (1, Branch.GENERATION, "A")


@pytest.mark.parametrize("noise", [(0.009, 0.0), (0.004, 0.004), (0.009, 0.008)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_noise_has_no_parts(noise: tuple[float, float], seed: int) -> None:
    """Honest scores of several workers have no part that is apart."""
    result = compare_scores(of_workers(make_batch(64, 48, 32, noise=noise[0], repeat=noise[1], seed=seed), 16))
    assert [pair.hidden for pair in result.pairs] == [(), (), ()]
    assert result.exit == 0


def heavy(batch: ToyBatch, generator: np.random.Generator) -> ScoreResult:
    """A few tokens far off on every pass, others each time (routing flips)."""
    shape = batch.response.shape
    for name in batch.scores:
        tail = np.clip(0.3 * generator.standard_t(3, shape), -3, 3) * (generator.random(shape) < 0.02)
        batch.scores[name] = np.minimum(batch.scores[name] + tail, -1e-6)
    return batch.compare()


@pytest.mark.parametrize("seed", range(4))
def test_a_heavy_tail_is_noise_where_the_repeats_have_it(seed: int) -> None:
    """Tokens that are far off on repeats as well point at no side: the answer is the repeats, or agreement."""
    result = heavy(make_batch(32, 48, 32, noise=0.002, seed=seed), np.random.default_rng(seed))
    assert result.decision.branch in (Branch.REPEATS, Branch.AGREE), result.headline
    assert all(pair.status is not PairStatus.APART for pair in result.pairs)


def test_one_far_token_is_told_beside_quiet_repeats() -> None:
    """One token 8 nats off among thousands is apart, also where the repeats have tails of half a nat."""

    batch = make_batch(64, 48, 32)
    batch.scores["B1"] = batch.scores["B1"].copy()
    batch.scores["B1"][2, 2] -= 0.5
    batch.scores["A"] = batch.scores["A"].copy()
    batch.scores["A"][3, 7] -= 8
    result = batch.compare()
    assert (result.exit, result.decision.side) == (1, "A")
