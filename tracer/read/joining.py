"""How the fingerprints of many processes join into the rows of one boundary.

A *sighting* is one row (place, expert) seen for the n-th time. Each process contributes *tracks*: one slice of the
boundary's columns (for partial sums, of one mesh coordinate), over its rows in recorded order. Equal slices of one
sighting are copies and must agree; different ones must be disjoint and together whole, and their fingerprints add up.

Everything that only depends on which rows and slices there are is a ``Join``, made once and used for every boundary
with the same layout; what is left per boundary is gathering, adding and comparing digests.

Shape suffixes: N rows of one track in recorded order, M sightings sorted by (row, n), R distinct (token, expert).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tracer.errors import Code, InternalError
from tracer.format.schema import Block
from tracer.format.store_read import Segment
from tracer.read.spans import Coverage, Spans, cover
from tracer.read.token_table import PLACE_BITS

__all__ = ["Cell", "Clash", "Fault", "Join", "Roll", "Rows", "Track", "clashes", "gather", "make_join", "take"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

_SIGHTING_BITS = 63 - PLACE_BITS


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
        self.sighting_N = code_N << _SIGHTING_BITS
        repeated = code_N[1:] == code_N[:-1]
        if repeated.any():
            line = np.arange(len(code_N))
            start = np.where(np.append(False, repeated), 0, line)
            nth_N = line - np.maximum.accumulate(start)
            if int(nth_N.max()) >> _SIGHTING_BITS:
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
        return _joined(
            [getattr(segment, name)[block.stats_start : block.stats_start + block.row_count] for segment, block in self.pieces]
        )

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


@dataclass(frozen=True)
class Part:
    """Some rows of a track and the sightings they are: recorded ``lines`` (None: all, in order), ``into`` M (None: all)."""

    lines: I64 | None
    into: I64 | None


@dataclass(frozen=True)
class Fault:
    """Sightings whose slices are not the whole row, once. They are left out of the join. ``code_F``: their row codes."""

    coverage: Coverage
    cells: tuple[Cell, ...]
    code_F: I64


@dataclass(frozen=True)
class Join:
    """Where every row of every track goes.

    ``provides`` and ``repeats``, per track: rows it is the first to give a cell of, and rows another track gave before.
    ``aligned``: all tracks have the same rows, so that they add up in recorded order, and ``order_N`` sorts the sum.
    ``copies``: the most processes that hold one cell of one sighting.
    ``kept_R``: the first sighting of each distinct (token, expert), None for all. ``again_M``, ``first_M``: sightings of a
    row seen before, and the sighting to hold them against: the first of the same place (a repeat, ``same_place``),
    or the first of the same token elsewhere (a sibling).
    """

    code_M: I64
    nth_M: I64
    provides: tuple[Part | None, ...]
    repeats: tuple[Part | None, ...]
    aligned: bool
    order_N: I64 | None
    copies: int
    faults: tuple[Fault, ...]
    token_R: I64
    expert_R: I64 | None
    seen_R: I64
    kept_R: I64 | None
    again_A: I64
    first_A: I64
    same_place_A: Bools

    def __len__(self) -> int:
        return len(self.code_M)


def make_join(tracks: Sequence[Track], token_P: I64, expert_bits: int, coordinates: int, width: int) -> Join:
    """Work out a join. ``tracks``: sorted by cell, then rank. ``coordinates``: how many partial sums make the whole, 1 if none."""
    rolls = {id(track.roll): track.roll for track in tracks}
    sighting_M = tracks[0].roll.sighting_N
    if len(rolls) > 1:
        sighting_M = np.unique(np.concatenate([roll.sighting_N for roll in rolls.values()]))
    into = {
        key: None if len(roll) == len(sighting_M) else np.searchsorted(sighting_M, roll.sighting_N) for key, roll in rolls.items()
    }
    provides, repeats, copies, signature_M = _who_gives_what(tracks, into, len(sighting_M))
    faults, good_M = _find_faults(tracks, sighting_M, signature_M, coordinates, width)
    if faults:
        sighting_M = sighting_M[good_M]
        narrowed: dict[int, Part] = {}
        for parts in (provides, repeats):
            for at, part in enumerate(parts):
                if part is not None:
                    parts[at] = narrowed.setdefault(id(part), _narrowed(part, good_M))

    code_M = sighting_M >> _SIGHTING_BITS
    mask = (1 << expert_bits) - 1
    token_M = token_P[code_M >> expert_bits]
    expert_M = (code_M & mask) - 1
    kept_R, seen_R, again, first_of, same_place = _by_token((token_M << expert_bits) | (expert_M + 1), code_M)
    token_R, expert_R = take(token_M, kept_R), take(expert_M, kept_R)
    return Join(
        code_M=code_M,
        nth_M=sighting_M & ((1 << _SIGHTING_BITS) - 1),
        provides=tuple(provides),
        repeats=tuple(repeats),
        aligned=len(rolls) == 1 and not faults,
        order_N=tracks[0].roll.order_N,
        copies=copies,
        faults=tuple(faults),
        token_R=token_R,
        expert_R=expert_R if len(expert_R) and int(expert_R.max()) >= 0 else None,
        seen_R=seen_R,
        kept_R=kept_R,
        again_A=again,
        first_A=first_of,
        same_place_A=same_place,
    )


def _find_faults(
    tracks: Sequence[Track], sighting_M: I64, signature_M: U64, coordinates: int, width: int
) -> tuple[list[Fault], Bools]:
    """Sightings that are not whole, by what they lack, and a mask of the others."""
    faults: list[Fault] = []
    good_M = np.ones(len(sighting_M), np.bool_)
    if len(signature_M) and signature_M.min() != signature_M.max():
        _, examples, group_M = np.unique(signature_M, return_index=True, return_inverse=True)
    else:
        examples, group_M = np.zeros(min(len(signature_M), 1), np.int64), np.zeros(len(signature_M), np.int64)
    for group, example in enumerate(examples.tolist()):
        cells = _cells_of(tracks, sighting_M[example])
        coverage = cover([(((cell.coordinate, cell.coordinate + 1),), cell.spans) for cell in cells], coordinates, width)
        if not coverage.whole:
            faulty_M = group_M == group
            good_M &= ~faulty_M
            faults.append(Fault(coverage, cells, sighting_M[faulty_M] >> _SIGHTING_BITS))
    return sorted(faults, key=lambda fault: int(fault.code_F[0])), good_M


def _by_cell(tracks: Sequence[Track]) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive tracks with one cell."""
    start = 0
    for stop in range(1, len(tracks) + 1):
        if stop == len(tracks) or tracks[stop].cell != tracks[start].cell:
            yield start, stop
            start = stop


def _who_gives_what(
    tracks: Sequence[Track], into: dict[int, I64 | None], count: int
) -> tuple[list[Part | None], list[Part | None], int, U64]:
    """Per track what it provides and what it repeats; the most copies; per sighting a number that equal sets of cells share."""
    provides: list[Part | None] = [None] * len(tracks)
    repeats: list[Part | None] = [None] * len(tracks)
    signature_M = np.zeros(count, np.uint64)
    copies = 1
    for start, stop in _by_cell(tracks):
        mark = np.uint64(xxhash.xxh3_64_intdigest(repr(tracks[start].cell).encode()))
        if len({id(track.roll) for track in tracks[start:stop]}) == 1:
            roll, places = tracks[start].roll, into[id(tracks[start].roll)]
            whole = Part(roll.order_N, places)
            provides[start] = whole
            repeats[start + 1 : stop] = [whole] * (stop - start - 1)
            copies = max(copies, stop - start)
            signature_M[slice(None) if places is None else places] += mark
            continue
        held_M = np.zeros(count, np.int32)
        for at in range(start, stop):
            roll, places = tracks[at].roll, into[id(tracks[at].roll)]
            whole = Part(roll.order_N, places)
            known_N = held_M[slice(None) if places is None else places] > 0
            if not known_N.any():
                provides[at] = whole
            elif known_N.all():
                repeats[at] = whole
            else:
                provides[at], repeats[at] = _masked(whole, ~known_N), _masked(whole, known_N)
            held_M[slice(None) if places is None else places] += 1
        copies = max(copies, int(held_M.max(initial=0)))
        signature_M[held_M > 0] += mark
    return provides, repeats, copies, signature_M


def _masked(part: Part, mask: Bools) -> Part:
    """Those of a part's rows that the mask, over them in sorted order, keeps."""
    kept = np.flatnonzero(mask)
    return Part(kept if part.lines is None else part.lines[kept], kept if part.into is None else part.into[kept])


def _narrowed(part: Part, good_M: Bools) -> Part:
    """The part without sightings that are not good, renumbered among the good ones."""
    kept = _masked(part, take(good_M, part.into))
    assert kept.into is not None
    return Part(kept.lines, (np.cumsum(good_M) - 1)[kept.into])


def _cells_of(tracks: Sequence[Track], sighting: int) -> tuple[Cell, ...]:
    """The distinct cells that hold a sighting."""
    found = []
    for start, stop in _by_cell(tracks):
        for roll in {id(track.roll): track.roll for track in tracks[start:stop]}.values():
            at = int(np.searchsorted(roll.sighting_N, sighting))
            if at < len(roll) and roll.sighting_N[at] == sighting:
                found.append(tracks[start].cell)
                break
    return tuple(found)


def _by_token(row_M: I64, code_M: I64) -> tuple[I64 | None, I64, I64, I64, Bools]:
    """Group sightings by (token, expert). See ``Join`` for what is returned."""
    none = np.empty(0, np.int64)
    if np.all(row_M[1:] > row_M[:-1]):
        return None, np.ones(len(row_M), np.int64), none, none, none.astype(np.bool_)
    order = np.argsort(row_M, kind="stable")
    row, code = row_M[order], code_M[order]
    new_row = np.append(True, row[1:] != row[:-1])
    new_place = new_row | np.append(True, code[1:] != code[:-1])
    line = np.arange(len(row))
    row_start, place_start = (np.maximum.accumulate(np.where(new, line, 0)) for new in (new_row, new_place))
    again = np.flatnonzero(~new_row)
    same_place = ~new_place[again]
    first_of = np.where(same_place, place_start[again], row_start[again])
    starts = np.flatnonzero(new_row)
    return order[starts], np.diff(np.append(starts, len(row))), order[again], order[first_of], same_place


def take(array: Array, index: I64 | None) -> Array:
    """``array[index]``, all of it without a copy where the index is None."""
    return array if index is None else array[index]


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

    ``coordinate``: only the tracks of this one. ``every_copy``: repeats too, not only whoever provides a row.
    """
    total: Array | None = None
    owned = False
    for track, provided, repeated in zip(tracks, join.provides, join.repeats, strict=True):
        if coordinate is not None and track.cell.coordinate != coordinate:
            continue
        for part in (provided, repeated if every_copy else None):
            if part is None:
                continue
            if join.aligned:
                if total is None:
                    total = get(track)
                else:
                    total = combine(total, get(track), out=total if owned else None)
                    owned = True
                continue
            column = take(get(track), part.lines)
            if total is None:
                total = np.zeros((len(join), *column.shape[1:]), column.dtype)
            into = slice(None) if part.into is None else part.into
            total[into] = combine(total[into], column)
    if total is None:
        return np.zeros((len(join), *get(tracks[0]).shape[1:]), get(tracks[0]).dtype)
    return take(total, join.order_N) if join.aligned else total


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
    for start, stop in _by_cell(tracks):
        if all(part is None for part in join.repeats[start:stop]):
            continue
        given = join.provides[start]
        one = given is not None and all(part is given for part in join.repeats[start + 1 : stop])
        given_M2 = np.empty((0, 2), np.uint64)
        if not one:
            given_M2 = np.zeros((len(join), 2), np.uint64)
            for track, part in zip(tracks[start:stop], join.provides[start:stop], strict=True):
                if part is not None:
                    given_M2[slice(None) if part.into is None else part.into] = take(track.digest_N2, part.lines)
        for at in range(start, stop):
            part = join.repeats[at]
            if part is None:
                continue
            if one:  # the same rows: no need to sort them
                wrong_N2 = tracks[start].digest_N2 != tracks[at].digest_N2
                wrong = take(wrong_N2.any(axis=1), part.lines) if wrong_N2.any() else None
            else:
                wrong = (take(given_M2, part.into) != take(tracks[at].digest_N2, part.lines)).any(axis=1)
            if wrong is not None and wrong.any():
                found += _clashes_of(join, tracks[start:at], join.provides[start:at], tracks[at], _masked(part, wrong))
    return found


def _clashes_of(join: Join, earlier: Sequence[Track], provides: Sequence[Part | None], other: Track, part: Part) -> list[Clash]:
    """Whom each of these rows was held against."""
    found = []
    assert part.into is not None
    assert part.lines is not None
    for first, given in zip(earlier, provides, strict=True):
        if given is not None:
            into = np.arange(len(join)) if given.into is None else given.into
            both, at, first_at = np.intersect1d(part.into, into, assume_unique=True, return_indices=True)
            if len(both):
                found.append(Clash(first, other, both, first_at if given.lines is None else given.lines[first_at], part.lines[at]))
    return found
