"""What becomes of a boundary once it is measured."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sides import Side
from tracer.read.compare import compare_boundary
from tracer.read.findings import BoundaryOutcome, FindingCode, Flip, Kind
from tracer.read.floor import Floors, Tolerance
from tracer.read.outcomes import Judged, cells_of, compare_all, judge, result_of
from tracer.read.pairing import pair_sides

NAME = "layers.1.attn.out"


def judged(a: Side, b: Side, floors: Floors | None = None, name: str = NAME) -> Judged:
    """Compare and judge one boundary of two sides."""
    x, y = a.trace(), b.trace()
    return judge(compare_boundary(x.boundaries[name], y.boundaries[name], pair_sides(x, y).tokens), floors or Floors())


def test_only_common_boundaries_are_compared() -> None:
    """Boundaries that one side lacks are not in the comparison."""
    a, b = Side().trace(), Side(level=1).trace()
    found = compare_all(a, b, pair_sides(a, b), [boundary.name for boundary in a.catalogue])
    assert set(found) == set(b.boundaries)


def test_distance_is_that_of_the_rows_above() -> None:
    """Largest and median distance are of the rows above the floor where there are any."""
    b = Side()
    b.change(NAME, "s0:1", by=1e-5)
    b.change(NAME, "s0:2", by=1e-2)
    found = judged(Side(), b, Floors(tolerance=Tolerance(1e-4)))
    assert found.outcome is BoundaryOutcome.DIFFERS
    assert found.above_D.tolist() == [False, True]
    assert found.distance is not None
    assert found.distance.largest == found.distance.median


def test_within_the_floor_is_an_outcome_of_its_own() -> None:
    """Rows that differ within the limit make no difference and are still counted."""
    a, b = Side(), Side()
    b.change(NAME, "s0:1", by=1e-5)
    found = judged(a, b, Floors(tolerance=Tolerance(1e-3)))
    result = result_of(found, a.trace(), Floors(), root=False, healed_at="")
    assert (result.outcome, result.rows_differing, result.rows_above_floor) == (BoundaryOutcome.WITHIN_FLOOR, 1, 0)
    assert (result.first_request, result.first_position, result.tokens) == ("s0", 1, "s0:1")


def test_a_dtype_within_the_limit_is_information() -> None:
    """Another dtype is judged by distance where a limit was given, and differs where it is beyond."""
    a, b = Side(), Side()
    b.values[NAME].dtype = "bfloat16"
    for limit, kind, outcome in ((1e-1, Kind.INFORMATION, BoundaryOutcome.WITHIN_FLOOR), (1e-6, Kind.DIFFERENCE, BoundaryOutcome.DIFFERS)):
        found = judged(a, b, Floors(tolerance=Tolerance(limit)))
        assert [(finding.code, finding.kind) for finding in found.findings] == [(FindingCode.DTYPE_DIFFERS, kind)]
        assert found.outcome is outcome


def test_many_integers_name_the_first_column() -> None:
    """Of a wide integer row the first column that differs is shown, of a narrow one the whole row."""
    a, b = Side(), Side()
    for side in (a, b):
        side.values["input.positions"].rows = np.tile(np.arange(40), (12, 1))
    b.values["input.positions"].rows[4, [7, 9]] = 99
    assert judged(a, b, name="input.positions").text == "A 7, B 99 in column 7 and 1 more columns"


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_below_the_resolution_claims_no_more_than_it_knows(dtype: str) -> None:
    """A change that leaves every statistic equal is the sign of zero only where nothing else could hide."""
    a, b = Side(), Side()
    for side, zero in ((a, 0.0), (b, -0.0)):
        values = side.values["scorer.logprobs"]
        values.rows, values.dtype = values.rows.astype(dtype), dtype
        values.rows[3] = zero
    text = judged(a, b, name="scorer.logprobs").text
    assert text.startswith("below the sketch's resolution: sign of zero")
    assert ("smaller than the sketch" in text) is (dtype == "float64")


def test_cells_say_what_was_compared() -> None:
    """Full coverage without a difference is None twice; rows of one side are not compared."""
    whole = cells_of(judged(Side(), Side()), 12)
    assert whole is not None
    assert (whole.compared_K, whole.differs_K) == (None, None)
    b = Side()
    b.drop_rows("s0:3", boundary=NAME)
    part = cells_of(judged(Side(), b), 12)
    assert part is not None
    assert part.compared_K is not None
    assert np.flatnonzero(~part.compared_K).tolist() == [3]


def test_flips_are_listed_token_by_token() -> None:
    """Of a choice that differs, the first tokens are named with what each side chose; of values that are no choice, none."""
    name = "layers.1.moe.topk_ids"
    a, b = Side(moe=True), Side(moe=True)
    for side, ids in ((a, [2, 5]), (b, [2, 6])):
        side.values[name].rows[side.at("s1:1")] = ids
    found = result_of(judged(a, b, name=name), a.trace(), Floors(), root=False, healed_at="")
    assert found.flips == (Flip(request="s1", position=1, a=(2, 5), b=(2, 6)),)
    b.change(NAME, "s0:1")
    assert result_of(judged(a, b), a.trace(), Floors(), root=False, healed_at="").flips == ()
