"""What each process recorded of a boundary, ready to be joined: rows as codes, slices as cells.

A *sighting* is one row (place, expert) seen for the n-th time. A *track* is what one process recorded of one slice
of a boundary's columns (for partial sums, of one mesh coordinate), over its rows in recorded order. Shape suffix: N rows of one track.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tracer.errors import Code, InternalError
from tracer.format.schema import Block
from tracer.format.store_read import Segment
from tracer.read.spans import Spans
from tracer.read.token_table import PLACE_BITS

__all__ = ["SIGHTING_BITS", "Cell", "Roll", "RowList", "Rows", "Track"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]

SIGHTING_BITS = 63 - PLACE_BITS
"""Low bits of a sighting, which count how often the row was seen before."""


@dataclass(frozen=True, eq=False)
class RowList:
    """Rows of one or more blocks, as row codes; equal lists are one object, whichever process they came from."""

    code_N: I64


class Roll:
    """The rows of a track: ``code_N`` in recorded order, and how they sort. ``order_N``: argsort, None where sorted already.
    ``sighting_N``: row code and how often this track had the row before, in one number, sorted."""

    def __init__(self, code_N: I64, forward_N: Array | None = None) -> None:
        """``forward_N``: forward of each row, where recorded order is not the order of execution."""
        self.code_N = code_N
        self.order_N: I64 | None = None
        if len(code_N) and not np.all(code_N[1:] > code_N[:-1]):
            self.order_N = np.argsort(code_N, kind="stable") if forward_N is None else np.lexsort((forward_N, code_N))
            code_N = code_N[self.order_N]
        self.sighting_N = code_N << SIGHTING_BITS
        repeated = code_N[1:] == code_N[:-1]
        if repeated.any():
            line = np.arange(len(code_N))
            start = np.where(np.append(False, repeated), 0, line)
            nth_N = line - np.maximum.accumulate(start)
            if int(nth_N.max()) >> SIGHTING_BITS:
                raise InternalError(Code.INTERNAL, f"a row was recorded {nth_N.max()} times by one process")
            self.sighting_N += nth_N

    def __len__(self) -> int:
        return len(self.code_N)


class Rows:
    """Row lists and rolls, each made once for all blocks and tracks that have the same rows."""

    def __init__(self) -> None:
        self._lists: dict[tuple[int, int, int, bool], RowList] = {}
        self._by_content: dict[bytes, RowList] = {}
        self._rolls: dict[tuple[Any, ...], Roll] = {}

    def add(self, segment: Segment, block: Block, code_R: I64, step: int) -> RowList | None:
        """The list of a block's rows; ``step`` is added to every code. None where the list was known already."""
        key = (id(segment), block.row_start, block.row_count, bool(step))
        if key in self._lists:
            return None
        code_N = code_R[segment.block_lines(block)]
        if step:
            code_N += step
        return self._lists.setdefault(key, self._by_content.setdefault(_content(code_N), RowList(code_N)))

    def roll(self, pieces: Sequence[tuple[Segment, Block]], following: bool) -> Roll:
        """The rows of a track made of these blocks. ``following``: its rows speak of the next token."""
        lists = [self._lists[id(segment), block.row_start, block.row_count, following] for segment, block in pieces]
        mixed = len({id(segment) for segment, _ in pieces}) < len(pieces)  # blocks of one segment are not in order of time
        key: tuple[Any, ...] = tuple(id(rows) for rows in lists)
        if mixed:
            key = (None, *((id(segment), block.row_start, block.row_count) for segment, block in pieces))
        if key not in self._rolls:
            code_N = lists[0].code_N if len(lists) == 1 else np.concatenate([rows.code_N for rows in lists])
            forward_N = np.concatenate([forwards(segment, block) for segment, block in pieces]) if mixed else None
            whole = (_content(code_N), b"" if forward_N is None else _content(forward_N))
            if whole not in self._rolls:
                self._rolls[whole] = Roll(code_N, forward_N)
            self._rolls[key] = self._rolls[whole]
        return self._rolls[key]


def _content(array: Array) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).data)


def forwards(segment: Segment, block: Block) -> Array:
    """Forward of each row of a block, int32."""
    forward_N: Array = segment.rows_forward[segment.block_lines(block)]
    return forward_N


@dataclass(frozen=True, order=True)
class Cell:
    """A slice of a boundary: ``spans`` of columns, and for partial sums the mesh coordinate (else 0)."""

    coordinate: int
    spans: Spans


@dataclass(frozen=True, eq=False)
class Track:
    """What one process recorded of one cell, in order of time."""

    rank: int
    cell: Cell
    pieces: tuple[tuple[Segment, Block], ...]
    roll: Roll

    @property
    def digest_N2(self) -> U64:
        """uint64 (N, 2), mapped where it is one piece."""
        return _joined([segment.block_digest(block) for segment, block in self.pieces])

    @property
    def has_statistics(self) -> bool:
        """Float statistics are kept of every row."""
        return all(block.stats_start >= 0 for _, block in self.pieces)

    @property
    def has_values(self) -> bool:
        """Raw integer values are kept of every row."""
        return all(block.values_start >= 0 for _, block in self.pieces)

    def statistic(self, name: str) -> Array:
        """``sketch``, ``sum_squares``, ``abs_max`` or ``nonfinite`` of every row, in recorded order."""
        return _joined([segment.block_statistic(block, name) for segment, block in self.pieces])

    def values(self, width: int) -> I64:
        """Raw values in their logical columns, int64 (N, width), 0 where not held."""
        parts = []
        for segment, block in self.pieces:
            held = segment.block_values(block)
            assert held is not None, "a block without values"
            if block.spans:
                part = np.zeros((block.row_count, width), np.int64)
                part[:, np.concatenate([np.arange(start, stop) for start, stop in block.spans])] = held
                held = part
            parts.append(held)
        return _joined(parts)

    @property
    def forward_N(self) -> Array:
        """Forward of each row, in recorded order."""
        return _joined([forwards(segment, block) for segment, block in self.pieces])


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
