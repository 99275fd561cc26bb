"""Choices that differ: scores out of sketches, gaps in ulps, ties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.material import dumped
from tests.sides import Side
from tracer.read.choices import ChoiceReport, describe_choices, scores_of_rows, ulps_between
from tracer.read.compare import compare_boundary
from tracer.read.pairing import pair_sides

SCORES, IDS = "layers.1.moe.router_logits", "layers.1.moe.topk_ids"


def described(a: Side, b: Side, *, scores: bool = True) -> ChoiceReport:
    """Describe the choice of layer 1."""
    x, y = a.trace(), b.trace()
    tokens = pair_sides(x, y).tokens
    choice, by = (compare_boundary(x.boundaries[name], y.boundaries[name], tokens) for name in (IDS, SCORES))
    report = describe_choices(choice, by if scores else None)
    assert report is not None
    return report


def chosen(side: Side, row: str, ids: list[int], scores: list[float] | None = None) -> Side:
    """Set the ids, and the scores, of one row."""
    side.values[IDS].rows[side.at(row)] = ids
    if scores is not None:
        side.values[SCORES].rows[side.at(row)] = scores
    return side


def pair(scores: list[float]) -> tuple[Side, Side]:
    """Two sides that choose {2, 5} and {2, 6} by the same scores."""
    return chosen(Side(moe=True), "s1:1", [2, 5], scores), chosen(Side(moe=True), "s1:1", [2, 6], scores)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(0, 2**32 - 1))
def test_scores_come_back_exactly(columns: int, seed: int) -> None:
    """Up to 16 columns the sketch gives every score back, bit for bit."""
    side = Side(moe=True)
    rows = np.random.default_rng(seed).standard_normal((len(side), columns)).astype(np.float32)
    side.values[SCORES].rows = rows
    found = scores_of_rows(side.trace().boundaries[SCORES], np.arange(len(side)))
    assert found is not None
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_neighbours_are_one_ulp_apart(dtype: str) -> None:
    """Two neighbouring numbers of a dtype differ by one ulp, equal ones by none."""
    bits = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype]
    x = np.array([1.5, -1.5, 1.5])
    y = np.array([1.5 - 2.0**-bits, -1.5 - 2.0**-bits, 1.5])
    assert ulps_between(x, y, dtype).tolist() == [1.0, 1.0, 0.0]


def test_a_tie_is_a_gap_of_zero_on_both_sides() -> None:
    """Equal scores of the experts that were swapped are a tie."""
    report = described(*pair([0, 0, 9, 0, 0, 4, 4, 0]))
    assert (report.tokens, report.ties, report.largest_gap_ulps) == (1, 1, None)
    assert "a tie" in report.text()


def test_a_gap_is_told_and_the_wrong_side_named() -> None:
    """Where the scores decide, the gap is counted and the side that chose against its own scores is named."""
    report = described(*pair([0, 0, 9, 0, 0, 4, float(np.float32(4) - np.float32(2**-21)), 0]))
    assert (report.ties, report.largest_gap_ulps, report.not_top_a, report.not_top_b) == (0, 1.0, 0, 1)


def test_scores_that_do_not_decide_are_said_so() -> None:
    """Where both sides chose against the recorded scores, something else decides, and no gap is claimed."""
    a, b = pair([9, 8, 9, 9, 9, 4, 9, 0])
    assert described(a, b).not_top_a == 1
    chosen(a, "s0:1", [2, 3], [0, 0, 9, 9, 0, 0, 0, 0])
    chosen(b, "s0:1", [0, 1], [0, 0, 9, 9, 0, 0, 0, 0])
    assert "a bias or groups" in described(a, b).unknown


def test_the_same_set_in_another_order_is_no_flip() -> None:
    """Ids that only changed places are counted apart."""
    a, b = chosen(Side(moe=True), "s1:1", [2, 5]), chosen(Side(moe=True), "s1:1", [5, 2])
    report = described(a, b)
    assert (report.tokens, report.reordered) == (0, 1)
    assert "another order" in report.text()


def test_without_scores_the_gap_is_unknown() -> None:
    """Scores that were not recorded, are too many, or are not finite leave the gap unknown, with the reason."""
    a, b = pair([0, 0, 9, 0, 0, 4, 4, 0])
    assert "not recorded" in described(a, b, scores=False).text()
    nan = pair([0, 0, 9, 0, 0, 4, float("nan"), 0])
    assert "not finite" in described(*nan).text()
    wide = pair([0, 0, 9, 0, 0, 4, 4, 0])
    for side in wide:
        side.values[SCORES].rows = np.pad(side.values[SCORES].rows, ((0, 0), (0, 12)))
    assert "20 scores per row" in described(*wide).text()


def test_more_scores_than_a_sketch_holds_come_from_dumps() -> None:
    """Dumped scores of a router with more experts than a sketch tells apart give the same gap; without those of the token there is none."""
    a, b = pair([0, 0, 9, 0, 0, 4, 4, 0])
    for side, row in ((a, [2, 5]), (b, [2, 19])):
        side.values[SCORES].rows = np.pad(side.values[SCORES].rows, ((0, 0), (0, 12)))
        side.values[SCORES].rows[side.at("s1:1"), 19] = np.float32(4) - np.float32(2**-21)
        side.values[SCORES].rows[side.at("s1:1"), 6] = 0
        chosen(side, "s1:1", row)
    x, y = a.trace(), b.trace()
    tokens = pair_sides(x, y).tokens
    choice, by = (compare_boundary(x.boundaries[name], y.boundaries[name], tokens) for name in (IDS, SCORES))
    report = describe_choices(choice, by, (dumped(a, x, SCORES), dumped(b, y, SCORES)))
    assert report is not None
    assert (report.tokens, report.ties, report.largest_gap_ulps, report.not_top_a, report.not_top_b) == (1, 0, 1.0, 0, 1)
    other = describe_choices(choice, by, (dumped(a, x, SCORES), dumped(b, y, SCORES, ["s0:1"])))
    assert other is not None
    assert "were not dumped" in other.unknown
