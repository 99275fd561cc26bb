"""Shapes that a difference of values can have, each fitted on half of the rows and tested on the other half.

A shape holds if on the rows not used to find it, it leaves at most an eighth of the difference. Rounding leaves all of it,
so no shape of this module fits ordinary noise. Simple shapes come first: the first that holds is the answer.

Shape suffixes: N rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.read.findings import Shape
from tracer.read.matched import MatchedRows
from tracer.read.wording import count

__all__ = ["Found", "kept_length", "one_sided", "some_columns", "spans_text", "value_shape"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_LEFT = 1 / 8
"""Share of the difference that a shape may leave, in root mean square over the tested rows."""
_CLEAR = 2.0**-18
"""Relative differences below this are of the size of the sketches' own rounding."""
_FEW_COLUMNS = 4
_ENOUGH_ROWS = 8
_MOST_RANK = 64
_ELEMENTS = 64
_SIGMAS = 6.0
_MANY_ROUNDINGS = 16
_SPANS_SHOWN = 4


@dataclass(frozen=True)
class Found:
    """A shape that holds. Fields as in ``Explanation``. ``source``: empty where whoever asked knows it."""

    shape: Shape
    text: str
    fitted: int
    tested: int
    misfit: float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class _Halves:
    """Rows to fit on and rows to test on. With a single row its columns are halved instead, for shapes of one number."""

    a_fit: F64
    b_fit: F64
    a_test: F64
    b_test: F64

    @classmethod
    def of(cls, a_NC: F64, b_NC: F64) -> _Halves:
        if len(a_NC) == 1:
            return cls(a_NC[:, ::2], b_NC[:, ::2], a_NC[:, 1::2], b_NC[:, 1::2])
        return cls(a_NC[::2], b_NC[::2], a_NC[1::2], b_NC[1::2])

    def misfit(self, predicted: F64) -> float:
        """What a prediction of the tested rows leaves of the difference, root mean square over rows; inf where nothing is tested."""
        return _misfit(predicted, self.a_test, self.b_test)


def _misfit(predicted_NC: F64, a_NC: F64, b_NC: F64) -> float:
    """Error of a prediction of B, of the difference or of B itself, whichever is smaller: a vanishing B is no ratio of A."""
    left_NC = b_NC - predicted_NC
    whole = np.linalg.norm(b_NC - a_NC, axis=1)
    whole = np.minimum(whole, np.maximum(np.linalg.norm(b_NC, axis=1), 1e-6 * whole))
    rows = whole > 0
    if not rows.any():
        return float("inf")
    share = np.linalg.norm(left_NC[rows], axis=1) / whole[rows]
    return float(np.sqrt(np.mean(np.minimum(share, 1.0) ** 2)))


def value_shape(rows: MatchedRows) -> Found | None:
    """The simplest shape of values that holds: zero, a sign, a ratio, a vector, a ratio per row or column, low rank."""
    a_NC, b_NC = rows.a_NC, rows.b_NC
    apart = np.linalg.norm(b_NC - a_NC, axis=1) > 0
    a_NC, b_NC = a_NC[apart], b_NC[apart]
    if not len(a_NC) or (not rows.exact and not _is_clear(a_NC, b_NC)):
        return None
    halves = _Halves.of(a_NC, b_NC)
    if not halves.a_test.size:
        return None
    shapes: tuple[Callable[[MatchedRows, _Halves], Found | None], ...] = (_zero, _constant_ratio)
    if len(a_NC) > 1:
        shapes += (_constant_vector, _row_ratio, _column_ratio, _low_rank)
    for shape in shapes:
        found = shape(rows, halves)
        if found is not None:
            return found
    return None


def _is_clear(a_NC: F64, b_NC: F64) -> bool:
    """Whether the difference is more than the rounding of float32 sketches."""
    size = np.maximum(np.linalg.norm(a_NC, axis=1), np.linalg.norm(b_NC, axis=1))
    return bool(np.median(np.linalg.norm(b_NC - a_NC, axis=1)) > _CLEAR * np.median(size))


def _zero(rows: MatchedRows, halves: _Halves) -> Found | None:
    for side, fit, test, other in (("B", halves.b_fit, halves.b_test, halves.a_test), ("A", halves.a_fit, halves.a_test, halves.b_test)):
        if not fit.any() and not test.any() and other.any():
            return Found(Shape.ZERO, f"{side} is all zero", len(fit), len(test), 0.0, {"side": side.lower()})
    return None


def _constant_ratio(rows: MatchedRows, halves: _Halves) -> Found | None:
    if halves.a_fit.shape[1] * len(halves.a_fit) < 2:
        return None
    energy = float((halves.a_fit**2).sum())
    if energy == 0:
        return None
    ratio = float((halves.a_fit * halves.b_fit).sum()) / energy
    misfit = halves.misfit(ratio * halves.a_test)
    if misfit > _LEFT:
        return None
    tested = len(halves.a_test)
    if abs(ratio + 1) <= 4 * rows.epsilon:
        return Found(Shape.SIGN, "B is A with the sign flipped", len(halves.a_fit), tested, misfit, {"ratio": -1.0})
    digits = 7 if misfit < 1e-4 else 4
    return Found(
        Shape.CONSTANT_RATIO, f"constant ratio: B is A times {ratio:.{digits}g}", len(halves.a_fit), tested, misfit, {"ratio": ratio}
    )


def _constant_vector(rows: MatchedRows, halves: _Halves) -> Found | None:
    if len(halves.a_fit) < 2 or len(halves.a_test) < 2:
        return None
    vector = (halves.b_fit - halves.a_fit).mean(axis=0)
    misfit = halves.misfit(halves.a_test + vector)
    if misfit > _LEFT:
        return None
    text = "one constant vector: B is A plus the same row everywhere"
    parameters = {"length": float(np.linalg.norm(vector))}
    if rows.exact and np.ptp(vector) <= 4 * rows.epsilon * abs(float(vector.mean())):
        parameters = {"value": float(vector.mean())}
        text = f"constant offset: B is A plus {vector.mean():.4g}"
    return Found(Shape.CONSTANT_VECTOR, text, len(halves.a_fit), len(halves.a_test), misfit, parameters)


def _ratios(a_NC: F64, b_NC: F64, axis: int) -> F64:
    """Best ratio per row (axis 1) or column (axis 0), 1 where A is zero."""
    energy = (a_NC**2).sum(axis=axis)
    product = (a_NC * b_NC).sum(axis=axis)
    ratios: F64 = np.divide(product, energy, out=np.ones_like(product), where=energy > 0)
    return ratios


def _row_ratio(rows: MatchedRows, halves: _Halves) -> Found | None:
    """One ratio per row: of every row half of the columns give the ratio, the others are tested, where there are enough."""
    columns = halves.a_fit.shape[1]
    if columns < 2 or (columns <= _FEW_COLUMNS and len(halves.a_test) < _ENOUGH_ROWS):
        return None
    ratio_fit = _ratios(halves.a_fit, halves.b_fit, 1)
    known, tested = (slice(0, None, 2), slice(1, None, 2)) if columns > _FEW_COLUMNS else (slice(None), slice(None))
    ratio_test = _ratios(halves.a_test[:, known], halves.b_test[:, known], 1)
    misfit = _misfit((ratio_test[:, None] * halves.a_test)[:, tested], halves.a_test[:, tested], halves.b_test[:, tested])
    if misfit > _LEFT:
        return None
    ratios = np.concatenate([ratio_fit, ratio_test])
    low, high = float(ratios.min()), float(ratios.max())
    always = ", always below 1" if high < 1 else ", always above 1" if low > 1 else ""
    text = f"one ratio per row: {low:.4g} to {high:.4g}{always}"
    parameters: dict[str, Any] = {"low": low, "high": high}
    if rows.exact and columns <= 64:
        sums = [side.sum(axis=1) for side in (rows.a_NC, rows.b_NC)]
        for side, total in zip("AB", sums, strict=True):
            if (np.abs(total - 1) <= 4 * rows.epsilon).all():
                other = sums[1 if side == "A" else 0]
                text += f"; rows of {side} sum to 1, those of the other side to {other.min():.2f} to {other.max():.2f}"
                parameters["sums_to_one"] = side.lower()
                break
    return Found(Shape.ROW_RATIO, text, len(halves.a_fit), len(halves.a_test), misfit, parameters)


def _column_ratio(rows: MatchedRows, halves: _Halves) -> Found | None:
    if not rows.exact or len(halves.a_fit) < 3 or len(halves.a_test) < 3:
        return None
    ratio_C = _ratios(halves.a_fit, halves.b_fit, 0)
    misfit = halves.misfit(ratio_C * halves.a_test)
    if misfit > _LEFT:
        return None
    moved = np.flatnonzero(np.abs(ratio_C - 1) > 4 * rows.epsilon)
    if len(moved) and (np.abs(ratio_C[moved] + 1) <= 4 * rows.epsilon).all():
        text = f"sign flipped in columns {spans_text(moved)}"
        return Found(Shape.SIGN, text, len(halves.a_fit), len(halves.a_test), misfit, {"columns": moved.tolist()[:64]})
    low, high = float(ratio_C.min()), float(ratio_C.max())
    text = f"one ratio per column: {low:.4g} to {high:.4g}"
    if len(moved) and np.ptp(ratio_C[moved]) <= 8 * rows.epsilon * abs(float(ratio_C[moved].mean())):
        text = f"ratio {ratio_C[moved].mean():.4g} in columns {spans_text(moved)}"
    return Found(Shape.COLUMN_RATIO, text, len(halves.a_fit), len(halves.a_test), misfit, {"low": low, "high": high, "columns": len(moved)})


def _low_rank(rows: MatchedRows, halves: _Halves) -> Found | None:
    """Few directions carry the difference, and the rows themselves need at least twice as many."""
    fit, test = len(halves.a_fit), len(halves.a_test)
    if fit < _ENOUGH_ROWS or test < _ENOUGH_ROWS:
        return None
    most = min(fit // 2, halves.a_fit.shape[1] // 2, _MOST_RANK)
    rank, misfit = _rank(halves.b_fit - halves.a_fit, halves.b_test - halves.a_test, most)
    if rank is None:
        return None
    own, _ = _rank(halves.a_fit, halves.a_test, 2 * rank - 1)
    if own is not None:
        return None
    return Found(Shape.LOW_RANK, f"low rank: the difference has rank {rank}", fit, test, misfit, {"rank": rank})


def _rank(fit_NC: F64, test_NC: F64, most: int) -> tuple[int | None, float]:
    """Least number of directions of some rows that hold all but an eighth of the others, at most so many."""
    fit_NC, test_NC = _unit(fit_NC), _unit(test_NC)
    if not len(fit_NC) or not len(test_NC) or most < 1:
        return None, float("inf")
    values, vectors = np.linalg.eigh(fit_NC @ fit_NC.T)
    order = np.argsort(values)[::-1][:most]
    order = order[values[order] > 1e-12 * max(float(values.max()), 1e-300)]
    directions_KC = (vectors[:, order] / np.sqrt(values[order])).T @ fit_NC
    held_NK = (test_NC @ directions_KC.T) ** 2
    left_K = np.sqrt(np.maximum(1.0 - np.cumsum(held_NK, axis=1), 0.0).mean(axis=0))
    if not len(left_K) or left_K.min() > _LEFT:
        return None, float("inf")
    rank = int(np.flatnonzero(left_K <= max(1.5 * left_K.min(), 1e-6))[0]) + 1  # what further directions add is rounding
    return rank, float(left_K[rank - 1])


def _unit(rows_NC: F64) -> F64:
    """The rows that are not zero, each of length 1."""
    length = np.linalg.norm(rows_NC, axis=1)
    kept: F64 = rows_NC[length > 0] / length[length > 0, None]
    return kept


# ---------------------------------------------------------------- beside the value shapes


def one_sided(rows: MatchedRows) -> Found | None:
    """No element of one side is larger than the other's. Where only sums of squares are known: the rows of one side are
    shorter on average, beyond chance, by more than a sixteenth of a rounding. Only differences near rounding: of a large one
    it says nothing."""
    squares_a_N, squares_b_N = rows.squares_a_N, rows.squares_b_N
    size = np.sqrt(np.maximum(squares_a_N, squares_b_N))
    apart = np.linalg.norm(rows.b_NC - rows.a_NC, axis=1)
    close = apart <= _MANY_ROUNDINGS * rows.epsilon * size
    if not close.mean() > 1 / 2:
        return None
    if rows.exact:
        found = _one_sided_elements(rows)
        if found is not None:
            return found
    usable = close & (squares_a_N > 0)
    if usable.sum() < 2 * _ENOUGH_ROWS:
        return None
    longer_N = (squares_b_N[usable] / squares_a_N[usable] - 1) / 2
    biases = [_bias(longer_N[start::2]) for start in (0, 1)]
    if min(abs(mean) for mean, _ in biases) < rows.epsilon / 16 or biases[0][0] * biases[1][0] < 0:
        return None
    if min(sigmas for _, sigmas in biases) < _SIGMAS:
        return None
    mean = float(longer_N.mean())
    text = f"one-sided: rows of B are {'longer' if mean > 0 else 'shorter'} by {abs(mean):.2%} on average, which rounding to nearest is not"
    tested = len(longer_N) // 2
    return Found(Shape.ONE_SIDED, text, len(longer_N) - tested, tested, None, {"mean_ratio": 1 + mean, "sigmas": biases[1][1]})


def _bias(values: F64) -> tuple[float, float]:
    """Mean, and by how many standard errors it is off zero."""
    error = float(values.std()) / np.sqrt(len(values))
    mean = float(values.mean())
    return mean, abs(mean) / error if error > 0 else float("inf")


def _one_sided_elements(rows: MatchedRows) -> Found | None:
    halves = _Halves.of(rows.a_NC, rows.b_NC)
    for what, measure in (("in magnitude", np.abs), ("", lambda values: values)):
        up_fit = _sides(measure(halves.b_fit) - measure(halves.a_fit))
        up_test = _sides(measure(halves.b_test) - measure(halves.a_test))
        if min(len(up_fit), len(up_test)) < _ELEMENTS or up_fit.mean() not in (0.0, 1.0) or not (up_test == up_fit[0]).all():
            continue
        larger = "A" if up_fit[0] else "B"
        ratio = float(np.abs(rows.b_NC).sum() / np.abs(rows.a_NC).sum())
        text = f"one-sided: no element of {larger} is larger{' ' + what if what else ''}, mean ratio {ratio:.5g}"
        return Found(Shape.ONE_SIDED, text, len(halves.a_fit), len(halves.a_test), 0.0, {"mean_ratio": ratio, "elements": len(up_test)})
    return None


def _sides(difference_NC: F64) -> Bools:
    """Of the elements that differ, whether B is above."""
    return np.asarray(difference_NC[difference_NC != 0] > 0)


def kept_length(rows: MatchedRows) -> Found | None:
    """Rows that differ widely and yet are as long: rotated or permuted. Exact rows tell the smallest block that keeps its length."""
    squares_a_N, squares_b_N = rows.squares_a_N, rows.squares_b_N
    size = np.sqrt(np.maximum(squares_a_N, squares_b_N))
    apart = np.linalg.norm(rows.b_NC - rows.a_NC, axis=1)
    wide = apart > 2 * _MANY_ROUNDINGS * rows.epsilon * size
    if wide.sum() < 4 or wide.mean() < 1 / 2:
        return None
    if not _kept(squares_a_N[wide], squares_b_N[wide], rows.epsilon).all():
        return None
    tested = int(wide.sum()) // 2
    text, parameters = "rows keep their length: a rotation or a permutation", {}
    if rows.exact:
        a_NC, b_NC = rows.a_NC[wide], rows.b_NC[wide]
        for block in _blocks(a_NC.shape[1]):
            squares = [(side.reshape(len(side), -1, block) ** 2).sum(axis=2) for side in (a_NC, b_NC)]
            if all(_kept(squares[0][half], squares[1][half], rows.epsilon).all() for half in (slice(0, None, 2), slice(1, None, 2))):
                if block < a_NC.shape[1]:
                    text = f"every block of {block} columns keeps its norm: rotated or permuted within"
                    parameters = {"block": block}
                break
    return Found(Shape.LENGTH_KEPT, text, int(wide.sum()) - tested, tested, None, parameters)


def _kept(squares_a: F64, squares_b: F64, epsilon: float) -> Bools:
    """Whether lengths are equal up to a few roundings."""
    larger = np.maximum(squares_a, squares_b)
    return np.asarray(np.abs(squares_b - squares_a) <= 8 * epsilon * larger)


def _blocks(columns: int) -> Sequence[int]:
    return [block for block in (8, 16, 32, 64, 96, 128, 192, 256, 512) if block < columns and columns % block == 0] + [columns]


def some_columns(rows: MatchedRows) -> Found | None:
    """The difference is confined to some columns, all others are bitwise equal; not where only single columns are left."""
    if not rows.exact or rows.dtype_a != rows.dtype_b or len(rows) < 2:
        return None
    halves = _Halves.of(rows.a_NC, rows.b_NC)
    fit_C = (halves.a_fit != halves.b_fit).any(axis=0)
    test_C = (halves.a_test != halves.b_test).any(axis=0)
    moved = np.flatnonzero(fit_C)
    scattered = len(moved) > _FEW_COLUMNS and 4 * (np.count_nonzero(np.diff(moved) != 1) + 1) > len(moved)
    if not len(moved) or len(moved) == len(fit_C) or scattered or (test_C != fit_C).any():
        return None
    columns = len(fit_C)
    text = f"only columns {spans_text(moved)} of {columns} differ"
    if np.array_equal(moved, np.arange(columns // 2, columns)):
        text += ", the second half"
    elif np.array_equal(moved, np.arange(columns // 2)):
        text += ", the first half"
    return Found(Shape.SOME_COLUMNS, text, len(halves.a_fit), len(halves.a_test), 0.0, {"columns": len(moved)})


def spans_text(columns: I64) -> str:
    """``0..15, 32..47``, at most a few spans."""
    breaks = np.flatnonzero(np.diff(columns) != 1)
    starts = columns[np.concatenate([[0], breaks + 1])]
    stops = columns[np.concatenate([breaks, [len(columns) - 1]])]
    spans = [f"{start}..{stop}" if stop > start else f"{start}" for start, stop in zip(starts, stops, strict=True)]
    more = f" and {count(len(spans) - _SPANS_SHOWN, 'more span')}" if len(spans) > _SPANS_SHOWN else ""
    return ", ".join(spans[:_SPANS_SHOWN]) + more
