"""How the fingerprints of many processes join into the rows of one boundary.

Equal slices of one sighting are copies and must agree; different ones must be disjoint and together whole, and their
fingerprints add up. A ``Join`` is everything about this that depends only on which rows and slices there are; it is made
once and used for every boundary with the same layout (``gathering``).

Shape suffixes: N rows of one track in recorded order, M sightings sorted by (row, n), G sightings that have a cell,
R distinct (token, expert), A sightings of rows seen before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from tracer.read.spans import Coverage, cover
from tracer.read.tracks import SIGHTING_BITS, Cell, Track

__all__ = ["Fault", "Join", "Part", "Sheet", "make_join", "take"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Part:
    """Some rows of a track and the sightings they are: recorded ``lines`` (None: all, in order), ``into`` M (None: all)."""

    lines: I64 | None
    into: I64 | None


@dataclass(frozen=True)
class Sheet:
    """One cell over all processes: how its rows are made, and which copies to compare.

    ``givers``: tracks that provide rows. ``source_G``: for each row its line in their columns put behind each other, None for
    all, in order. ``into_G``: the sightings, None for all. ``repeats``: (track, its rows that others gave before, track with
    exactly the same rows that gave them all, if any).
    """

    cell: Cell
    givers: tuple[int, ...]
    source_G: I64 | None
    into_G: I64 | None
    repeats: tuple[tuple[int, Part, int | None], ...]


@dataclass(frozen=True)
class Fault:
    """Sightings whose slices are not the whole row, once. They are left out of the join. ``code_F``: their row codes."""

    coverage: Coverage
    cells: tuple[Cell, ...]
    code_F: I64


@dataclass(frozen=True)
class Join:
    """Where every row of every track goes.

    ``provides``, per track: the rows it is the first to give a cell of. ``sheets``: one per cell.
    ``aligned``: all tracks have the same rows, so that they add up in recorded order, and ``order_N`` sorts the sum.
    ``copies``: the most processes that hold one cell of one sighting.
    ``kept_R``: the first sighting of each distinct (token, expert), None for all. ``again_A``, ``first_A``: sightings of a
    row seen before, and the sighting to hold them against: the first of the same place (a repeat, ``same_place_A``),
    or the first of the same token elsewhere (a sibling).
    """

    code_M: I64
    nth_M: I64
    provides: tuple[Part | None, ...]
    sheets: tuple[Sheet, ...]
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
    into = {key: None if len(roll) == len(sighting_M) else np.searchsorted(sighting_M, roll.sighting_N) for key, roll in rolls.items()}
    provides, repeats, twins, copies, signature_M = _who_gives_what(tracks, into, len(sighting_M))
    faults, good_M = _find_faults(tracks, sighting_M, signature_M, coordinates, width)
    if faults:
        sighting_M = sighting_M[good_M]
        narrowed: dict[int, Part] = {}
        for parts in (provides, repeats):
            for at, part in enumerate(parts):
                if part is not None:
                    parts[at] = narrowed.setdefault(id(part), _narrowed(part, good_M))

    code_M = sighting_M >> SIGHTING_BITS
    mask = (1 << expert_bits) - 1
    token_M = token_P[code_M >> expert_bits]
    expert_M = (code_M & mask) - 1
    kept_R, seen_R, again, first_of, same_place = _by_token((token_M << expert_bits) | (expert_M + 1), code_M)
    token_R, expert_R = take(token_M, kept_R), take(expert_M, kept_R)
    return Join(
        code_M=code_M,
        nth_M=sighting_M & ((1 << SIGHTING_BITS) - 1),
        provides=tuple(provides),
        sheets=tuple(_sheets(tracks, provides, repeats, twins, len(sighting_M))),
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


def _find_faults(tracks: Sequence[Track], sighting_M: I64, signature_M: U64, coordinates: int, width: int) -> tuple[list[Fault], Bools]:
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
            faults.append(Fault(coverage, cells, sighting_M[faulty_M] >> SIGHTING_BITS))
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
) -> tuple[list[Part | None], list[Part | None], list[int | None], int, U64]:
    """Per track what it provides, what it repeats, and which track gave exactly the same rows; then the most copies, and
    per sighting a number that equal sets of cells share."""
    provides: list[Part | None] = [None] * len(tracks)
    repeats: list[Part | None] = [None] * len(tracks)
    twins: list[int | None] = [None] * len(tracks)
    signature_M = np.zeros(count, np.uint64)
    copies = 1
    for start, stop in _by_cell(tracks):
        mark = np.uint64(xxhash.xxh3_64_intdigest(repr(tracks[start].cell).encode()))
        times: dict[int, int] = {}
        for at in range(start, stop):
            times[id(tracks[at].roll)] = times.get(id(tracks[at].roll), 0) + 1
        held_M = np.zeros(count, np.int32)
        whole_of: dict[int, tuple[int, Part]] = {}
        for at in range(start, stop):
            roll = tracks[at].roll
            if id(roll) in whole_of:
                twins[at], repeats[at] = whole_of[id(roll)]
                continue
            places = into[id(roll)]
            part = Part(roll.order_N, places)
            places_or_all = slice(None) if places is None else places
            known_N = held_M[places_or_all] > 0
            if not known_N.any():
                provides[at] = part
                whole_of[id(roll)] = at, part
            elif known_N.all():
                repeats[at] = part
            else:
                provides[at], repeats[at] = _masked(part, ~known_N), _masked(part, known_N)
            held_M[places_or_all] += times[id(roll)] if id(roll) in whole_of else 1
        copies = max(copies, int(held_M.max(initial=0)))
        signature_M[held_M > 0] += mark
    return provides, repeats, twins, copies, signature_M


def _sheets(
    tracks: Sequence[Track], provides: Sequence[Part | None], repeats: Sequence[Part | None], twins: Sequence[int | None], count: int
) -> Iterator[Sheet]:
    """The parts of each cell's tracks as one list of rows."""
    for start, stop in _by_cell(tracks):
        givers = tuple(at for at in range(start, stop) if provides[at] is not None)
        source_M = np.full(count, -1, np.int64)
        behind = 0
        for at in givers:
            part = provides[at]
            assert part is not None
            lines = part.lines if part.lines is not None else np.arange(count if part.into is None else len(part.into))
            source_M[slice(None) if part.into is None else part.into] = lines + behind
            behind += len(tracks[at].roll)
        into_G = None if not count or source_M.min() >= 0 else np.flatnonzero(source_M >= 0)
        source_G = take(source_M, into_G)
        in_order = len(source_G) == behind and np.array_equal(source_G, np.arange(behind))
        again = tuple((at, part, twins[at]) for at in range(start, stop) if (part := repeats[at]) is not None)
        yield Sheet(tracks[start].cell, givers, None if in_order else source_G, into_G, again)


def take(array: npt.NDArray[Scalar], index: I64 | None) -> npt.NDArray[Scalar]:
    """``array[index]`` along the first axis, all of it without a copy where the index is None."""
    return array if index is None else np.take(array, index, axis=0)


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
