"""What a process recorded of one slice: rows as codes, equal lists once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.shard_records import Rank, tensor_parallel, values
from tracer.read.load import load_trace
from tracer.read.tracks import SIGHTING_BITS, Cell, Roll, Rows, Track


def test_a_roll_counts_how_often_it_saw_a_row() -> None:
    """Rows in any order sort by code, and the n-th of a code comes n-th."""
    roll = Roll(np.array([5, 3, 5, 4, 5, 3]))
    code, nth = roll.sighting_N >> SIGHTING_BITS, roll.sighting_N & ((1 << SIGHTING_BITS) - 1)
    assert code.tolist() == [3, 3, 4, 5, 5, 5]
    assert nth.tolist() == [0, 1, 0, 0, 1, 2]
    assert roll.order_N is not None
    assert roll.order_N.tolist() == [1, 5, 3, 0, 2, 4]
    assert Roll(np.array([1, 2, 9])).order_N is None


def test_forwards_decide_where_recorded_order_does_not() -> None:
    """Blocks of one segment are told apart by forward, so that the first execution comes first."""
    roll = Roll(np.array([5, 5]), np.array([1, 0]))
    assert roll.order_N is not None
    assert roll.order_N.tolist() == [1, 0]


def test_equal_rows_of_several_processes_are_one_roll(tmp_path: Path) -> None:
    """Whoever recorded them and however they were cut into segments, equal rows sort once; columns stay each track's own."""
    whole = values(8)
    for rank in tensor_parallel(tmp_path, 2):
        rank.add("x", whole, take=range(5), spans=((4, 6), (0, 2)))
        if rank.rank:
            rank.writer.flush()
        rank.add("x", whole, take=range(5, 12), spans=((4, 6), (0, 2)), forward=1).commit()
    lists, rolls, tracks = Rows(), [], []
    for shard in load_trace(tmp_path).shards:
        pieces = tuple(shard.blocks())
        for segment, block in pieces:
            lists.add(segment, block, 100 * segment.rows_sequence.astype(np.int64) + segment.rows_position, 0)
        rolls.append(lists.roll(pieces, False))
        tracks.append(Track(shard.rank, Cell(0, ((0, 2), (4, 6))), pieces, rolls[-1]))
    assert [len(track.pieces) for track in tracks] == [1, 2]
    assert rolls[0] is rolls[1]
    for track in tracks:
        assert track.forward_N.tolist() == [0] * 5 + [1] * 7
        assert track.has_statistics
        assert not track.has_values
        assert track.statistic("sketch").shape == (12, 16)
    np.testing.assert_array_equal(tracks[0].digest_N2, tracks[1].digest_N2)


def test_values_land_in_their_logical_columns(tmp_path: Path) -> None:
    """Raw values of a slice are placed by its spans, in whatever order it holds them."""
    whole = np.arange(72).reshape(12, 6)
    Rank(tmp_path).ids().add("x", whole, spans=((4, 6), (0, 1)), dtype="int64").commit()
    (shard,) = load_trace(tmp_path).shards
    pieces = tuple(shard.blocks())
    held = Track(0, Cell(0, ((0, 1), (4, 6))), pieces, Roll(np.arange(12))).values(6)
    np.testing.assert_array_equal(held[:, [0, 4, 5]], whole[:, [0, 4, 5]])
    assert not held[:, 1:4].any()
