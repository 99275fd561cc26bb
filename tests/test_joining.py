"""Joins of arbitrary tracks, against a plain dictionary of every cell."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.shard_records import Rank, values
from tracer.read.gathering import clashes, gather
from tracer.read.joining import make_join
from tracer.read.load import load_trace
from tracer.read.spans import cover
from tracer.read.tracks import Cell, Rows, Track

EXPERT_BITS = 2
WIDTH = 8
SLICES = [((0, 8),), ((0, 4),), ((4, 8),), ((2, 6),)]


tracks_drawn = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(SLICES),
        st.lists(st.integers(0, 5), min_size=1, max_size=8),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=5,
)


@given(tracks_drawn, st.booleans(), st.lists(st.integers(0, 3), min_size=6, max_size=6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_joins_equal_a_plain_dictionary(
    drawn: list[tuple[int, tuple[tuple[int, int], ...], list[int], int, int]], partial: bool, tokens: list[int]
) -> None:
    """Of any tracks with repeats, copies, overlaps and holes: sums, faults, clashes and groups are those found cell by cell."""
    whole = values(WIDTH, count=6)
    token_P = np.array(tokens)
    coordinates = 2 if partial else 1
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, spans, rows, changed, flush) in enumerate(drawn):
            writer = Rank(Path(folder), rank, len(drawn))
            writer.open("s0")
            for forward, place in enumerate(rows):
                tensor = whole + 1 if changed and place == 3 else whole
                writer.add("x", tensor, [("s0", p) for p in range(6)], take=[place], spans=spans, forward=forward)
                if forward == flush:
                    writer.writer.flush()
            writer.commit()
        shards = load_trace(folder).shards
        lists = Rows()
        tracks = []
        for shard, (coordinate, spans, _, _, _) in zip(shards, drawn, strict=True):
            pieces = tuple(shard.blocks())
            for segment, block in pieces:
                lists.add(segment, block, segment.rows_position.astype(np.int64) << EXPERT_BITS, 0)
            tracks.append(Track(shard.rank, Cell(coordinate if partial else 0, spans), pieces, lists.roll(pieces, False)))
        tracks.sort(key=lambda track: (track.cell, track.rank))
        join = make_join(tracks, token_P, EXPERT_BITS, coordinates, WIDTH)

        cells: dict[tuple[int, int], dict[Cell, list[tuple[Track, np.ndarray]]]] = defaultdict(lambda: defaultdict(list))
        for track in tracks:
            count: dict[int, int] = defaultdict(int)
            for code, digest in zip(track.roll.code_N.tolist(), track.digest_N2, strict=True):
                cells[code, count[code]][track.cell].append((track, digest))
                count[code] += 1
        good, faulty = [], 0
        for sighting in sorted(cells):
            held = list(cells[sighting])
            boxes = [(((cell.coordinate, cell.coordinate + 1),), cell.spans) for cell in held]
            if cover(boxes, coordinates, WIDTH).whole:
                good.append(sighting)
            else:
                faulty += 1
        assert list(zip(join.code_M.tolist(), join.nth_M.tolist(), strict=True)) == good
        assert sum(len(fault.code_F) for fault in join.faults) == faulty
        for coordinate in range(coordinates):
            wanted = []
            for sighting in good:
                firsts = [copies[0][1] for cell, copies in cells[sighting].items() if cell.coordinate == coordinate]
                wanted.append(np.add.reduce(firsts))
            found = gather(join, tracks, lambda track: track.digest_N2, coordinate=coordinate)
            np.testing.assert_array_equal(found, np.array(wanted, np.uint64).reshape(-1, 2))
        wrong = {
            (join.code_M.tolist()[at], join.nth_M.tolist()[at], clash.first.rank, clash.other.rank, line, other)
            for clash in clashes(join, tracks)
            for at, line, other in zip(clash.into_D.tolist(), clash.first_line_D.tolist(), clash.other_line_D.tolist(), strict=True)
        }
        expected = set()
        for code, nth in good:
            for copies in cells[code, nth].values():
                first = copies[0]
                for other, digest in copies[1:]:
                    if (digest != first[1]).any():
                        lines = [int(np.flatnonzero(track.roll.code_N == code)[nth]) for track in (first[0], other)]
                        expected.add((code, nth, first[0].rank, other.rank, *lines))
        assert wrong == expected
        rows_seen: dict[int, list[int]] = defaultdict(list)
        for at, (code, _) in enumerate(good):
            rows_seen[tokens[code >> EXPERT_BITS]].append(at)
        assert join.token_R.tolist() == sorted(rows_seen)
        assert join.seen_R.tolist() == [len(rows_seen[token]) for token in sorted(rows_seen)]
        kept = range(len(good)) if join.kept_R is None else join.kept_R.tolist()
        assert list(kept) == [rows_seen[token][0] for token in sorted(rows_seen)]
        again = set()
        for seen in rows_seen.values():
            for at in seen[1:]:
                place = next(other for other in seen if good[other][0] == good[at][0])
                again.add((at, place, True) if place != at else (at, seen[0], False))
        assert set(zip(join.again_A.tolist(), join.first_A.tolist(), join.same_place_A.tolist(), strict=True)) == again
