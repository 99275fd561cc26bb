"""The score faults of the catalogue: planted in records of a real model, and answered with the branch of the row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.planters import faults, scoring
from tests.planters.core import Fault
from tests.planters.faults import FAULTS
from tracer.format.score_records import Logits, ScoreName, ScoreRecord
from tracer.scores.results import Branch, LogClass, RefitKind, ScoreResult
from tracer.scores.score_comparison import compare_scores

SCORED = {fault.id: fault for fault in FAULTS.values() if fault.kind == "scores"}
EXPECTED = {
    "F42": (Branch.SCORING, "A", RefitKind.TEMPERATURE, "T = 0.7"),
    "F43": (Branch.SCORING, "A", RefitKind.KEPT_SET, "top_k = 20"),
    "F44": (Branch.GENERATION, "A", RefitKind.MISSING, "3 tokens, first r1:7"),
    "F45": (Branch.SCORING, "C", RefitKind.EXTRA_MASS, "64 columns of zeros"),
    "F46": (Branch.SCORING, "C", RefitKind.PLACES, "tokens 12, 36 of the sequence"),
    "F47": (Branch.SCORING, "C", RefitKind.CHUNKS, "chunks [0, 3, 1, 2]"),
    "F52": (Branch.AGREE, "", None, ""),
}


@pytest.fixture(scope="module", autouse=True)
def sampled_once() -> Iterator[None]:
    """Most rows damage the same honest records: sampling them once is enough, as no row writes into them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "score_records", cache(scoring.score_records))
        yield


def compare(planted: dict[str, Any], *, logits: bool) -> ScoreResult:
    """Compare the planted records, with or without the trainer's full logits."""
    start = planted["response_start"]
    return compare_scores(
        ScoreRecord(
            request=f"r{q}",
            ids=ids,
            prompt_length=start,
            scores={ScoreName(name): planted[name][q] for name in ("A", "B0", "B1", "C0", "C1")},
            logits=Logits(ScoreName.C0, np.arange(len(ids) - start), planted["logits_C"][q].numpy()) if logits else None,
        )
        for q, ids in enumerate(planted["tokens"])
    )


def test_every_row_is_here() -> None:
    """Every score fault of the catalogue has an expected answer."""
    assert set(EXPECTED) == set(SCORED)


@pytest.mark.parametrize("fault", SCORED.values(), ids=lambda fault: fault.id)
def test_fault_is_named(fault: Fault) -> None:
    """Branch, side, cause and its parameter are those of the row; without full logits the side and the verdict still are."""
    planted = fault.build()
    branch, side, cause, parameter = EXPECTED[fault.id]
    result = compare(planted, logits=True)
    decision = result.decision
    assert (decision.branch, decision.side, decision.cause) == (branch, side, cause), (result.headline, result.refits)
    assert result.exit in fault.exit
    assert decision.klass is (LogClass.NUMERICAL if cause is None else LogClass.DEFECT)
    if cause is not None:
        assert any(refit.kind is cause and refit.matched and parameter in refit.parameter for refit in result.refits), result.refits
    without = compare(planted, logits=False)
    assert (without.exit, without.decision.side) == (result.exit, side)
