"""Rows of two sides made by hand, for explanations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.sides import Side
from tracer.format.fingerprint import fingerprint_rows
from tracer.read.dumped import DumpedBoundary, Dumps
from tracer.read.grids import round_to
from tracer.read.logical import LogicalTrace
from tracer.read.matched import MatchedRows

F64 = npt.NDArray[np.float64]


def random_rows(rows: int = 32, columns: int = 64, *, seed: int = 0, dtype: str = "float32") -> F64:
    """Normal values on the grid of a dtype, float64 (N, C)."""
    return round_to(np.random.default_rng(seed).standard_normal((rows, columns)), dtype)


def matched(a_NC: F64, b_NC: F64, *, dtype: str = "float32", dtype_b: str = "", exact: bool = True, **fields: Any) -> MatchedRows:
    """The rows as explanations get them; with ``exact=False`` by their sketches."""
    squares = [(side**2).sum(axis=1) for side in (a_NC, b_NC)]
    values = [a_NC, b_NC]
    if not exact:
        values = []
        for side in (a_NC, b_NC):
            sketch = fingerprint_rows(side.astype(np.float32), "float32").sketch_N16
            assert sketch is not None
            values.append(sketch.astype(np.float64))
    known: dict[str, Any] = {
        "name": "layers.0.attn.q", "dtype_a": dtype, "dtype_b": dtype_b or dtype, "a_NC": values[0], "b_NC": values[1],
        "squares_a_N": squares[0], "squares_b_N": squares[1], "exact": exact, "source": "dumps" if exact else "sketches",
        "token_N": np.arange(len(a_NC)), "position_N": np.arange(len(a_NC)), "total": len(a_NC),
    }  # fmt: skip
    return MatchedRows(**known | fields)


def dumped(side: Side, trace: LogicalTrace, name: str, rows: Sequence[str] = ()) -> DumpedBoundary:
    """Raw values of one boundary of a side, all rows or some, as if they had been dumped."""
    values = side.values[name]
    stored = np.ascontiguousarray(values.rows, np.float32)
    raw = (stored.view(np.uint32) >> 16).astype(np.uint16) if values.dtype == "bfloat16" else stored
    keep = [side.at(row) for row in rows] or list(range(len(stored)))
    boundary = trace.boundaries[name]
    at = np.searchsorted(boundary.token_R, keep)
    return DumpedBoundary(
        trace, name, values.dtype, stored.shape[1], boundary.token_R[at], None, boundary.digest_R2[at],
        np.ascontiguousarray(raw[keep]).view(np.uint8).reshape(len(keep), -1), np.zeros(len(keep), np.bool_),
    )  # fmt: skip


def dumps_of(side: Side, trace: LogicalTrace, *names: str, rows: Sequence[str] = ()) -> Dumps:
    """Dumps of some boundaries of a side."""
    return Dumps(trace, {name: dumped(side, trace, name, rows) for name in names})
