"""What a side says against itself: holes, overlaps, copies, partial sums, recompute, repeats, siblings."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.shard_records import IDS, ROWS, Array, Rank, assert_holds, commit_all, stitched, tensor_parallel, values
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import BoundaryStatus, RowScope
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.load import load_trace
from tracer.read.logical import LogicalTrace
from tracer.read.stitch import stitch

Q = "layers.0.attn.q"
OUT = "layers.2.attn.out"


def nudged(tensor: Array, row: int, column: int = 17) -> Array:
    """The same with one element one ulp up."""
    changed: Array = tensor.copy()
    changed[row, column] = np.nextafter(changed[row, column], np.float32(np.inf))
    return changed


def only(trace: LogicalTrace) -> Finding:
    """The one finding there is."""
    (finding,) = trace.findings
    return finding


def test_s08_s26_copies_that_differ_name_both_ranks_and_the_row(tmp_path: Path) -> None:
    """One element off in one of three copies is a difference of the side with itself, at the earliest row."""
    whole = values(32)
    ranks = tensor_parallel(tmp_path, 3)
    for rank, tensor in zip(ranks, (whole, whole, nudged(nudged(whole, 10), 8)), strict=True):
        rank.add(OUT, tensor)
    commit_all(ranks)
    trace = stitched(tmp_path)
    finding = only(trace)
    assert (finding.code, finding.kind, finding.boundary) == (FindingCode.REPLICAS_DISAGREE, Kind.DIFFERENCE, OUT)
    assert (finding.request, finding.position, finding.ranks, finding.rows) == ("s1", 1, (0, 2), 2)
    assert "rank 2 (tp=2) against rank 0 (tp=0)" in finding.text
    assert "distance up to" in finding.text
    assert_holds(trace.boundaries[OUT], whole)
    assert stitched(tmp_path, reverse=True).findings == trace.findings


def test_copies_of_slices_in_other_orders_are_compared_row_by_row(tmp_path: Path) -> None:
    """Copies recorded in other row orders and over other row ranges still find the one row that differs."""
    whole = values(32)
    ranks = tensor_parallel(tmp_path, 4)
    ranks[0].add(Q, whole, take=range(8), spans=((0, 16),))
    ranks[1].add(Q, nudged(whole, 6, 3), take=[11, 10, 9, 8, 7, 6, 5], spans=((0, 16),))
    ranks[2].add(Q, whole, spans=((16, 32),))
    ranks[3].add(Q, whole, take=[3, 1], spans=((16, 32),))
    commit_all(ranks)
    trace = stitched(tmp_path)
    finding = only(trace)
    assert finding.code is FindingCode.REPLICAS_DISAGREE
    assert (finding.request, finding.position, finding.ranks, finding.rows) == ("s0", 6, (0, 1), 1)
    assert "cols 0:16" in finding.text
    assert_holds(trace.boundaries[Q], whole)


def test_s29_identical_partial_sums_are_no_partial_sums(tmp_path: Path) -> None:
    """Values declared partial that are the same on every coordinate are an absence with a remedy."""
    ranks = tensor_parallel(tmp_path, 2)
    for rank in ranks:
        rank.add(OUT, values(32), partial="tp")
    commit_all(ranks)
    finding = only(stitched(tmp_path))
    assert (finding.code, finding.kind) == (FindingCode.PARTIAL_COPIES_IDENTICAL, Kind.ABSENCE)
    assert "declared partial over tp, but all 2 copies are identical" in finding.text
    assert finding.remedy


def test_s30_the_sum_of_copies_is_there_where_copies_disagree(tmp_path: Path) -> None:
    """Partial sums declared replicated disagree, and their sum is at hand for a hint."""
    whole = np.round(values(32) * 16) / 16
    ranks = tensor_parallel(tmp_path, 2)
    for share, rank in zip((0.75, 0.25), ranks, strict=True):
        rank.add(OUT, (whole * share).astype(np.float32))
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert only(trace).code is FindingCode.REPLICAS_DISAGREE
    load = trace.boundaries[OUT].load_sum_of_copies
    assert load is not None
    summed, expected = load(), fingerprint_rows(whole.astype(np.float32), "float32").sketch_N16
    assert summed is not None
    assert expected is not None
    np.testing.assert_allclose(summed.sketch_R16, expected, atol=1e-5)


def test_s34_a_hole_names_the_rank_and_the_columns(tmp_path: Path) -> None:
    """A rank that recorded everything but one boundary is named with the columns that are missing there."""
    ranks = tensor_parallel(tmp_path, 2)
    for index, rank in enumerate(ranks):
        rank.add("embedding", values(32))
        if index == 0:
            rank.add(Q, values(32), spans=((0, 16),))
    commit_all(ranks)
    trace = stitched(tmp_path)
    finding = only(trace)
    assert (finding.code, finding.kind, finding.boundary, finding.rows) == (FindingCode.HOLE, Kind.UNREADABLE, Q, 12)
    assert (finding.ranks, finding.request, finding.position) == ((1,), "s0", 0)
    assert "cols 16:32" in finding.text
    assert len(trace.boundaries[Q]) == 0


def test_holes_of_some_rows_leave_the_others(tmp_path: Path) -> None:
    """Rows that lack a slice are left out and named; the rest joins."""
    whole = values(32)
    ranks = tensor_parallel(tmp_path, 4)
    for index, rank in enumerate(ranks):
        rank.add(Q, whole, take=[4, 2, 9] if index == 2 else range(12), spans=((8 * index, 8 * index + 8),))
    commit_all(ranks)
    trace = stitched(tmp_path)
    finding = only(trace)
    assert (finding.code, finding.rows, finding.ranks, finding.request, finding.position) == (FindingCode.HOLE, 9, (2,), "s0", 0)
    assert "cols 16:24" in finding.text
    boundary = trace.boundaries[Q]
    assert boundary.token_R.tolist() == [2, 4, 9]
    np.testing.assert_array_equal(boundary.digest_R2, fingerprint_rows(whole[[2, 4, 9]], "float32").digest_N2)


def test_a_rank_that_ran_once_more_leaves_a_hole_in_the_second_execution(tmp_path: Path) -> None:
    """Slices join by execution: a second sighting of one rank alone is not completed by the first of the other."""
    ranks = tensor_parallel(tmp_path, 2)
    for index, rank in enumerate(ranks):
        rank.add(Q, values(32), spans=((16 * index, 16 * index + 16),))
    ranks[0].add(Q, values(32), spans=((0, 16),), forward=1)
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert only(trace).code is FindingCode.HOLE
    assert_holds(trace.boundaries[Q], values(32))


def test_a_missing_partial_sum_names_the_coordinate(tmp_path: Path) -> None:
    """Partial sums of two of three coordinates are a hole at the third."""
    ranks = tensor_parallel(tmp_path, 3)
    for index, rank in enumerate(ranks):
        rank.add("embedding", values(8))
        if index != 1:
            rank.add(OUT, values(8, index), partial="tp")
    commit_all(ranks)
    finding = only(stitched(tmp_path))
    assert (finding.code, finding.ranks) == (FindingCode.HOLE, (1,))
    assert "tp=1" in finding.text


def test_a_stage_without_the_boundary_is_not_blamed(tmp_path: Path) -> None:
    """Who says that a boundary belongs elsewhere is not the rank whose slice is missing."""
    ranks = tensor_parallel(tmp_path, 3)
    ranks[0].add(Q, values(32), spans=((0, 16),))
    ranks[1].add("embedding", values(32)).declare(Q, status=BoundaryStatus.ELSEWHERE)
    ranks[2].add("embedding", values(32))
    commit_all(ranks)
    assert only(stitched(tmp_path)).ranks == (2,)


def test_s32_holes_of_an_absent_shard_are_said_once(tmp_path: Path) -> None:
    """With a shard missing the trace is incomplete already; its holes at every boundary are not repeated."""
    ranks = tensor_parallel(tmp_path, 2)
    for index, rank in enumerate(ranks):
        rank.add(Q, values(32), spans=((16 * index, 16 * index + 16),))
    ranks[0].commit()
    trace = stitch(load_trace(tmp_path))
    assert {finding.code for finding in trace.findings} == {FindingCode.SHARD_UNCOMMITTED}
    assert len(trace.boundaries[Q]) == 0


def test_partial_overlap_is_an_error(tmp_path: Path) -> None:
    """Slices that are neither equal nor disjoint are unreadable, although their columns add up to the width."""
    ranks = tensor_parallel(tmp_path, 2)
    ranks[0].add(Q, values(32), spans=((0, 16),))
    ranks[1].add(Q, values(32), spans=((8, 24),))
    commit_all(ranks)
    finding = only(stitched(tmp_path))
    assert (finding.code, finding.kind, finding.ranks) == (FindingCode.SLICES_OVERLAP, Kind.UNREADABLE, (0, 1))
    assert "cols 8:16" in finding.text


def test_whole_rows_beside_slices_of_other_rows_join(tmp_path: Path) -> None:
    """One rank holds some rows whole, two others hold the rest in halves: nothing overlaps."""
    whole = values(32)
    ranks = tensor_parallel(tmp_path, 3)
    ranks[0].add(Q, whole, take=range(5))
    for index in (1, 2):
        ranks[index].add(Q, whole, take=range(5, 12), spans=((16 * index - 16, 16 * index),))
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries[Q], whole)
    assert trace.findings == ()


def test_declarations_that_exclude_each_other_are_unreadable(tmp_path: Path) -> None:
    """A boundary that one rank calls partial and another whole cannot be joined."""
    ranks = tensor_parallel(tmp_path, 2)
    ranks[0].add(OUT, values(8), partial="tp")
    ranks[1].add(OUT, values(8))
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert (only(trace).kind, only(trace).ranks) == (Kind.UNREADABLE, (0, 1))
    assert OUT not in trace.boundaries


def test_s37_repeats_that_agree_are_counted_and_others_are_findings(tmp_path: Path) -> None:
    """The same forward twice is seen twice; a second execution that differs is named with row and executions."""
    whole = values(32)
    rank = Rank(tmp_path).ids()
    for forward, tensor in enumerate((whole, nudged(whole, 5))):
        rank.add("embedding", whole, forward=forward).add(OUT, tensor, forward=forward)
    rank.commit()
    trace = stitched(tmp_path)
    assert trace.boundaries["embedding"].seen_R.tolist() == [2] * 12
    finding = only(trace)
    assert (finding.code, finding.kind, finding.boundary) == (FindingCode.REPEATS_DISAGREE, Kind.DIFFERENCE, OUT)
    assert (finding.request, finding.position, finding.rows) == ("s0", 5, 1)
    assert "executions 1 and 2 of s0:5" in finding.text
    assert 0 < trace.noise[OUT] < 1e-6
    assert_holds(trace.boundaries[OUT], whole)


def test_repeats_with_nonfinite_values_have_no_size(tmp_path: Path) -> None:
    """inf in one execution and -inf in the other differ by more than any floor covers, though the finite rest is equal."""
    whole, other = values(32), values(32)
    whole[5, 3], other[5, 3] = np.inf, -np.inf
    rank = Rank(tmp_path).ids()
    for forward, tensor in enumerate((whole, other)):
        rank.add(OUT, tensor, forward=forward)
    rank.commit()
    trace = stitched(tmp_path)
    assert only(trace).code is FindingCode.REPEATS_DISAGREE
    assert np.isposinf(trace.noise[OUT])


def test_s61_siblings_that_disagree_are_named(tmp_path: Path) -> None:
    """Of four siblings the third is off at one prompt row: siblings 1 and 3, and the size is the side's noise."""
    ids = {f"p{sibling}": [1, 2, 3, 4, 10 + sibling] for sibling in range(4)}
    rows = [(label, position) for label in ids for position in range(5)]
    whole = np.concatenate([values(32, count=4), values(32, 9, count=1)] * 4)
    whole[[4, 9, 14, 19], 0] = range(4)
    changed = whole.copy()
    changed[12] *= 2
    Rank(tmp_path).ids(ids).add(OUT, changed, rows).commit()
    trace = stitched(tmp_path)
    finding = only(trace)
    assert (finding.code, finding.request, finding.position, finding.rows) == (FindingCode.SIBLINGS_DISAGREE, "p2", 2, 1)
    assert "siblings 1 and 3 of one prefix, p0 and p2" in finding.text
    assert trace.noise[OUT] == pytest.approx(0.5, abs=0.2)


def test_siblings_of_two_scopes_are_told_apart_by_scope(tmp_path: Path) -> None:
    """Equal keys in two data-parallel scopes are siblings; where the names are equal the scopes are shown."""
    ranks = [Rank(tmp_path, rank, 2, {"dp": (rank, 2)}) for rank in range(2)]
    for index, rank in enumerate(ranks):
        rank.open("s0", IDS["s0"], scope=f"dp={index}")
        rank.add(OUT, nudged(values(32), 3) if index else values(32), ROWS, take=range(7))
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert trace.boundaries[OUT].seen_R.tolist() == [2] * 7
    assert "dp=0 s0 and dp=1 s0" in only(trace).text


def test_integers_that_disagree_have_no_size(tmp_path: Path) -> None:
    """Choices that differ between repeats are a finding whose noise is undefined, never zero."""
    ids = np.arange(24).reshape(12, 2)
    changed = ids.copy()
    changed[3, 1] = 99
    Rank(tmp_path).ids().add("ids", ids, dtype="int64").add("ids", changed, dtype="int64", forward=1).commit()
    trace = stitched(tmp_path)
    assert only(trace).code is FindingCode.REPEATS_DISAGREE
    assert math.isnan(trace.noise["ids"])


def test_a_sign_of_zero_is_below_the_resolution(tmp_path: Path) -> None:
    """Repeats that differ by the sign of a zero differ, by a size the sketch cannot see."""
    whole = values(32)
    whole[2, 3] = 0.0
    other = whole.copy()
    other[2, 3] = -0.0
    Rank(tmp_path).ids().add(OUT, whole).add(OUT, other, forward=1).commit()
    finding = only(stitched(tmp_path))
    assert "below the sketch's resolution" in finding.text


def test_s69_recompute_is_checked_against_the_first_pass(tmp_path: Path) -> None:
    """Recompute counts apart; an equal or cut short one is no finding, another is one with rank and row."""
    whole = values(32)
    rank = Rank(tmp_path).ids()
    rank.add("embedding", whole).add(OUT, whole).add(Q, whole)
    rank.add("embedding", whole, recompute=True).add(OUT, nudged(whole, 8), take=[9, 8], recompute=True)
    rank.add(Q, whole, take=range(3), recompute=True).commit()
    trace = stitched(tmp_path)
    finding = only(trace)
    assert (finding.code, finding.kind, finding.boundary) == (FindingCode.RECOMPUTE_DISAGREES, Kind.DIFFERENCE, OUT)
    assert (finding.request, finding.position, finding.rows, finding.ranks) == ("s1", 1, 1, (0,))
    assert "1 of 2 recomputed rows" in finding.text
    boundary = trace.boundaries[OUT]
    assert (boundary.executions, boundary.recomputed, boundary.seen_R.tolist()) == (1, 1, [1] * 12)


def test_recompute_is_held_against_its_own_forward(tmp_path: Path) -> None:
    """With two forwards of the same rows and other values, each recompute is compared with its own forward."""
    first, second = values(32), values(32, 1)
    rank = Rank(tmp_path).ids()
    for forward, tensor in enumerate((first, second)):
        rank.add(OUT, tensor, forward=forward)
    rank.add(OUT, second, take=range(5), forward=1, recompute=True).add(OUT, first, take=range(3), forward=0, recompute=True).commit()
    assert {finding.code for finding in stitched(tmp_path).findings} == {FindingCode.REPEATS_DISAGREE}


def test_next_token_rows_are_named_where_they_were_recorded(tmp_path: Path) -> None:
    """A finding about a next-token row speaks of the row's own position."""
    scores = values(1, count=12)
    changed = scores.copy()
    changed[3] = 9
    rank = Rank(tmp_path).ids()
    for forward, tensor in enumerate((scores, changed)):
        rank.add("scorer.logprobs", tensor, forward=forward, fields={"rows": RowScope.NEXT})
    rank.commit()
    assert (only(stitched(tmp_path)).request, only(stitched(tmp_path)).position) == ("s0", 3)


def test_findings_come_in_causal_order(tmp_path: Path) -> None:
    """Of several disagreements the earliest boundary is named first, vacuous ones at their place."""
    whole = values(32)
    names = ["embedding", "layers.0.residual", "layers.1.residual", "final_norm"]
    ranks = tensor_parallel(tmp_path, 2)
    for index, rank in enumerate(ranks):
        for name in names:
            if name == "layers.1.residual":
                rank.vacuous(name)
            else:
                rank.add(name, nudged(whole, 3) if index and name != "embedding" else whole)
    commit_all(ranks)
    found = [(finding.boundary, finding.code) for finding in stitched(tmp_path).findings]
    assert found == [
        ("layers.0.residual", FindingCode.REPLICAS_DISAGREE),
        ("layers.1.residual", FindingCode.VACUOUS),
        ("final_norm", FindingCode.REPLICAS_DISAGREE),
    ]
