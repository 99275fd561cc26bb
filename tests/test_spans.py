"""Spans and boxes: when slices are equal, and what they cover."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracer.read.spans import Box, cover, normal_spans, span_text


def test_equal_sets_of_columns_are_one_normal_form() -> None:
    """Order and cuts of spans do not matter, and nothing means everything."""
    assert normal_spans([(8, 16), (0, 4), (4, 8)], 32) == ((0, 16),)
    assert normal_spans([(0, 4), (8, 12)], 32) == ((0, 4), (8, 12))
    assert normal_spans([], 32) == ((0, 32),)
    assert span_text(((0, 4), (8, 12))) == "0:4, 8:12"


def test_a_grid_of_boxes_is_whole() -> None:
    """Four quarters leave nothing out and cover nothing twice; three name the missing one."""
    quarters: list[Box] = [(((r, r + 2),), ((c, c + 4),)) for r in (0, 2) for c in (0, 4)]
    assert cover(quarters, 4, 8).whole
    found = cover(quarters[:3], 4, 8)
    assert found.missing == (quarters[3],)
    assert not found.twice
    assert cover([*quarters, (((1, 2),), ((0, 1),))], 4, 8).twice == ((((1, 2),), ((0, 1),)),)


def test_a_hole_and_an_overlap_of_the_same_size_do_not_cancel() -> None:
    """Slices 0:16 and 8:24 of 32 columns have 32 columns together, and are not whole."""
    found = cover([(((0, 1),), ((0, 16),)), (((0, 1),), ((8, 24),))], 1, 32)
    assert found.missing == ((((0, 1),), ((24, 32),)),)
    assert found.twice == ((((0, 1),), ((8, 16),)),)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3)), max_size=6, unique=True))
def test_coverage_counts_every_cell(sizes: list[tuple[int, int, int, int]]) -> None:
    """What is missing or doubled is exactly what counting cell by cell finds."""
    boxes: list[Box] = [(((top, top + height),), ((left, left + wide),)) for top, height, left, wide in sizes]
    count = np.zeros((8, 8), int)
    for rows, columns in boxes:
        count[rows[0][0] : rows[0][1], columns[0][0] : columns[0][1]] += 1
    found = cover(boxes, 8, 8)
    for wanted, listed in ((count == 0, found.missing), (count > 1, found.twice)):
        drawn = np.zeros((8, 8), bool)
        for rows, columns in listed:
            for top, bottom in rows:
                for left, right in columns:
                    assert not drawn[top:bottom, left:right].any()
                    drawn[top:bottom, left:right] = True
        np.testing.assert_array_equal(drawn, wanted)
