"""Carrying out a join for one boundary: adding up what different slices hold, comparing what copies hold.

Shape suffixes: see ``joining``; D copies that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.read.joining import Join, Part, Sheet, take
from tracer.read.tracks import Track

__all__ = ["Clash", "clashes", "gather"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]


def gather(
    join: Join,
    tracks: Sequence[Track],
    get: Callable[[Track], Array],
    combine: np.ufunc = np.add,
    *,
    coordinate: int | None = None,
    every_copy: bool = False,
) -> Array:
    """Combine one column of all tracks into (M, ...), in order of cell and rank; may be mapped memory.

    ``coordinate``: only the cells of this one. ``every_copy``: what repeats a row counts too, not only what provides it.
    """
    total: Array | None = None
    owned = False

    def add(column: Array, into: I64 | None, fresh: bool) -> None:
        nonlocal total, owned
        if into is None and total is None:
            total, owned = column, fresh
        elif into is None:
            total = combine(total, column, out=total if owned else None)
            owned = True
        else:
            if total is None or not owned:
                total = np.zeros((len(join), *column.shape[1:]), column.dtype) if total is None else total.copy()
                owned = True
            total[into] = combine(take(total, into), column)

    for sheet in join.sheets:
        if coordinate is not None and sheet.cell.coordinate != coordinate:
            continue
        if join.aligned:
            add(get(tracks[sheet.givers[0]]), None, False)
        else:
            add(_given(sheet, tracks, get), sheet.into_G, sheet.source_G is not None or len(sheet.givers) > 1)
        for at, part, _ in sheet.repeats if every_copy else ():
            if join.aligned:
                add(get(tracks[at]), None, False)
            else:
                add(take(get(tracks[at]), part.lines), part.into, part.lines is not None)
    if total is None:
        some = get(tracks[0])
        return np.zeros((len(join), *some.shape[1:]), some.dtype)
    return take(total, join.order_N) if join.aligned else total


def _given(sheet: Sheet, tracks: Sequence[Track], get: Callable[[Track], Array]) -> Array:
    """One column of a cell's rows, (G, ...)."""
    columns = [get(tracks[at]) for at in sheet.givers]
    return take(columns[0] if len(columns) == 1 else np.concatenate(columns), sheet.source_G)


@dataclass(frozen=True)
class Clash:
    """Copies that differ: rows of ``other`` that ``first`` gave before with other digests. ``into_D``: sightings;
    ``first_line_D``, ``other_line_D``: recorded lines of the two."""

    first: Track
    other: Track
    into_D: I64
    first_line_D: I64
    other_line_D: I64


def clashes(join: Join, tracks: Sequence[Track]) -> list[Clash]:
    """Every pair of copies that are not bitwise equal, each held against the first copy of its cell."""
    found: list[Clash] = []
    for sheet in join.sheets:
        given_G2: U64 | None = None
        for at, part, twin in sheet.repeats:
            mine_N2 = tracks[at].digest_N2
            if twin is not None and np.array_equal(mine_N2, tracks[twin].digest_N2):
                continue  # the same rows in the same order: no need to sort them
            if given_G2 is None:
                given_G2 = _given(sheet, tracks, lambda track: track.digest_N2)
            there = part.into
            if there is not None and sheet.into_G is not None:
                there = np.searchsorted(sheet.into_G, there)
            wrong = (take(given_G2, there) != take(mine_N2, part.lines)).any(axis=1)
            if wrong.any():
                found += _clashes_of(join, tracks, sheet, tracks[at], part, wrong)
    return found


def _clashes_of(join: Join, tracks: Sequence[Track], sheet: Sheet, other: Track, part: Part, wrong: Bools) -> list[Clash]:
    """Whom each of the wrong rows of a part was held against."""
    found = []
    bad = np.flatnonzero(wrong)
    into, lines = (bad if whole is None else whole[bad] for whole in (part.into, part.lines))
    for giver in sheet.givers:
        given = join.provides[giver]
        assert given is not None
        given_into = np.arange(len(join)) if given.into is None else given.into
        both, at, first_at = np.intersect1d(into, given_into, assume_unique=True, return_indices=True)
        if len(both):
            first_lines = first_at if given.lines is None else given.lines[first_at]
            found.append(Clash(tracks[giver], other, both, first_lines, lines[at]))
    return found
