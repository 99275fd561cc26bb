"""Carrying out a join: what adds up, what is compared, what is not copied. Digests of any layout: see ``test_joining``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.shard_records import Array, Rank, commit_all, tensor_parallel, values
from tracer.format.schema import Span
from tracer.read.gathering import clashes, gather
from tracer.read.joining import Join, make_join
from tracer.read.load import load_trace
from tracer.read.tracks import Cell, Rows, Track


def joined(path: Path, spans: list[tuple[Span, ...]], width: int) -> tuple[Join, list[Track]]:
    """The tracks of a trace whose ranks hold these slices, and their join."""
    lists, tracks = Rows(), []
    for shard, held in zip(load_trace(path).shards, spans, strict=True):
        pieces = tuple(shard.blocks())
        for segment, block in pieces:
            lists.add(segment, block, 7 * segment.rows_sequence.astype(np.int64) + segment.rows_position, 0)
        tracks.append(Track(shard.rank, Cell(0, held), pieces, lists.roll(pieces, False)))
    tracks.sort(key=lambda track: (track.cell, track.rank))
    return make_join(tracks, np.arange(12), 0, 1, width), tracks


def test_one_process_in_order_is_not_copied(tmp_path: Path) -> None:
    """Digests of one shard with sorted rows stay mapped memory."""
    Rank(tmp_path).ids().add("x", values(8)).commit()
    join, tracks = joined(tmp_path, [((0, 8),)], 8)
    found = gather(join, tracks, lambda track: track.digest_N2)
    assert np.shares_memory(found, tracks[0].pieces[0][0].file.column("digest"))
    assert not found.flags.writeable


def test_columns_combine_as_asked_and_shared_memory_is_never_written(tmp_path: Path) -> None:
    """Sums and maxima over slices and rows; the files' own columns are read-only and stay as they were."""
    whole = values(8)
    ranks = tensor_parallel(tmp_path, 3)
    ranks[0].add("x", whole, spans=((0, 4),))
    ranks[1].add("x", whole, take=[11, 3, 5, 4, 0], spans=((4, 8),))
    ranks[2].add("x", whole, take=[1, 2, 6, 7, 8, 9, 10], spans=((4, 8),))
    commit_all(ranks)
    join, tracks = joined(tmp_path, [((0, 4),), ((4, 8),), ((4, 8),)], 8)
    largest = gather(join, tracks, lambda track: track.statistic("abs_max"), np.maximum)
    np.testing.assert_array_equal(largest, np.abs(whole).max(axis=1))
    squares = gather(join, tracks, lambda track: track.statistic("sum_squares"))
    np.testing.assert_allclose(squares, np.square(whole.astype(np.float64)).sum(axis=1))
    assert clashes(join, tracks) == []


def test_every_copy_counts_where_asked(tmp_path: Path) -> None:
    """Copies are compared, not added; with ``every_copy`` they add up, whatever order their rows are in."""
    whole = values(8)
    parts: list[Array] = [(whole * share).astype(np.float32) for share in (0.5, 0.25, 0.25)]
    ranks = tensor_parallel(tmp_path, 3)
    for rank, part in zip(ranks, parts, strict=True):
        rank.add("x", part, take=range(12) if rank.rank < 2 else range(11, -1, -1))
    commit_all(ranks)
    join, tracks = joined(tmp_path, [((0, 8),)] * 3, 8)
    once, summed = (gather(join, tracks, lambda track: track.statistic("sketch"), every_copy=every) for every in (False, True))
    np.testing.assert_allclose(summed, 2 * once, rtol=1e-5, atol=1e-5)
    found = clashes(join, tracks)
    assert [(clash.first.rank, clash.other.rank, len(clash.into_D)) for clash in found] == [(0, 1, 12), (0, 2, 12)]
    assert found[1].other_line_D.tolist() == list(range(11, -1, -1))
