"""Which part of a whole a set of slices covers: spans of columns, boxes of rows by columns.

A span is half-open. A box is (row spans, column spans), each ascending and apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tracer.format.schema import Span

__all__ = ["Box", "Coverage", "Spans", "cover", "normal_spans", "span_text"]

Spans = tuple[Span, ...]
Box = tuple[Spans, Spans]


def normal_spans(spans: Iterable[Span], whole: int) -> Spans:
    """Ascending, adjacent spans joined; nothing stands for ``0 .. whole``. Two slices are equal when these are."""
    ordered = sorted(spans)
    if not ordered:
        return ((0, whole),)
    joined = [ordered[0]]
    for start, stop in ordered[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def span_text(spans: Iterable[Span]) -> str:
    """``0:16, 48:64``."""
    return ", ".join(f"{start}:{stop}" for start, stop in spans)


@dataclass(frozen=True)
class Coverage:
    """What distinct boxes leave out of ``rows x columns``, and what they cover twice, as boxes."""

    missing: tuple[Box, ...]
    twice: tuple[Box, ...]

    @property
    def whole(self) -> bool:
        """Every cell exactly once."""
        return not self.missing and not self.twice


def cover(boxes: Sequence[Box], rows: int, columns: int) -> Coverage:
    """Lay distinct boxes over a whole of ``rows x columns``."""
    row_cuts = sorted({0, rows, *(cut for spans, _ in boxes for span in spans for cut in span)})
    column_cuts = sorted({0, columns, *(cut for _, spans in boxes for span in spans for cut in span)})
    row_of = {cut: index for index, cut in enumerate(row_cuts)}
    column_of = {cut: index for index, cut in enumerate(column_cuts)}
    count = np.zeros((len(row_cuts) - 1, len(column_cuts) - 1), np.int64)
    for row_spans, column_spans in boxes:
        for top, bottom in row_spans:
            for left, right in column_spans:
                count[row_of[top] : row_of[bottom], column_of[left] : column_of[right]] += 1

    def boxed(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[Box, ...]:
        found: list[Box] = []
        for index in np.flatnonzero(mask.any(axis=1)):
            band = (row_cuts[index], row_cuts[index + 1])
            held = normal_spans([(column_cuts[column], column_cuts[column + 1]) for column in np.flatnonzero(mask[index])], columns)
            if found and found[-1][1] == held and found[-1][0][-1][1] == band[0]:
                found[-1] = (normal_spans([*found[-1][0], band], rows), held)
            else:
                found.append(((band,), held))
        return tuple(found)

    return Coverage(boxed(count == 0), boxed(count > 1))
