"""Nothing passes by absence: boundaries and rows of one side."""

from __future__ import annotations

import pytest

from tests.sides import Side
from tracer.format.schema import BoundaryStatus
from tracer.read.absences import absent_boundary, missing_rows, token_findings
from tracer.read.compare import compare_boundary
from tracer.read.findings import BoundaryOutcome, Finding, FindingCode, Kind
from tracer.read.findings import Side as Which
from tracer.read.floor import Floors
from tracer.read.outcomes import judge
from tracer.read.pairing import pair_sides

NAME = "layers.1.attn.core"
NOTHING_SAID: dict[Which, set[str]] = {side: set() for side in Which}
Status = BoundaryStatus


@pytest.mark.parametrize(
    ("status_a", "status_b", "outcome", "side"),
    [
        (None, Status.VACUOUS, BoundaryOutcome.MISSING, Which.B),
        (Status.UNRESOLVED, None, BoundaryOutcome.MISSING, Which.A),
        (None, Status.NOT_SELECTED, BoundaryOutcome.MISSING, Which.B),
        (Status.VACUOUS, Status.VACUOUS, BoundaryOutcome.MISSING, Which.BOTH),
        (Status.VACUOUS, Status.NOT_SELECTED, BoundaryOutcome.MISSING, Which.A),
        (None, Status.NOT_OBSERVABLE, BoundaryOutcome.NOT_OBSERVABLE, None),
        (Status.NOT_OBSERVABLE, Status.UNRESOLVED, BoundaryOutcome.NOT_OBSERVABLE, None),
        (Status.NOT_SELECTED, Status.NOT_SELECTED, BoundaryOutcome.NOT_RECORDED, None),
        (Status.UNRESOLVED, Status.UNRESOLVED, BoundaryOutcome.NOT_RECORDED, None),
    ],
)
def test_what_a_status_means(status_a: Status | None, status_b: Status | None, outcome: BoundaryOutcome, side: Which | None) -> None:
    """A boundary is missing where a side should have it, and no absence where a host cannot show it or nobody wanted it."""
    a, b = Side(), Side()
    for made, status in ((a, status_a), (b, status_b)):
        if status is not None:
            made.drop(NAME, status=status)
    x, y = a.trace(), b.trace()
    info = next(boundary for boundary in x.catalogue if boundary.name == NAME)
    result, finding = absent_boundary(info, x, y, NOTHING_SAID)
    assert result.outcome is outcome
    assert (None if finding is None else finding.side) is side


def test_what_a_side_said_itself_is_not_said_again() -> None:
    """The outcome stays missing, without a second finding."""
    b = Side()
    b.drop(NAME)
    x, y = Side().trace(), b.trace()
    info = next(boundary for boundary in x.catalogue if boundary.name == NAME)
    result, finding = absent_boundary(info, x, y, {**NOTHING_SAID, Which.B: {NAME}})
    assert (result.outcome, finding) == (BoundaryOutcome.MISSING, None)


def rows_of(a: Side, b: Side, name: str) -> list[Finding]:
    """Findings about the rows of one boundary that only one side has."""
    x, y = a.trace(), b.trace()
    pairing = pair_sides(x, y)
    judged = judge(compare_boundary(x.boundaries[name], y.boundaries[name], pairing.tokens), Floors())
    return list(missing_rows(judged, x, y, pairing, None).findings)


def test_rows_of_one_boundary_are_named_on_either_side() -> None:
    """Rows that a boundary lacks on one side are listed for that side."""
    a, b = Side(), Side()
    a.drop_rows("s1:4", boundary=NAME)
    b.drop_rows("s0:2", "s0:3", boundary=NAME)
    found = rows_of(a, b, NAME)
    assert [(finding.side, finding.kind, finding.text) for finding in found] == [
        (Which.B, Kind.ABSENCE, "2 rows only in A: s0 2 (2..3)"),
        (Which.A, Kind.ABSENCE, "1 row only in B: s1:4"),
    ]


def test_declared_rows_of_one_boundary_are_information() -> None:
    """A declaration for that boundary covers exactly its rows."""
    b = Side()
    b.drop_rows("s0:2", "s0:3", boundary=NAME)
    b.declared = {"kept in cache": {NAME: [("s0", 2)]}}
    found = rows_of(Side(), b, NAME)
    assert [(finding.code, finding.rows) for finding in found] == [(FindingCode.ROWS_NOT_COMPUTED, 1), (FindingCode.ROWS_UNMATCHED, 1)]


def test_sampled_rows_with_nothing_in_common_are_an_absence() -> None:
    """Rows that are computed only where needed excuse some missing rows, never all of them."""
    a, b = Side(), Side()
    everything = [*(f"s0:{at}" for at in range(7)), *(f"s1:{at}" for at in range(5))]
    a.drop_rows(*everything[:6], boundary="lm_head")
    b.drop_rows(*everything[6:], boundary="lm_head")
    assert {finding.code for finding in rows_of(a, b, "lm_head")} == {FindingCode.ROWS_UNMATCHED}


def test_tokens_that_part_match_and_are_missing_are_told_apart() -> None:
    """A pair that parts is a difference; a sequence without any partner is an absence."""
    a, b = Side({"x": [1, 2, 3, 4], "y": [7, 8]}), Side({"x": [1, 2, 3, 5]})
    x, y = a.trace(), b.trace()
    found = token_findings(x, y, pair_sides(x, y))
    assert [(finding.code, finding.kind) for finding in found] == [
        (FindingCode.INPUT_DIFFERS, Kind.DIFFERENCE),
        (FindingCode.ROWS_UNMATCHED, Kind.ABSENCE),
    ]
    assert found[0].text.startswith("x:3: A has id 4, B has id 5; 1 row of A and 1 of B from there on are not compared")
