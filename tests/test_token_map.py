"""The map of a comparison: bounded, and nothing that differs is lost by aggregation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sides import Side
from tracer.read.diff import diff_traces
from tracer.read.token_map import MOST_COLUMNS, assign_columns


@pytest.mark.parametrize("lengths", [[7, 5], [1], [4096], [300, 1, 4000], [3] * 100, [2] * 5000], ids=lambda lengths: f"{len(lengths)}")
def test_columns_are_few_and_in_order(lengths: list[int]) -> None:
    """There are at most so many columns, each a run of neighbours; with few sequences none spans two."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    column = assign_columns(sequence)
    assert column[0] == 0
    assert set(np.diff(column)) <= {0, 1}
    assert column[-1] < MOST_COLUMNS
    if 2 * len(lengths) <= MOST_COLUMNS:
        assert all(len(np.unique(sequence[column == at])) == 1 for at in range(column[-1] + 1))


def test_a_token_each_where_there_is_room() -> None:
    """With few tokens every token has a column of its own, named by request and position."""
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    result = diff_traces(Side().trace(), b.trace())
    columns = result.token_map.columns
    assert [(column.request, column.position, column.tokens) for column in columns][:3] == [("s0", 0, 1), ("s0", 1, 1), ("s0", 2, 1)]
    rows = {row.boundary: row for row in result.token_map.rows}
    assert rows["layers.2.attn.core"].columns == ()
    out = rows["layers.2.attn.out"]
    assert (out.columns, out.rows, out.roots) == ((5,), (1,), (1,))
    differing = {boundary.name: boundary.rows_differing for boundary in result.boundaries if boundary.rows_differing}
    assert {name: sum(row.rows) for name, row in rows.items() if row.rows} == differing
    assert rows["scorer.logprobs"].unseen == (0, 7)  # the first token of a sequence has no score


def test_the_largest_distance_is_kept() -> None:
    """Many tokens share a column, which shows its worst row; integers have no distance."""
    ids = {"long": list(range(2000))}
    a, b = Side(ids), Side(ids)
    b.change("layers.1.attn.out", "long:700", by=0.5)
    b.change("layers.1.attn.out", "long:701", by=1e-4)
    result = diff_traces(a.trace(), b.trace())
    row = next(row for row in result.token_map.rows if row.boundary == "layers.1.attn.out")
    found = next(boundary for boundary in result.boundaries if boundary.name == "layers.1.attn.out")
    assert sum(row.rows) == 2
    assert found.distance is not None
    assert found.distance.largest is not None
    assert max(value for value in row.largest if value is not None) == pytest.approx(found.distance.largest, rel=0.01)
    assert len(result.token_map.columns) <= MOST_COLUMNS
