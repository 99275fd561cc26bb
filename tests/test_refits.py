"""Tests of ``tracer.scores.refits``: every cause that scores alone can name, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.score_cases import F64, ToyBatch, make_batch
from tracer.format.score_records import ScoreName
from tracer.scores.aligning import align_records
from tracer.scores.refits import best_refit, score_refits
from tracer.scores.results import Refit, RefitKind

LIMIT = 0.02


def refits(batch: ToyBatch, x: str = "A", y: str = "B0") -> list[Refit]:
    return score_refits(align_records(batch.records()), ScoreName(x), ScoreName(y), LIMIT)


def offset(a: F64) -> F64:
    return a - 0.1


def offset_from_one(a: F64) -> F64:
    return a - 0.1 * (np.arange(a.shape[1]) > 0)


def zeros(a: F64) -> F64:
    a = a.copy()
    a[1, 7] = a[2, 3] = a[2, 30] = 0.0
    return a


def places(a: F64) -> F64:
    a = a.copy()
    a[:, [4, 28]] -= 3
    return a


def above_everywhere(a: F64) -> F64:
    return np.minimum(a + np.random.default_rng(2).uniform(0.1, 1.0, a.shape), -0.001)


CASES: dict[str, tuple[Callable[[F64], F64], RefitKind, str]] = {
    "offset": (offset, RefitKind.OFFSET, "nats on every token"),
    "offset from the second token": (offset_from_one, RefitKind.OFFSET, "from response token 1 on"),
    "moved left": (lambda a: np.roll(a, -1, axis=1), RefitKind.SHIFT, "+1 token"),
    "moved right": (lambda a: np.roll(a, 1, axis=1), RefitKind.SHIFT, "-1 token"),
    "zeros": (zeros, RefitKind.MISSING, "3 tokens, first r1:7"),
    "fixed places": (places, RefitKind.PLACES, "tokens 12, 36 of the sequence"),
    "chunks": (
        lambda a: np.concatenate([a[:, 12 * n : 12 * n + 12] for n in (0, 3, 1, 2)], axis=1),
        RefitKind.CHUNKS,
        "chunks [0, 3, 1, 2]",
    ),
    "above everywhere": (above_everywhere, RefitKind.KEPT_SET, "A - B0 from"),
    "scaled": (lambda a: 0.7 * a, RefitKind.FACTOR, "0.7 times"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named(name: str) -> None:
    """Each planted cause matches, with its parameter, and wins over the others."""
    spoil, kind, parameter = CASES[name]
    batch = make_batch()
    batch.scores["A"] = spoil(batch.scores["A"])
    found = best_refit(refits(batch))
    assert found is not None
    assert found.kind is kind
    assert parameter in found.parameter
    assert (found.score, found.reference) == (ScoreName.A, "B0")
    assert found.after <= LIMIT


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a,
        lambda a: np.minimum(a + 0.3 * np.random.default_rng(1).standard_normal(a.shape), -1e-3),
        lambda a: a[::-1],
        lambda a: np.minimum(a * 1.4 + 0.2, -1e-3),
    ],
    ids=["honest", "noise", "other requests", "slope"],
)
def test_nothing_is_named_where_nothing_fits(spoil: Callable[[F64], F64]) -> None:
    """Honest noise, large noise, exchanged requests and a slope match no cause."""
    batch = make_batch()
    batch.scores["A"] = spoil(batch.scores["A"])
    assert best_refit(refits(batch)) is None


def test_chance_on_the_fitted_half_is_no_match() -> None:
    """What fits half of the tokens by accident is refuted by the other half."""
    batch = make_batch(4, 40)
    odd = (np.arange(4)[:, None] + np.arange(40)) % 2 == 1
    batch.scores["A"] = np.where(odd, batch.scores["A"] - 2 * np.random.default_rng(0).random((4, 40)), batch.scores["A"] - 0.1)
    assert best_refit(refits(batch)) is None
