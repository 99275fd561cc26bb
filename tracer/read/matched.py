"""Rows of both sides side by side, as numbers: what explanations are tested on.

Values come from dumps, from recorded integers, or from the sketch where a row has at most 16 columns, for each then
has a bucket of its own. Otherwise the sketches stand for the rows: they are linear, so that ratios, signs, added
vectors and ranks show in them as in the rows themselves.

Shape suffixes: N matched rows, C columns (16 where sketches stand for rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint_plan import GROUP, sketch_buckets, sketch_signs
from tracer.read.compare import Comparison
from tracer.read.logical import LogicalBoundary, Statistics

__all__ = ["EPSILON", "MatchedRows", "exact_scores", "recorded_rows", "spread"]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

EPSILON = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Largest relative error of one rounding to nearest."""

MOST_ROWS = 512
"""Rows that explanations look at; they are spread evenly over all that differ."""

_EXACT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, eq=False)
class MatchedRows:
    """Some differing rows of one boundary, on both sides. ``a_NC``, ``b_NC``: float64, finite, never changed; bits decide
    that rows differ, so two of them may be equal here only where zeros differ in sign.

    ``exact``: these are the values themselves, column by column; else sketches stand for them. ``token_N``: A's token
    index. ``position_N``: of the token in its sequence. ``expert_N``: of (token, expert) rows. ``total``: rows that differ,
    looked at or not.
    """

    name: str
    dtype_a: str
    dtype_b: str
    a_NC: F64
    b_NC: F64
    exact: bool
    source: str
    token_N: I64
    sequence_N: I64
    position_N: I64
    expert_N: I64 | None = None
    total: int = 0

    def __len__(self) -> int:
        return len(self.a_NC)

    @property
    def epsilon(self) -> float:
        """Relative error of one rounding in the coarser of both dtypes."""
        return max(EPSILON.get(self.dtype_a, 2.0**-24), EPSILON.get(self.dtype_b, 2.0**-24))

    @property
    def coarser(self) -> str:
        """The coarser of both dtypes."""
        return max(self.dtype_a, self.dtype_b, key=lambda dtype: EPSILON.get(dtype, 0.0))


def spread(indices: I64, most: int) -> I64:
    """At most so many of them, evenly spread, in order."""
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, most).astype(np.int64)]


def exact_scores(boundary: LogicalBoundary, statistics: Statistics, rows: I64) -> npt.NDArray[np.float32] | None:
    """Values of rows of at most 16 columns out of their sketch, (N, C); None where it does not hold them."""
    if boundary.width > GROUP or boundary.partial_axis or boundary.dtype not in _EXACT:
        return None
    columns = np.arange(boundary.width)
    found: npt.NDArray[np.float32] = statistics.sketch_R16[rows][:, sketch_buckets(columns)] * sketch_signs(columns)
    return found


def recorded_rows(comparison: Comparison, pairs: I64, sequence_K: I64, position_K: I64) -> MatchedRows | None:
    """The given differing pairs as recorded: exact where their values are kept, else sketches. None without either, or
    where nothing finite is left. ``sequence_K``, ``position_K``: of A's tokens."""
    chosen = spread(pairs, MOST_ROWS)
    rows_a, rows_b = comparison.sides(chosen)
    held_a, held_b = comparison.a.load_values(), comparison.b.load_values()
    exact, source = True, "recorded values"
    finite: Bools = np.ones(len(chosen), np.bool_)
    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    if held_a is not None and held_b is not None:
        a, b = held_a[rows_a], held_b[rows_b]
    else:
        statistics_a, statistics_b = comparison.a.load_statistics(), comparison.b.load_statistics()
        if statistics_a is None or statistics_b is None:
            return None
        finite = (statistics_a.nonfinite_R[rows_a] == 0) & (statistics_b.nonfinite_R[rows_b] == 0)
        values_a = exact_scores(comparison.a, statistics_a, rows_a)
        values_b = exact_scores(comparison.b, statistics_b, rows_b)
        if values_a is not None and values_b is not None:
            a, b = values_a, values_b
        else:
            exact, source = False, "sketches"
            a, b = statistics_a.sketch_R16[rows_a], statistics_b.sketch_R16[rows_b]
            finite &= np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1)
    if not finite.any():
        return None
    token_N = comparison.token_R[chosen][finite]
    return MatchedRows(
        name=comparison.name,
        dtype_a=comparison.a.dtype,
        dtype_b=comparison.b.dtype,
        a_NC=a[finite].astype(np.float64),
        b_NC=b[finite].astype(np.float64),
        exact=exact,
        source=source,
        token_N=token_N,
        sequence_N=sequence_K[token_N],
        position_N=position_K[token_N],
        expert_N=None if comparison.a.expert_R is None else comparison.a.expert_R[rows_a][finite],
        total=len(pairs),
    )
