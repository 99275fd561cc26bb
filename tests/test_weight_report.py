"""``tracer weights`` as a result: states, rows, verdict."""

from __future__ import annotations

import numpy as np

from tests.sides import Side
from tracer.format.fingerprint import fingerprint_rows
from tracer.read.findings import Finding, FindingCode, Kind, Verdict
from tracer.read.weight_report import WeightState, diff_weights, rows_text

NAME = "lm_head.weight"


def with_rows(seed: int, rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Side:
    """A side that recorded the rows of one weight."""
    side = Side()
    side.set_weight(NAME, seed, rows=len(rows))
    side.weight_rows[NAME] = fingerprint_rows(rows, "float32")
    return side


def test_equal_weights_are_the_same() -> None:
    """Equal weights are identical, every one of them listed."""
    result = diff_weights(Side().trace(), Side().trace())
    assert (result.exit, {line.state for line in result.weights}) == (0, {WeightState.IDENTICAL})


def test_rows_that_differ_are_named() -> None:
    """With rows recorded on both sides the differing rows are named with their distance."""
    rows = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    other = rows.copy()
    other[[3, 40]] *= np.float32(1.01)
    result = diff_weights(with_rows(0, rows).trace(), with_rows(1, other).trace())
    line = next(line for line in result.weights if line.name == NAME)
    assert (result.exit, line.rows_differing, line.first_rows) == (1, 2, (3, 40))
    assert line.distance is not None
    assert line.distance.largest is not None
    assert 0.004 < line.distance.largest < 0.02
    assert rows_text(line).startswith("2 of 64 rows (3, 40), largest distance 0.01")


def test_permuted_rows_are_told() -> None:
    """The same rows in another order are said to be that."""
    rows = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    result = diff_weights(with_rows(0, rows).trace(), with_rows(1, rows[::-1].copy()).trace())
    assert "the same rows in another order" in next(line.text for line in result.weights if line.name == NAME)


def test_what_is_missing_or_unknown_is_no_green() -> None:
    """A parameter of one side only, or without a fingerprint, leaves the verdict open."""
    missing, unknown, none = Side(), Side(), Side()
    del missing.weights[NAME]
    unknown.set_weight(NAME, 0, unknown="repacked")
    none.weights = {}
    for side in (missing, unknown, none):
        assert diff_weights(Side().trace(), side.trace()).verdict is Verdict.COULD_NOT_TELL


def test_copies_that_disagree_are_different() -> None:
    """A side whose copies of a weight disagree is different, whatever the other side has."""
    b = Side()
    b.findings = [Finding(code=FindingCode.REPLICAS_DISAGREE, kind=Kind.DIFFERENCE, boundary=NAME, ranks=(0, 1), text="copies differ")]
    assert diff_weights(Side().trace(), b.trace()).exit == 1
