"""One boundary on two sides: aligning rows, structure before values, distances."""

from __future__ import annotations

import dataclasses
import functools

import msgspec
import numpy as np
import pytest

from tests.sides import Side, catalogue
from tracer.format.schema import RowScope
from tracer.read.compare import SKETCH_RESOLUTION, Comparison, Method, compare_boundary
from tracer.read.diff import diff_traces
from tracer.read.findings import BoundaryOutcome
from tracer.read.floor import Tolerance
from tracer.read.logical import PartialPart
from tracer.read.pairing import pair_sides

NAME = "layers.1.attn.out"


def compared(a: Side, b: Side, name: str = NAME) -> Comparison:
    """Compare one boundary of two sides."""
    x, y = a.trace(), b.trace()
    return compare_boundary(x.boundaries[name], y.boundaries[name], pair_sides(x, y).tokens)


def test_equal_rows_touch_digests_only() -> None:
    """Equal boundaries in the same order are compared without an index and without statistics."""
    found = compared(Side(), Side())
    assert (found.method, len(found.differing), found.rows_a) == (Method.DIGEST, 0, None)
    assert "statistics" not in found.__dict__


def test_rows_in_another_order_are_aligned() -> None:
    """Sequences in another order pair row by row, and the pair that differs is named by A's token."""
    a, b = Side(), Side({"s1": [21, 22, 23, 24, 25], "s0": [11, 12, 13, 14, 15, 16, 17]})
    b.change(NAME, "s0:5")
    found = compared(a, b)
    assert found.token_R[found.differing].tolist() == [a.at("s0:5")]
    rows_a, rows_b = found.sides(found.differing)
    assert (rows_a.tolist(), rows_b.tolist()) == ([a.at("s0:5")], [b.at("s0:5")])


def test_rows_of_one_side_are_listed() -> None:
    """Rows without a partner are listed for their side and not compared."""
    b = Side()
    b.drop_rows("s0:5", "s1:0", boundary=NAME)
    found = compared(Side(), b)
    assert (len(found), found.only_a.tolist(), found.only_b.tolist()) == (10, [5, 7], [])


def test_expert_rows_pair_by_token_and_expert() -> None:
    """Expert rows are paired by (token, expert), whatever the order of experts."""
    a, b = Side(moe=True), Side(moe=True)
    name = "layers.0.moe.expert_out"
    values = b.values[name]
    assert values.experts is not None
    values.experts = values.experts.copy()
    values.experts[0] = (values.experts[0] + 1) % 8 if (values.experts[0] + 1) % 8 != values.experts[1] else (values.experts[0] + 2) % 8
    found = compared(a, b, name)
    assert (len(found), len(found.only_a), len(found.only_b), len(found.differing)) == (23, 1, 1, 0)


@pytest.mark.parametrize("other", ["float16", "float32"])
def test_another_dtype_is_compared_by_sketch(other: str) -> None:
    """Other dtypes have no common digest; equal numbers lie within the sketch's resolution."""
    a, b = Side(), Side()
    for side, dtype in ((a, "bfloat16"), (b, other)):
        values = side.values[NAME]
        values.rows, values.dtype = np.round(values.rows * 4) / 4, dtype
    found = compared(a, b)
    assert (found.method, found.dtype_differs, len(found.differing)) == (Method.SKETCH, True, 0)
    assert found.distances(np.arange(12)).max() <= SKETCH_RESOLUTION


def test_integers_against_floats_differ_without_a_distance() -> None:
    """Data of another kind differs, and no distance is made up."""
    b = Side()
    b.values["input.positions"].rows, b.values["input.positions"].dtype = b.values["input.positions"].rows.astype(np.float32), "float32"
    found = compared(Side(), b, "input.positions")
    assert (found.method, len(found.differing)) == (Method.SKETCH, 12)
    assert np.isnan(found.distance_D).all()


def test_partial_sums_of_one_split_are_compared_part_by_part() -> None:
    """A part that differs is found although the sums may be equal."""
    x = Side().trace()
    boundary = x.boundaries[NAME]
    digest = boundary.digest_R2
    swapped = digest.copy()
    swapped[3] += np.uint64(1)
    zero = np.zeros_like(digest)
    a = dataclasses.replace(boundary, partial_axis="tp", parts=(PartialPart(0, 2, digest), PartialPart(1, 2, zero)))
    b = dataclasses.replace(boundary, partial_axis="tp", parts=(PartialPart(1, 2, zero), PartialPart(0, 2, swapped)))
    found = compare_boundary(a, b, pair_sides(x, x).tokens)
    assert (found.method, found.differing.tolist()) == (Method.PARTS, [3])


def test_a_zero_row_that_differs_has_distance_zero() -> None:
    """Rows of zeros of another sign have no norm; their distance is below the resolution, not undefined."""
    a, b = Side(), Side()
    a.values[NAME].rows[2] = 0.0
    b.values[NAME].rows[2] = -0.0
    found = compared(a, b)
    assert found.distance_D.tolist() == [0.0]


def test_distances_outlive_the_statistics() -> None:
    """After ``release`` the distances asked for stay and everything loaded for them is gone."""
    b = Side()
    b.change(NAME, "s0:5")
    found = compared(Side(), b)
    before = found.distance_D
    found.release()
    assert "statistics" not in found.__dict__
    np.testing.assert_array_equal(found.distance_D, before)


def test_statistics_that_no_row_has_give_no_distance() -> None:
    """A sum of squares that is not finite, as only a damaged or forged file has it, is no distance of zero: no limit covers it."""
    for squares in (np.nan, np.inf):
        a, b = Side(), Side()
        b.values["final_norm"].rows[2, 3] = -0.0
        a.values["final_norm"].rows[2, 3] = 0.0
        trace = b.trace()
        boundary = trace.boundaries["final_norm"]
        statistics = boundary.load_statistics()
        assert statistics is not None
        odd = dataclasses.replace(statistics, sum_squares_R=np.full_like(statistics.sum_squares_R, squares))
        forged_boundary = dataclasses.replace(boundary, load_statistics=functools.partial(dataclasses.replace, odd))
        boundaries = {**trace.boundaries, "final_norm": forged_boundary}
        forged = dataclasses.replace(trace, boundaries=boundaries)
        assert diff_traces(a.trace(), trace, tolerance=Tolerance(1.0)).exit == 0
        assert diff_traces(a.trace(), forged, tolerance=Tolerance(1.0)).exit == 1


def test_rows_about_another_token_are_not_compared() -> None:
    """A boundary whose rows speak of the next token on one side only is incomparable, not different."""
    other = [msgspec.structs.replace(info, rows=RowScope.NEXT) if info.name == "layers.1.mlp.out" else info for info in catalogue()]
    b = Side(boundaries=other)
    result = diff_traces(Side().trace(), b.trace())
    found = next(boundary for boundary in result.boundaries if boundary.name == "layers.1.mlp.out")
    assert (result.exit, found.outcome) == (2, BoundaryOutcome.INCOMPARABLE)
    assert "of the next on the other" in result.headline
