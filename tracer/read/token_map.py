"""The map of a comparison: boundaries in causal order against tokens, small enough to draw whatever was compared.

Tokens are taken in side A's order and put into at most ``MOST_COLUMNS`` columns of neighbours. With few sequences no column
spans two of them; with many, columns are equal runs through all of them. A column shows its largest distance, so nothing
that differs can vanish by aggregation.

Shape suffixes: K tokens of side A, R matched rows, D differing rows among them, M columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tracer.read.causes import Causes
from tracer.read.compare import Method
from tracer.read.findings import MapColumn, MapRow, TokenMap
from tracer.read.logical import LogicalTrace
from tracer.read.outcomes import Judged
from tracer.read.wording import token_name

__all__ = ["MOST_COLUMNS", "draw_token_map"]

I64 = npt.NDArray[np.int64]

MOST_COLUMNS = 256


def draw_token_map(a: LogicalTrace, judged: Mapping[str, Judged], causes: Causes) -> TokenMap:
    """The map of all compared boundaries. ``judged``: in causal order."""
    if not len(a.tokens):
        return TokenMap()
    column_K = assign_columns(a.tokens.sequence_K)
    columns = int(column_K[-1]) + 1
    rows = []
    for name, found in judged.items():
        if found.comparison.method is not Method.NONE and len(found.comparison):
            cells = None if name in causes.harmless else causes.cells.get(name)
            rows.append(_row(found, column_K, columns, None if cells is None else cells.root_K))
    return TokenMap(columns=_columns(a, column_K, columns), rows=tuple(rows))


def assign_columns(sequence_K: I64) -> I64:
    """Column of every token, int64 (K,), ascending from 0. ``sequence_K``: the sequence of each token, ascending."""
    tokens = len(sequence_K)
    starts = np.flatnonzero(np.diff(sequence_K, prepend=sequence_K[0] - 1))
    if 2 * len(starts) > MOST_COLUMNS:
        return np.arange(tokens) * min(tokens, MOST_COLUMNS) // tokens
    size = -(-tokens // (MOST_COLUMNS - len(starts)))
    lengths = np.diff(starts, append=tokens)
    first_column = np.concatenate([[0], np.cumsum(-(-lengths // size))[:-1]])
    within_K = np.arange(tokens) - np.repeat(starts, lengths)
    result: I64 = np.repeat(first_column, lengths) + within_K // size
    return result


def _columns(a: LogicalTrace, column_K: I64, columns: int) -> tuple[MapColumn, ...]:
    edges = np.searchsorted(column_K, np.arange(columns + 1))
    found = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        (request, position), (last_request, last_position) = token_name(a, start), token_name(a, stop - 1)
        found.append(
            MapColumn(request=request, position=position, last_request=last_request, last_position=last_position, tokens=stop - start)
        )
    return tuple(found)


def _row(judged: Judged, column_K: I64, columns: int, root_K: npt.NDArray[np.bool_] | None) -> MapRow:
    comparison = judged.comparison
    column_R = column_K[comparison.token_R]
    seen_M = np.bincount(column_R, minlength=columns) > 0
    unseen = tuple(np.flatnonzero(~seen_M).tolist())
    if not len(comparison.differing):
        return MapRow(boundary=judged.name, unseen=unseen)
    column_D = column_R[comparison.differing]
    rows_M = np.bincount(column_D, minlength=columns)
    largest_M = np.full(columns, -1.0)
    known_D = np.full(len(column_D), np.nan) if comparison.values is not None else comparison.distance_D
    finite_D = np.isfinite(known_D)
    np.maximum.at(largest_M, column_D[finite_D], known_D[finite_D])
    roots_M = np.zeros(columns, np.int64) if root_K is None else np.bincount(column_K[root_K], minlength=columns)
    touched = np.flatnonzero(rows_M)
    return MapRow(
        boundary=judged.name,
        columns=tuple(touched.tolist()),
        rows=tuple(rows_M[touched].tolist()),
        largest=tuple(None if value < 0 else float(f"{value:.3g}") for value in largest_M[touched].tolist()),
        roots=tuple(roots_M[touched].tolist()),
        unseen=unseen,
    )
