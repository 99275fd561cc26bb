"""Rows of both sides as numbers: recorded values, small rows out of sketches, sketches."""

from __future__ import annotations

import numpy as np

from tests.sides import Side
from tracer.read.compare import Comparison, compare_boundary
from tracer.read.matched import MOST_ROWS, recorded_rows, spread
from tracer.read.pairing import pair_sides

NAME = "layers.1.attn.out"


def compared(a: Side, b: Side, name: str) -> tuple[Comparison, np.ndarray]:
    """One boundary of two sides, and the positions of A's tokens."""
    x, y = a.trace(), b.trace()
    return compare_boundary(x.boundaries[name], y.boundaries[name], pair_sides(x, y).tokens), x.tokens.position_K


def test_small_rows_are_exact_and_wide_ones_are_sketches() -> None:
    """Eight router logits come back as they are; 32 columns are stood for by 16 buckets, with the squares of the whole row."""
    b = Side(moe=True)
    b.change("layers.1.moe.router_logits", "s0:2", "s1:1")
    b.change(NAME, "s0:2", "s1:1")
    comparison, position = compared(Side(moe=True), b, "layers.1.moe.router_logits")
    rows = recorded_rows(comparison, comparison.differing, position)
    assert rows is not None
    assert (rows.exact, rows.source, rows.a_NC.shape, rows.position_N.tolist()) == (True, "recorded values", (2, 8), [2, 1])
    np.testing.assert_array_equal(rows.b_NC, b.values["layers.1.moe.router_logits"].rows[[2, 8]].astype(np.float64))
    comparison, position = compared(Side(moe=True), b, NAME)
    rows = recorded_rows(comparison, comparison.differing, position)
    assert rows is not None
    assert (rows.exact, rows.source, rows.a_NC.shape) == (False, "sketches", (2, 16))
    np.testing.assert_allclose(rows.squares_b_N, (b.values[NAME].rows[[2, 8]].astype(np.float64) ** 2).sum(axis=1))


def test_rows_that_are_not_finite_are_left_out() -> None:
    """A row with a NaN stands for nothing; without any other row there is nothing to explain."""
    b = Side()
    b.change(NAME, "s0:2")
    b.values[NAME].rows[4, 3] = np.nan
    comparison, position = compared(Side(), b, NAME)
    rows = recorded_rows(comparison, comparison.differing, position)
    assert rows is not None
    assert (len(rows), rows.total) == (1, 2)
    assert recorded_rows(comparison, comparison.differing[1:], position) is None


def test_many_rows_are_thinned_evenly() -> None:
    """No more rows than explanations look at, from the first to the last."""
    chosen = spread(np.arange(100_000), MOST_ROWS)
    assert (len(chosen), chosen[0], chosen[-1]) == (MOST_ROWS, 0, 99_999)
    assert spread(np.arange(5), MOST_ROWS).tolist() == [0, 1, 2, 3, 4]
