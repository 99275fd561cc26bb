"""Rows of both sides side by side, as numbers: what explanations are tested on.

Values come from dumps, from recorded integers, or from the sketch where a row has at most 16 columns, for each then
has a bucket of its own. Otherwise the sketches stand for the rows: they are linear, so that ratios, signs, added
vectors and ranks show in them as in the rows themselves.

Shape suffixes: N matched rows, C columns (16 where sketches stand for rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import decode_to_float32
from tracer.format.fingerprint_plan import GROUP, sketch_buckets, sketch_signs
from tracer.read.compare import Comparison
from tracer.read.dumped import DumpedBoundary
from tracer.read.logical import LogicalBoundary, Statistics

__all__ = ["EPSILON", "MOST_VALUES", "MatchedRows", "dumped_lines", "dumped_rows", "exact_scores", "recorded_rows", "spread"]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Values = npt.NDArray[Any]

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

MOST_VALUES = 1 << 22
"""Values per side that explanations look at, unless rows are wider: then eight of them."""

_EXPERTS = 1 << 20

_EXACT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, eq=False)
class MatchedRows:
    """Some differing rows of one boundary, on both sides. ``a_NC``, ``b_NC``: float64, finite, never changed; bits decide
    that rows differ, so two of them may be equal here only where zeros differ in sign.

    ``exact``: these are the values themselves, column by column; else sketches stand for them. ``token_N``: A's token
    index. ``position_N``: of the token in its sequence. ``expert_N``: of (token, expert) rows. ``squares_a_N``,
    ``squares_b_N``: sums of squares of the whole rows. ``total``: rows that differ, looked at or not. ``head``: columns
    of one attention head, 0 where unknown.
    """

    name: str
    dtype_a: str
    dtype_b: str
    a_NC: F64
    b_NC: F64
    squares_a_N: F64
    squares_b_N: F64
    exact: bool
    source: str
    token_N: I64
    position_N: I64
    expert_N: I64 | None = None
    total: int = 0
    head: int = 0

    def __len__(self) -> int:
        return len(self.a_NC)

    def take(self, kept_N: Bools) -> MatchedRows:
        """Some of the rows."""
        return replace(
            self, a_NC=self.a_NC[kept_N], b_NC=self.b_NC[kept_N], squares_a_N=self.squares_a_N[kept_N],
            squares_b_N=self.squares_b_N[kept_N], token_N=self.token_N[kept_N], position_N=self.position_N[kept_N],
            expert_N=None if self.expert_N is None else self.expert_N[kept_N],
        )  # fmt: skip

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


def recorded_rows(comparison: Comparison, pairs: I64, position_K: I64) -> MatchedRows | None:
    """The given differing pairs as recorded: exact where their values are kept, else sketches. None without either, or
    where nothing finite is left. ``position_K``: of A's tokens."""
    chosen = spread(pairs, MOST_ROWS)
    rows_a, rows_b = comparison.sides(chosen)
    held_a, held_b = comparison.a.load_values(), comparison.b.load_values()
    if held_a is not None and held_b is not None:
        return _matched(comparison, pairs, chosen, held_a[rows_a], held_b[rows_b], "recorded values", position_K)
    statistics_a, statistics_b = comparison.a.load_statistics(), comparison.b.load_statistics()
    if statistics_a is None or statistics_b is None:
        return None
    a, b = exact_scores(comparison.a, statistics_a, rows_a), exact_scores(comparison.b, statistics_b, rows_b)
    if a is not None and b is not None:
        source = "recorded values"
    else:
        a, b, source = statistics_a.sketch_R16[rows_a], statistics_b.sketch_R16[rows_b], "sketches"
    squares = statistics_a.sum_squares_R[rows_a], statistics_b.sum_squares_R[rows_b]
    finite = (statistics_a.nonfinite_R[rows_a] == 0) & (statistics_b.nonfinite_R[rows_b] == 0)
    return _matched(comparison, pairs, chosen, a, b, source, position_K, finite, squares)


def dumped_rows(comparison: Comparison, pairs: I64, a: DumpedBoundary, b: DumpedBoundary, position_K: I64) -> MatchedRows | None:
    """The given differing pairs as far as both sides hold their raw values; None where that is none of them."""
    rows_a, rows_b = comparison.sides(pairs)
    at_a, at_b = dumped_lines(a, comparison.a, rows_a), dumped_lines(b, comparison.b, rows_b)
    held = np.flatnonzero((at_a >= 0) & (at_b >= 0))
    if not len(held) or a.width != b.width:
        return None
    columns = max(a.width, 1)
    chosen = spread(held, max(min(MOST_ROWS, MOST_VALUES // columns), 8))
    try:
        values_a, values_b = (
            decode_to_float32(side.raw_RB[lines[chosen]], side.dtype).reshape(len(chosen), side.width)
            for side, lines in ((a, at_a), (b, at_b))
        )
    except ValueError:
        return None  # packed: bytes without values of their own
    return _matched(comparison, pairs, pairs[chosen], values_a, values_b, "dumps", position_K)


def dumped_lines(dumped: DumpedBoundary, boundary: LogicalBoundary, rows: I64) -> I64:
    """Per row of a boundary its line in the dump, -1 where it is not in it or its bytes are not those of the row."""
    code, wanted = dumped.token_R * _EXPERTS, boundary.token_R[rows] * _EXPERTS
    if dumped.expert_R is not None and boundary.expert_R is not None:
        code, wanted = code + dumped.expert_R + 1, wanted + boundary.expert_R[rows] + 1
    if not len(code):
        return np.full(len(rows), -1)
    at = np.minimum(np.searchsorted(code, wanted), len(code) - 1)
    good = (code[at] == wanted) & ~dumped.altered_R[at] & (dumped.digest_R2[at] == boundary.digest_R2[rows]).all(axis=1)
    return np.where(good, at, -1)


def _matched(
    comparison: Comparison, pairs: I64, chosen: I64, a: Values, b: Values, source: str, position_K: I64, finite: Bools | None = None,
    squares: tuple[F64, F64] | None = None,
) -> MatchedRows | None:  # fmt: skip
    """Rows as float64, without those that are not finite."""
    good = np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1)
    good &= True if finite is None else finite
    if not good.any():
        return None
    a_NC, b_NC = a[good].astype(np.float64), b[good].astype(np.float64)
    token_N = comparison.token_R[chosen][good]
    expert_R = comparison.a.expert_R
    return MatchedRows(
        name=comparison.name,
        dtype_a=comparison.a.dtype,
        dtype_b=comparison.b.dtype,
        a_NC=a_NC,
        b_NC=b_NC,
        squares_a_N=(a_NC**2).sum(axis=1) if squares is None else squares[0][good],
        squares_b_N=(b_NC**2).sum(axis=1) if squares is None else squares[1][good],
        exact=source != "sketches",
        source=source,
        token_N=token_N,
        position_N=position_K[token_N],
        expert_N=None if expert_R is None else expert_R[comparison.sides(chosen)[0]][good],
        total=len(pairs),
    )
